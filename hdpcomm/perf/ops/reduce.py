"""reduce: size(B) is the buffer of a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import contribution, reduced
from hdpcomm.perf.operation import Case, Operation, bind_call

__all__ = ["Reduce"]


class Reduce(Operation):
    """Out of place: the result goes into a second buffer."""

    name = "reduce"
    core_name = "reduce"
    reduces = True
    rooted = True

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        function = case.comm.reduce if case.in_place else functools.partial(case.comm.reduce, out=out)
        return bind_call(function, x, case.root, case.redop, algorithm=case.algorithm, async_op=async_op)

    def given(self, case: Case) -> torch.Tensor:
        return contribution(case.kind, case.redop, case.comm.rank, case.comm.size, case.shape.send)

    def expected(self, case: Case) -> torch.Tensor | None:
        if case.comm.rank != case.root:
            return None
        return reduced(case.kind, case.redop, case.comm.size, case.shape.recv)
