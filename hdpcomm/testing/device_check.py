"""Finds missing waits and early reuse in programs for devices, without a GPU (docs/device.md).

A program runs on simulated devices whose operations are interleaved by a seed; what no event, flag or synchronize
orders is reported with both operations and their lines, in whatever order they happened to run::

    from hdpcomm.testing.device_check import check, planted_sites

    def program() -> None:
        comm = hdp.init(transport="sim")
        ...

    check(program, 2, seeds=range(50))                        # raises OrderingError
    for site in planted_sites(program, 2):                    # each wait, record, signal of the run, left out in turn
        assert site.found, site
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hdpcomm.comm.bootstrap import close_all, thread_rank
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.testing import run_threads
from hdpcomm.testing.kept_memory import KeptMemory

try:
    from hdpcomm.testing import _native
except ImportError as error:
    raise ImportError(
        "hdpcomm.testing.device_check needs hdpcomm.testing._native, which no wheel contains: build from source with "
        "CMAKE_ARGS=-DHDPCOMM_TESTING=ON pip install --no-build-isolation -e ."
    ) from error

__all__ = ["PlantedSite", "OrderingError", "OrderingReport", "check", "current_rank", "planted_sites"]


@dataclass(frozen=True, slots=True)
class OrderingReport:
    """Two operations that should be ordered, and are not.

    ``kind``: "missing wait", "reused too early", "use after free", "never written" or "deadlock". ``first`` and
    ``second``: (file, line) of their calls. ``text``: one sentence on both.
    """

    kind: str
    first: tuple[str, int]
    second: tuple[str, int]
    text: str


class OrderingError(Error):
    """A check found operations that are not ordered. ``seed`` repeats it; ``reports`` holds all that it found."""

    def __init__(self, message: str, *, seed: int = -1, reports: tuple[OrderingReport, ...] = ()) -> None:
        super().__init__(message)
        self.seed = seed
        self.reports = reports

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (self.args[0], self.seed, self.reports)


def _rebuild_error(message: str, seed: int, reports: tuple[OrderingReport, ...]) -> OrderingError:
    return OrderingError(message, seed=seed, reports=reports)


@dataclass(frozen=True, slots=True)
class PlantedSite:
    """A line that orders operations, and what the check says when it is left out.

    ``call``: "record", "wait", "writeValue", "waitValue", "synchronize", "kernel signal" or "kernel wait"; ``uses``:
    how often it was called.
    """

    call: str
    file: str
    line: int
    uses: int
    found: tuple[OrderingReport, ...]


def current_rank() -> int:
    """The rank of the calling thread; for programs that open devices themselves. Call it inside of :func:`check`."""
    joined = getattr(thread_rank, "value", None)
    if joined is None:
        raise InvalidUsage("current_rank() was called outside of check(): only ranks that are threads have one")
    return int(joined.rank)


def check(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    seeds: Iterable[int] = range(50),
    timeout: float = 60.0,
    transport: str = "shm",
) -> list[list[Any]]:
    """Runs ``fn(*args)`` on ``world_size`` ranks (threads of this process), once for each seed.

    Inside, ``hdpcomm.init(transport="sim")`` or ``open_sim(current_rank())`` gives the rank its device. ``transport``
    is what ``init()`` takes where it names none. ``timeout``: seconds for one run; where all ranks wait for devices and
    nothing can run, the shortest wait ends at once instead. A run keeps the memory of all its tensors.
    Returns the results by seed and rank.

    Raises: OrderingError with the reports of the first seed that has any (and what ``fn`` raised as its cause); else
        what ``fn`` raised.
    """
    results = []
    for seed in seeds:
        _, values = _clean_run(fn, world_size, args, seed, _Options(timeout, transport))
        results.append(values)
    return results


def planted_sites(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    seeds: Iterable[int] = (0,),
    path: str = "",
    timeout: float = 60.0,
    transport: str = "shm",
) -> list[PlantedSite]:
    """Runs ``fn`` as :func:`check` does, then replays the run once for each line that orders, with that line left out.

    The run itself is a sound one, so a planted bug corrupts nothing; the replay tells what would no longer be ordered.
    ``path``: only lines of files whose path contains it. ``found`` of a site holds the reports of all seeds; it is
    empty for a line that this run did not need.

    Raises: OrderingError when the program is not clean as it is.
    """
    sites: dict[tuple[str, int, str], PlantedSite] = {}
    for seed in seeds:
        run, _ = _clean_run(fn, world_size, args, seed, _Options(timeout, transport))
        for site in run.ordering_sites():
            if path not in site.file:
                continue
            key = (site.file, site.line, site.call)
            before = sites.get(key)
            found = (before.found if before else ()) + _reports(run.reports(site))
            uses = (before.uses if before else 0) + site.uses
            sites[key] = PlantedSite(site.call, site.file, site.line, uses, found)
    return [sites[key] for key in sorted(sites)]


@dataclass(frozen=True, slots=True)
class _Options:
    """How one run is made."""

    timeout: float
    transport: str


def _clean_run(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], seed: int, options: _Options
) -> tuple[_native.DeviceCheck, list[Any]]:
    run, values, error = _run(fn, world_size, args, seed, options)
    reports = _reports(run.reports())
    # A rank that fails by itself leaves the others waiting: then its error is the news.
    follows = error is not None and not isinstance(error, TimeoutError) and {r.kind for r in reports} <= {"deadlock"}
    if reports and not follows:
        raise _error(reports, seed) from error
    if error is not None:
        raise error
    return run, values


def _run(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], seed: int, options: _Options
) -> tuple[_native.DeviceCheck, list[Any], BaseException | None]:
    run = _native.DeviceCheck(seed)
    # Memory that one rank frees and another is given would be one address for two tensors that nothing orders.
    kept = [KeptMemory() for _ in range(world_size)]
    entered = threading.Barrier(world_size)
    raised: list[BaseException] = []

    def rank_main() -> Any:
        rank = current_rank()
        run.enter_rank(rank)
        entered.wait(options.timeout)  # so that no rank is taken for the only one
        try:
            with kept[rank]:
                result = fn(*args)
                close_all("")
            return result
        except BaseException as failure:
            raised.append(failure)
            raise
        finally:
            run.leave_rank()

    values: list[Any] = []
    error: BaseException | None = None
    try:
        values = run_threads(rank_main, world_size, timeout=options.timeout, transport=options.transport)
    except Exception as failure:
        # The error of the rank that failed first, not one that it caused on another rank.
        error = min([failure, *raised], key=lambda each: isinstance(each, (TimeoutError, ConnectionError)))
    finally:
        run.finish()
    return run, values, error


def _reports(found: list[_native.CheckReport]) -> tuple[OrderingReport, ...]:
    return tuple(
        OrderingReport(each.kind, (each.first.file, each.first.line), (each.second.file, each.second.line), each.text)
        for each in found
    )


def _error(reports: tuple[OrderingReport, ...], seed: int) -> OrderingError:
    lines = [f"{each.kind}: {each.text}" for each in reports[:5]]
    more = f"\n  ... and {len(reports) - 5} more" if len(reports) > 5 else ""
    text = "\n  ".join(lines)
    count = f"seed {seed}: {len(reports)} pair(s) of operations are not ordered (repeat with seeds=[{seed}])"
    return OrderingError(f"{count}\n  {text}{more}", seed=seed, reports=reports)
