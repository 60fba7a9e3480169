"""hdpcomm.integrations.huggingface.Trainer on 2 ranks of the backend, with weights whole and in parts, against
transformers.Trainer in one process."""

from __future__ import annotations

from typing import Any

from common import Figures, join, leave, main, tiny_llama, trained
from transformers_trainer import arguments, rows


def work(backend: str) -> Figures:
    import transformers

    planned = backend == "hdpcomm"
    # Documents of 12, 11, .. 1 tokens, twice.
    cut = [{name: row[: 12 - i % 12] for name, row in each.items()} for i, each in enumerate(rows())]
    if planned:
        join(backend)  # before TrainingArguments, which would take gloo

    def trainer(zero: int) -> Any:
        args = arguments(f"out-{backend}-{zero}", 3 if planned else 6, optim="sgd", learning_rate=0.1)
        if planned:
            from hdpcomm.integrations.huggingface import Trainer

            return Trainer(model=tiny_llama(), args=args, train_dataset=cut, zero=zero)
        collator = transformers.DataCollatorWithFlattening()
        return transformers.Trainer(model=tiny_llama(), args=args, train_dataset=cut, data_collator=collator)

    figures = {}
    for zero in (0, 3):
        figures |= trained(trainer(zero), f"zero {zero}")
    if planned:
        leave(backend)
    return figures


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "transformers"], atol=2e-4)
