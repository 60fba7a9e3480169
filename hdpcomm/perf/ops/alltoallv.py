"""alltoallv: every rank sends unequal parts, more to ranks that are further away, as nccl-tests does by default."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.perf.data import values
from hdpcomm.perf.operation import Case, Operation, Shape, bind_call, blocks

__all__ = ["AllToAllV", "parts"]


def parts(count: int, ranks: int) -> list[int]:
    """Elements for the rank that is 0, 1, ... ranks further: in proportion to the distance, ``count * ranks`` in total
    (rounded down part by part). Nothing for the rank itself, unless it is alone."""
    if ranks == 1:
        return [count]
    distances = ranks * (ranks - 1) // 2
    return [count * ranks * distance // distances for distance in range(ranks)]


class AllToAllV(Operation):
    """size(B) is what a rank sends, and as much what it receives; there is no in-place form."""

    name = "alltoallv"
    core_name = "all_to_all"
    in_place = False
    note = "a rank sends d times as much to the rank d further as to the next one, and nothing to itself"

    def shape(self, elements: int, ranks: int) -> Shape:
        count = blocks(elements, ranks)
        total = sum(parts(count, ranks))
        return Shape(count, total, total, total)

    def bus_factor(self, ranks: int) -> float:
        return (ranks - 1) / ranks  # as nccl-tests counts, although nothing stays on the rank

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor, *, async_op: bool) -> Callable[[], Any]:
        to, come = _splits(case)
        return bind_call(case.comm.all_to_all, out, x, come, to, algorithm=case.algorithm, async_op=async_op)

    def expected(self, case: Case) -> torch.Tensor | None:
        size, rank = case.comm.size, case.comm.rank
        sizes = parts(case.shape.count, size)
        blocks_ = []
        for source in range(size):
            to = [sizes[(target - source) % size] for target in range(size)]
            first = list(itertools.accumulate(to, initial=0))[rank]
            blocks_.append(values(case.kind, source, to[rank], first=first))
        return torch.cat(blocks_)


def _splits(case: Case) -> tuple[list[int], list[int]]:
    """Elements for each rank, and from each rank."""
    size, rank = case.comm.size, case.comm.rank
    sizes = parts(case.shape.count, size)
    return [sizes[(peer - rank) % size] for peer in range(size)], [sizes[(rank - peer) % size] for peer in range(size)]
