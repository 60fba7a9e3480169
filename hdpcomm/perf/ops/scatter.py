"""scatter: size(B) is the root's input, count the part of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, Shape, bind_call, blocks

__all__ = ["Scatter"]


class Scatter(Operation):
    """In place: the root's output is its part of the input."""

    name = "scatter"
    core_name = "scatter"
    rooted = True

    def shape(self, elements: int, ranks: int) -> Shape:
        part = blocks(elements, ranks)
        return Shape(part, part * ranks, part, part * ranks)

    def in_place_views(self, shared: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        part = case.shape.recv
        return shared, shared[case.comm.rank * part : (case.comm.rank + 1) * part]

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        source = x if case.comm.rank == case.root else None
        return bind_call(case.comm.scatter, out, source, case.root, algorithm=case.algorithm, async_op=async_op)

    def given(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, case.root, case.shape.send) if case.comm.rank == case.root else None

    def expected(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, case.root, case.shape.recv, first=case.comm.rank * case.shape.recv)
