"""Servers of a loader in threads of the ranks: each rank makes some of the blocks and finds the others in the spool."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from hdpcomm.data.agree import on_rank_0, raise_together
from hdpcomm.data.loader.block import SequencePart, make_block
from hdpcomm.data.loader.order import BlockPlace, LoadedBatch, SequencePlace, StreamSampler
from hdpcomm.data.loader.spool import Spool, SpooledBlock
from hdpcomm.data.loader.stream import DocumentStream
from hdpcomm.errors import Aborted, CommTimeout, Error, InvalidUsage
from hdpcomm.log import LOG

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["ThreadServers"]

_POLL_S = 0.005
_TAKE_OVER_S = 5.0  # after which a rank makes the block of another rank, which may have died
_CLOSE_S = 10.0  # that close() waits for the documents that are being read
_KEPT_BYTES = 1 << 30  # of blocks that were used, for the next epoch
P = ParamSpec("P")
T = TypeVar("T")


class ThreadServers:
    """Threads of this rank. Collective over ``comm``, whose ranks share a folder of blocks. Two threads of a
    :class:`LoaderService` call :meth:`next_batch` and :meth:`read`.

    Each rank makes the blocks of its positions. What another rank does not make in time it makes itself, from then on
    at once, so that no rank depends on another one.

    Args:
        options: of the :class:`StreamSampler`.
        threads: that make tokens, of each rank.
        folder: where the spool is made.
        deadline_s: longest wait for a block.
    """

    def __init__(
        self,
        stream: DocumentStream,
        options: Mapping[str, Any],
        *,
        threads: int,
        folder: Path,
        comm: Communicator | None,
        deadline_s: float,
    ) -> None:
        self.stream = stream
        self._rank, self._size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._deadline_s = deadline_s
        self._spool = self._shared(folder, comm)
        self._stopped = threading.Event()
        self._guard = threading.Lock()
        self._open: dict[int, SpooledBlock] = {}
        self._late: set[int] = set()
        self._making: dict[int, Future[None]] = {}
        self._made: dict[int, int] = {}
        self._pool = DaemonThreads(threads, "hdpcomm-loader")
        self._sampler = StreamSampler(len(stream.blocks), self._lengths, self._want, **options)
        self._live: set[int] = set()

    def _shared(self, folder: Path, comm: Communicator | None) -> Spool:
        spool: Spool | None = None

        def make() -> str:
            nonlocal spool
            spool = Spool.make(folder)
            return str(spool.path)

        path, error = Path(on_rank_0(comm, make)), None
        try:
            spool = spool or Spool(path)
        except OSError:
            error = InvalidUsage(
                f"{path}: rank {self._rank} does not see this folder, which rank 0 has made; give one that all hosts "
                "share (--data-cache)"
            )
        raise_together(comm, error)
        assert spool is not None
        return spool

    def next_batch(self) -> LoadedBatch:
        """The batch of the next step; waits until its lengths are known."""
        batch = self._sampler.next()
        self._live = self._sampler.live()
        return batch

    def read(self, sequence: SequencePlace, start: int, stop: int) -> SequencePart:
        """Tokens ``start`` to ``stop`` of a sequence."""
        return self._block(sequence.at).part(sequence.number, start, stop)

    def used(self, batches: Sequence[LoadedBatch]) -> None:
        """Told after each step which batches may still be read."""
        live = self._live | {sequence.block for batch in batches for sequence in batch.sequences}
        with self._guard:
            for block in [block for block in self._open if block not in live]:
                del self._open[block]
            room = sum(self._made.values()) - _KEPT_BYTES // self._size
            for block in [block for block in self._made if block not in live]:
                if room <= 0:
                    break
                room -= self._made.pop(block)
                self._spool.delete(block)

    def stop(self) -> None:
        """Ends what waits; at once."""
        self._stopped.set()

    def close(self) -> None:
        """Ends all threads, and removes the files that no other rank uses."""
        self.stop()
        if not self._pool.close(_CLOSE_S):
            with self._guard:
                stuck = sorted(block for block, making in self._making.items() if making.running())
            places = ", ".join(self.stream.place(block) for block in stuck)
            LOG.warning(
                f"rank {self._rank} closes its loader, but a thread still reads {places}: reading or the tokenizer is "
                "stuck or very slow; the thread is left behind and ends with the process"
            )
        self._open.clear()
        self._spool.leave()

    def _want(self, places: Sequence[BlockPlace]) -> None:
        for place in places:
            if place.position % self._size == self._rank:
                self._begin(place.block)

    def _begin(self, block: int) -> Future[None]:
        with self._guard:
            making = self._making.get(block)
            if making is None:
                making = self._making[block] = self._pool.submit(self._make, block)
            return making

    def _make(self, block: int) -> None:
        """In a thread of the pool."""
        try:
            if self._stopped.is_set() or self._spool.open(block) is not None:
                return
            try:
                size = self._spool.write(block, make_block(self.stream, block, self._stopped))
            except Aborted:  # other ranks make this block themselves
                raise
            except Error as error:
                with contextlib.suppress(Error):
                    self._spool.fail(block, str(error))
                raise
            with self._guard:
                self._made[block] = size
        finally:
            with self._guard:
                self._making.pop(block, None)

    def _lengths(self, place: BlockPlace) -> npt.NDArray[np.int64]:
        return np.diff(self._block(place).bounds)

    def _block(self, place: BlockPlace) -> SpooledBlock:
        """The block, open; waits for it."""
        with self._guard:
            found = self._open.get(place.block)
        if found is not None:
            return found
        begun, maker = time.monotonic(), place.position % self._size
        making: Future[None] | None = None
        while (found := self._spool.open(place.block)) is None:
            waited = time.monotonic() - begun
            if self._stopped.is_set():
                raise Aborted("the loader was closed while it waited for tokens")
            if waited > self._deadline_s:
                raise CommTimeout(
                    f"rank {self._rank} has had no tokens of {self.stream.place(place.block)} for "
                    f"{self._deadline_s:g} s, which rank {maker} makes: reading or the tokenizer is stuck or too slow; "
                    "give more --loaders, or build the data before (hdpcomm data build)"
                )
            if making is not None and making.done() and not making.cancelled():
                making.result()
                making = None
            if maker != self._rank and waited > _TAKE_OVER_S:
                self._late.add(maker)
            if making is None and (maker == self._rank or maker in self._late):
                making = self._begin(place.block)
            time.sleep(_POLL_S)
        with self._guard:
            return self._open.setdefault(place.block, found)


class DaemonThreads:
    """A pool of threads. Python waits for those of a ``ThreadPoolExecutor`` before a process ends, for ever if a
    tokenizer or a file system is stuck; for these it does not.

    Args:
        count: threads, which are started with the first calls.
        name: of each, with its number behind it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._guard = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The result of ``call(*args, **kwargs)``, made by the next free thread; cancelled if the pool is closed."""
        future: Future[T] = Future()

        def run() -> None:
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._guard:
            if self._closed:
                future.cancel()
                return future
            self._calls.put(run)
            if len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def close(self, timeout_s: float) -> bool:
        """Cancels the calls that no thread has begun and waits for the others.

        Args:
            timeout_s: longest wait.

        Returns: whether all threads have ended.
        """
        with self._guard:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
