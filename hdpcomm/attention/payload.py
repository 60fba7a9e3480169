"""Messages with the keys and values of a pack: K and V themselves, or the latent of MLA, which each rank expands.

A row (one token) travels as one vector, so the rings and gathers that move it need not know what it holds. In backward
the gradients of the rows travel in the same form. Source of the latent: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdpcomm.kernels.transfers import autocast_type

__all__ = ["Latent", "Payload"]

_Pair = tuple[Tensor, Tensor]


class Payload:
    """The rows of one rank: K [rows, kv_heads, k_dim] and V [rows, kv_heads, v_dim]; :class:`Latent` travels in another
    form. All methods are local; ``buffer`` is [rows, width], and None means this rank's own rows.

    Attributes:
        width: values of a row.
        like: a tensor of the type and device of the rows.
    """

    shared = False
    """Whether a row serves all heads, so that a choice of heads travels as the whole."""
    like: Tensor

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._k_shape, self._v_shape = tuple(k.shape[1:]), tuple(v.shape[1:])
        self._k_width = k.shape[1] * k.shape[2]
        self.rows, self.kv_heads, self.v_dim, self.like = k.shape[0], k.shape[1], v.shape[2], k
        self.width = self._k_width + v.shape[1] * v.shape[2]

    def pack(self, out: Tensor | None = None) -> Tensor:
        """This rank's own rows, [rows, width], as they travel."""
        return torch.cat((self._k.flatten(1), self._v.flatten(1)), dim=1, out=out)

    def _views(self, rows: Tensor) -> _Pair:
        return (
            rows[:, : self._k_width].view(rows.shape[0], *self._k_shape),
            rows[:, self._k_width :].view(rows.shape[0], *self._v_shape),
        )

    def expand(self, buffer: Tensor | None, dtype: torch.dtype) -> _Pair:
        """K [rows, kv_heads, k_dim] and V [rows, kv_heads, v_dim] in ``dtype``."""
        k, v = (self._k, self._v) if buffer is None else self._views(buffer)
        return k.to(dtype), v.to(dtype)

    def new_grads(self, grads: Tensor) -> _Pair:
        """Where the gradients of K and V are added, for rows whose gradients are ``grads`` [rows, width]."""
        return self._views(grads)

    def fold(self, buffer: Tensor | None, pair: _Pair, grads: Tensor, dtype: torch.dtype) -> None:
        """Adds what was put into ``pair`` (of :meth:`new_grads`) to ``grads``, unless it is a view of them; products
        are computed in ``dtype``."""

    def split(self, grads: Tensor) -> _Pair:
        """The gradients of the two tensors that the payload was made of, from those of this rank's own rows."""
        return self._views(grads)

    def heads(self, chosen: slice) -> Payload:
        """These rows with some of the kv heads only."""
        return Payload(self._k[:, chosen], self._v[:, chosen])

    def join(self, parts: Sequence[_Pair]) -> _Pair:
        """The gradients of :meth:`split` from those of choices of heads that follow each other."""
        dk, dv = zip(*parts, strict=True)
        return (dk[0], dv[0]) if len(parts) == 1 else (torch.cat(dk, dim=1), torch.cat(dv, dim=1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own type, also where autocast would choose another."""
    with torch.autocast(autocast_type(a), enabled=False):
        return a @ b


class Latent(Payload):
    """The compressed kv and the shared rope key of MLA, and the weight that expands them.

    ``latent``: [rows, 1, rank + rope_dim], ``weight``: [heads, nope_dim + v_dim, rank]. K of a head is its first
    ``nope_dim`` products followed by the rope key, V the other products. The gradient of the weight is this rank's
    share: the sum over the ranks is the gradient.
    """

    shared = True

    def __init__(self, latent: Tensor, weight: Tensor, *, rope_dim: int, v_dim: int) -> None:
        self._latent, self._weight = latent, weight
        self._rank, self._rope = weight.shape[2], rope_dim
        self._nope = weight.shape[1] - v_dim
        self.rows, self.width, self.like = latent.shape[0], latent.shape[2], latent
        self.kv_heads, self.v_dim = weight.shape[0], v_dim
        self._weight_grad: Tensor | None = None

    def pack(self, out: Tensor | None = None) -> Tensor:
        own = self._latent.flatten(1)
        return own if out is None else out.copy_(own)

    def _parts(self, buffer: Tensor | None, dtype: torch.dtype) -> _Pair:
        """Compressed kv [rows, rank] and rope key [rows, rope_dim]."""
        rows = (self._latent.flatten(1) if buffer is None else buffer).to(dtype)
        return rows[:, : self._rank], rows[:, self._rank :]

    def expand(self, buffer: Tensor | None, dtype: torch.dtype) -> _Pair:
        compressed, rope = self._parts(buffer, dtype)
        heads, dims, _ = self._weight.shape
        both = _product(compressed, self._weight.to(dtype).flatten(0, 1).T).view(compressed.shape[0], heads, dims)
        k = both.new_empty((both.shape[0], heads, self._nope + self._rope))
        k[..., : self._nope] = both[..., : self._nope]
        k[..., self._nope :] = rope[:, None]
        return k, both[..., self._nope :].contiguous()

    def new_grads(self, grads: Tensor) -> _Pair:
        shape = (grads.shape[0], self._weight.shape[0])
        return grads.new_zeros((*shape, self._nope + self._rope)), grads.new_zeros((*shape, self.v_dim))

    def fold(self, buffer: Tensor | None, pair: _Pair, grads: Tensor, dtype: torch.dtype) -> None:
        compressed, _ = self._parts(buffer, dtype)
        dk, dv = pair
        both = torch.cat((dk[..., : self._nope], dv), dim=-1).flatten(1).to(dtype)
        weight = self._weight.to(dtype).flatten(0, 1)
        grads[:, : self._rank] += _product(both, weight)
        grads[:, self._rank :] += dk[..., self._nope :].sum(1)
        share = _product(both.T, compressed).to(grads.dtype).view_as(self._weight)
        self._weight_grad = share if self._weight_grad is None else self._weight_grad.add_(share)

    def split(self, grads: Tensor) -> _Pair:
        share = self._weight_grad
        if share is None:
            share = torch.zeros(self._weight.shape, dtype=grads.dtype, device=grads.device)
        return grads.unsqueeze(1), share

    def heads(self, chosen: slice) -> Latent:
        return Latent(self._latent, self._weight[chosen], rope_dim=self._rope, v_dim=self.v_dim)

    def join(self, parts: Sequence[_Pair]) -> _Pair:
        return parts[0][0], torch.cat([share for _, share in parts])
