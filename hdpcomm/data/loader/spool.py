"""Blocks of tokens in the files of a folder: what the servers of one rank make, the ranks beside it read in parts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import uuid
import weakref
from pathlib import Path

import numpy as np

from hdpcomm.data.loader.block import SequencePart, TokenBlock
from hdpcomm.errors import Error, InvalidUsage

__all__ = ["Spool", "SpooledBlock"]

_SIZE = struct.Struct("<Q")
_PREFIX = "loader-"


class SpooledBlock:
    """A block in a file, of which only the lengths are in memory. The file is closed with the last reference, so that
    a thread may still read what another one has dropped."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._path = path
        (size,) = _SIZE.unpack(self._read(0, _SIZE.size))
        header = json.loads(self._read(_SIZE.size, size))
        self.bounds = np.frombuffer(self._read(_SIZE.size + size, 8 * header["bounds"]), dtype=np.int64)
        self._dtype = np.dtype(header["dtype"])
        self._tokens = _SIZE.size + size + self.bounds.nbytes
        self._masks = self._tokens + int(self.bounds[-1]) * self._dtype.itemsize if header["masked"] else 0

    def part(self, index: int, start: int, stop: int) -> SequencePart:
        """Tokens ``start`` to ``stop`` of sequence ``index``, with the label of the last one; reads no more."""
        begin = int(self.bounds[index]) + start
        count = min(int(self.bounds[index]) + stop + 1, int(self.bounds[index + 1])) - begin
        size = self._dtype.itemsize
        tokens = np.frombuffer(self._read(self._tokens + begin * size, count * size), dtype=self._dtype)
        counted = np.frombuffer(self._read(self._masks + begin, count), dtype=np.bool_) if self._masks else None
        return SequencePart(tokens, counted)

    def _read(self, start: int, count: int) -> bytes:
        data = os.pread(self._file, count, start)
        if len(data) != count:
            raise Error(
                f"{self._path}: has {len(data)} bytes at {start:,} where {count} were expected; another process has "
                "changed the folder of a running loader: resume from the last checkpoint"
            )
        return data


class Spool:
    """A folder of blocks. The last process that leaves removes it; if all were killed, the next spool beside it does.

    Args:
        path: what :meth:`make` gave, on this host or another one.

    Raises: OSError if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        _locked(self._lock, fcntl.LOCK_SH)

    @staticmethod
    def make(parent: Path) -> Spool:
        """A new folder. Raises: InvalidUsage if it cannot be made."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for left in parent.glob(f"{_PREFIX}*"):
                _remove_unused(left)
            name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
            hidden = parent / f".{name}"
            hidden.mkdir()
            (hidden / "lock").touch()
            made = Spool(hidden)
            made.path = hidden.rename(parent / name)
        except OSError as error:
            raise InvalidUsage(
                f"{parent}: no folder can be made there ({error.strerror}); give one that this user may write to "
                "(--data-cache), on a file system that all hosts share"
            ) from None
        return made

    def leave(self) -> None:
        """Nothing is read or written here any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _remove_unused(self.path)

    def write(self, block: int, made: TokenBlock) -> int:
        """Publishes a block, whole or not at all; returns its bytes. Raises: Error if the disk is full."""
        facts = {"bounds": len(made.bounds), "dtype": made.tokens.dtype.str, "masked": bool(len(made.counted))}
        head = json.dumps(facts).encode()
        chunks = [_SIZE.pack(len(head)), head, made.bounds.tobytes(), made.tokens.tobytes(), made.counted.tobytes()]
        return self._publish(self._path(block), chunks)

    def fail(self, block: int, reason: str) -> None:
        """Tells all readers why there will be no such block."""
        self._publish(self._path(block).with_suffix(".error"), [reason.encode("utf-8", "surrogatepass")])

    def open(self, block: int) -> SpooledBlock | None:
        """The block, if it is there. Raises: InvalidUsage of :meth:`fail`."""
        try:
            return SpooledBlock(self._path(block))
        except FileNotFoundError:
            pass
        with contextlib.suppress(FileNotFoundError):
            reason = self._path(block).with_suffix(".error").read_bytes()
            raise InvalidUsage(reason.decode("utf-8", "surrogatepass"))
        return None

    def delete(self, block: int) -> None:
        """Makes room; who has it open may read on."""
        self._path(block).unlink(missing_ok=True)

    def _path(self, block: int) -> Path:
        return self.path / f"{block}.tokens"

    def _publish(self, path: Path, chunks: list[bytes]) -> int:
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            with hidden.open("wb") as file:
                file.writelines(chunks)
                size = file.tell()
            hidden.rename(path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            raise Error(
                f"{path.parent}: tokens cannot be written there ({error.strerror}); make room, or give another folder "
                "(--data-cache)"
            ) from error
        return size


def _locked(file: int, kind: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:  # held by another process; or the file system has no locks, and nothing is ever swept
        return False
    return True


def _remove_unused(path: Path) -> None:
    """Removes a folder that no living process is in."""
    with contextlib.suppress(OSError):
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            if _locked(lock, fcntl.LOCK_EX):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
