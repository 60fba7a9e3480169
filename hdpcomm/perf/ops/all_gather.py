"""all_gather: size(B) is the gathered whole, count the part of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, Shape, bind_call, blocks

__all__ = ["AllGather"]


class AllGather(Operation):
    """In place: the input is the rank's part of the output."""

    name = "all_gather"
    core_name: ClassVar[str | None] = "all_gather"

    def shape(self, elements: int, ranks: int) -> Shape:
        part = blocks(elements, ranks)
        return Shape(part, part, part * ranks, part * ranks)

    def bus_factor(self, ranks: int) -> float:
        return (ranks - 1) / ranks

    def in_place_views(self, shared: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        part = case.shape.send
        return shared[case.comm.rank * part : (case.comm.rank + 1) * part], shared

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        return bind_call(case.comm.all_gather, out, x, algorithm=case.algorithm, async_op=async_op)

    def given(self, case: Case) -> torch.Tensor:
        return values(case.kind, case.comm.rank, case.shape.send)

    def expected(self, case: Case) -> torch.Tensor | None:
        return torch.cat([values(case.kind, rank, case.shape.send) for rank in range(case.comm.size)])
