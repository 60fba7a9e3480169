"""Trainers of transformers and TRL by a folder with ``zero=3``: the losses and weights of one process without plans,
also of a run that goes on with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from hdpcomm.integrations.huggingface import HybridDataParallel  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, tiny  # noqa: E402
from tests.ranks.train.test_huggingface_sft import WORDS, tokenizer  # noqa: E402

COST = CostModel(1e-9, 1e-6, 1e-4)
ROWS = 12  # of a step, on all ranks together
DOORS: dict[str, tuple[Any, Any]] = {
    "transformers": (transformers.Trainer, transformers.TrainingArguments),
    "SFT": (trl.SFTTrainer, trl.SFTConfig),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
}


def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """By prompt and place in its group, whatever rank has them."""
    tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    found = [[5 + (sum(each) + 11 * (place % 2) + i) % 38 for i in range(2 + sum(each) % 7 + 9 * (place % 2))]
             for place, each in enumerate(tokens)]  # fmt: skip
    return {"prompt_ids": tokens, "completion_ids": found, "logprobs": [[-3.5] * len(each) for each in found]}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def run(door: str, out: str, size: int, name: str) -> list[float]:
    """The losses of a run on so many ranks, 0: one process without plans; it saves the model under the name."""
    torch.set_num_threads(1)
    base, config = DOORS[door]
    changed: dict[str, Any] = {
        "optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2, "bf16": False,
        "num_generations": 2, "max_completion_length": 32, "max_length": None, "padding_free": False,
    }  # fmt: skip
    given = arguments(Path(out, str(size)), ROWS // max(1, size), 1).to_dict() | changed
    if config is not transformers.TrainingArguments:
        given["gradient_checkpointing"] = False
    args = config(**{key: value for key, value in given.items() if key in config.__dataclass_fields__})
    more: dict[str, Any] = {"train_dataset": [{"input_ids": row["input_ids"]} for row in documents()] * 4}
    if door == "transformers":
        more["data_collator"] = transformers.DataCollatorWithFlattening()
    elif door == "SFT":
        more = {"train_dataset": datasets.Dataset.from_list(more["train_dataset"]), "processing_class": tokenizer()}
    else:
        rows = [{"prompt": " ".join(WORDS[(7 * n + i) % 40] for i in range(1 + n % 9))} for n in range(24)]
        more = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
        more |= {"reward_funcs": reward, "rollout_func": answers}
    kind = base
    if size:
        kind = type("Planned", (HybridDataParallel, base), {})
        more |= {"zero": 3, "cost_model": COST}
    try:
        model = f"{out}/model" if size else transformers.AutoModelForCausalLM.from_pretrained(f"{out}/model")
        trainer = kind(model=model, args=args, **more)
        trainer.train(resume_from_checkpoint=f"{out}/2/checkpoint-2" if size == 3 else None)
        trainer.save_model(f"{out}/{name}")
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]
    finally:
        leave()


def saved(folder: str) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize("door", DOORS)
def test_losses_and_weights_are_those_of_one_process(ranks: Any, tmp_path: Path, door: str) -> None:
    out = str(tmp_path)
    tiny().save_pretrained(tmp_path / "model")
    losses = run(door, out, 0, "plain")
    for size in (2, 3):
        for found in ranks(size, run, door, out, size, f"parts-{size}"):
            assert found == pytest.approx(losses, abs=1e-5)
            assert len(found) == 4
        assert not list(tmp_path.rglob(".hdpcomm-*"))
    wanted, before = saved(f"{out}/plain"), saved(f"{out}/model")
    for size in (2, 3):
        for name, value in saved(f"{out}/parts-{size}").items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-4, msg=name)
    assert max(float((wanted[name] - value).abs().max()) for name, value in before.items()) > 1e-2
