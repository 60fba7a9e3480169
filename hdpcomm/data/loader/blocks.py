"""Blocks of documents as stores of tokens: threads of each rank make some, in a folder that all ranks share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from hdpcomm.data.agree import on_rank_0, raise_together
from hdpcomm.data.build import STALE_S, Document, documents_of, encoder_facts, open_published
from hdpcomm.data.corpus import Corpus, corpus_of
from hdpcomm.data.loader.order import BlockPlace
from hdpcomm.data.loader.stream import DocumentStream
from hdpcomm.data.store_writer import PartWriter, partial_of, publish
from hdpcomm.data.token_store import TokenStore
from hdpcomm.errors import Aborted, CommTimeout, Error, InvalidUsage
from hdpcomm.log import LOG

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Blocks"]

_POLL_S = 0.005
_TAKE_OVER_S = 5.0  # after which a rank makes the block of another rank, which may have died
_CLOSE_S = 10.0  # that close() waits for the documents that are being read
_KEPT_BYTES = 1 << 30  # of blocks that were used, for the next epoch
_PREFIX = "loader-"


def _made_folder(parent: Path, stream: DocumentStream, comm: Communicator | None) -> tuple[Path, str]:
    """The folder of this stream's blocks, and what tells this run's files there from those of others. Collective.

    Equal streams have the same folder: their blocks are the same whoever makes them, and one that is removed is made
    again. What killed runs left goes a day later.

    Raises: InvalidUsage, on all ranks: it cannot be made, or a rank does not see it.
    """
    facts = json.dumps([stream.facts, sorted(stream.files.items())])
    folder = parent / f"{_PREFIX}{hashlib.sha256(facts.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"

    def make() -> list[str]:
        session = uuid.uuid4().hex[:8]
        try:
            for left in parent.glob(f"{_PREFIX}*"):
                if left != folder and time.time() - left.stat().st_mtime > STALE_S:
                    shutil.rmtree(left, ignore_errors=True)
            while not (folder / f"{session}.run").exists():
                folder.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # a run that ended meanwhile has removed it
                    (folder / f"{session}.run").touch()
        except OSError as error:
            raise InvalidUsage(
                f"{parent}: no folder can be made there ({error.strerror}); give one that this user may write to "
                "(--data-cache), on a file system that all hosts share"
            ) from None
        return [str(folder), session]

    path, session = on_rank_0(comm, make)
    folder, error = Path(path), None
    if not (folder / f"{session}.run").exists():
        error = InvalidUsage(
            f"{folder}: a rank does not see this folder, which rank 0 has made; give one that all hosts share "
            "(--data-cache)"
        )
    raise_together(comm, error)
    return folder, session


class Blocks:
    """The blocks of a stream, each a corpus of its own. Collective over ``comm``; after that its methods are local.

    Each rank makes the blocks of its positions, in threads. What another rank does not make in time it makes itself,
    from then on at once, so that no rank depends on another one. The threads are daemons, since Python waits for those
    of a ``ThreadPoolExecutor`` before a process ends, for ever if a tokenizer or a file system is stuck.

    Args:
        threads: that make tokens, of each rank.
        folder: where a folder of blocks is made, which all ranks see.
        deadline_s: longest wait for a block.
    """

    def __init__(
        self, stream: DocumentStream, *, threads: int, folder: Path, comm: Communicator | None, deadline_s: float
    ) -> None:
        self.stream = stream
        self._rank, self._size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._deadline_s = deadline_s
        self.folder, self._session = _made_folder(folder, stream, comm)
        self._stopped = threading.Event()
        self._guard = threading.Lock()
        self._open: dict[int, Corpus] = {}
        self._late: set[int] = set()
        self._begun: set[int] = set()
        self._making: set[int] = set()
        self._made: dict[int, int] = {}
        self._failed: dict[int, Error] = {}
        self._calls: SimpleQueue[int | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"hdpcomm-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def want(self, places: Iterable[BlockPlace]) -> None:
        """Begins to make those of this rank."""
        for place in places:
            if place.position % self._size == self._rank:
                self._begin(place.block)

    def corpus(self, place: BlockPlace) -> Corpus:
        """The block; waits for it.

        Raises:
            InvalidUsage: a record is wrong (``file:line``), or a file has changed since the stream was opened.
            Error: with the place, whatever else a tokenizer or the system raises.
            CommTimeout, Aborted.
        """
        with self._guard:
            found = self._open.get(place.block)
        if found is not None:
            return found
        begun, maker, path = time.monotonic(), place.position % self._size, self._path(place.block)
        store: TokenStore | None = None
        while store is None:
            if path.exists():
                try:
                    store = open_published(path)
                except InvalidUsage:
                    if path.exists():  # else another run has removed it
                        raise
                continue
            if (error := self._failure(place.block)) is not None:
                raise error
            waited = time.monotonic() - begun
            if self._stopped.is_set():
                raise Aborted("the loader was closed while it waited for tokens")
            if waited > self._deadline_s:
                raise CommTimeout(
                    f"rank {self._rank} has had no tokens of {self.stream.place(place.block)} for "
                    f"{self._deadline_s:g} s, which rank {maker} makes: reading or the tokenizer is stuck or too slow; "
                    "give more --loaders, or build the data before (hdpcomm data build)"
                )
            if maker != self._rank and waited > _TAKE_OVER_S:
                self._late.add(maker)
            if maker == self._rank or maker in self._late:
                self._begin(place.block)
            time.sleep(_POLL_S)
        made = corpus_of(self.stream.name, [store], context=self.stream.context)
        with self._guard:
            return self._open.setdefault(place.block, made)

    def forget(self, live: set[int]) -> None:
        """All other blocks may go, on all ranks."""
        with self._guard:
            for block in [block for block in self._open if block not in live]:
                del self._open[block]
            room = sum(self._made.values()) - _KEPT_BYTES // self._size
            for block in [block for block in self._made if block not in live]:
                if room <= 0:
                    break
                room -= self._made.pop(block)
                self._remove(block)

    def stop(self) -> None:
        """Ends what waits; at once."""
        self._stopped.set()

    def close(self) -> None:
        """Ends all threads, and removes what this rank has made; ranks that still want it make it again."""
        self.stop()
        for _ in self._threads:
            self._calls.put(None)
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            with self._guard:
                places = ", ".join(map(self.stream.place, sorted(self._making)))
            LOG.warning(
                f"rank {self._rank} closes its loader, but a thread still reads {places}: reading or the tokenizer is "
                "stuck or very slow; the thread is left behind and ends with the process"
            )
        self._open.clear()
        for block in list(self._made):
            self._remove(block)
        own = [self._error_path(block) for block in self._failed]
        if self._rank == 0:
            own.append(self.folder / f"{self._session}.run")
        for file in own:
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are in it, or gone
            self.folder.rmdir()

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block}"

    def _error_path(self, block: int) -> Path:
        return self.folder / f"{self._session}-{block}.error"

    def _remove(self, block: int) -> None:
        """At once for those that look for it; who has it open reads on."""
        aside = partial_of(self._path(block), uuid.uuid4().hex[:8])
        with contextlib.suppress(OSError):
            self._path(block).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _failure(self, block: int) -> Error | None:
        """Why there will be no such block, by the rank that was to make it."""
        with contextlib.suppress(FileNotFoundError):
            return InvalidUsage(self._error_path(block).read_text("utf-8", "surrogateescape"))
        return self._failed.get(block)

    def _begin(self, block: int) -> None:
        with self._guard:
            if block not in self._begun:
                self._begun.add(block)
                self._calls.put(block)

    def _work(self) -> None:
        while (block := self._calls.get()) is not None:
            with self._guard:
                self._making.add(block)
            try:
                if not (self._stopped.is_set() or self._path(block).exists() or self._failure(block)):
                    self._make(block)
            except Aborted:  # other ranks make this block themselves
                pass
            except Error as error:
                self._fail(block, error)
            finally:
                with self._guard:
                    self._making.discard(block)
                    self._begun.discard(block)

    def _make(self, block: int) -> None:
        """Reads the documents of a block and writes their tokens, the same ones whoever does it, whole or not at
        all."""
        documents, final = self._documents(block), self._path(block)
        partial = partial_of(final, uuid.uuid4().hex[:8])
        try:
            partial.mkdir(parents=True)
            writer = PartWriter(partial, 0, vocabulary=self.stream.vocabulary)
            for tokens, counted in documents:
                writer.add(0, tokens, counted)
            writer.close()
            size = sum(file.stat().st_size for file in partial.iterdir())
            publish(partial, final, parts=1, facts=encoder_facts(self.stream.encoder))
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise Error(
                f"{final.parent}: tokens cannot be written there ({error.strerror}); make room, or give another folder "
                "(--data-cache)"
            ) from error
        with self._guard:
            self._made[block] = size

    def _documents(self, block: int) -> Sequence[Document]:
        stream = self.stream
        try:
            stream.check_unchanged(block)
            units = stream.blocks[block]
            return [each for unit in units for each in documents_of(unit, stream.encoder, stream.fields, self._stopped)]
        except Error:
            raise
        except OSError as error:
            where = error.filename or stream.place(block)
            raise Error(f"{where}: {error.strerror or error}; check that the file can be read") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise Error(f"{stream.place(block)}: {reason}; look at these documents or the tokenizer") from error

    def _fail(self, block: int, error: Error) -> None:
        """Tells all ranks why there will be no such block, if the disk takes it."""
        self._failed[block] = error
        path = self._error_path(block)
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):
            hidden.write_text(str(error), "utf-8", "surrogateescape")
            hidden.rename(path)
