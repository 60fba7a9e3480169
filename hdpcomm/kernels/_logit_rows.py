"""Cross-entropy of rows of logits at hand: losses, then the gradient; by the fused kernels, or by torch for float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm._core import kernels as _core
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import dtype_code, launch

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["IGNORE", "LogitRows", "VocabularyShard", "row_gradient", "row_losses"]


IGNORE = -100
"""The label of a token that has no loss."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Which columns of the vocabulary the logits are, and who holds the others (None: nobody)."""

    first: int
    total: int
    comm: Communicator | None

    def shape(self, rows: Tensor) -> tuple[int, int, int, int, int, int]:
        """Sizes for the kernels of ``rows: [tokens, columns]``."""
        return (*rows.shape, rows.stride(0), self.first, self.total, IGNORE)

    def gather(self, stats: Tensor) -> Tensor:
        """``[shards, 3, tokens]`` from this rank's ``[3, tokens]``. Collective over ``comm``."""
        if self.comm is None:
            return stats[None]
        everyone = stats.new_empty(self.comm.size, *stats.shape)
        self.comm.all_gather(everyone, stats)
        return everyone


def row_losses(
    rows: Tensor, labels: Tensor, weights: Tensor | None, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses ``[tokens]``, sums ``[2, tokens]``: the largest logit and the sum of exp(logit - largest), and for each
    shard these two and the logit of the label, ``[shards, 3, tokens]``), fp32. Collective over the shard's ``comm``.

    By the fused kernels; by torch's own operations, in fp64, for rows of float64.
    """
    if rows.dtype == torch.float64:
        return _plain_losses(rows, labels, weights, shard)
    tokens = rows.shape[0]
    stats = torch.empty(3, tokens, dtype=torch.float32, device=rows.device)
    launch(
        _core.cross_entropy_stats, rows, *shard.shape(rows), dtype_code(rows), rows.data_ptr(), labels.data_ptr(),
        stats.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    everyone = shard.gather(stats)
    sums, losses = (torch.empty(n, tokens, dtype=torch.float32, device=rows.device) for n in (2, 1))
    launch(
        _core.cross_entropy_loss, rows, everyone.data_ptr(), labels.data_ptr(), _address(weights), sums.data_ptr(),
        losses.data_ptr(), everyone.shape[0], tokens, IGNORE,
    )  # fmt: skip
    return losses[0], sums, everyone


def row_gradient(
    rows: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    shard: VocabularyShard,
    sums: Tensor,
    upstream: Tensor,
    gradient: Tensor,
) -> None:
    """Writes ``upstream * weights * (softmax(rows) - onehot(labels))`` to ``gradient``, which may be ``rows``.

    ``upstream``: fp32 (fp64 for float64) ``[tokens]``, or a number for all tokens, expanded (stride 0).
    """
    if rows.dtype == torch.float64:
        counts = labels != IGNORE
        factors = _factors(weights, counts, rows)
        here = _labels_here(rows, labels, counts, shard)
        torch.sub(rows, (sums[0] + sums[1].log())[:, None], out=gradient)
        gradient.exp_().mul_(factors[:, None])
        gradient[~counts] = 0.0  # whatever their logits
        gradient[here] -= factors[here[0]]
        gradient.mul_(upstream[:, None])
        return
    launch(
        _core.cross_entropy_grad, rows, *shard.shape(rows), dtype_code(rows), rows.data_ptr(), labels.data_ptr(),
        sums.data_ptr(), _address(weights), upstream.data_ptr(), upstream.stride(0), gradient.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip


def _plain_losses(
    rows: Tensor, labels: Tensor, weights: Tensor | None, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    counts = labels != IGNORE
    if bool(((labels < 0) | (labels >= shard.total))[counts].any()):
        raise InvalidUsage(f"a label is outside of the vocabulary of {shard.total} columns")
    here = _labels_here(rows, labels, counts, shard)
    stats = rows.new_zeros(3, rows.shape[0])
    stats[0] = rows.amax(1) if rows.shape[1] else -torch.inf
    stats[1] = (rows - stats[0][:, None]).nan_to_num_(nan=-torch.inf).exp_().sum(1)
    stats[2, here[0]] = rows[here]
    stats[:, ~counts] = 0.0
    everyone = shard.gather(stats)
    largest = everyone[:, 0].amax(0)
    total = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(0)
    sums = torch.stack((largest, torch.where(counts, total, 1.0)))
    return _factors(weights, counts, rows) * (sums[0] + sums[1].log() - everyone[:, 2].sum(0)), sums, everyone


def _labels_here(rows: Tensor, labels: Tensor, counts: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """(rows, columns) of the labels that this shard has."""
    own = (counts & (labels >= shard.first) & (labels < shard.first + rows.shape[1])).nonzero()[:, 0]
    return own, labels[own] - shard.first


def _factors(weights: Tensor | None, counts: Tensor, rows: Tensor) -> Tensor:
    return counts.to(rows.dtype) if weights is None else counts * weights.to(rows.dtype)


class LogitRows:
    """A chunk of logits ``[tokens, columns]`` with its labels and factors.

    Attributes:
        losses: ``[tokens]``.
        stats: ``[shards, 3, tokens]``: the largest logit, the sum of exp(logit - largest), and the logit of the label.
    """

    def __init__(self, logits: Tensor, labels: Tensor, weights: Tensor | None, shard: VocabularyShard) -> None:
        self._logits, self._labels, self._weights, self._shard = logits, labels, weights, shard
        self._entropy: _Entropy | None = None
        self.losses, self._sums, self.stats = row_losses(logits, labels, weights, shard)

    def entropies(self) -> Tensor:
        """Entropy of each token's distribution, ``[tokens]``; 0 where there is no label. Collective over ``comm``."""
        lse = self._sums[0] + self._sums[1].log()
        self._entropy = _Entropy(self._logits, lse, self._labels != IGNORE, self._shard)
        return self._entropy.values

    def weigh(self, weights: Tensor, entropy_weights: Tensor | None) -> None:
        """Factors of the losses, and of the entropies, in the gradient; in place of those given at first."""
        self._weights = weights
        if self._entropy is not None:
            self._entropy.weights = entropy_weights

    def gradient(self, scale: float, *, in_place: bool) -> Tensor:
        """Gradient of ``scale * sum(losses)`` by the logits, in their type; ``in_place``: it takes their memory."""
        logits, sums = self._logits, self._sums
        entropy = None if self._entropy is None else self._entropy.gradient(logits, scale)
        out = logits if in_place else torch.empty_like(logits)
        upstream = torch.full((1,), scale, dtype=sums.dtype, device=out.device).expand(out.shape[0])
        row_gradient(logits, self._labels, self._weights, self._shard, sums, upstream, out)
        return out if entropy is None else out.add_(entropy)


class _Entropy:
    """``H = lse - sum(p x)`` of each token, in the type of ``lse``, and ``dH / dx = -p (x - lse + H)``.

    Attributes:
        values: ``[tokens]``; 0 where there is no label.
        weights: factors of the entropies in the gradient; ``None``: they have none.
    """

    def __init__(self, logits: Tensor, lse: Tensor, counts: Tensor, shard: VocabularyShard) -> None:
        self._lse, self._counts = lse, counts
        self.weights: Tensor | None = None
        chances, surprises = self._chances(logits)
        sums = chances.mul_(surprises).sum(1)
        if shard.comm is not None:
            shard.comm.all_reduce(sums)
        self.values = torch.where(counts, -sums, 0.0)

    def gradient(self, logits: Tensor, scale: float) -> Tensor | None:
        if self.weights is None:
            return None
        chances, surprises = self._chances(logits)
        factors = torch.where(self._counts, -scale * self.weights, 0.0)
        return surprises.add_(self.values[:, None]).mul_(chances).mul_(factors[:, None]).to(logits.dtype)

    def _chances(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(p, log p), where p = 0 has log p = 0; it counts as nothing then. So has every column without a label."""
        logs = torch.where(self._counts[:, None], logits.to(self._lse.dtype) - self._lse[:, None], -torch.inf)
        chances = logs.exp()
        return chances, logs.masked_fill_(chances == 0, 0.0)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
