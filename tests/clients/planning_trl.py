"""TRL's SFTTrainer and GRPOTrainer with plans on 2 ranks of the backend, with weights whole and in parts and with
adapters of peft, against TRL's own in one process."""

from __future__ import annotations

from typing import Any

from common import Figures, join, leave, main, tiny_llama, trained, word_tokenizer
from transformers_trainer import arguments, rows

CASES = {"SFT": (0, 3), "SFT with adapters": (3,), "GRPO": (0, 3)}
"""By what is trained, the stages of ZeRO."""


def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers that follow from the prompt and the place in its group, whatever rank has it."""
    tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    found = [[2 + (sum(each) + 7 * (place % 2) + i) % 60 for i in range(3 + sum(each) % 5 + 4 * (place % 2))]
             for place, each in enumerate(tokens)]  # fmt: skip
    return {"prompt_ids": tokens, "completion_ids": found, "logprobs": [[-4.0] * len(each) for each in found]}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def trainer_of(case: str, backend: str, zero: int) -> Any:
    import datasets
    import peft
    import trl

    from hdpcomm.integrations.huggingface import HybridDataParallel

    planned = backend == "hdpcomm"
    base, config = (trl.GRPOTrainer, trl.GRPOConfig) if case == "GRPO" else (trl.SFTTrainer, trl.SFTConfig)
    kind = type(f"Planned{base.__name__}", (HybridDataParallel, base), {}) if planned else base
    more: dict[str, Any] = {"zero": zero} if planned else {}
    lines = [" ".join(f"w{max(2, token)}" for token in row["input_ids"][: 12 - i % 9]) for i, row in enumerate(rows())]
    batch = 4 if planned else 8
    given = arguments(f"out-{backend}-{zero}-{case.replace(' ', '-')}", batch, optim="sgd", learning_rate=0.1).to_dict()
    given |= {"bf16": False, "gradient_checkpointing": False}
    if case == "GRPO":
        given |= {"num_generations": 2, "max_completion_length": 16}
        data = [{"prompt": line} for line in lines]
        more |= {"reward_funcs": reward, "rollout_func": answers}
    else:
        data = [{"prompt": line.split(" ")[0] + " ", "completion": line} for line in lines]
        if "adapters" in case:
            more["peft_config"] = peft.LoraConfig(r=2, target_modules="all-linear")
    fields = {name: value for name, value in given.items() if name in config.__dataclass_fields__}
    return kind(
        model=tiny_llama(), args=config(**fields), train_dataset=datasets.Dataset.from_list(data),
        processing_class=word_tokenizer(), **more,
    )  # fmt: skip


def work(backend: str) -> Figures:
    import torch

    if backend == "hdpcomm":
        join(backend)
    figures = {}
    for case, stages in CASES.items():
        for zero in stages:
            torch.manual_seed(7)
            figures |= trained(trainer_of(case, backend, zero), f"{case}, zero {zero}")
    if backend == "hdpcomm":
        leave(backend)
    return figures


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "trl", "transformers", "accelerate", "peft"], atol=2e-4)
