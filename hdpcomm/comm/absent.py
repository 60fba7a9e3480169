"""Ranks that are not there: what a device of any mesh would hold, on one process (:class:`AbsentRanks`)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hdpcomm.comm.work import ENDED, Work
from hdpcomm.errors import InvalidUsage

__all__ = ["AbsentRanks"]


class AbsentRanks:
    """Stands for a :class:`hdpcomm.Communicator` where tensors are on torch's meta device, which have sizes and no
    bytes: each message has arrived when it is sent, and what has bytes is the same on all ranks.

    A mesh of it, and models cut for that mesh, are those of one rank of many; their passes allocate what that rank's
    would, so that its memory is known without any of them (:func:`hdpcomm.measure.memory.profile_memory`).

    Args:
        size: number of ranks.
        rank: the one whose place this process takes.
        ranks_per_host: for meshes, whose tensor ranks are to lie on one host.
    """

    device = torch.device("meta")

    def __init__(self, size: int, rank: int = 0, *, ranks_per_host: int | None = None) -> None:
        if not 0 <= rank < size:
            raise InvalidUsage(f"rank is {rank} of {size} ranks; give one from 0 to {size - 1}")
        self._ranks_per_host = ranks_per_host or size
        self.ranks: tuple[int, ...] = tuple(range(size))
        self.global_rank = rank
        self.rank = rank
        hosts = [each // self._ranks_per_host for each in range(size)]
        self._core = SimpleNamespace(world=SimpleNamespace(nodes=lambda: hosts))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subset(self, ranks: Sequence[int]) -> AbsentRanks | None:
        chosen = tuple(self.ranks[place] for place in ranks)
        if self.global_rank not in chosen:
            return None
        made = object.__new__(AbsentRanks)
        made.__dict__.update(self.__dict__)
        made.ranks, made.rank = chosen, chosen.index(self.global_rank)
        return made

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def _arrived(self, *_: Any, **__: Any) -> Work:
        return ENDED

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, **_: Any) -> Work:
        """Fills all parts with this rank's own."""
        if not out.is_meta:
            out.view(self.size, -1).copy_(x.reshape(1, -1).expand(self.size, -1))
        return ENDED

    def all_reduce(self, x: torch.Tensor, op: str = "sum", **_: Any) -> Work:
        if op == "sum" and not x.is_meta:
            x *= self.size
        return ENDED

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, _: Any = None, in_splits: Sequence[int] = (), **__: Any
    ) -> Work:
        """Fills all parts with what this rank has for itself."""
        if not out.is_meta:
            own = torch.split(x, list(in_splits) or x.numel() // self.size)[self.rank]
            out.view(self.size, -1).copy_(own.expand(self.size, -1))
        return ENDED

    send = recv = exchange = barrier = _arrived
    reduce_scatter = broadcast = reduce = gather = scatter = _arrived

    def landing_zone(self, x: Any) -> None:
        """``None``: buffers of rings are counted as tensors."""

    def lands(self, _: int) -> bool:
        return False
