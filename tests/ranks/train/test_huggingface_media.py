"""transformers' and TRL's trainers with images and videos: the weights of the same trainer in one process."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("PIL")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

from hdpcomm.integrations.huggingface import HybridDataParallel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, leave, weights  # noqa: E402
from tests.harness.tiny_media import WORDS, collated, model_of, picture, processor, sample_of  # noqa: E402

PARTS = ["t", "tit", "tiit", "ti", "tvtitit", "ttttt", "it", "iti", "t", "tvt", "titt", "tt"]


def run(kind: Any, out: str, family: str, batch: int, accumulate: int, **given: Any) -> Any:
    """(weights after 3 steps, losses)."""
    parts = PARTS if "vl" in family else [each.replace("v", "i") for each in PARTS]
    samples = [sample_of(family, each, seed, torch.float32) for seed, each in enumerate(parts)]
    changed = {"max_steps": 3, "remove_unused_columns": False, "learning_rate": 0.05}
    trainer = kind(
        model=model_of(family, torch.float32), args=arguments(Path(out), batch, accumulate, **changed),
        train_dataset=samples, data_collator=partial(collated, two_way=family == "gemma3"), **given,
    )  # fmt: skip
    trainer.model_accepts_loss_kwargs = True  # else the reference weighs labels by the batches that they come in
    trainer.train()
    return weights(trainer.model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def planned(out: str, family: str, batch: int, accumulate: int, options: dict[str, Any]) -> Any:
    from hdpcomm.integrations.huggingface import Trainer

    try:
        return run(Trainer, out, family, batch, accumulate, **options)
    finally:
        leave()


@pytest.mark.parametrize(
    ("family", "size", "accumulate", "options"),
    [
        ("qwen2_5_vl", 2, 1, {}),
        ("qwen3_vl", 2, 2, {}),
        ("llava", 3, 1, {}),
        ("qwen3_vl", 2, 1, {"zero": 2}),
        ("gemma3", 2, 1, {}),
        ("qwen2_audio", 2, 1, {}),
    ],
)
def test_weights_are_those_of_transformers(
    ranks: Any, tmp_path: Path, family: str, size: int, accumulate: int, options: dict[str, Any]
) -> None:
    batch = 12 // size // accumulate // (1 if size == 3 else 2)
    found = ranks(size, planned, str(tmp_path / "a"), family, batch, accumulate, options)
    try:
        expected, losses = run(transformers.Trainer, str(tmp_path / "b"), family, batch * size, accumulate)
    finally:
        leave()
    for own, logged in found:
        assert logged == pytest.approx(losses, abs=2e-4)
        for name, value in expected.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=2e-5, msg=name)


def rows_of(kind: str) -> Any:
    """Twelve conversations with 0 to 2 images each; for GRPO prompts, and for DPO pairs, with one each."""
    rows = []
    for i in range(12):
        images = [picture(10 * i + k) for k in range(i % 3 if kind == "sft" else 1)]
        asked = [{"type": "image"} for _ in images] + [{"type": "text", "text": " ".join(WORDS[i : i + 3 + i % 5])}]
        answer = [{"type": "text", "text": " ".join(WORDS[2 * i : 2 * i + 1 + i])}]
        prompt = [{"role": "user", "content": asked}]
        worse = [{"type": "text", "text": " ".join(WORDS[i : i + 1 + i % 4])}]
        if kind == "grpo":
            rows.append({"prompt": prompt, "images": images})
        elif kind == "dpo":
            answers = {"chosen": [{"role": "assistant", "content": answer}]}
            answers["rejected"] = [{"role": "assistant", "content": worse}]
            rows.append({"prompt": prompt, "images": images, **answers})
        else:
            rows.append({"images": images, "messages": [*prompt, {"role": "assistant", "content": answer}]})
    return datasets.Dataset.from_list(rows)


class PlannedSFT(HybridDataParallel, trl.SFTTrainer):  # type: ignore[misc]
    pass


class CannedGRPO(trl.GRPOTrainer):  # type: ignore[misc]
    """Its answers do not come from the model."""

    def _generate_single_turn(self, prompt_ids: list[Any], *_: Any, **__: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        draw = torch.Generator().manual_seed(100 * self.calls + self.accelerator.process_index)
        counts = [2 + i % 7 for i in range(len(prompt_ids))]
        return [torch.randint(5, 45, (count,), generator=draw).tolist() for count in counts], None


class PlannedGRPO(HybridDataParallel, CannedGRPO):
    pass


class PlannedDPO(HybridDataParallel, trl.DPOTrainer):  # type: ignore[misc]
    pass


CONFIGS = {trl.SFTTrainer: ("sft", trl.SFTConfig), CannedGRPO: ("grpo", trl.GRPOConfig)}
CONFIGS |= {trl.DPOTrainer: ("dpo", trl.DPOConfig)}


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(completion)) % 5) for completion in completions]


def train_trl(kind: Any, out: str) -> Any:
    """(weights, losses) of a trainer of TRL's under DDP, or with plans."""
    torch.manual_seed(7)
    [(what, config)] = [found for base, found in CONFIGS.items() if issubclass(kind, base)]
    policy = what == "grpo"
    args = arguments(Path(out), 4, 1).to_dict() | {"learning_rate": 0.1, "max_steps": 3, "bf16": False}
    args |= {"gradient_checkpointing": False, "remove_unused_columns": False, "max_length": None}
    args |= {"num_generations": 4, "max_completion_length": 16} if policy else {}
    names = config.__dataclass_fields__
    model = model_of("qwen2_5_vl", torch.float32)
    model.config.use_cache = False
    model.config._name_or_path = str(Path(out).parent / "model")  # from where DPO reads its reference
    more = {"reward_funcs": reward} if policy else {}
    try:
        trainer = kind(
            model=model, args=config(**{name: value for name, value in args.items() if name in names}),
            train_dataset=rows_of(what), processing_class=processor(), **more,
        )  # fmt: skip
        if what == "sft":
            trainer.model_accepts_loss_kwargs = True
        trainer.train()
        trainer.accelerator.wait_for_everyone()
        return weights(trainer.model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    finally:
        gc.collect()
        leave()


@pytest.mark.parametrize(
    ("own", "planning"), [(trl.SFTTrainer, PlannedSFT), (CannedGRPO, PlannedGRPO), (trl.DPOTrainer, PlannedDPO)]
)
def test_weights_are_those_of_trl(ranks: Any, tmp_path: Path, own: Any, planning: Any) -> None:
    model_of("qwen2_5_vl", torch.float32).save_pretrained(tmp_path / "model")
    found = ranks(2, train_trl, planning, str(tmp_path / "a"))
    expected = ranks(2, train_trl, own, str(tmp_path / "b"))
    for (value, logged), (wanted, losses) in zip(found, expected, strict=True):
        assert logged == pytest.approx(losses, abs=2e-4)
        for name in wanted:
            torch.testing.assert_close(value[name], wanted[name], rtol=0, atol=2e-5, msg=name)
