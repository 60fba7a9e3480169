"""Running code on several ranks of this host, as tests do."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hdpcomm import _core
from hdpcomm.arguments import check_whole
from hdpcomm.comm.bootstrap import TRANSPORTS, ThreadRank, close_all, thread_rank
from hdpcomm.comm.launch import RankPool, run_ranks
from hdpcomm.errors import CommTimeout, InvalidUsage

__all__ = ["RankPool", "run_threads", "spawn"]


def spawn(
    fn: Callable[..., Any], world_size: int, *args: Any, transport: str | None = None, timeout: float = 60.0
) -> list[Any]:
    """Runs ``fn(*args)`` on ``world_size`` ranks; returns the results by rank.

    ``fn`` is a function of an importable module; inside, ``hdpcomm.init()`` joins the world. ``transport``: that of
    ``init()``, between processes; ``"threads"``: threads of this process (see :func:`run_threads`). ``timeout``:
    seconds for the whole run; past it the stacks of all ranks are printed.

    Raises: what a rank raised; PeerLost when a rank died; CommTimeout past the timeout.
    """
    if transport == "threads":
        return run_threads(fn, world_size, *args, timeout=timeout)
    if transport not in (None, *TRANSPORTS):
        raise InvalidUsage(f"transport {transport!r} is unknown; give one of: threads, {', '.join(TRANSPORTS)}")
    if transport in (None, "auto"):
        return run_ranks(fn, world_size, *args, timeout=timeout)
    return run_ranks(_on_transport, world_size, transport, fn, *args, timeout=timeout)


def _on_transport(transport: str, fn: Callable[..., Any], *args: Any) -> Any:
    os.environ["HDPCOMM_TRANSPORT"] = transport  # of a process that runs nothing else
    return fn(*args)


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    transport: str = "shm",
    timeout: float = 60.0,
) -> list[Any]:
    """Runs ``fn(*args)`` on ``world_size`` ranks that are threads of this process; returns the results by rank.

    Inside, ``hdpcomm.init()`` joins their world (once a run), by ``transport`` unless it names one: shm or sim; on CUDA
    each rank is a process (:func:`spawn`). ``fn`` may be any callable. ``timeout``: seconds for the run, and the
    default of its operations.

    Raises: what a rank raised, also where other ranks are stuck (a CommTimeout that names them is its cause then, if it
    has no other); CommTimeout when ranks are stuck and none raised.
    """
    check_whole("ranks", "world_size", world_size, least=1, most=4096)
    segment = _core.transport.create_segment(world_size)
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def main(rank: int) -> None:
        thread_rank.value = ThreadRank(segment, rank, timeout, transport)
        try:
            results[rank] = fn(*args)
            close_all("")
        except BaseException as error:
            errors[rank] = error
            close_all(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    late = _join(threads, timeout)
    told = dict(errors)  # a rank that is stuck may still add to the other
    if told:
        error = told[min(told, key=lambda rank: (isinstance(told[rank], ConnectionError), rank))]
        if late is not None and error.__cause__ is None and error.__context__ is None:
            raise error from late
        raise error
    if late is not None:
        raise late
    return results


def _join(threads: Sequence[threading.Thread], timeout: float) -> CommTimeout | None:
    """Waits until all have ended; past ``timeout`` seconds prints the stacks of those that have not, and names them."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if not stuck:
        return None
    frames = sys._current_frames()
    for rank in stuck:
        print(f"--- stack of rank {rank}", file=sys.stderr)
        traceback.print_stack(frames.get(threads[rank].ident or 0), file=sys.stderr)
    return CommTimeout(f"ranks {stuck} did not end within {timeout} s; their stacks are on stderr", ranks=stuck)
