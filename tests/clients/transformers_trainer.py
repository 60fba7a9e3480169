"""transformers.Trainer with DDP, on the backend as it is: accumulation, clipping, evaluation."""

from __future__ import annotations

from typing import Any

from common import Figures, batches, figures_of, join, leave, main, tiny_llama


def arguments(out: str, batch: int, **changed: Any) -> Any:
    import transformers

    given = {
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(out, **(given | changed))


def rows() -> list[dict[str, list[int]]]:
    """24 documents of one length, labelled."""
    return [{"input_ids": row, "labels": row} for row in batches(0, 1, rows=24)[0].tolist()]


def work(backend: str) -> Figures:
    import transformers

    join(backend)  # before TrainingArguments: accelerate itself would take gloo
    model = tiny_llama()
    args = arguments(f"out-{backend}", 3)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    leave(backend)
    return {"losses": losses, "weights": figures_of(model), "evaluated": [evaluated]}


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch", "transformers", "accelerate"])
