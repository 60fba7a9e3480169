"""hypercube: an all-gather by exchanges with the ranks whose numbers differ in one bit, as in nccl-tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, Shape, blocks

__all__ = ["Hypercube"]


class Hypercube(Operation):
    """size(B) is the gathered whole, count the part of a rank. In place: the input is the rank's part of the output."""

    name = "hypercube"
    asynchronous = False

    def shape(self, elements: int, ranks: int) -> Shape:
        if ranks & (ranks - 1):
            raise InvalidUsage(f"hypercube: there are {ranks} ranks; give a power of two, or use all_gather")
        part = blocks(elements, ranks)
        return Shape(part, part, part * ranks, part * ranks)

    def bus_factor(self, ranks: int) -> float:
        return (ranks - 1) / ranks

    def in_place_views(self, shared: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        part = case.shape.send
        return shared[case.comm.rank * part : (case.comm.rank + 1) * part], shared

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

    def given(self, case: Case) -> torch.Tensor:
        return values(case.kind, case.comm.rank, case.shape.send)

    def expected(self, case: Case) -> torch.Tensor | None:
        return torch.cat([values(case.kind, rank, case.shape.send) for rank in range(case.comm.size)])
