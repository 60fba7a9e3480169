"""subset: creates communicators over changing ordered sets of ranks, and uses each for the first time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import contribution, reduced
from hdpcomm.perf.operation import Bound, Case, Operation, bind_call

__all__ = ["Subset", "members"]


def members(iteration: int, ranks: int) -> tuple[int, ...]:
    """The subset of an iteration: sizes from 2 to all in turn, in another order each time, always with rank 0."""
    if ranks < 3:
        return tuple((iteration + k) % ranks for k in range(ranks))
    size = 2 + iteration % (ranks - 1)
    chosen = [(iteration // (ranks - 1) + k) % ranks for k in range(size)]
    if 0 not in chosen:
        chosen[iteration % size] = 0
    return tuple(chosen)


class Subset(Operation):
    """Out of place: creating a communicator and its first all_reduce; in place: only an all_reduce on an old one."""

    name = "subset"
    core_name = "all_reduce"
    reduces = True
    asynchronous = False
    note = (
        "left: subset() and its first all_reduce of size(B); right: the same all_reduce on communicators that were kept"
    )

    def bind(self, case: Case) -> Bound:
        return _BoundSubset(self, case)

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        del case, x, out, async_op
        return lambda: None  # _BoundSubset.measure does the timing

    def given(self, case: Case) -> None:
        del case

    def expected(self, case: Case) -> None:
        del case


class _BoundSubset(Bound):
    """Times each subset on its members (NaN on other ranks), without the library's clean-up (``forget``)."""

    def __init__(self, operation: Operation, case: Case) -> None:
        super().__init__(operation, case)
        self.created_s: list[float] = []
        self._kept: dict[tuple[int, ...], Any] = {}

    def measure(self, iterations: int) -> list[float] | None:
        return [seconds for seconds, _ in self._rounds(iterations, checking=False)]

    def fill(self) -> None:
        """Does nothing: every subset fills its own data."""

    def wrong(self) -> int:
        rounds = min(2 * self.case.comm.size, 8)
        return sum(wrong for _, wrong in self._rounds(rounds, checking=True))

    def forget_kept(self) -> None:
        """Frees the communicators that were kept, if a library needs that."""
        for comm in self._kept.values():
            self._forget(comm)
        self._kept = {}

    def _rounds(self, iterations: int, *, checking: bool) -> list[tuple[float, int]]:
        case, done = self.case, list[tuple[float, int]]()
        for iteration in range(iterations):
            ranks = members(iteration, case.comm.size)
            if not checking:
                case.comm.barrier()
            if case.in_place and ranks not in self._kept:
                self._kept[ranks] = case.comm.subset(ranks)
            started = time.perf_counter()
            comm = self._kept[ranks] if case.in_place else case.comm.subset(ranks)
            created = time.perf_counter()
            if comm is None:
                done.append((math.nan, 0))
                continue
            if checking:
                self.x.copy_(contribution(case.kind, case.redop, comm.rank, comm.size, self.x.numel()))
                started = created = time.perf_counter()
            bind_call(comm.all_reduce, self.x, case.redop, algorithm=case.algorithm)()
            ended = time.perf_counter()
            wrong = 0
            if checking:
                right = reduced(case.kind, case.redop, comm.size, self.x.numel())
                wrong = int((self.x.to(torch.float64) != right.to(torch.float64)).sum())
            else:
                self.created_s.append(created - started)
            done.append((ended - started, wrong))
            if not case.in_place:
                self._forget(comm)
        return done

    def details(self) -> dict[str, float]:
        """Microseconds of the creation alone, on this rank."""
        if self.case.in_place or not self.created_s:
            return {}
        return {"create_us": statistics.median(self.created_s) * 1e6, "create_min_us": min(self.created_s) * 1e6}

    @staticmethod
    def _forget(comm: Any) -> None:
        forget = getattr(comm, "forget", None)
        if forget is not None:
            forget()
