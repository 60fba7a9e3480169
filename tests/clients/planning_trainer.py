"""hdpcomm.integrations.huggingface.Trainer on 2 ranks of the backend, against transformers.Trainer in one process."""

from __future__ import annotations

from common import Figures, figures_of, join, leave, main, tiny_llama
from transformers_trainer import arguments, rows


def work(backend: str) -> Figures:
    import transformers

    model = tiny_llama()
    # Documents of 12, 11, .. 1 tokens, twice.
    cut = [{name: row[: 12 - i % 12] for name, row in each.items()} for i, each in enumerate(rows())]
    if backend == "hdpcomm":
        join(backend)  # before TrainingArguments, which would take gloo
    args = arguments(f"out-{backend}", 3 if backend == "hdpcomm" else 6, optim="sgd", learning_rate=0.1)
    if backend == "hdpcomm":
        from hdpcomm.integrations.huggingface import Trainer

        trainer = Trainer(model=model, args=args, train_dataset=cut)
    else:
        collator = transformers.DataCollatorWithFlattening()
        trainer = transformers.Trainer(model=model, args=args, train_dataset=cut, data_collator=collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if backend == "hdpcomm":
        leave(backend)
    return {"losses": losses, "weights": figures_of(model)}


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "transformers"], atol=2e-4)
