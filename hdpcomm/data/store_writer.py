"""Writing a store of tokens: each rank writes a part, then one rank publishes all of them under the store's name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdpcomm.data.images import EncodedImage
from hdpcomm.data.token_store import BLOCK_BYTES, CHECKSUM, FORMATS, KIND, META, NO_IMAGES, TABLES, token_dtype
from hdpcomm.files import fingerprint, json_checksum, sync_folder, write_synced

__all__ = ["PartWriter", "partial_of", "publish"]


def partial_of(final: Path, key: str) -> Path:
    """The hidden folder in which a store is written before it gets its name; ``key`` tells builders apart."""
    return final.with_name(f".{final.name}.{key}.partial")


class _BlockFile:
    """Appends to a file and keeps the CRC-32 of each of its blocks. The file is made with its first byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: list[int] = []
        self.size = 0
        self._waiting = bytearray()
        self._file: Any = None

    def append(self, data: bytes | bytearray) -> None:
        self.size += len(data)
        self._waiting += data
        if len(self._waiting) >= 16 * BLOCK_BYTES:
            self._flush(len(self._waiting) // BLOCK_BYTES * BLOCK_BYTES)

    def _flush(self, size: int) -> None:
        if not size:
            return
        if self._file is None:
            self._file = self.path.open("wb")
        view = memoryview(self._waiting)
        for start in range(0, size, BLOCK_BYTES):
            self.sums.append(zlib.crc32(view[start : min(size, start + BLOCK_BYTES)]))
        self._file.write(view[:size])
        view.release()
        del self._waiting[:size]

    def close(self) -> None:
        self._flush(len(self._waiting))
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


class PartWriter:
    """One rank's part of a store. Rows of documents carry the number of their unit, so that the order of the whole does
    not depend on who wrote what.

    Args:
        folder: of all parts, :func:`partial_of` the store.
        part: number of this part.
        vocabulary: every token is below it.
    """

    def __init__(self, folder: Path, part: int, *, vocabulary: int) -> None:
        self._folder, self._part = folder, part
        self._dtype = token_dtype(vocabulary)
        self._tokens = _BlockFile(folder / f"tokens-{part}.bin")
        self._mask = _BlockFile(folder / f"mask-{part}.bin")
        self._pictures = _BlockFile(folder / f"images-{part}.bin")
        self._images: list[tuple[int, ...]] = []
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._contents: dict[int, hashlib._Hash] = {}
        self._first = 0

    def add(
        self, unit: int, tokens: npt.NDArray[Any], counted: npt.NDArray[np.bool_] | None,
        images: Sequence[EncodedImage] = (),
    ) -> None:  # fmt: skip
        """Appends a document. ``counted``: which tokens count for the loss; ``None``: all."""
        for picture, sizes in images:
            kept, size = (os.fsencode(picture.path), len(picture.data)) if picture.path else (picture.data, -1)
            place = self._part, self._pictures.size, len(kept), size, zlib.crc32(picture.data)
            self._images.append((len(self._rows), *sizes, *place))
            self._pictures.append(kept)
        masked = -1 if counted is None else self._mask.size
        content = self._contents.setdefault(unit, hashlib.sha256())
        self._rows.append((unit, self._part, self._first, len(tokens), masked))
        for file, values, dtype in ((self._tokens, tokens, self._dtype), (self._mask, counted, np.uint8)):
            if values is not None:
                file.append(data := np.ascontiguousarray(values, dtype=dtype).tobytes())
                content.update(data)
        self._first += len(tokens)

    def close(self) -> None:
        """Writes what is left, and the rows and checksums that :func:`publish` collects."""
        for file in (self._tokens, self._mask, self._pictures):
            file.close()
        np.savez(
            self._folder / f"rows-{self._part}.npz",
            rows=np.array(self._rows, dtype=np.int64).reshape(-1, 5),
            tokens=np.array(self._tokens.sums, dtype=np.uint32),
            mask=np.array(self._mask.sums, dtype=np.uint32),
            images=np.array(self._pictures.sums, dtype=np.uint32),
            contents=np.array([[unit, *each.digest()] for unit, each in self._contents.items()], np.int64).reshape(
                -1, 33
            ),
            table=np.array(self._images, dtype=np.int64).reshape(-1, NO_IMAGES.shape[1]),
        )


def publish(partial: Path, final: Path, *, parts: int, facts: dict[str, Any]) -> int:
    """Collects what ``parts`` writers have closed, and renames the folder to ``final``; returns the documents.

    The documents stand in the order of their units. A store that is there already is replaced. Called by one rank.
    """
    tables: list[Any] = []
    pictures, contents, sums, sizes = [], [], [], {}
    for part in range(parts):
        with np.load(partial / f"rows-{part}.npz") as found:
            pictures.append(found["table"])
            pictures[-1][:, 0] += sum(len(each) for each in tables)
            tables.append(found["rows"])
            contents += found["contents"].tolist()
            for kind in ("tokens", "mask", "images"):
                if len(found[kind]):
                    name = f"{kind}-{part}.bin"
                    sizes[name] = (partial / name).stat().st_size
                    sums.append(found[kind])
        (partial / f"rows-{part}.npz").unlink()
    rows = np.concatenate(tables)
    order = np.argsort(rows[:, 0], kind="stable")
    documents, images = rows[order, 1:], np.concatenate(pictures)
    images[:, 0] = np.argsort(order)[images[:, 0]]
    np.save(partial / "documents.npy", documents)
    np.save(partial / "checksums.npy", np.concatenate(sums) if sums else np.zeros(0, dtype=np.uint32))
    if len(images):
        np.save(partial / TABLES[2], images[np.argsort(images[:, 0], kind="stable")])
    content = hashlib.sha256(json.dumps(sorted(contents)).encode()).hexdigest()
    tables_on_disk = {name: fingerprint(partial / name) for name in TABLES[: 3 if len(images) else 2]}
    meta = {
        "kind": KIND,
        "format": FORMATS[len(images) > 0],
        **facts,
        "content": content,
        "tables": tables_on_disk,
        "parts": sizes,
    }
    write_synced(partial / META, json.dumps(meta | {CHECKSUM: json_checksum(meta)}, indent=1))
    _rename(partial, final)
    return len(documents)


def _rename(partial: Path, final: Path) -> None:
    while True:
        aside = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")
        with contextlib.suppress(FileNotFoundError):
            final.rename(aside)
        try:
            partial.rename(final)
            break
        except OSError as error:  # another run has published the same store in between
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    sync_folder(final.parent)
