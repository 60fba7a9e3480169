"""sendrecv: every rank sends size(B) to the next one while it receives as much from the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, bind_call

__all__ = ["SendRecv"]


class SendRecv(Operation):
    """There is no in-place form: the sent and the received message need a buffer each."""

    name = "sendrecv"
    in_place = False

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        after, before = (case.comm.rank + 1) % case.comm.size, (case.comm.rank - 1) % case.comm.size
        return bind_call(case.comm.exchange, [(x, after)], [(out, before)], async_op=async_op)

    def given(self, case: Case) -> torch.Tensor:
        return values(case.kind, case.comm.rank, case.shape.send)

    def expected(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, (case.comm.rank - 1) % case.comm.size, case.shape.recv)
