"""Pre-tokenised documents in memory maps: the folders that ``hdpcomm data build`` and the cache of indexes write.

``meta.json`` says what is there; ``documents.npy`` holds ``[documents, 4]``: part, first token in it, length in tokens,
first byte of the loss mask (-1: every token counts); ``tokens-P.bin`` and ``mask-P.bin`` hold the parts, each written
by one rank; ``checksums.npy`` holds the CRC-32 of each block of the parts. Opening a store checks its sizes, its
documents and its checksums; a block of a part is checked when it is first read. So a store of any size opens at once,
and no token that was changed on the disk is ever trained on.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import fingerprint, json_checksum, open_regular, read_text

__all__ = ["BLOCK_BYTES", "FORMAT", "META", "TokenStore", "is_store", "open_store", "token_dtype"]

FORMAT = 2
CHECKSUM = "sha256"
META = "meta.json"
BLOCK_BYTES = 1 << 18
KIND = "hdpcomm tokens"
TABLES = ("documents.npy", "checksums.npy")
Index = npt.NDArray[np.int64]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest unsigned type for token numbers below ``vocabulary``."""
    return np.dtype(np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def is_store(path: Path) -> bool:
    """Whether ``path`` is a folder that names itself a store, or has the files of one; not looked into further."""
    try:
        if not (path / META).is_file():
            return False
        return all((path / name).is_file() for name in TABLES) or _meta(path).get("kind") == KIND
    except (OSError, ValueError, RecursionError):
        return False


@dataclass(frozen=True, eq=False)
class TokenStore:
    """An open store; made by :func:`open_store`. Pickled by its path.

    Attributes:
        documents: ``[documents, 4]``, see above.
        encoder: fingerprint of what made the tokens (:class:`hdpcomm.data.encoders.Encoder`).
        vocabulary: every token is below it.
    """

    path: Path
    documents: Index
    encoder: str
    encoder_name: str
    vocabulary: int
    parts: Mapping[str, npt.NDArray[Any]]
    checksums: Mapping[str, npt.NDArray[np.uint32]]
    checked: Mapping[str, npt.NDArray[np.bool_]]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_store, (self.path,)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> Index:
        """``[documents]``: tokens of each document."""
        return self.documents[:, 2]

    @property
    def masked(self) -> npt.NDArray[np.bool_]:
        """``[documents]``: whether some of its tokens do not count for the loss."""
        return self.documents[:, 3] >= 0

    def tokens(self, document: int, first: int, length: int) -> Index:
        """``length`` tokens of a document from its token ``first`` on. Local; reads no more than their blocks.

        Raises: InvalidUsage if a block is damaged.
        """
        part, start, _, _ = (int(value) for value in self.documents[document])
        return self._read(f"tokens-{part}.bin", start + first, length).astype(np.int64)

    def name_of(self, document: int) -> str:
        """Its place in the folder, for messages."""
        return f"{self.path} document {document}"

    def counted(self, document: int, first: int, length: int) -> npt.NDArray[np.bool_]:
        """Which of these tokens count for the loss, as targets."""
        part, _, _, start = (int(value) for value in self.documents[document])
        if start < 0:
            return np.ones(length, dtype=np.bool_)
        return self._read(f"mask-{part}.bin", start + first, length).astype(np.bool_)

    def check(self) -> int:
        """Reads and checks every block; returns the bytes. Raises: InvalidUsage at the first damaged one."""
        for name, part in self.parts.items():
            self._check(name, 0, part.nbytes)
        return sum(part.nbytes for part in self.parts.values())

    def _read(self, name: str, start: int, count: int) -> npt.NDArray[Any]:
        if not count:
            return np.zeros(0, dtype=np.uint8)
        part = self.parts[name]
        size = part.dtype.itemsize
        self._check(name, start * size, (start + count) * size)
        return part[start : start + count]

    def _check(self, name: str, start: int, stop: int) -> None:
        checked, whole = self.checked[name], self.parts[name].view(np.uint8)
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if checked[block]:
                continue
            begin = block * BLOCK_BYTES
            if zlib.crc32(whole[begin : begin + BLOCK_BYTES].data) != self.checksums[name][block]:
                raise InvalidUsage(
                    f"{self.path / name}: damaged between bytes {begin:,} and "
                    f"{min(begin + BLOCK_BYTES, whole.nbytes):,}; delete {self.path} and build it again"
                )
            checked[block] = True


def open_store(path: Path) -> TokenStore:
    """Opens the store at ``path``. Local.

    Raises: InvalidUsage if there is none, or one of another format, or one that is damaged.
    """
    path = Path(path)
    try:
        meta = _meta(path)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{META}: {error}") from None
    if meta.get("kind") != KIND:
        raise InvalidUsage(f"{path}: holds no tokens of hdpcomm; make a store with hdpcomm data build")
    checksum = meta.pop(CHECKSUM, None)
    if meta.get("format") != FORMAT:
        raise InvalidUsage(
            f"{path}: has format {meta.get('format')}, and this hdpcomm reads format {FORMAT}; build it again"
        )
    if checksum != json_checksum(meta):
        raise _damaged(path, f"{META} does not have the checksum that it names")
    try:
        return _open(path, meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def _open(path: Path, meta: Mapping[str, Any]) -> TokenStore:
    for name, expected in meta["tables"].items():
        if fingerprint(path / name, expected or []) != expected:
            raise _damaged(path, f"{name} is not as it was written")
    documents = np.load(path / "documents.npy", mmap_mode="r")
    sums = np.load(path / "checksums.npy", mmap_mode="r")
    dtype = token_dtype(meta["vocabulary"])
    parts: dict[str, npt.NDArray[Any]] = {}
    checksums: dict[str, npt.NDArray[np.uint32]] = {}
    first = 0
    for name, size in meta["parts"].items():
        with open_regular(path / name) as file:
            found = os.fstat(file.fileno()).st_size
        if found != size or Path(name).name != name:
            raise _damaged(path, f"{name} has {found:,} bytes, expected {size:,}")
        parts[name] = np.memmap(path / name, mode="r", dtype=dtype if name.startswith("tokens") else np.uint8)
        blocks = -(-size // BLOCK_BYTES)
        checksums[name] = sums[first : first + blocks]
        first += blocks
    if documents.dtype != np.int64 or documents.ndim != 2 or documents.shape[1] != 4 or first != len(sums):
        raise _damaged(path, "its tables do not fit each other")
    return TokenStore(
        path=path,
        documents=documents,
        encoder=str(meta["encoder"]),
        encoder_name=str(meta["encoder_name"]),
        vocabulary=int(meta["vocabulary"]),
        parts=parts,
        checksums=checksums,
        checked={name: np.zeros(len(each), dtype=np.bool_) for name, each in checksums.items()},
    )


def _meta(path: Path) -> dict[str, Any]:
    content = json.loads(read_text(path / META))
    return content if isinstance(content, dict) else {}


def _damaged(path: Path, what: str) -> InvalidUsage:
    return InvalidUsage(f"{path}: damaged ({what}); delete this folder and build it again")
