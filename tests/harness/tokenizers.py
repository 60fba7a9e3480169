"""A small tokenizer in a folder, as a model's folder has one."""

from __future__ import annotations

from pathlib import Path


def save_tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    """A byte-level BPE of a few hundred tokens with an end of sequence, ``<end>``."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the cat"] * 4, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False
    )
    made.chat_template = chat_template
    made.save_pretrained(folder)
    return folder
