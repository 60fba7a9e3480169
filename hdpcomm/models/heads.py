"""Last layers of models of transformers, and to what the labels of their outputs belong."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["NEXT_TOKEN", "SEQUENCE", "TOKEN", "classified_token", "head_of"]

NEXT_TOKEN, TOKEN, SEQUENCE = "next token", "token", "sequence"
"""To what a label belongs: to the token after that of the outputs, to that token, or to the sequence, whose last token
that is no padding has the outputs."""
_CLASSIFIERS = {"ForSequenceClassification": SEQUENCE, "ForTokenClassification": TOKEN}


def head_of(model: Any) -> tuple[nn.Module, str] | None:
    """The last layer of a model of transformers, inside of peft's or not, and to what its labels belong. Local.

    Returns: ``None`` where there is neither a head that gives logits of tokens, nor the linear layer ``score`` that
    classifiers over causal decoders have.
    """
    if callable(getattr(model, "get_base_model", None)):
        model = model.get_base_model()
    if (head := model.get_output_embeddings()) is not None:
        return head, NEXT_TOKEN
    score = getattr(model, "score", None)
    names = [kind.__name__ for kind in type(model).__mro__]
    for ending, labels in _CLASSIFIERS.items():
        if isinstance(score, nn.Module) and any(name.endswith(ending) for name in names):
            return score, labels
    return None


def classified_token(tokens: Tensor, padding: int | None) -> int:
    """The place of the token whose outputs classify a sequence: the last that is no padding, as transformers finds
    it. Local.

    Args:
        padding: the token of that name in the model's configuration, which a sequence may have at its end.
    """
    seen = (tokens != (-1 if padding is None else padding)).nonzero()
    return int(seen[-1]) if len(seen) else 0
