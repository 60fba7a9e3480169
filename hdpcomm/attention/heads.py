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

__all__ = ["HeadExchange", "TokenShares", "grouped_layout", "head_shares", "token_shares"]

_Pair = tuple[Tensor, Tensor]


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


class HeadExchange:
    """The exchanges of a call's tensors in a group of neighbours, between (my tokens, all heads) and (the group's
    tokens, my heads). Every member takes the whole latent of MLA, and its heads of the weight.

    Args:
        layouts: of q, and of k.
        counts: heads of q, and of k.
        latent: whether keys and values are the latent of MLA.

    Attributes:
        outer: the ranks with the same place in the other groups, among which the ring or the gather runs.
    """

    def __init__(
        self, comm: Communicator, size: int, layouts: Sequence[Layout], counts: tuple[int, int], *, latent: bool
    ) -> None:
        self._member, group = comm.rank % size, comm.rank // size
        inner = comm.subset(range(group * size, (group + 1) * size))
        outer = comm.subset(range(self._member, comm.size, size))
        assert inner is not None
        assert outer is not None
        self._inner, self.outer, self._latent = inner, outer, latent
        self._counts = counts[0], 1 if latent else counts[1]
        self._heads = head_shares(*self._counts, size)
        self._tokens = [token_shares(layout, size, group) for layout in layouts]

    @property
    def queries(self) -> slice:
        """This rank's heads of q."""
        return self._heads[0][self._member]

    def collect(self, rows: tuple[Tensor, ...], kv: _Pair) -> tuple[list[Tensor], _Pair]:
        """From (my tokens, all heads) to (the group's tokens, my heads). ``rows`` have the layout of q. Collective over
        the group, as all that follow."""
        if self._latent:
            *collected, latent = self._collect(*rows, kv[0], kv=1)
            return collected, (latent, kv[1][self.queries].contiguous())
        *collected, k, v = self._collect(*rows, *kv, kv=2)
        return collected, (k, v)

    def collect_rows(self, *rows: Tensor) -> list[Tensor]:
        """:meth:`collect` without keys."""
        return self._collect(*rows, kv=0)

    def give_back(self, *tensors: Tensor, kv: int = 0) -> list[Tensor]:
        """From (the group's tokens, my heads) to (my tokens, all heads); sums heads that several members hold, in the
        order of members. The last ``kv`` tensors have the layout of k."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        outgoing, shapes = [], []
        for x, kind in zip(tensors, kinds, strict=True):
            members, parts = self._tokens[kind].members, []
            for rows in members:
                parts.append(x.new_empty((rows.total, *x.shape[1:])))
                copy_rows(parts[-1], x.contiguous(), rows.inverse())
            outgoing.append(parts)
            mine = members[self._member].total
            shapes.append([(mine, share.stop - share.start, *x.shape[2:]) for share in self._heads[kind]])
        results = []
        for x, kind, parts in zip(tensors, kinds, self._swap(outgoing, shapes), strict=True):
            whole = x.new_zeros((parts[0].shape[0], self._counts[kind], *x.shape[2:]))
            for share, part in zip(self._heads[kind], parts, strict=True):
                whole[:, share] += part
            results.append(whole)
        return results

    def give_back_grads(self, dq: Tensor, pair: _Pair) -> tuple[Tensor, _Pair]:
        """Gradients of q and of the two tensors of keys and values."""
        if not self._latent:
            dq, dk, dv = self.give_back(dq, *pair, kv=2)
            return dq, (dk, dv)
        dq, dlatent = self.give_back(dq, pair[0], kv=1)
        share = pair[1].new_zeros((self._counts[0], *pair[1].shape[1:]))
        share[self.queries] = pair[1]
        return dq, (dlatent, share)

    def _collect(self, *tensors: Tensor, kv: int) -> list[Tensor]:
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        outgoing = [[x[:, share] for share in self._heads[kind]] for x, kind in zip(tensors, kinds, strict=True)]
        shapes = [
            [(rows.total, *parts[self._member].shape[1:]) for rows in self._tokens[kind].members]
            for parts, kind in zip(outgoing, kinds, strict=True)
        ]
        results = []
        for kind, parts in zip(kinds, self._swap(outgoing, shapes), strict=True):
            results.append(parts[0].new_empty((self._tokens[kind].rows, *parts[0].shape[1:])))
            for part, rows in zip(parts, self._tokens[kind].members, strict=True):
                copy_rows(results[-1], part, rows)
        return results

    def _swap(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """What each member gives, of ``shapes``, for what goes to each: both by tensor, then by member."""
        sends, recvs, arriving = [], [], []
        for parts, wanted in zip(outgoing, shapes, strict=True):
            here = [
                part.contiguous() if peer == self._member else part.new_empty(shape)
                for peer, (part, shape) in enumerate(zip(parts, wanted, strict=True))
            ]
            peers = [peer for peer in range(len(parts)) if peer != self._member]
            sends += [(parts[peer].contiguous(), peer) for peer in peers]
            recvs += [(here[peer], peer) for peer in peers]
            arriving.append(here)
        self._inner.exchange(sends, recvs)
        return arriving
