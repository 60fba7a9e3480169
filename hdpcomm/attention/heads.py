"""Head parallelism (Ulysses): a group of ranks exchanges data so that each member holds fewer heads of more tokens.

The ranks of a communicator form groups of ``size`` neighbours. Within a group, rank i takes the i-th share of the
heads of all the group's tokens. Neighbours hold neighbouring pieces of the zigzag, so a group holds one head and one
tail of each sequence, like one rank of a ring. Sources: DeepSpeed-Ulysses, and USP (arXiv 2405.07719) for the hybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from hdpcomm.attention._kernels import Rows, copy_rows
from hdpcomm.attention.layout import Layout

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["HeadGroup", "TokenShares", "grouped_layout", "head_shares", "token_shares"]


@lru_cache(maxsize=128)
def grouped_layout(layout: Layout, size: int) -> Layout:
    """The layout of groups of ``size`` neighbours."""
    return layout.grouped(size)


@dataclass(frozen=True, slots=True, eq=False)
class TokenShares:
    """Where the tokens of each member are among those of its group."""

    members: tuple[Rows, ...]
    """For each member: copies from its rows to the group's rows."""
    rows: int
    """Rows of the group."""


@lru_cache(maxsize=128)
def token_shares(layout: Layout, size: int, group: int) -> TokenShares:
    """The shares of the tokens of ``group``, one of ``layout.size // size``; pure and local."""
    whole = grouped_layout(layout, size)
    members = tuple(layout.rows_in(whole, group * size + member) for member in range(size))
    return TokenShares(members, whole.rows(group))


def head_shares(heads: int, kv_heads: int, size: int) -> tuple[list[slice], list[slice]]:
    """By member: its heads of q, and those of k and v that they use (shared where there are fewer than members); of
    numbers that the choice of a variant has found to fit."""
    q_share, kv_share = heads // size, max(1, kv_heads // size)
    queries = [slice(i * q_share, (i + 1) * q_share) for i in range(size)]
    keys = [slice(i * kv_heads // size, i * kv_heads // size + kv_share) for i in range(size)]
    return queries, keys


class HeadGroup:
    """This rank's place in its group, and the exchanges between (tokens, all heads) and (group's tokens, my heads)."""

    def __init__(self, comm: Communicator, size: int) -> None:
        first = comm.rank // size * size
        inner = comm.subset(range(first, first + size))
        outer = comm.subset(range(comm.rank % size, comm.size, size))
        assert inner is not None
        assert outer is not None
        self.inner, self.outer = inner, outer
        self.size, self.member, self.group = size, comm.rank % size, comm.rank // size

    def collect(
        self, tensors: Sequence[Tensor], tokens: Sequence[TokenShares], heads: Sequence[list[slice]]
    ) -> list[Tensor]:
        """[rows, all heads, ...] of each tensor -> [group's rows, my heads, ...]. Collective over the group."""
        sends, recvs, arriving = [], [], []
        for x, shares, parts in zip(tensors, tokens, heads, strict=True):
            for peer in range(self.size):
                here = x[:, parts[self.member]]
                arriving.append(x.new_empty((shares.members[peer].total, *here.shape[1:])))
                if peer == self.member:
                    arriving[-1].copy_(here)
                else:
                    sends.append((x[:, parts[peer]].contiguous(), peer))
                    recvs.append((arriving[-1], peer))
        self.inner.exchange(sends, recvs)
        results = []
        for i, shares in enumerate(tokens):
            parts_here = arriving[i * self.size : (i + 1) * self.size]
            whole = parts_here[0].new_empty((shares.rows, *parts_here[0].shape[1:]))
            for part, rows in zip(parts_here, shares.members, strict=True):
                copy_rows(whole, part, rows)
            results.append(whole)
        return results

    def give_back(
        self,
        tensors: Sequence[Tensor],
        tokens: Sequence[TokenShares],
        heads: Sequence[list[slice]],
        counts: Sequence[int],
    ) -> list[Tensor]:
        """[group's rows, my heads, ...] -> [rows, all ``counts`` heads, ...]; sums heads that several members hold, in
        the order of members. Collective over the group.
        """
        sends, recvs, arriving = [], [], []
        for x, shares, parts in zip(tensors, tokens, heads, strict=True):
            mine = shares.members[self.member].total
            for peer in range(self.size):
                rows = shares.members[peer]
                part = x.new_empty((rows.total, *x.shape[1:]))
                copy_rows(part, x.contiguous(), rows.inverse())
                if peer == self.member:
                    arriving.append(part)
                else:
                    width = parts[peer].stop - parts[peer].start
                    arriving.append(x.new_empty((mine, width, *x.shape[2:])))
                    sends.append((part, peer))
                    recvs.append((arriving[-1], peer))
        self.inner.exchange(sends, recvs)
        results = []
        for i, (x, shares, parts, count) in enumerate(zip(tensors, tokens, heads, counts, strict=True)):
            whole = x.new_zeros((shares.members[self.member].total, count, *x.shape[2:]))
            for peer in range(self.size):
                whole[:, parts[peer]] += arriving[i * self.size + peer]
            results.append(whole)
        return results
