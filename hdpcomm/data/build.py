"""Builds a store of tokens: all ranks of a communicator share out the units of the input and write a part each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch

from hdpcomm.data.agree import on_rank_0, raise_together
from hdpcomm.data.encoders import Encoder, FolderEncoder, check_tokens
from hdpcomm.data.images import EncodedImage, Picture, take_pictures
from hdpcomm.data.records import Fields, File, Unit, files_of, records
from hdpcomm.data.remote import RemoteFile
from hdpcomm.data.store_writer import PartWriter, partial_of, publish
from hdpcomm.data.token_store import TokenStore, open_store
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.files import user_folder

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["build_store", "cache_folder", "open_published", "store_key"]

_Document = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None, list[EncodedImage]]
_ROUND_S = 0.5  # between two looks at how far the other ranks are
_STALE_S = 86400.0  # after which what a killed process left is removed


def cache_folder() -> Path:
    """Where indexes are kept unless the caller says: ``hdpcomm/data`` in the user's cache (``XDG_CACHE_HOME``)."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "data"


def store_key(files: Sequence[File], encoder: Encoder, fields: Fields) -> str:
    """Name of the store of these files in a cache: changes with any of them, with the tokenizer and the fields."""
    digest = hashlib.sha256(json.dumps([encoder.fingerprint, asdict(fields)]).encode())
    for path in files:
        if isinstance(path, RemoteFile):
            digest.update(f"{path.identity}\n".encode())
            continue
        for file in files_of(path):
            status = file.stat()
            digest.update(
                f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape")
            )
    return digest.hexdigest()[:24]


def build_store(
    units: Sequence[Unit],
    encoder: Encoder,
    final: Path,
    *,
    comm: Communicator | None,
    fields: Fields,
    check: Callable[[], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> TokenStore:
    """Writes the store ``final``, there whole or not at all, and opens it. Collective: equal arguments on every rank.

    The order of the documents is that of ``units``, on any number of ranks. Documents without a token, and
    conversations in which the assistant says nothing, are left out.

    Args:
        final: on a file system that all ranks see. One that is there already is replaced.
        check: called on rank 0 when all is read; raises InvalidUsage if the input has changed since.
        on_progress: called on this rank about twice a second with what is done and the whole, in sizes of units.

    Raises: InvalidUsage, on every rank the same: of the first unit that is wrong, or no document at all.
    """
    partial = Path(on_rank_0(comm, lambda: _make_partial(final)))
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    worker = _Worker(units, encoder, fields, partial, rank, size)
    total = sum(unit.size for unit in units)
    try:
        worker.start()
        while not _round(worker, comm, on_progress, total):
            pass
        error = worker.failure
        raise_together(comm, error[1] if error else None, order=error[0] if error else 0)
        on_rank_0(comm, check)
        on_rank_0(comm, lambda: _publish(partial, final, size, encoder))
    except BaseException:
        worker.stopped.set()
        worker.join()
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return open_published(final)


def open_published(final: Path) -> TokenStore:
    """Another run may be putting its own store in the place of this one, which holds the same."""
    for _ in range(20):
        with contextlib.suppress(InvalidUsage):
            return open_store(final)
        time.sleep(0.05)
    return open_store(final)


def _make_partial(final: Path) -> str:
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f".{final.name}.*.partial"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    shutil.rmtree(left, ignore_errors=True)
        partial = partial_of(final, uuid.uuid4().hex[:8])
        partial.mkdir()
    except OSError as error:
        raise InvalidUsage(
            f"{final}: cannot be made ({error.strerror}); give a folder that this user may write to (--data-cache, or "
            "--out)"
        ) from None
    return str(partial)


def _publish(partial: Path, final: Path, parts: int, encoder: Encoder) -> int:
    for part in range(parts):
        if not (partial / f"rows-{part}.npz").exists():
            raise InvalidUsage(f"{final}: rank {part} wrote to another file system; give a folder that all ranks see")
    facts = {"encoder": encoder.fingerprint, "encoder_name": encoder.name, "vocabulary": encoder.vocabulary}
    return publish(partial, final, parts=parts, facts=facts)


def _round(
    worker: _Worker, comm: Communicator | None, on_progress: Callable[[int, int], None] | None, total: int
) -> bool:
    """Waits a little for this rank's work; whether all ranks have ended theirs, or one has failed."""
    worker.join(_ROUND_S)
    state = torch.tensor([worker.is_alive(), worker.failure is not None, worker.done], dtype=torch.int64)
    if comm is not None:
        comm.all_reduce(state)
    working, failed, done = state.tolist()
    if on_progress is not None:
        on_progress(done, total)
    if failed:
        worker.stopped.set()
        worker.join()
    return bool(failed) or not working


class _Worker(threading.Thread):
    """Encodes this rank's units beside the thread that keeps in touch with the other ranks."""

    def __init__(
        self, units: Sequence[Unit], encoder: Encoder, fields: Fields, folder: Path, rank: int, size: int
    ) -> None:
        super().__init__(name="hdpcomm-data", daemon=True)
        self._units = list(enumerate(units))[rank::size]
        self._encoder, self._fields = encoder, fields
        self._folder, self._rank = folder, rank
        self.stopped = threading.Event()
        self.done = 0
        self.failure: tuple[int, Error] | None = None

    def run(self) -> None:
        place, path = 0, cast("File", self._folder)
        try:
            writer = PartWriter(self._folder, self._rank, vocabulary=self._encoder.vocabulary)
            for place, unit in self._units:
                path = unit.path
                for document in self._documents(unit):
                    if self.stopped.is_set():  # another rank has failed
                        return
                    writer.add(place, *document)
                self.done += unit.size
            writer.close()
        except Error as error:
            self.failure = place, error
        except Exception as error:
            where, why = path, f"{type(error).__name__}: {error}; check that the file is whole"  # as compressed ones
            if isinstance(error, OSError) and error.strerror:
                where, why = (
                    error.filename or self._folder,
                    f"{error.strerror}; make room, or check that it can be read",
                )
            self.failure = place, Error(f"{where}: {why}")

    def _documents(self, unit: Unit) -> Iterator[_Document]:
        """(tokens, which of them count for the loss, images) of documents with a token, and of conversations with an
        answer."""
        folder = None
        if isinstance(unit.path, RemoteFile):
            unit = replace(unit, path=replace(unit.path, stopped=self.stopped))
        else:
            folder = (unit.path if unit.path.is_dir() else unit.path.parent).absolute()
        for where, content in records(unit, self._fields):
            pictures: list[Picture] = []
            if isinstance(content, tuple):
                messages, pictures = take_pictures(*content, where, folder)
                document: _Document = *self._encoder.chat(messages, where), []
            elif isinstance(content, np.ndarray):
                check_tokens(content, self._encoder.name, self._encoder.vocabulary, where)
                document = content, None, []
            else:
                document = self._encoder.text(content), None, []
            if isinstance(self._encoder, FolderEncoder):
                document = self._encoder.with_images(*document[:2], pictures, where)
            if len(document[0]) and (document[1] is None or document[1][1:].any()):
                yield document
