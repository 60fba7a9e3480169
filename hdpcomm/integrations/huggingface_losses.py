"""Labels of the models that transformers' Trainer trains: of next tokens, of tokens and of sequences. Losses of it and
of TRL's trainers that are no plain cross-entropy, and metrics that need logits.

Functions of logits (``compute_loss_func``, label smoothing) get the logits of a chunk of labelled tokens at a time, in
an order that has nothing to do with rows, so the loss of a token must be a function of its logits and its label;
:func:`token_loss` tries that out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import CausalLMOutput

from hdpcomm.attention import SequenceSlice
from hdpcomm.attention.pack_context import PackContext, current_pack
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.huggingface_batch import sequences_of
from hdpcomm.integrations.row_passes import Sequences
from hdpcomm.kernels import LabelLoss
from hdpcomm.models.heads import NEXT_TOKEN, SEQUENCE
from hdpcomm.models.media import MediaEncoder
from hdpcomm.train.losses import TokenLoss
from hdpcomm.train.losses.functions import IGNORE
from hdpcomm.train.losses.label_terms import Batch, LabelTerms, token_terms

__all__ = ["LogitLoss", "ModelLabels", "TokenMetrics", "add_noise", "function_terms", "token_loss"]


@dataclass(frozen=True, slots=True)
class LogitLoss:
    """A user's loss of logits.

    Attributes:
        function: ``function(outputs, labels, num_items_in_batch=N)``, a scalar.
        of: to what a label belongs, see :mod:`hdpcomm.models.heads`.
        means: it divides by the labels that it sees, whatever N is.
    """

    function: Callable[..., Any]
    of: str
    means: bool

    def sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of labelled tokens: ``[n, columns]`` logits, ``[n]`` labels, at least one. Local."""
        loss = _called(self.function, self.of, logits, labels, 1)
        return loss * len(labels) if self.means else loss


def token_loss(name: str, function: Callable[..., Any], of: str, columns: int) -> LogitLoss:
    """The loss that a function is, where it is the mean over the labelled tokens of one step, and looks at each by
    itself. Local.

    Args:
        name: of the function, for messages.
        columns: of the logits.

    Raises: InvalidUsage: it is something else.
    """
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(7, columns, generator=draw)
    labels = torch.randint(columns, (7,), generator=draw)

    def value(part: slice, items: int = 1) -> Tensor:
        return _called(function, of, logits[part], labels[part], items, name)

    if of == NEXT_TOKEN:
        _check_shifts(name, function, logits, labels)
    first, second, whole = value(slice(3)), value(slice(3, 7)), value(slice(7))
    if torch.allclose(whole, first + second, rtol=1e-4, atol=1e-6) and torch.allclose(2 * value(slice(7), 2), whole):
        return LogitLoss(function, of, means=False)
    if torch.allclose(7 * whole, 3 * first + 4 * second, rtol=1e-4, atol=1e-6):
        return LogitLoss(function, of, means=True)
    raise InvalidUsage(
        f"Trainer: {name} is not supported with plans, since it is no mean over labelled tokens: of 7 tokens it is "
        f"{float(whole):.4g}, of the first 3 {float(first):.4g}, of the others {float(second):.4g}; give the sum of a "
        "function of each token's logits and label, divided by num_items_in_batch"
    )


def _check_shifts(name: str, function: Callable[..., Any], logits: Tensor, labels: Tensor) -> None:
    """Raises InvalidUsage where labels are those of their own tokens: the last one of a row predicts nothing."""
    more = logits.new_zeros(1, logits.shape[1], requires_grad=True)
    loss = _called(function, NEXT_TOKEN, logits, labels, 1, name, more)
    (gradient,) = torch.autograd.grad(loss, more, allow_unused=True) if loss.requires_grad else (None,)
    if gradient is not None and bool(gradient.any()):
        raise InvalidUsage(
            f"Trainer: {name} gives the logits of a token the label of that token; it gets labels as they are in the "
            "batch: compare logits[..., :-1, :] with labels[..., 1:]"
        )


def _called(
    function: Callable[..., Any],
    of: str,
    logits: Tensor,
    labels: Tensor,
    items: int,
    name: str = "the loss",
    last: Tensor | None = None,
) -> Tensor:
    """``last``: logits of the last token of a row, which predicts nothing."""
    if of == NEXT_TOKEN:  # one row, with labels as those of a batch
        logits = torch.cat((logits, logits.new_zeros(1, logits.shape[1]) if last is None else last))
        labels = torch.cat((labels.new_full((1,), IGNORE), labels))
    else:
        logits = logits.clone()  # as a model's, they may be changed
    if of != SEQUENCE:
        logits, labels = logits[None], labels[None]
    count = torch.tensor(items, device=labels.device)
    try:
        loss = function(CausalLMOutput(logits=logits), labels, num_items_in_batch=count)
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidUsage(
            f"Trainer: {name} ended with {error!r}; with plans it gets outputs that have logits and nothing else, "
            "labels, and num_items_in_batch="
        ) from error
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise InvalidUsage(f"Trainer: {name} gave {got}; expected a scalar tensor")
    return loss


@dataclass(slots=True)
class TokenMetrics:
    """Sums over the labels of this rank's passes: entropies, labels that have the largest logit, labels."""

    shards: list[dict[int, Tensor]] = field(default_factory=list)
    """By shard and first label of a chunk, which may run several times."""

    def means(self, mesh: Mesh) -> tuple[float, float]:
        """(entropy, share of labels that have the largest logit) of all ranks' labels; 0 without any. Collective over
        ``mesh.comm``."""
        sums = torch.zeros(3, dtype=torch.float64)
        if mesh.tensor_rank == 0:  # the others have the same
            for chunks in self.shards:
                for chunk in chunks.values():
                    sums += chunk.cpu()
        mesh.comm.all_reduce(sums)
        entropy, right, labels = sums.tolist()
        return entropy / max(1.0, labels), right / max(1.0, labels)


def function_terms(
    lengths: list[int], loss: LogitLoss | None, metrics: TokenMetrics | None, *, dynamic: bool = False
) -> LabelTerms:
    """Losses of next tokens, or of classes, by a function of logits; ``None``: by cross-entropy.

    Args:
        metrics: get what they count.
        dynamic: the cross-entropy of a token counts as much as the probability of its label (DFT, arXiv 2508.05629).
    """

    def make(shard: Any) -> LabelLoss:
        chunks: dict[int, Tensor] | None = None if metrics is None else {}
        if metrics is not None and chunks is not None:
            metrics.shards.append(chunks)
        if loss is not None:
            return LabelLoss(_OfLogits(loss, shard.labels, chunks), temperature=None)
        of_log_probs = _OfLogProbs(shard.labels != IGNORE, chunks, dynamic=dynamic)
        return LabelLoss(of_log_probs, entropy=chunks is not None, ranked=of_log_probs.ranked)

    return LabelTerms(Batch(lengths), make, mass=float)


class _OfLogits:
    def __init__(self, loss: LogitLoss, labels: Tensor, chunks: dict[int, Tensor] | None) -> None:
        self._loss, self._labels, self._chunks = loss, labels, chunks

    def __call__(self, logits: Tensor, _: Tensor | None, part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        labels = self._labels[part]
        labelled = labels != IGNORE
        losses, slopes = logits.new_zeros(len(labels)), torch.zeros_like(logits)
        if not bool(labelled.any()):
            return losses, slopes, None
        rows, labels = logits[labelled].view(len(labels[labelled]), -1), labels[labelled]
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            loss = self._loss.sum(leaf, labels)
            slopes[labelled] = torch.autograd.grad(loss, leaf)[0].view(-1, *logits.shape[1:])
        losses[0] = loss.detach()
        if self._chunks is not None:
            logs = rows.log_softmax(-1)
            entropies = -torch.where(logs.isfinite(), logs.exp() * logs, 0.0).sum(-1)
            self._chunks[part.start] = _sums(entropies, rows.argmax(-1) == labels, len(labels))
        return losses, slopes, None


class _OfLogProbs:
    def __init__(self, labelled: Tensor, chunks: dict[int, Tensor] | None, *, dynamic: bool) -> None:
        self._labelled, self._chunks, self._dynamic = labelled, chunks, dynamic
        self._largest: Tensor | None = None

    def ranked(self, largest: Tensor, _: slice) -> None:
        """See :class:`hdpcomm.kernels.LabelLoss`."""
        self._largest = largest

    def __call__(
        self, log_probs: Tensor, entropies: Tensor | None, part: slice
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        labelled = self._labelled[part]
        if self._chunks is not None and entropies is not None and self._largest is not None:
            right = self._largest & labelled
            self._chunks[part.start] = _sums(torch.where(labelled, entropies, 0.0), right, labelled.sum())
        factors = labelled.to(log_probs.dtype)
        if self._dynamic:
            factors = factors * log_probs.exp()
        return -log_probs * factors, -factors, None


def _sums(entropies: Tensor, right: Tensor, labels: Tensor | int) -> Tensor:
    count = torch.as_tensor(labels, dtype=torch.float64, device=entropies.device)
    return torch.stack((entropies.double().sum(), right.double().sum(), count))


def add_noise(embedding: nn.Module, alpha: float) -> RemovableHandle:
    """Makes the layer add uniform noise to the embeddings of training: at most ``alpha / sqrt(length * width)``, with
    the length of each token's own sequence. Local.

    Source: NEFTune, arXiv 2310.05914.
    """

    def noisy(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        if not layer.training:
            return output
        pack = current_pack()
        lengths = _lengths(pack, output.shape[1]).to(output.device)
        most = alpha / (lengths * output.shape[2]).sqrt()
        return output + (torch.rand_like(output) * 2 - 1) * most[None, :, None].to(output.dtype)

    return embedding.register_forward_hook(noisy)


def _lengths(pack: PackContext, count: int) -> Tensor:
    """Tokens of the sequence of each of this rank's tokens, float32 ``[count]``."""
    rank, size = (0, 1) if pack.comm is None else (pack.comm.rank, pack.comm.size)
    if pack.padded:
        return torch.ones(count)
    if isinstance(pack.cu_seqlens, SequenceSlice):
        return torch.full((count,), float(pack.cu_seqlens.sequence.bounds[-1]))
    cu_seqlens = torch.tensor(pack.cu_seqlens.sequences().cu_seqlens)
    places = pack.cu_seqlens.places(rank, size)
    return cu_seqlens.diff().float()[torch.searchsorted(cu_seqlens, places, right=True) - 1]


_REGRESSION, _CLASSES, _SEVERAL = "regression", "single_label_classification", "multi_label_classification"
"""Values of ``config.problem_type``."""


class ModelLabels:
    """The labels in batches for a model, and their losses as transformers computes them.

    Args:
        adapted: an :class:`hdpcomm.models.AdaptedCausalLM`.

    Attributes:
        loss: a function of logits in the place of the cross-entropy.
        dynamic: cross-entropies count as much as the probability of their label (DFT).
    """

    def __init__(self, adapted: Any) -> None:
        self.loss: LogitLoss | None = None
        self.dynamic = False
        self.of: str = adapted.labels_of
        self._config = adapted.causal_lm.config
        self.media: MediaEncoder | None = adapted.media

    @property
    def padding(self) -> int | None:
        """The token that ends no sequence."""
        padding: int | None = self._config.get_text_config().pad_token_id
        return padding

    def sequences(self, batch: Mapping[str, Any]) -> Sequences:
        """See :func:`hdpcomm.integrations.huggingface_batch.sequences_of`. Local. Chooses the problem of a classifier
        of sequences whose configuration names none, as transformers does."""
        if self.of != SEQUENCE:
            return sequences_of(batch, self.of, media=self.media)
        config, labels = self._config, batch.get("labels")
        if config.problem_type is None and isinstance(labels, Tensor):
            numbers = _CLASSES if labels.dtype in (torch.int64, torch.int32) else _SEVERAL
            config.problem_type = _REGRESSION if config.num_labels == 1 else numbers
        targets = 0 if config.problem_type == _CLASSES else config.num_labels
        return sequences_of(batch, SEQUENCE, padding=self.padding, targets=targets)

    def terms(self, batch: Sequences, metrics: TokenMetrics | None = None) -> LabelTerms | None:
        """The losses of labels or targets; ``None``: each label's loss is its cross-entropy. Local.

        Args:
            metrics: get what they count, of next tokens.

        Raises: InvalidUsage: a function of logits, and targets that are no classes.
        """
        if batch.targets is None:
            if self.loss is None and metrics is None and not self.dynamic:
                return None
            return function_terms(batch.lengths, self.loss, metrics, dynamic=self.dynamic)
        if self.loss is not None:
            raise InvalidUsage(
                f"Trainer: a function of logits with problem_type={self._config.problem_type!r} is not supported with "
                "plans; leave out compute_loss_func and label_smoothing_factor"
            )
        function = _squared_errors if self._config.problem_type == _REGRESSION else _binary_cross_entropies
        columns = [str(k) for k in range(batch.targets.shape[1])]
        return token_terms(TokenLoss(function, columns, temperature=None), Batch(batch.lengths))


def _squared_errors(values: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    targets = torch.stack(list(columns.values()), 1)
    return (values.view(targets.shape) - targets).square().mean(1)


def _binary_cross_entropies(values: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    targets = torch.stack(list(columns.values()), 1)
    return F.binary_cross_entropy_with_logits(values.view(targets.shape), targets, reduction="none").mean(1)
