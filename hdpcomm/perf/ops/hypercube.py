"""hypercube: an all-gather by exchanges with the ranks whose numbers differ in one bit, as in nccl-tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.perf.operation import Case, Shape
from hdpcomm.perf.ops.all_gather import AllGather

__all__ = ["Hypercube"]


class Hypercube(AllGather):
    """Each exchange is waited for before the next one, which doubles the bytes. The ranks are a power of two."""

    name = "hypercube"
    core_name = None
    asynchronous = False

    def shape(self, elements: int, ranks: int) -> Shape:
        if ranks & (ranks - 1):
            raise InvalidUsage(f"hypercube: there are {ranks} ranks; give a power of two, or use all_gather")
        return super().shape(elements, ranks)

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        del async_op
        comm, part = case.comm, case.shape.send
        own = out[comm.rank * part : (comm.rank + 1) * part]
        steps = []
        bit = 1
        while bit < comm.size:
            peer = comm.rank ^ bit
            mine, theirs = comm.rank & -bit, peer & -bit  # the blocks that both have gathered so far
            steps.append(
                ([(out[mine * part : (mine + bit) * part], peer)], [(out[theirs * part : (theirs + bit) * part], peer)])
            )
            bit *= 2

        def gather() -> None:
            if not case.in_place:
                own.copy_(x)
            for send, recv in steps:
                comm.exchange(send, recv)

        return gather
