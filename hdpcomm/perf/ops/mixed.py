"""mixed: an all_gather on each of several overlapping subsets, all in flight at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Bound, Case, Operation, Shape, Storage, Works, bind_call, blocks

__all__ = ["Mixed", "windows"]


def windows(ranks: int) -> tuple[tuple[int, ...], ...]:
    """The default subsets: all ranks, and every pair of neighbours, in alternating order."""
    pairs = [(rank, rank + 1) if rank % 2 else (rank + 1, rank) for rank in range(ranks - 1)]
    return (tuple(range(ranks)), *pairs)


class Mixed(Operation):
    """size(B) is the gathered whole of one subset; algbw is the aggregate of all ranks and subsets."""

    name = "mixed"
    core_name = "all_gather"
    in_place = False
    note = "size(B) is of one subset; algbw and busbw are bytes that all ranks of all subsets receive, over the time"

    def shape(self, elements: int, ranks: int) -> Shape:
        del ranks
        return Shape(elements, 0, 0, elements)

    def aggregate(self, case: Case) -> float:
        moved = sum((len(ranks) - 1) * len(ranks) * blocks(case.shape.total, len(ranks)) for ranks in _subsets(case))
        return moved / case.shape.total if case.shape.total else 0.0

    def bind(self, case: Case) -> Bound:
        return _BoundMix(self, case)

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        del case, x, out, async_op
        return lambda: None  # the calls are those of _BoundMix

    def given(self, case: Case) -> None:
        del case

    def expected(self, case: Case) -> None:
        del case


def _subsets(case: Case) -> tuple[tuple[int, ...], ...]:
    return case.subsets or windows(case.comm.size)


class _BoundMix(Bound):
    def __init__(self, operation: Operation, case: Case) -> None:
        super().__init__(operation, case)
        self._parts: list[tuple[int, Storage, Storage, Any]] = []
        starts = []
        for index, ranks in enumerate(_subsets(case)):
            comm = case.comm.subset(ranks)  # the same on all ranks and in one order; None: not a member
            if comm is None:
                continue
            part = blocks(case.shape.total, comm.size)
            x, out = (Storage(case, n) for n in (part, part * comm.size))
            self._parts.append((index, x, out, comm))
            starts.append(bind_call(comm.all_gather, out.data, x.data, algorithm=case.algorithm, async_op=True))

        def start() -> Works:
            return Works([begin() for begin in starts])

        self.start = start
        self.run = lambda: start().wait()

    def fill(self) -> None:
        for k, x, out, comm in self._parts:
            x.poison()
            out.poison()
            x.data.copy_(values(self.case.kind, 64 * k + comm.rank, x.data.numel()))

    def wrong(self) -> int:
        count = 0
        for k, x, out, comm in self._parts:
            parts = [values(self.case.kind, 64 * k + rank, x.data.numel()) for rank in range(comm.size)]
            count += int((out.data.to(torch.float64) != torch.cat(parts).to(torch.float64)).sum())
            count += x.overwritten_guards() + out.overwritten_guards()
        return count
