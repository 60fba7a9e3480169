"""reduce_scatter: size(B) is the input of a rank, count its part of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import contribution, reduced
from hdpcomm.perf.operation import Case, Operation, Shape, bind_call, blocks

__all__ = ["ReduceScatter"]


class ReduceScatter(Operation):
    """In place: the output is the rank's part of the input."""

    name = "reduce_scatter"
    core_name = "reduce_scatter"
    reduces = True

    def shape(self, elements: int, ranks: int) -> Shape:
        part = blocks(elements, ranks)
        return Shape(part, part * ranks, part, part * ranks)

    def bus_factor(self, ranks: int) -> float:
        return (ranks - 1) / ranks

    def in_place_views(self, shared: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        part = case.shape.recv
        return shared, shared[case.comm.rank * part : (case.comm.rank + 1) * part]

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        return bind_call(case.comm.reduce_scatter, out, x, case.redop, algorithm=case.algorithm, async_op=async_op)

    def given(self, case: Case) -> torch.Tensor:
        return contribution(case.kind, case.redop, case.comm.rank, case.comm.size, case.shape.send)

    def expected(self, case: Case) -> torch.Tensor | None:
        first = case.comm.rank * case.shape.recv
        return reduced(case.kind, case.redop, case.comm.size, case.shape.recv, first=first)
