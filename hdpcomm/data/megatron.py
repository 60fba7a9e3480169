"""Tokens that Megatron-Core has preprocessed: ``PREFIX.bin`` and its index ``PREFIX.idx``, memory-mapped in place.

The index begins with ``MMIDIDX``, the version 1, a code of the tokens' type and two counts; then the length of each
sequence (int32), its first byte (int64), and where documents begin among the sequences (int64, with the end).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdpcomm.data.encoders import check_tokens
from hdpcomm.errors import InvalidUsage

__all__ = ["MegatronTokens", "megatron_prefix", "open_megatron"]

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MegatronTokens:
    """An open pair of files; made by :func:`open_megatron`. Pickled by its prefix.

    Attributes:
        starts, lengths: ``[documents]``: first token of each in the file, and how many it has.
        encoder, encoder_name, vocabulary: of the run, whose tokenizer must have made the tokens.
    """

    prefix: str
    encoder: str
    encoder_name: str
    vocabulary: int
    data: npt.NDArray[Any]
    starts: Index
    lengths: Index

    def __reduce__(self) -> tuple[Any, ...]:
        return open_megatron, (self.prefix, self.encoder, self.encoder_name, self.vocabulary)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def files(self) -> tuple[Path, ...]:
        """Index and tokens."""
        return Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")

    def tokens(self, document: int, first: int, length: int) -> Index:
        """``length`` tokens of a document from its token ``first`` on. Local. Raises: InvalidUsage for one that the
        tokenizer does not have."""
        start = int(self.starts[document]) + first
        found = self.data[start : start + length].astype(np.int64)
        check_tokens(found, self.encoder_name, self.vocabulary, self.name_of(document))
        return found

    def name_of(self, document: int) -> str:
        """Its number, for messages."""
        return f"{self.prefix} document {document}"


def megatron_prefix(path: Path) -> str | None:
    """Prefix of a pair of files that ``path`` names, by it or by one of them; ``None`` for other paths. Local."""
    name = str(path)
    prefix = name[:-4] if path.suffix in (".bin", ".idx") else name
    pair = [Path(prefix + ending).is_file() for ending in (".idx", ".bin")]
    return prefix if all(pair) and (prefix != name or not path.exists()) else None


def open_megatron(prefix: str, encoder: str, encoder_name: str, vocabulary: int) -> MegatronTokens:
    """Opens the pair of files of a prefix; the others are attributes. Local.

    Raises: InvalidUsage if the index is damaged or of another format, or does not fit to the tokens.
    """
    try:
        with Path(f"{prefix}.idx").open("rb") as file:
            content = file.read(_HEADER.size)
        if len(content) < _HEADER.size or not content.startswith(_MAGIC):
            raise _wrong(prefix, "it does not begin like one")
        _, version, code, sequences, marks = _HEADER.unpack(content)
        if version != 1 or code not in _TYPES:
            raise _wrong(
                prefix, f"it has version {version} and type {code}, and version 1 and whole numbers were expected"
            )
        index, dtype = np.memmap(f"{prefix}.idx", mode="r"), np.dtype(_TYPES[code])
        ends = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * marks]).tolist()
        if len(index) != ends[-1]:
            raise _wrong(prefix, f"it has {len(index):,} bytes, and {ends[-1]:,} were expected (text alone)")
        views = [index[begin:end] for begin, end in pairwise(ends)]
        lengths, (pointers, places) = views[0].view("<i4").astype(np.int64), (each.view("<i8") for each in views[1:])
        before = np.concatenate(([0], np.cumsum(lengths)))
        if (pointers != before[:-1] * dtype.itemsize).any() or (lengths < 0).any():
            raise _wrong(prefix, "its sequences do not follow each other")
        if marks < 2 or places[0] != 0 or places[-1] != sequences or (np.diff(places) < 0).any():
            raise _wrong(prefix, "its documents are not all of its sequences, or it has none")
        size, wanted = Path(f"{prefix}.bin").stat().st_size, int(before[-1]) * dtype.itemsize
        if size != wanted:
            raise InvalidUsage(f"{prefix}.bin: {size:,} bytes, and its .idx says {wanted:,}; copy both again")
        data = np.memmap(f"{prefix}.bin", mode="r", dtype=dtype) if size else np.zeros(0, dtype)
    except OSError as error:
        raise InvalidUsage(f"{prefix}.bin and .idx cannot be read ({error.strerror})") from None
    starts = before[places]
    return MegatronTokens(prefix, encoder, encoder_name, vocabulary, data, starts[:-1], np.diff(starts))


def _wrong(prefix: str, why: str) -> InvalidUsage:
    return InvalidUsage(f"{prefix}.idx: no index of Megatron-Core, or a damaged one ({why}); make it again")
