"""Pre-tokenised documents in memory maps: the folders that ``hdpcomm data build`` and the cache of indexes write.

``meta.json`` says what is there; ``documents.npy`` holds ``[documents, 4]``: part, first token in it, length in tokens,
first byte of the loss mask (-1: every token counts); ``tokens-P.bin`` and ``mask-P.bin`` hold the parts, each written
by one rank; ``checksums.npy`` holds the CRC-32 of each block of the parts. ``images.npy``, where there are images, has
``[images, 12]``: document, first token, and what :meth:`hdpcomm.data.images.ImageProcessor.sizes` tells; part, first
byte and bytes in ``images-P.bin`` of the image, or of the path of its own file; bytes of that file (-1: there is none)
and the CRC-32 of the image. Opening a store checks its sizes, its documents and its checksums; a block of a part, or an
image, is checked when it is first read. So a store of any size opens at once, and no token or image that was changed on
the disk is ever trained on.
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

from hdpcomm.data.images import Picture
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import fingerprint, json_checksum, open_regular, read_text

__all__ = ["BLOCK_BYTES", "FORMATS", "META", "TokenStore", "is_store", "open_store", "token_dtype"]

FORMATS = (2, 3)
"""Without images, and with some."""
CHECKSUM = "sha256"
META = "meta.json"
BLOCK_BYTES = 1 << 18
KIND = "hdpcomm tokens"
TABLES = ("documents.npy", "checksums.npy", "images.npy")
NO_IMAGES = np.zeros((0, 12), dtype=np.int64)
Index = npt.NDArray[np.int64]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest unsigned type for token numbers below ``vocabulary``."""
    return np.dtype(np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def is_store(path: Path) -> bool:
    """Whether ``path`` is a folder that names itself a store, or has the files of one; not looked into further."""
    try:
        if not (path / META).is_file():
            return False
        return all((path / name).is_file() for name in TABLES[:2]) or _meta(path).get("kind") == KIND
    except (OSError, ValueError, RecursionError):
        return False


@dataclass(frozen=True, eq=False)
class TokenStore:
    """An open store; made by :func:`open_store`. Pickled by its path.

    Attributes:
        documents, images: see above.
        encoder: fingerprint of what made the tokens (:class:`hdpcomm.data.encoders.Encoder`).
        vocabulary: every token is below it.
        content: digest of all tokens, whoever wrote them; empty in stores of older versions.
    """

    path: Path
    documents: Index
    images: Index
    encoder: str
    encoder_name: str
    vocabulary: int
    content: str
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

    def picture(self, image: int) -> Picture:
        """An image by its place in the table. Raises: InvalidUsage: its block is damaged, or its file another one."""
        *_, part, first, count, size, checksum = (int(value) for value in self.images[image])
        data = self._read(f"images-{part}.bin", first, count).tobytes()
        if size < 0:
            return Picture(data)
        path, wrong = os.fsdecode(data), "has changed"
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            content, wrong = b"", f"cannot be read any more ({error.strerror})"
        if len(content) != size or zlib.crc32(content) != checksum:
            raise InvalidUsage(f"image {path} {wrong}; put it back, or delete {self.path} and build it again")
        return Picture(content, path)

    def check(self) -> int:
        """Reads and checks every block and image; returns the bytes. Raises: InvalidUsage at the first damaged one."""
        for name, part in self.parts.items():
            self._check(name, 0, part.nbytes)
        for image in range(len(self.images)):
            self.picture(image)
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
    if meta.get("format") not in FORMATS:
        raise InvalidUsage(
            f"{path}: has format {meta.get('format')}, and this hdpcomm reads format 2 or 3; build it again"
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
        images=np.load(path / TABLES[2], mmap_mode="r") if TABLES[2] in meta["tables"] else NO_IMAGES,
        encoder=str(meta["encoder"]),
        encoder_name=str(meta["encoder_name"]),
        vocabulary=int(meta["vocabulary"]),
        content=str(meta.get("content", "")),
        parts=parts,
        checksums=checksums,
        checked={name: np.zeros(len(each), dtype=np.bool_) for name, each in checksums.items()},
    )


def _meta(path: Path) -> dict[str, Any]:
    content = json.loads(read_text(path / META))
    return content if isinstance(content, dict) else {}


def _damaged(path: Path, what: str) -> InvalidUsage:
    return InvalidUsage(f"{path}: damaged ({what}); delete this folder and build it again")
