"""all_reduce: size(B) is the buffer of a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import contribution, reduced
from hdpcomm.perf.operation import Case, Operation, bind_call

__all__ = ["AllReduce"]


class AllReduce(Operation):
    """Out of place: the result goes into a second buffer."""

    name = "all_reduce"
    core_name = "all_reduce"
    reduces = True

    def bus_factor(self, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        function = case.comm.all_reduce if case.in_place else functools.partial(case.comm.all_reduce, out=out)
        return bind_call(function, x, case.redop, algorithm=case.algorithm, async_op=async_op)

    def given(self, case: Case) -> torch.Tensor:
        return contribution(case.kind, case.redop, case.comm.rank, case.comm.size, case.shape.send)

    def expected(self, case: Case) -> torch.Tensor | None:
        return reduced(case.kind, case.redop, case.comm.size, case.shape.recv)
