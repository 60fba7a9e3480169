"""The transition of a chunk of tokens, without its initial state, and its gradients.

With the state S before the chunk, a chunk's outputs and the state after it are

    V' = U - W S        O = Q~ S + P V'        S' = E S + K~^T V'

For the delta rule, W and U are the WY form of the product of (I - beta k k^T) (UT transform, arXiv 2412.06464 section
3.3); without it (Mamba-2's ssd), W is 0 and U is V. All tensors are [chunks, chunk, ...], one chunk of one head each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdpcomm.attention.linear.decay import ChannelDecay, Decay, ScalarDecay

__all__ = ["ChunkGrads", "Chunks"]


@dataclass(slots=True)
class ChunkGrads:
    """Gradients of what :class:`Chunks` holds."""

    w: torch.Tensor | None
    u: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    total: torch.Tensor
    """[chunks, dk, 1]: the sum over columns of (gradient of E S) S."""


class Chunks:
    """``q``, ``k``: [chunks, chunk, dk], ``v``: [chunks, chunk, dv], ``g``: [chunks, chunk] or [chunks, chunk, dk],
    ``beta``: [chunks, chunk], or None for no delta rule. All in the type that is computed in."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
    ) -> None:
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
        self.w: torch.Tensor | None = None
        """W: [chunks, chunk, dk]; None for 0"""
        self.u = v
        """U: [chunks, chunk, dv]"""
        if beta is not None:
            self._scaled = k * beta[..., None]
            self._mix = decay.pairs(self._scaled, k)  # its diagonal is not read
            sides = torch.cat((self._scaled * decay.from_start, v * beta[..., None]), dim=2)
            self._solved = torch.linalg.solve_triangular(self._mix, sides, upper=False, unitriangular=True)
            self.w, self.u = self._solved.split((k.shape[2], v.shape[2]), dim=2)

    def backward(
        self, grads: ChunkGrads
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
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
