"""TRL's SFTTrainer with DDP on the backend as it is: padded rows, completions only."""

from __future__ import annotations

from common import Figures, figures_of, join, leave, main, tiny_llama, word_tokenizer
from transformers_trainer import arguments, rows


def work(backend: str) -> Figures:
    import datasets
    from trl import SFTConfig, SFTTrainer

    join(backend)
    text = [" ".join(f"w{max(2, i)}" for i in row["input_ids"]) for row in rows()]
    data = [{"prompt": line[: line.index(" ") + 1], "completion": line[line.index(" ") + 1 :]} for line in text]
    given = arguments(f"out-{backend}", 3).to_dict()
    config = SFTConfig(**{name: value for name, value in given.items() if name in SFTConfig.__dataclass_fields__})
    model = tiny_llama()
    trainer = SFTTrainer(
        model=model, args=config, train_dataset=datasets.Dataset.from_list(data), processing_class=word_tokenizer()
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    leave(backend)
    return {"losses": losses, "weights": figures_of(model)}


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch", "trl", "transformers"])
