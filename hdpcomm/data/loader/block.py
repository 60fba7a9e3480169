"""The tokens of a block of documents, and the parts of its sequences that ranks ask for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hdpcomm.data.corpus import labelled
from hdpcomm.data.loader.stream import DocumentStream
from hdpcomm.data.records import records
from hdpcomm.data.token_store import token_dtype
from hdpcomm.errors import Aborted, Error

__all__ = ["SequencePart", "TokenBlock", "make_block"]

Counted = npt.NDArray[np.bool_]


class SequencePart(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sequence, and the next one, whose label is that of the last.

    Attributes:
        tokens: ``[stop - start + 1]``, one fewer at the end of the sequence.
        counted: which of these count for the loss; ``None``: all.
    """

    tokens: npt.NDArray[Any]
    counted: Counted | None

    @property
    def nbytes(self) -> int:
        """As they travel."""
        return int(self.tokens.nbytes + (0 if self.counted is None else self.counted.nbytes))

    def labelled(self, length: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) ``[length]`` int64; ``length`` is stop - start."""
        return labelled(self.tokens, self.counted, length)


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """A block of a stream as tokens.

    Attributes:
        bounds: ``[sequences + 1]``: where in ``tokens`` each sequence begins.
        tokens: of all sequences, one after the other, in the smallest type.
        counted: which of them count for the loss; empty: all.
    """

    bounds: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]
    counted: Counted


def make_block(stream: DocumentStream, block: int, stopped: threading.Event | None = None) -> TokenBlock:
    """Reads the documents of a block and makes their tokens: the same ones whoever does it. Local.

    Args:
        stopped: if set, no further document is begun.

    Raises:
        Aborted: it was stopped.
        InvalidUsage: a record is wrong (``file:line``), or a file has changed since the stream was opened.
        Error: with the place, whatever else a tokenizer or the system raises.
    """
    try:
        stream.check_unchanged(block)
        return _made(stream, block, stopped)
    except Error:
        raise
    except OSError as error:
        where = error.filename or stream.place(block)
        raise Error(f"{where}: {error.strerror or error}; check that the file can be read") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise Error(f"{stream.place(block)}: {reason}; look at these documents or the tokenizer") from error


def _made(stream: DocumentStream, block: int, stopped: threading.Event | None) -> TokenBlock:
    bounds = [0]
    tokens: list[npt.NDArray[np.int64]] = []
    masks: list[Counted | None] = []
    for document, mask in _documents(stream, block):
        if stopped is not None and stopped.is_set():
            raise Aborted("the loader was closed while it read a block")
        for first in range(0, len(document), stream.context):
            rows = slice(first, first + stream.context)
            counted = None if mask is None else mask[rows]
            if counted is not None and not counted[1:].any():
                continue  # nothing is to be learned
            tokens.append(document[rows])
            masks.append(counted)
            bounds.append(bounds[-1] + len(tokens[-1]))
    masked = any(mask is not None for mask in masks)
    whole = [np.ones(len(piece), np.bool_) if mask is None else mask for piece, mask in zip(tokens, masks, strict=True)]
    return TokenBlock(
        bounds=np.array(bounds, dtype=np.int64),
        tokens=np.concatenate([*tokens, np.zeros(0, np.int64)]).astype(token_dtype(stream.vocabulary)),
        counted=np.concatenate(whole) if masked else np.zeros(0, np.bool_),
    )


def _documents(stream: DocumentStream, block: int) -> Iterator[tuple[npt.NDArray[np.int64], Counted | None]]:
    """(tokens, which of them count for the loss) of documents with a token, and of conversations with an answer."""
    for unit in stream.blocks[block]:
        for where, content in records(unit, stream.fields):
            if isinstance(content, list):
                tokens, mask = stream.encoder.chat(content, where)
                if mask[1:].any():
                    yield tokens, mask
            elif len(tokens := stream.encoder.text(content)):
                yield tokens, None
