"""Shards of the ranks of a host, in memory that all of them map: :class:`SharedShards`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.comm.window import Window

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.train.buckets import Bucket

__all__ = ["BucketShards", "SharedShards"]

_ALIGNED = 64
"""Bytes to whose multiple parts begin: a cache line."""


@dataclass(slots=True)
class BucketShards:
    """The shards of one bucket, in the memory of their owners.

    Attributes:
        count: elements of a part.
        word: of each owner's window, which tells how many have added to its part.
    """

    owners: Communicator
    count: int
    dtype: torch.dtype
    offset: int
    word: int
    window: Window | None = None

    def part(self, owner: int) -> Tensor:
        """``[count]``, a view of the owner's memory."""
        assert self.window is not None
        return self.window.tensor(owner, self.offset, self.count, self.dtype)

    @property
    def own(self) -> Tensor:
        return self.part(self.owners.rank)


class SharedShards:
    """Collects what is to lie in shared memory, and makes one window for each set of owners."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, ...], list[BucketShards]] = {}
        self.windows: list[Window] = []

    def reserve(self, bucket: Bucket, dtype: torch.dtype) -> BucketShards:
        """The shards of a bucket, whose memory :meth:`make` brings. Local; in one order on all owners."""
        owners = bucket.sharding.owners
        assert owners is not None
        wanted = self._wanted.setdefault(owners.ranks, [])
        end = wanted[-1].offset + wanted[-1].count * wanted[-1].dtype.itemsize if wanted else 0
        made = BucketShards(owners, bucket.part, dtype, -(-end // _ALIGNED) * _ALIGNED, len(wanted))
        wanted.append(made)
        return made

    def make(self) -> None:
        """Collective over all owners, which have reserved alike."""
        for wanted in self._wanted.values():
            last = wanted[-1]
            window = Window(last.owners, words=len(wanted), nbytes=last.offset + last.count * last.dtype.itemsize)
            for parts in wanted:
                parts.window = window
            self.windows.append(window)
        self._wanted.clear()
