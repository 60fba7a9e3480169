"""broadcast: size(B) is the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, bind_call

__all__ = ["Broadcast"]


class Broadcast(Operation):
    """Out of place: the root copies its input into the broadcast buffer, within the measured time."""

    name = "broadcast"
    core_name = "broadcast"
    rooted = True
    note = "broadcast works in place; out-of-place includes the root's copy into the buffer"

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        broadcast = bind_call(case.comm.broadcast, out, case.root, algorithm=case.algorithm, async_op=async_op)
        if case.in_place or case.comm.rank != case.root:
            return broadcast

        def copy_and_broadcast() -> Any:
            out.copy_(x)
            return broadcast()

        return copy_and_broadcast

    def given(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, case.root, case.shape.send) if case.comm.rank == case.root else None

    def expected(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, case.root, case.shape.recv)
