"""Running code on several ranks of this host, as tests do."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from hdpcomm import _core
from hdpcomm.comm.bootstrap import ThreadRank, close_all, thread_rank
from hdpcomm.comm.launch import RankPool, run_ranks
from hdpcomm.errors import CommTimeout, InvalidUsage

__all__ = ["RankPool", "run_threads", "spawn"]


def spawn(
    fn: Callable[..., Any], world_size: int, *args: Any, transport: str | None = None, timeout: float = 60.0
) -> list[Any]:
    """Runs ``fn(*args)`` on ``world_size`` ranks; returns the results by rank.

    ``fn`` is a function of an importable module; inside, ``hdpcomm.init()`` joins the world. ``transport``: ``None`` or
    ``"shm"``: processes; ``"threads"``: threads of this process (see :func:`run_threads`). ``timeout``: seconds for the
    whole run; past it the stacks of all ranks are printed.

    Raises: what a rank raised; PeerLost when a rank died; CommTimeout past the timeout.
    """
    if transport == "threads":
        return run_threads(fn, world_size, *args, timeout=timeout)
    if transport not in (None, "auto", "shm"):
        raise InvalidUsage(f"transport {transport!r} is unknown; give 'shm' (processes) or 'threads'")
    return run_ranks(fn, world_size, *args, timeout=timeout)


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs ``fn(*args)`` on ``world_size`` ranks that are threads of this process; returns the results by rank.

    Inside, ``hdpcomm.init()`` joins their world (once a run). ``fn`` may be any callable. ``timeout``: seconds for the
    run, and the default of its operations.
    """
    segment = _core.comm.create_segment(world_size)
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def main(rank: int) -> None:
        thread_rank.value = ThreadRank(segment, rank, timeout)
        try:
            results[rank] = fn(*args)
            close_all("")
        except BaseException as error:
            errors[rank] = error
            close_all(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        frames = sys._current_frames()
        for rank in stuck:
            print(f"--- stack of rank {rank}", file=sys.stderr)
            traceback.print_stack(frames.get(threads[rank].ident or 0), file=sys.stderr)
        raise CommTimeout(f"ranks {stuck} did not end within {timeout} s; their stacks are on stderr", ranks=stuck)
    if errors:
        raise errors[min(errors, key=lambda rank: (isinstance(errors[rank], ConnectionError), rank))]
    return results
