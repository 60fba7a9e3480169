"""ring: keys and values go once round the ring, as in ring attention: size - 1 neighbour exchanges, each waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, Shape

__all__ = ["Ring"]


class Ring(Operation):
    """size(B) is K and V of one rank together; two messages a step."""

    name = "ring"
    in_place = False
    asynchronous = False
    note = "time is of one ring step; a rotation is size - 1 of them; size(B) is K and V of one rank"

    def shape(self, elements: int, ranks: int) -> Shape:
        del ranks
        half = blocks_of_two(elements)
        return Shape(2 * half, 2 * half, 2 * half, 2 * half)

    def operations_per_call(self, ranks: int) -> int:
        return max(1, ranks - 1)

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        del async_op
        comm, steps, half = case.comm, case.comm.size - 1, case.shape.count // 2
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        spare = torch.empty_like(out)
        # The last step writes to `out`, the one before to `spare`, and so on; `x` is only read.
        written = [out if (steps - step) % 2 else spare for step in range(steps)]
        read = [x, *written[:-1]]
        sends = [[(source[:half], after), (source[half:], after)] for source in read[:steps]]
        recvs = [[(target[:half], before), (target[half:], before)] for target in written]

        def rotate() -> None:
            for outgoing, incoming in zip(sends, recvs, strict=True):
                comm.exchange(outgoing, incoming)

        return rotate

    def expected(self, case: Case) -> torch.Tensor | None:
        if case.comm.size == 1:
            return None
        return values(case.kind, (case.comm.rank + 1) % case.comm.size, case.shape.recv)


def blocks_of_two(elements: int) -> int:
    """Elements of K, and of V."""
    return max(elements // 2, 1 if elements else 0)
