"""torch.distributed's gloo with the methods of a Communicator, so that operations run on both unchanged.

Only what the operations call, without a choice of algorithms. Where gloo has no out-of-place form, the copy that its
users must make is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm.comm.bootstrap import open_store
from hdpcomm.comm.launchers import joined, rank_and_size

__all__ = ["Gloo", "join_gloo"]

# Newer names of the same functions; torch warns of the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Works:
    """Several operations that are waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Gloo:
    """A process group of gloo; ``ranks`` are global. Roots and peers are positions, as in a Communicator.

    ``timeout``: of the group's operations, and of its subsets'.
    """

    def __init__(self, group: Any, ranks: Sequence[int], *, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())

    def subset(self, ranks: Sequence[int]) -> Gloo | None:
        """``new_group``: all ranks of the job call it. gloo orders the ranks of a group as given only if asked."""
        chosen = [self.ranks[rank] for rank in ranks]
        group = dist.new_group(chosen, backend="gloo", sort_ranks=False, timeout=self._timeout)
        return Gloo(group, chosen, timeout=self._timeout) if dist.get_rank() in chosen else None

    def barrier(self) -> None:
        dist.barrier(self._group)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, *, async_op: bool = False) -> Any:
        return _all_gather(out, x, group=self._group, async_op=async_op)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        return _reduce_scatter(out, x, op=_OPS[op], group=self._group, async_op=async_op)

    def all_reduce(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        target = x if out is None else out.copy_(x)
        return dist.all_reduce(target, op=_OPS[op], group=self._group, async_op=async_op)

    def broadcast(self, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        return dist.broadcast(x, self.ranks[root], group=self._group, async_op=async_op)

    def reduce(
        self,
        x: torch.Tensor,
        root: int,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        target = x if out is None else out.copy_(x)
        return dist.reduce(target, self.ranks[root], op=_OPS[op], group=self._group, async_op=async_op)

    def gather(
        self,
        out: torch.Tensor | None,
        x: torch.Tensor,
        root: int,
        *,
        async_op: bool = False,
    ) -> Any:
        parts = None if out is None else list(out.chunk(self.size)) if out.numel() else [out] * self.size
        return dist.gather(x, parts, self.ranks[root], group=self._group, async_op=async_op)

    def scatter(
        self,
        out: torch.Tensor,
        x: torch.Tensor | None,
        root: int,
        *,
        async_op: bool = False,
    ) -> Any:
        parts = None if x is None else list(x.chunk(self.size)) if x.numel() else [x] * self.size
        return dist.scatter(out, parts, self.ranks[root], group=self._group, async_op=async_op)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        return dist.all_to_all_single(out, x, out_splits, in_splits, group=self._group, async_op=async_op)

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        *,
        async_op: bool = False,
    ) -> Works:
        works = [dist.isend(x, self.ranks[peer], group=self._group) for x, peer in sends]
        works += [dist.irecv(y, self.ranks[peer], group=self._group) for y, peer in recvs]
        both = Works(works)
        if not async_op:
            both.wait()
        return both


def join_gloo(seconds: float) -> Gloo:
    """torch.distributed on the job's own store, before ``init()``, which then uses the same one. Collective.

    ``seconds``: for joining and for every operation.
    """
    limit = timedelta(seconds=seconds)
    rank, size = rank_and_size() if joined() else (0, 1)
    store = dist.HashStore() if size == 1 else _store_of_run(rank, seconds)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return Gloo(dist.group.WORLD, range(size), timeout=limit)


def _store_of_run(rank: int, seconds: float) -> Any:
    """A part of the job's store for this run: ranks that live for several runs must not find old addresses."""
    store = open_store(rank, seconds)
    store.set_timeout(timedelta(seconds=seconds))
    run = store.add(f"hdpcomm/perf/{rank}", 1)
    return dist.PrefixStore(f"perf/{run}", store)  # type: ignore[attr-defined]
