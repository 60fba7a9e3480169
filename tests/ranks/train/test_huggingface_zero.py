"""``transformers.Trainer`` with plans whose ranks keep parts of the weights, gradients and the optimizer's state."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, padded, tiny, tiny_experts  # noqa: E402

COST = CostModel(1e-9, 1e-6, 1e-4)
OPTIONS = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}
LAST = "checkpoint-2"


def trainer_of(kind: Any, folder: str, accumulate: int, options: dict[str, Any], **changed: Any) -> Any:
    torch.set_num_threads(1)
    args = arguments(Path(folder), 1, accumulate, **OPTIONS | changed)
    data = {"train_dataset": documents(), "eval_dataset": documents()}
    model = tiny_experts() if "expert" in options.get("mesh", {}) else tiny()
    return kind(args=args, data_collator=padded, **{"model": model, **data, **options})


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def trains(folder: str, options: dict[str, Any]) -> Any:
    """Four steps of four documents, with a checkpoint after two; (losses, gradient norms, loss of an evaluation)."""
    from hdpcomm.integrations.huggingface import Trainer

    try:
        trainer = trainer_of(Trainer, folder, 2, {"cost_model": COST, **options}, save_strategy="steps", save_steps=2)
        trainer.train()
        found = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/last")
        if "zero" in options or "dtype" in options:
            with pytest.raises(InvalidUsage, match=r"train\(\) was called before"):
                trainer.train()
        norms = [float(row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]
        return losses_of(trainer), norms, found
    finally:
        leave()


def resumes(folder: str, accumulate: int, options: dict[str, Any], name: str) -> list[float]:
    from hdpcomm.integrations.huggingface import Trainer

    try:
        trainer = trainer_of(Trainer, folder, accumulate, {"cost_model": COST, **options})
        trainer.train(resume_from_checkpoint=f"{folder}/{LAST}")
        trainer.save_model(f"{folder}/{name}")
        return losses_of(trainer)
    finally:
        leave()


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return dict(model.named_parameters())


def check_close(found: str, expected: str, **limits: float) -> None:
    wanted = weights_of(expected)
    for name, value in weights_of(found).items():
        torch.testing.assert_close(value.float(), wanted[name].float(), **limits)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1},
        {"zero": 2},
        {"zero": 3},
        {"zero": 3, "dtype": torch.bfloat16},
        {"zero": 3, "optimizer_offload": True},
        {"mesh": {"tensor": 2}},
        {"mesh": {"tensor": 2}, "zero": 3},
        {"mesh": {"expert": 2}},
    ],
    ids=[
        "zero 1",
        "zero 2",
        "zero 3",
        "zero 3 in bf16",
        "optimizer on the host",
        "tensor ranks",
        "tensor ranks and zero 3",
        "expert ranks",
    ],
)
def test_parts_train_save_and_resume_as_whole_weights_do(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    twin = (
        {"dtype": options["dtype"]}
        if "dtype" in options
        else {"mesh": {"expert": 1}}
        if "expert" in options.get("mesh", {})
        else {}
    )
    size = 2
    if {"mesh", "zero"} <= options.keys():  # by its folder
        tiny().save_pretrained(tmp_path / "model")
        size, options = 4, {**options, "model": str(tmp_path / "model")}
    (losses, norms, evaluated), *_ = ranks(size, trains, whole, twin)
    near = {"rtol": 1e-2, "atol": 2e-2} if "dtype" in twin else {"rtol": 1e-4, "atol": 1e-5}
    for found, found_norms, found_evaluated in ranks(size, trains, parts, options):
        assert found == pytest.approx(losses, rel=1e-2 if "dtype" in twin else 1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-2 if "dtype" in twin else 1e-4)
        assert found_evaluated == pytest.approx(evaluated, rel=1e-2 if "dtype" in twin else 1e-5)
    check_close(f"{parts}/last", f"{whole}/last", **near)
    # On as many ranks every bit, on another number, without parts, and by transformers' own trainer the same run.
    ranks(size, resumes, parts, 2, options, "again")
    check_close(f"{parts}/again", f"{parts}/last", rtol=0, atol=0)
    ranks(1, resumes, parts, 2 * size, twin, "alone")
    check_close(f"{parts}/alone", f"{parts}/last", **near)
    if not twin:
        plain = trainer_of(transformers.Trainer, parts, 2 * size, {})
        plain.train(resume_from_checkpoint=f"{parts}/{LAST}")
        plain.save_model(f"{parts}/plain")
        check_close(f"{parts}/plain", f"{parts}/last", rtol=1e-3, atol=1e-4)


def stage_of(folder: str, memory: float, model: Any, given: dict[str, Any]) -> int | str:
    from hdpcomm.integrations import huggingface_checkpoints as huggingface_zero
    from hdpcomm.integrations.huggingface import Trainer

    before, huggingface_zero._memory_bytes = huggingface_zero._memory_bytes, lambda *_: memory
    try:
        options = {"cost_model": COST, "zero": "auto", "capacity": 64, "model": model}
        return trainer_of(Trainer, folder, 2, {**options, **given})._kept.zero
    except InvalidUsage as error:
        return str(error)
    finally:
        huggingface_zero._memory_bytes = before
        leave()


def test_the_least_stage_that_fits(ranks: Any, tmp_path: Path) -> None:
    config = tiny().config
    config.update({"hidden_size": 128, "intermediate_size": 512, "head_dim": 64})
    large = transformers.AutoModelForCausalLM.from_config(config)
    large.save_pretrained(tmp_path / "model")
    sizes = {"whole": 1e9, "less": 10.5e6, "none": 1e5}
    found = {name: ranks(2, stage_of, str(tmp_path), size, large, {})[1] for name, size in sizes.items()}
    assert (found["whole"], found["less"]) == (0, 1)
    assert "no stage of ZeRO brings a step within" in found["none"]
    assert ranks(2, stage_of, str(tmp_path), sizes["less"], str(tmp_path / "model"), {})[0] == 1
    cut = {"mesh": {"tensor": 2}}  # of which each rank has half
    assert ranks(2, stage_of, str(tmp_path), 8.5e6, large, cut)[0] == 0
    assert ranks(2, stage_of, str(tmp_path), 8.5e6, large, {})[0] != 0
    adapters = peft.get_peft_model(large, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert ranks(2, stage_of, str(tmp_path), sizes["less"], adapters, {})[0] == 0


def trains_worst(folder: str, options: dict[str, Any]) -> Any:
    """(best checkpoint, whole weights that are saved after it came back)."""
    from hdpcomm.integrations.huggingface import Trainer

    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    worst = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    try:
        trainer = trainer_of(Trainer, folder, 2, {"cost_model": COST, **options}, **often, **worst)
        trainer.train()
        trainer.save_model(f"{folder}/best")
        return trainer.state.best_model_checkpoint
    finally:
        leave()


@pytest.mark.parametrize(
    "options",
    [{"mesh": {"expert": 1}}, {"zero": 3, "dtype": torch.bfloat16}, {"mesh": {"tensor": 2}}, {"mesh": {"expert": 2}}],
    ids=["whole", "zero 3", "tensor", "expert"],
)
def test_the_best_model_comes_back(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Files have a tensor for each expert, which transformers' own trainer leaves out."""
    for best in ranks(2, trains_worst, str(tmp_path), options):
        assert best.endswith("checkpoint-1")
    check_close(f"{tmp_path}/best", best, rtol=0, atol=0)
    last = weights_of(str(max(tmp_path.glob("checkpoint-*"), key=lambda each: int(each.name.split("-")[1]))))
    assert any(not torch.equal(value, last[name]) for name, value in weights_of(best).items())


def trains_with_fsdp(folder: str, options: dict[str, Any], changed: dict[str, Any]) -> Any:
    from hdpcomm.integrations.huggingface import Trainer

    try:
        trainer = trainer_of(Trainer, folder, 2, {"cost_model": COST, **options}, **changed)
        assert bool(changed.get("fsdp")) == (trainer.args.fsdp is False)
        trainer.train()
        trainer.save_model(f"{folder}/{'fsdp' if 'fsdp' in changed else 'zero'}")
        return trainer._kept, losses_of(trainer)
    finally:
        leave()


@pytest.mark.parametrize(
    ("config", "bf16", "zero"),
    [
        (None, False, 3),
        ({"reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}, False, 2),
        ({"version": 1, "reshard_after_forward": "hybrid_shard", "backward_prefetch": "backward_pre"}, True, 3),
    ],
)
def test_fsdp_of_the_arguments_is_zero(ranks: Any, tmp_path: Path, config: Any, bf16: bool, zero: int) -> None:
    folder, dtype = str(tmp_path), torch.bfloat16 if bf16 else None
    fsdp = ranks(2, trains_with_fsdp, folder, {}, {"fsdp": True, "fsdp_config": config, "bf16": bf16})
    assert [(kept.zero, kept.dtype) for kept, _ in fsdp] == [(zero, dtype)] * 2
    assert fsdp == ranks(2, trains_with_fsdp, folder, {"zero": zero, "dtype": dtype}, {"bf16": bf16})
    check_close(f"{folder}/fsdp", f"{folder}/zero", rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"cpu_offload": True}, {}, "'cpu_offload'.=True .* parts on its device"),
        ({"activation_checkpointing": True}, {}, "gradient_checkpointing=True"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, {}, "SHARDED_STATE_DICT"),
        ({"version": 1, "reshard_after_forward": "some"}, {}, "'some' .*give one of .*full_shard"),
        ({"xla": True}, {}, "'xla'.=True .*not known here"),
        ({"sharding_group_size": 4}, {}, "'sharding_group_size'.=4 .*not known here"),
        ({}, {"zero": 1}, "zero=1 is given, and fsdp means zero=3"),
    ],
)
def test_fsdp_that_means_something_else_is_refused(tmp_path: Path, config: Any, options: Any, message: str) -> None:
    from hdpcomm.integrations.huggingface import Trainer

    with pytest.raises(InvalidUsage, match=message):
        trainer_of(Trainer, str(tmp_path), 1, options, fsdp=True, fsdp_config=config)
    leave()


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({"zero": 4}, {}, "zero"),
        ({"zero": "auto"}, {}, "zero='auto' without capacity="),
        ({"mesh": {"tensor": 0}}, {}, "tensor"),
        ({"mesh": {"pipeline": 2}}, {}, "pipelines need stages"),
        ({"mesh": {"expert": 2}, "queue": True}, {}, "queue=True with mesh={'expert': 2}"),
        ({"dtype": "bf16"}, {}, "dtype"),
    ],
)
def test_what_would_not_work_is_refused(tmp_path: Path, options: dict[str, Any], changed: Any, message: str) -> None:
    from hdpcomm.integrations.huggingface import Trainer

    with pytest.raises(InvalidUsage, match=message):
        trainer_of(Trainer, str(tmp_path), 1, options, **changed)
    leave()


def test_accelerates_own_cuts_are_refused(tmp_path: Path) -> None:
    from accelerate import ParallelismConfig

    from hdpcomm.integrations.huggingface import Trainer
    from hdpcomm.integrations.huggingface_options import check_options

    with pytest.raises(InvalidUsage, match=r"parallelism_config .*mesh={'tensor': N} cuts layers"):
        trainer_of(Trainer, str(tmp_path), 1, {}, parallelism_config=ParallelismConfig())
    trainer = trainer_of(Trainer, str(tmp_path), 1, {})
    trainer.model._tp_size = 2  # as from_pretrained(tp_plan="auto") leaves it on two ranks
    with pytest.raises(InvalidUsage, match=r"loaded with tp_plan .*give mesh={'tensor': N}"):
        check_options(trainer, trainer._kept, trainer._cut)
    leave()


PARTS = {"zero": 3, "capacity": 14, "slices": 16}
"""Rows of up to 44 tokens in slices, on ranks that have parts of the weights."""


def trains_policy(folder: str, preferences: bool, options: dict[str, Any], lora: bool) -> Any:
    """Whole weights after two steps of TRL's trainer, and its logs."""
    from tests.ranks.train.test_huggingface_trl import PlannedDPO, PlannedGRPO, trainer_of

    torch.manual_seed(7)
    more = {"peft_config": pytest.importorskip("peft").LoraConfig(r=2, target_modules="all-linear")} if lora else {}
    kind = PlannedDPO if preferences else PlannedGRPO
    changed = {"max_steps": 2, "optim": "sgd", "beta": 0.1}
    try:
        trainer = trainer_of(kind, f"{folder}/{options.get('zero', 0)}", changed, cost_model=COST, **options, **more)
        trainer.train()
        logs = [row for row in trainer.state.log_history if "loss" in row]
        whole = trainer._made[1].copied_weights(trainer.model.state_dict(keep_vars=True), keep=True)
        return {name: value.detach() for name, value in whole.items()}, logs
    finally:
        leave()


@pytest.mark.parametrize(("preferences", "lora"), [(True, False), (False, True)], ids=["DPO", "GRPO with adapters"])
def test_losses_of_trl_see_whole_weights(ranks: Any, tmp_path: Path, preferences: bool, lora: bool) -> None:
    pytest.importorskip("trl")
    tiny().save_pretrained(tmp_path / "model")
    whole, parts = (ranks(2, trains_policy, str(tmp_path), preferences, options, lora) for options in ({}, PARTS))
    for (found, history), (wanted, logged) in zip(parts, whole, strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
        for mine, theirs in zip(history, logged, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    from hdpcomm.integrations.huggingface_checkpoints import file_copy

    copy, large = file_copy(str(tmp_path)), torch.arange(1 << 19)
    assert torch.equal(copy(large), large)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            copy(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", r"optimizer.pt: .*expected the state of an optimizer: resume from another checkpoint"),
        ({"state": {}}, "optimizer.pt: no state and param_groups"),
        (
            {"state": {}, "param_groups": [{"params": [0, 1]}]},
            r"groups of \[2\] parameters, and .* \[1\]",
        ),
        ([Path()], "optimizer.pt: no plain values; expected"),
    ],
    ids=["damaged", "another dictionary", "another model", "objects"],
)
def test_states_of_other_optimizers_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    from hdpcomm.integrations.huggingface_checkpoints import load_optimizer

    path = tmp_path / "optimizer.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    nobody: Any = None
    with pytest.raises(InvalidUsage, match=message) as error:
        load_optimizer(nobody, [["weight"]], str(tmp_path))
    assert "weights_only" not in str(error.value)
