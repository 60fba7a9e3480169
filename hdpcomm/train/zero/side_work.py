"""Moves of tensors beside a rank's passes: by a thread where the host computes, by a stream where a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm._core import settings
from hdpcomm.comm.device.communicator import DeviceCommunicator

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["SideStream", "SideThread", "SideWork", "side_work"]

Work = Callable[[], None]


class SideThread:
    """Runs work beside what its caller computes, where the host computes."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, work: Work) -> Callable[[], object]:
        """Begins work that comes after all that the caller has computed so far. Returns a function that orders what
        the caller computes from its call on after the work, and raises what that has raised."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hdpcomm-weights")
        return self._pool.submit(work).result

    def mark(self) -> None:
        """Marks what the caller has computed so far, for :meth:`run_after`: all of it is there."""

    def run_after(self, _: Any, work: Work) -> None:
        """Work that comes after a mark, on the calling thread: any other than the one that computes."""
        work()

    def finish(self) -> None:
        """The calling thread waits until all of its :meth:`run_after` has ended; here it has. Raises: CommTimeout."""

    def close(self) -> None:
        """Ends what :meth:`start` needs, until it is called again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


class SideStream:
    """As :class:`SideThread`, where a GPU computes: a stream beside the caller's current one. Memory that work of
    :meth:`start` allocates is this stream's, and the caller may free it while it still computes with it: the next work
    that takes its place comes after that. So who starts work on a stream gives it no :meth:`run_after`."""

    def __init__(self, comm: DeviceCommunicator) -> None:
        self._comm = comm
        self._stream = torch.cuda.Stream(comm.device)  # type: ignore[no-untyped-call]

    def start(self, work: Work) -> Callable[[], object]:
        begun = self.mark()
        with torch.cuda.stream(self._stream):
            begun.wait()
            work()
            wait: Callable[[], object] = self._comm.mark().wait
            return wait

    def mark(self) -> Any:
        return self._comm.mark()

    def run_after(self, mark: Any, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            mark.wait()
            work()

    def finish(self) -> None:
        # What it waits for are passes: their operations have deadlines of their own.
        with torch.cuda.stream(self._stream):
            self._comm.mark().wait(settings().longest_wait_s)

    def close(self) -> None:
        """There is nothing to end."""


SideWork = SideThread | SideStream


def side_work(comm: Communicator) -> SideWork:
    """Side work for the device of a communicator. Local."""
    if isinstance(comm, DeviceCommunicator) and comm.device.type == "cuda":
        return SideStream(comm)
    return SideThread()
