"""alltoall: size(B) is the buffer of a rank, count the part for one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, Shape, bind_call, blocks

__all__ = ["AllToAll"]


class AllToAll(Operation):
    """There is no in-place form: ``Communicator.all_to_all`` needs two buffers."""

    name = "alltoall"
    core_name = "all_to_all"
    in_place = False

    def shape(self, elements: int, ranks: int) -> Shape:
        part = blocks(elements, ranks)
        return Shape(part, part * ranks, part * ranks, part * ranks)

    def bus_factor(self, ranks: int) -> float:
        return (ranks - 1) / ranks

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        return bind_call(case.comm.all_to_all, out, x, algorithm=case.algorithm, async_op=async_op)

    def given(self, case: Case) -> torch.Tensor:
        return values(case.kind, case.comm.rank, case.shape.send)

    def expected(self, case: Case) -> torch.Tensor | None:
        part, first = case.shape.count, case.comm.rank * case.shape.count
        return torch.cat([values(case.kind, rank, part, first=first) for rank in range(case.comm.size)])
