"""A step's ``fetch`` that tells the other ranks that this one reads data, so that they wait for it, and looks at its
tokens: one outside of the vocabulary is an error of an embedding without a word of where, or a fault of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.train.shards import Fetch, FetchAhead, FetchParts

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.train.layout import Layout

__all__ = ["declared", "vocabulary_of"]


class _Declared:
    def __init__(self, fetch: Any, comm: Communicator, vocabulary: int | None) -> None:
        self._fetch, self._comm, self._vocabulary = fetch, comm, vocabulary

    def __call__(self, place: int, /) -> Any:
        with self._comm.busy("reads data"):
            fetched = self._fetch(place)
        given = fetched.get("tokens") if isinstance(fetched, Mapping) else fetched
        self._check(given[0] if isinstance(given, tuple) and given else given, place)
        return fetched

    def _check(self, tokens: Any, place: int) -> None:
        if self._vocabulary is None or not isinstance(tokens, Tensor) or not tokens.numel() or tokens.is_cuda:
            return
        for token in map(int, tokens.aminmax()):
            if not 0 <= token < self._vocabulary:
                raise InvalidUsage(
                    f"fetch({place}) gave the token {token}; the model has embeddings of tokens 0 to "
                    f"{self._vocabulary - 1}: use its tokenizer, or a model with a larger vocabulary"
                )


class _DeclaredParts(_Declared):
    def part(self, place: int, start: int, stop: int, /) -> tuple[Tensor, Tensor]:
        with self._comm.busy("reads data"):
            parts: tuple[Tensor, Tensor] = self._fetch.part(place, start, stop)
        self._check(parts[0] if parts else None, place)
        return parts


class _DeclaredAhead(_DeclaredParts):
    def ahead(self, parts: Sequence[tuple[int, int, int]], /) -> None:
        self._fetch.ahead(parts)


def declared(fetch: Fetch, comm: Communicator, vocabulary: int | None) -> Fetch:
    """``fetch``, each call of which is an activity of this rank (:meth:`hdpcomm.comm.Communicator.busy`). It reads
    parts of sequences, and reads ahead, if ``fetch`` does. Local.

    Args:
        vocabulary: a token of at least that, or below 0, is an InvalidUsage; ``None``: nobody knows.
    """
    if isinstance(fetch, FetchAhead):
        return _DeclaredAhead(fetch, comm, vocabulary)
    return (_DeclaredParts if isinstance(fetch, FetchParts) else _Declared)(fetch, comm, vocabulary)


def vocabulary_of(model: nn.Module, layout: Layout) -> int | None:
    """Rows of the whole model's embedding of tokens, where this rank has it under a name that is known. Local."""
    for module in model.modules():
        for name in ("embedding", "embed_tokens", "wte"):
            embedding = getattr(module, name, None)
            if isinstance(embedding, nn.Embedding):
                return layout.of(embedding.weight).shape[0]
    return None
