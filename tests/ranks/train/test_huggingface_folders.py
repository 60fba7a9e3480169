"""Trainers of transformers and TRL that are given a model's folder: the weights of those that are given the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")
peft = pytest.importorskip("peft")

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.integrations.huggingface import Trainer  # noqa: E402
from hdpcomm.integrations.huggingface_checkpoints import load_weights  # noqa: E402
from hdpcomm.models import FolderWeights, adapt  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from hdpcomm.train.step.runner import Runner  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, tiny  # noqa: E402
from tests.ranks.train import test_huggingface_sft as sft  # noqa: E402
from tests.ranks.train import test_huggingface_trl as policies  # noqa: E402

COST = CostModel(1e-9, 1e-6, 1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(made)
    (made / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    return str(made)


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def check_equal(found: str, expected: str, atol: float = 0.0) -> None:
    wanted = weights_of(expected)
    for name, value in weights_of(found).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=atol, msg=name)


def trainer_of(model: Any, out: str, zero: int) -> Any:
    torch.set_num_threads(1)
    args = arguments(Path(out), 1, 2, optim="adamw_torch", learning_rate=1e-2, save_strategy="steps", save_steps=2)
    collator = transformers.DataCollatorWithFlattening()
    data = {"train_dataset": documents(), "eval_dataset": documents(), "data_collator": collator}
    return Trainer(model=model, args=args, cost_model=COST, zero=zero, **data)


def trains(model: str, out: str, zero: int, way: str) -> tuple[list[float], float, int]:
    """Losses, that of an evaluation, and bytes of the folder that this rank has read."""
    read = []
    whole = FolderWeights.whole

    def counted(self: FolderWeights, name: str) -> torch.Tensor:
        value = whole(self, name)
        read.append(value.nbytes)
        return value

    FolderWeights.whole = counted  # type: ignore[method-assign]
    start = Runner._same_start

    def checked(self: Runner) -> None:
        if zero == 3 and way in ("folder", "resumed"):
            assert not any(p.untyped_storage().nbytes() > p.itemsize for p in self.model.parameters())
        start(self)

    Runner._same_start = checked  # type: ignore[method-assign]
    try:
        given: Any = model if way != "model" else transformers.AutoModelForCausalLM.from_pretrained(model)
        trainer = trainer_of(given, out, zero)
        assert all(p.is_meta for p in trainer.model.parameters()) == (way != "model")
        evaluated = trainer.evaluate()["eval_loss"] if way == "evaluated" else 0.0
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2" if way == "resumed" else None)
        if zero == 3 and way != "evaluated":  # values come with passes
            assert all(p.isnan().all() for p in trainer.model.parameters())
            with pytest.raises(InvalidUsage, match="no values between steps, since zero=3"):
                trainer.model.save_pretrained(f"{out}/not")
        trainer.save_model(f"{out}/{way}")
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], evaluated, sum(read)
    finally:
        FolderWeights.whole, Runner._same_start = whole, start  # type: ignore[method-assign]
        leave()


@pytest.mark.parametrize("zero", [0, 3])
def test_same_bits_as_of_the_model_itself(ranks: Any, tmp_path: Path, folder: str, zero: int) -> None:
    out = str(tmp_path)
    (losses, *_), _ = ranks(2, trains, folder, out, zero, "model")
    results = ranks(2, trains, folder, out, zero, "folder")
    assert [found for found, *_ in results] == [losses, losses]
    check_equal(f"{out}/folder", f"{out}/model")
    assert json.loads(Path(out, "folder/generation_config.json").read_text())["max_new_tokens"] == 7
    size = sum(p.nbytes for p in weights_of(folder).values())
    assert size <= sum(read for *_, read in results) < 1.02 * size  # once on the host; tables of positions beside them
    ranks(2, trains, folder, out, zero, "resumed")
    check_equal(f"{out}/resumed", f"{out}/model")
    (_, evaluated, _), _ = ranks(2, trains, folder, out, zero, "evaluated")
    check_equal(f"{out}/evaluated", f"{out}/model")
    plain = transformers.Trainer(model=tiny(), args=arguments(tmp_path, 2, 1), eval_dataset=documents(),
                                 data_collator=transformers.DataCollatorWithFlattening())  # fmt: skip
    assert evaluated == pytest.approx(plain.evaluate()["eval_loss"], rel=0.05)  # batches' means of fewer tokens
    leave()


def trains_adapters(folder: str, out: str, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    try:
        given = {"peft_config": peft.LoraConfig(r=2, target_modules="all-linear"), "zero": 3, "cost_model": COST}
        changed = {"max_length": 32, "learning_rate": 1.0, "save_strategy": "steps", "save_steps": 2}
        trainer = sft.trainer_of(sft.PlanningSFT, out, 3, 2, changed, model=folder, **given)
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2" if name == "resumed" else None)
        trainer.save_model(f"{out}/{name}")
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]
    finally:
        leave()


def test_adapters_of_trl_on_a_model_in_parts(ranks: Any, tmp_path: Path, folder: str) -> None:
    out = str(tmp_path)
    losses, other = ranks(2, trains_adapters, folder, out, "adapters")
    assert losses == other
    assert losses[-1] < losses[0]
    adapters = lambda name: peft.PeftModel.from_pretrained(tiny(), f"{out}/{name}").state_dict()
    made = adapters("adapters")
    assert all(value.any() for name, value in made.items() if "lora_" in name)
    ranks(2, trains_adapters, folder, out, "resumed")
    for name, value in adapters("resumed").items():
        torch.testing.assert_close(value, made[name], rtol=0, atol=0, msg=name)


def trains_policy(kind: Any, out: str, changed: dict[str, Any], given: dict[str, Any]) -> list[float]:
    try:
        trainer = policies.trainer_of(kind, out, changed | {"max_steps": 2}, zero=3, cost_model=COST, **given)
        trainer.train()
        trainer.save_model(out)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]
    finally:
        leave()


@pytest.mark.parametrize(
    ("size", "kind", "changed"),
    [
        (2, policies.PlannedGRPO, {"beta": 0.1}),
        (2, policies.PlannedDPO, {}),
        (1, policies.PlannedDPO, {"precompute_ref_log_probs": True}),  # of data in memory TRL does it on one process
    ],
)
def test_policies_by_folder(ranks: Any, tmp_path: Path, size: int, kind: Any, changed: dict[str, Any]) -> None:
    model = str(tmp_path / "model")
    tiny().save_pretrained(model)
    found = ranks(size, trains_policy, kind, str(tmp_path / "folder"), changed, {"model": model})
    wanted = ranks(size, trains_policy, kind, str(tmp_path / "whole"), changed, {})
    assert found == [pytest.approx(losses, abs=1e-6) for losses in wanted]
    check_equal(str(tmp_path / "folder"), str(tmp_path / "whole"), atol=1e-6)  # references have other attention


def test_noise_is_found_once_the_weights_are_read(tmp_path: Path) -> None:
    policies.save_model_that_drops_out(tmp_path / "model")
    try:
        trainer = policies.trainer_of(policies.PlannedDPO, str(tmp_path / "run"), {}, model=str(tmp_path / "model"))
        with pytest.raises(InvalidUsage, match="two forward passes of the model in training mode differ"):
            trainer.train()
    finally:
        leave()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights='gaussian'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    ],
)
def test_adapters_that_begin_otherwise_are_refused(tmp_path: Path, folder: str, config: Any, message: str) -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], **config)
    try:
        with pytest.raises(InvalidUsage, match=f"{message} begin with values of the model"):
            sft.trainer_of(sft.PlanningSFT, str(tmp_path), 1, 1, {"max_length": 32}, model=folder, peft_config=lora)
    finally:
        leave()


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    tiny().config.save_pretrained(tmp_path / "new")
    with pytest.raises(InvalidUsage, match="has no weights"):
        trainer_of(str(tmp_path / "new"), str(tmp_path), 0)
    for name in ("no/model", str(tmp_path / "nothing")):
        with pytest.raises(InvalidUsage, match="no folder"):
            trainer_of(name, str(tmp_path), 0)
    leave()


def test_buffers_of_a_checkpoint_come_back(tmp_path: Path) -> None:
    """As the bias that routers of DeepSeek-V3 keep: a buffer, which is saved."""
    model = tiny()
    layer = model.model.layers[1]
    layer.register_buffer("bias_of_router", torch.tensor([1.0, 2.0]))
    model.save_pretrained(tmp_path)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = adapt(model)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    load_weights(adapted, tmp_path)
    assert layer.bias_of_router.tolist() == [1.0, 2.0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)
