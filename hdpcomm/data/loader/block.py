"""The tokens of a block of documents, and the parts of its sequences that ranks ask for."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm.data.corpus import IGNORE
from hdpcomm.data.loader.stream import DocumentStream, PayloadFields
from hdpcomm.data.records import records_with
from hdpcomm.data.token_store import token_dtype
from hdpcomm.errors import Aborted, Error, InvalidUsage

__all__ = ["Payload", "SequencePart", "TokenBlock", "make_block"]

Counted = npt.NDArray[np.bool_]


class Payload(NamedTuple):
    """Opaque bytes of a sequence.

    Attributes:
        first: the first of the tokens of the sequence that stand for them, which all are token 0 and have no loss. A
            document that was cut has them in each piece with such a token; then it counts from the piece's beginning,
            and is negative for all but the first.
        tokens: how many these are, in the whole document.
    """

    first: int
    tokens: int
    data: bytes


class SequencePart(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sequence, and the next one, whose label is that of the last.

    Attributes:
        tokens: ``[stop - start + 1]``, one fewer at the end of the sequence.
        counted: which of these count for the loss; ``None``: all.
    """

    tokens: npt.NDArray[Any]
    counted: Counted | None
    payloads: tuple[Payload, ...]

    @property
    def nbytes(self) -> int:
        """As they travel."""
        masks = 0 if self.counted is None else self.counted.nbytes
        return int(self.tokens.nbytes + masks + sum(len(each.data) for each in self.payloads))

    def labelled(self, length: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) ``[length]`` int64; ``length`` is stop - start."""
        read = torch.from_numpy(self.tokens.astype(np.int64))
        labels = torch.full((length,), IGNORE, dtype=torch.int64)
        following = len(read) - 1
        if following > 0:
            labels[:following] = read[1:]
            if self.counted is not None:
                labels[:following][~torch.from_numpy(self.counted[1:].astype(np.bool_))] = IGNORE
        return read[:length], labels


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """A block of a stream as tokens.

    Attributes:
        bounds: ``[sequences + 1]``: where in ``tokens`` each sequence begins.
        tokens: of all sequences, one after the other, in the smallest type.
        counted: which of them count for the loss; empty: all.
        payloads: of each sequence that has any.
    """

    bounds: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]
    counted: Counted
    payloads: Mapping[int, tuple[Payload, ...]]


def payloads_of(payloads: Sequence[Payload], start: int, stop: int) -> tuple[Payload, ...]:
    """Payloads of the tokens ``start`` to ``stop``, some of them at least."""
    return tuple(each for each in payloads if each.first < stop and start < each.first + each.tokens)


class _Document(NamedTuple):
    tokens: npt.NDArray[np.int64]
    counted: Counted | None
    payload: Payload | None


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
    payloads: dict[int, tuple[Payload, ...]] = {}
    for document in _documents(stream, block):
        if stopped is not None and stopped.is_set():
            raise Aborted("the loader was closed while it read a block")
        for first in range(0, len(document.tokens), stream.context):
            rows = slice(first, first + stream.context)
            piece = document.tokens[rows]
            counted = None if document.counted is None else document.counted[rows]
            if counted is not None and document.payload is None and not counted[1:].any():
                continue  # nothing is to be learned
            if document.payload is not None:
                moved = document.payload._replace(first=document.payload.first - first)
                if found := payloads_of([moved], 0, len(piece)):
                    payloads[len(tokens)] = found
            tokens.append(piece)
            masks.append(counted)
            bounds.append(bounds[-1] + len(piece))
    masked = any(mask is not None for mask in masks)
    whole = [np.ones(len(piece), np.bool_) if mask is None else mask for piece, mask in zip(tokens, masks, strict=True)]
    return TokenBlock(
        bounds=np.array(bounds, dtype=np.int64),
        tokens=np.concatenate([*tokens, np.zeros(0, np.int64)]).astype(token_dtype(stream.vocabulary)),
        counted=np.concatenate(whole) if masked else np.zeros(0, np.bool_),
        payloads=payloads,
    )


def _documents(stream: DocumentStream, block: int) -> Iterator[_Document]:
    """Documents with a token, and conversations with an answer."""
    fields, payload = stream.fields, stream.payload
    also = () if payload is None else (payload.data, payload.tokens)
    for unit in stream.blocks[block]:
        for where, content, more in records_with(unit, fields, also):
            found = None if payload is None else _payload(more, payload, where)
            if isinstance(content, list):
                tokens, mask = stream.encoder.chat(content, where)
                if not mask[1:].any():
                    continue
                counted: Counted | None = mask
            else:
                tokens, counted = stream.encoder.text(content), None
            if found is not None:
                counted = np.ones(len(tokens), np.bool_) if counted is None else counted
                counted = np.concatenate((np.zeros(found.tokens, np.bool_), counted))
                tokens = np.concatenate((np.zeros(found.tokens, np.int64), tokens))
            if len(tokens):
                yield _Document(tokens, counted, found)


def _payload(record: Mapping[str, Any], names: PayloadFields, where: object) -> Payload | None:
    data, tokens = record.get(names.data), record.get(names.tokens)
    if data is None and not tokens:
        return None
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidUsage(
                f"{where}: {names.data!r} is text and no base64 ({error}); give bytes that way"
            ) from None
    if not isinstance(data, bytes):
        raise InvalidUsage(f"{where}: {names.data!r} holds a {type(data).__name__}; bytes (or base64) were expected")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InvalidUsage(
            f"{where}: {names.tokens!r} is {tokens!r}; give how many tokens stand for {names.data!r}, at least 1"
        )
    return Payload(0, tokens, data)
