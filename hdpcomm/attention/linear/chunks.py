"""The transition of a chunk of tokens, without its initial state, and its gradients.

With the state S before the chunk, a chunk's outputs and the state after it are

    V' = U - W S        O = Q~ S + P V'        S' = E S + K~^T V'

For the delta rule, W and U are the WY form of the product of (I - beta k k^T) (UT transform, arXiv 2412.06464 section
3.3); without it (Mamba-2's ssd), W is 0 and U is V. All tensors are [chunks, chunk, ...], one chunk of one head each.

Decays inside a chunk are products of exp(g) between two tokens. g is summed up in float64, and differences of sums are
taken before they are rounded: a token that forgets all (g = -1000) must not blur the decay between its successors.
Exponents are never above the largest decay between two tokens, so nothing overflows that the result does not contain
(sub-chunks as in arXiv 2312.06635 section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ChunkGrads", "Chunks"]

_SUB = 16
"""Tokens of a sub-chunk of :class:`ChannelDecay`."""


class ScalarDecay:
    """One decay a token and head: g [chunks, chunk].

    ``from_start``, ``to_end`` [chunks, chunk, 1]: the decay from the start of the chunk to after the token, from the
    token to the end; ``total`` [chunks, 1, 1].
    """

    def __init__(self, g: Tensor, dtype: torch.dtype) -> None:
        sums = g.double().cumsum(1)
        self.from_start = torch.exp(sums).to(dtype)[..., None]
        self.to_end = torch.exp(sums[:, -1:] - sums).to(dtype)[..., None]
        self.total = self.from_start[:, -1:]
        above = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu_(1)
        between = (sums[:, :, None] - sums[:, None, :]).to(dtype)
        self._between = between.masked_fill_(above, -torch.inf).exp_()
        self._strict = torch.zeros_like(sums)

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        """[chunks, chunk, chunk]: sum over d of a[i, d] b[j, d] exp(g[j + 1] + ... + g[i]) for j <= i, else 0."""
        return torch.bmm(a, b.mT).mul_(self._between)

    def pairs_backward(self, a: Tensor, b: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of a and b from that of ``pairs`` (its lower triangle counts); keeps the share of g."""
        weight = grad * self._between
        strict = (grad * pairs).tril_(-1)
        self._strict += strict.sum(2, dtype=torch.float64) - strict.sum(1, dtype=torch.float64)
        return torch.bmm(weight, b), torch.bmm(weight.mT, a)

    def backward(self, left: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """The gradient of g; ``left``, ``right`` [chunks, chunk, dim]: products of ``from_start`` (``to_end``) with
        their gradients, ``total`` [chunks, dim, 1] likewise."""
        return _sum_up(
            self._strict + left.sum(-1, dtype=torch.float64),
            right.sum(-1, dtype=torch.float64),
            total.sum(-2, dtype=torch.float64),
        )


class ChannelDecay:
    """One decay a token, head and row of the state: g [chunks, chunk, dim].

    As :class:`ScalarDecay`, with ``from_start``, ``to_end`` [chunks, chunk, dim] and ``total`` [chunks, dim, 1]. Pairs
    of different sub-chunks are one product of matrices, both scaled to the start of the later one; the others are taken
    diagonal by diagonal.
    """

    def __init__(self, g: Tensor, dtype: torch.dtype) -> None:
        self._sums = g.double().cumsum(1)
        self._dtype = dtype
        self.from_start = torch.exp(self._sums).to(dtype)
        self.to_end = torch.exp(self._sums[:, -1:] - self._sums).to(dtype)
        self.total = self.from_start[:, -1:].mT
        self._strict = torch.zeros_like(self._sums)

    def _factors(self, start: int) -> tuple[Tensor, Tensor]:
        """(decay from before the sub-chunk at ``start`` to its tokens, from the tokens before it to there)."""
        middle = self._sums[:, start - 1 : start]
        after = torch.exp(self._sums[:, start : start + _SUB] - middle)
        return after.to(self._dtype), torch.exp(middle - self._sums[:, :start]).to(self._dtype)

    def _diagonal(self, distance: int) -> Tensor:
        """[chunks * subs, 16 - distance, dim]: decay between tokens of a sub-chunk that are ``distance`` apart."""
        sums = _by_sub(self._sums)
        return torch.exp(sums[:, distance:] - sums[:, : _SUB - distance]).to(self._dtype)

    @staticmethod
    def _blocks(x: Tensor) -> Tensor:
        """[chunks, subs, 16, 16]: the blocks on the diagonal of [chunks, chunk, chunk], a view."""
        subs = x.shape[1] // _SUB
        return x.view(x.shape[0], subs, _SUB, subs, _SUB).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        chunks, chunk, _ = a.shape
        products = a.new_zeros((chunks, chunk, chunk))
        for start in range(_SUB, chunk, _SUB):
            after, before = self._factors(start)
            rows = slice(start, start + _SUB)
            products[:, rows, :start] = torch.bmm(a[:, rows] * after, (b[:, :start] * before).mT)
        blocks = self._blocks(products)
        a_sub, b_sub = _by_sub(a), _by_sub(b)
        for distance in range(_SUB):
            row = a_sub[:, distance:] * b_sub[:, : _SUB - distance] * self._diagonal(distance)
            blocks.diagonal(-distance, 2, 3).copy_(row.sum(-1).view(chunks, chunk // _SUB, _SUB - distance))
        return products

    def pairs_backward(self, a: Tensor, b: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        del pairs
        chunk = a.shape[1]
        da, db = torch.zeros_like(a), torch.zeros_like(b)
        for start in range(_SUB, chunk, _SUB):
            after, before = self._factors(start)
            rows = slice(start, start + _SUB)
            part = grad[:, rows, :start]
            da[:, rows] += torch.bmm(part, b[:, :start] * before).mul_(after)
            db[:, :start] += torch.bmm(part.mT, a[:, rows] * after).mul_(before)
        self._strict += (a * da).double() - (b * db).double()  # the diagonal is not in them yet
        blocks = self._blocks(grad)
        a_sub, b_sub, da_sub, db_sub, strict = (_by_sub(x) for x in (a, b, da, db, self._strict))
        for distance in range(_SUB):
            weight = blocks.diagonal(-distance, 2, 3).flatten(0, 1)[..., None] * self._diagonal(distance)
            late, early = slice(distance, _SUB), slice(0, _SUB - distance)
            towards_a, towards_b = weight * b_sub[:, early], weight * a_sub[:, late]
            da_sub[:, late] += towards_a
            db_sub[:, early] += towards_b
            if distance:
                share = (towards_a * a_sub[:, late]).double()
                strict[:, late] += share
                strict[:, early] -= share
        return da_sub.view_as(a), db_sub.view_as(b)

    def backward(self, left: Tensor, right: Tensor, total: Tensor) -> Tensor:
        return _sum_up(self._strict + left.double(), right.double(), total.mT.double())


Decay = ScalarDecay | ChannelDecay


def _by_sub(x: Tensor) -> Tensor:
    """[chunks, chunk, dim] -> [chunks * subs, 16, dim]"""
    return x.reshape(x.shape[0] * (x.shape[1] // _SUB), _SUB, x.shape[2])


def _sum_up(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """The gradient of each g: of all later tokens' sums from the start, all earlier ones' to the end, and the total."""
    later = left.flip(1).cumsum(1).flip(1)
    earlier = right.cumsum(1) - right
    return later + earlier + total


@dataclass(slots=True)
class ChunkGrads:
    """Gradients of what :class:`Chunks` holds."""

    w: Tensor | None
    u: Tensor
    p: Tensor
    q: Tensor
    k: Tensor
    total: Tensor
    """[chunks, dk, 1]: the sum over columns of (gradient of E S) S."""


class Chunks:
    """``q``, ``k``: [chunks, chunk, dk], ``v``: [chunks, chunk, dv], ``g``: [chunks, chunk] or [chunks, chunk, dk],
    ``beta``: [chunks, chunk], or None for no delta rule. All in the type that is computed in."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> None:
        self._q, self._k, self._v, self._beta = q, k, v, beta
        decay: Decay = ScalarDecay(g, q.dtype) if g.ndim == 2 else ChannelDecay(g, q.dtype)
        self._decay = decay
        self.total = decay.total
        """E: [chunks, 1 or dk, 1]"""
        self.q = q * decay.from_start
        """Q~: [chunks, chunk, dk]"""
        self.k = k * decay.to_end
        """K~: [chunks, chunk, dk]"""
        self.p = decay.pairs(q, k)
        """P: [chunks, chunk, chunk], lower triangular"""
        self.w: Tensor | None = None
        """W: [chunks, chunk, dk]; None for 0"""
        self.u = v
        """U: [chunks, chunk, dv]"""
        if beta is not None:
            self._scaled = k * beta[..., None]
            self._mix = decay.pairs(self._scaled, k)  # its diagonal is not read
            sides = torch.cat((self._scaled * decay.from_start, v * beta[..., None]), dim=2)
            self._solved = torch.linalg.solve_triangular(self._mix, sides, upper=False, unitriangular=True)
            self.w, self.u = self._solved.split((k.shape[2], v.shape[2]), dim=2)

    def backward(self, grads: ChunkGrads) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v, g (float64) and beta. Changes ``grads``."""
        decay = self._decay
        dq, dk = decay.pairs_backward(self._q, self._k, self.p, grads.p.tril_())
        left = grads.q * self.q
        dq += grads.q.mul_(decay.from_start)
        right = grads.k * self.k
        dk += grads.k.mul_(decay.to_end)
        dv, dbeta = grads.u, None
        if self._beta is not None:
            assert grads.w is not None
            beta = self._beta[..., None]
            solved = torch.cat((grads.w, grads.u), dim=2)
            sides = torch.linalg.solve_triangular(self._mix.mT, solved, upper=True, unitriangular=True)
            dmix = torch.bmm(sides, self._solved.mT).neg_().tril_(-1)
            dscaled, dk_mix = decay.pairs_backward(self._scaled, self._k, self._mix, dmix)
            side, dv = sides.split((self._k.shape[2], self._v.shape[2]), dim=2)
            from_start = side * decay.from_start
            left += from_start * self._scaled
            dscaled += from_start
            dk += dk_mix
            dk.addcmul_(dscaled, beta)
            dbeta = (dscaled * self._k).sum(2) + (dv * self._v).sum(2)
            dv = dv * beta
        dg = decay.backward(left, right, grads.total * self.total)
        return dq, dk, dv, dg, dbeta
