"""The last linear layer and the loss of its logits in one: the logits of a chunk of tokens exist at a time. Its losses,
then the gradient, are those of :class:`LogitRows`: by the fused kernels, or by torch for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm._core import kernels as _core
from hdpcomm.arguments import check_type
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import autocast_type, dtype_code, launch, without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = [
    "IGNORE",
    "LabelLoss",
    "LossOptions",
    "VocabularyShard",
    "default_chunk_tokens",
    "linear_cross_entropy",
    "loss_of_log_probs",
    "row_gradient",
    "row_losses",
]

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


_SMALL_CHUNK = 16 << 20
"""Bytes of logits up to which a larger chunk costs nothing worth saving."""
_PRODUCT_ELEMENTS = 16 << 20
"""Elements of the weight's gradient that a product in a narrow type makes at a time, before it is added up."""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How the last layer's product becomes logits, and logits become a loss; from a model's configuration.

    Attributes:
        scale: factor of the logits.
        softcap: the logits become ``softcap * tanh(logits / softcap)``, after ``scale``; 0: they stay.

    Raises: InvalidUsage for numbers that are not finite, and for a ``softcap`` below 0.
    """

    scale: float = 1.0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise InvalidUsage(
                f"scale is {self.scale} and softcap {self.softcap}; expected finite numbers, softcap not below 0"
            )


@dataclass(frozen=True, slots=True)
class LabelLoss:
    """Loss of a label as a function of its log-probability; in place of ``weights``.

    Attributes:
        function: ``function(log_probs, entropies, part)``: (losses, their derivatives by the log-probabilities, and by
            the entropies or ``None``) of the labels of a chunk. ``log_probs``: ``[labels of the chunk]`` fp32 (fp64 for
            fp64), no graph; 0 where there is no label. ``entropies``: the same shape, of the whole distribution;
            ``None`` without :attr:`entropy`. ``part``: which labels these are. It is called for all chunks in their
            order, on all ranks that hold shards of the vocabulary with the same values; a chunk that is computed again
            for a backward pass calls it again.
        temperature: divides the logits at last, as where tokens were sampled. ``None``: it is a function of the outputs
            themselves, of models with other heads than a vocabulary's: ``[labels]`` of a single output, else ``[labels,
            outputs]``.
        entropy: whether it needs entropies.
        ranked: ``ranked(largest, part)`` is called before the loss of a chunk: ``largest``, bool ``[labels of the
            chunk]``, says whether the label has the largest logit; any value where there is no label.
    """

    function: Callable[[Tensor, Tensor | None, slice], tuple[Tensor, Tensor, Tensor | None]]
    temperature: float | None = 1.0
    entropy: bool = False
    ranked: Callable[[Tensor, slice], object] | None = None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions | None = None,
    weights: Tensor | LabelLoss | None = None,
    comm: Communicator | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The summed cross-entropy of ``hidden @ weight.T``, whose logits never exist as a whole; a scalar.

    The forward pass takes the tokens in chunks: logits, loss, and at once the gradients of ``hidden``, ``weight`` and
    ``bias``, so that backward only scales them. Beside its inputs it needs the gradients (that of ``weight`` is summed
    in at least fp32) and the logits of one chunk (two with ``softcap``), however many tokens there are.

    Args:
        hidden: ``[..., width]`` floating point; equal on all ranks of ``comm``.
        weight: ``[columns, width]``, of the type of ``hidden``; the columns of the vocabulary that this rank holds.
        labels: ``[...]`` int64, columns of the whole vocabulary, or :data:`IGNORE` for a token without a loss.
        bias: ``[columns]``.
        options: scale and soft cap of the logits. Default: neither.
        weights: ``[...]`` float32 (or float64 for float64), factors of the tokens' losses, which are not
            differentiated; or what the loss of a label is instead of its negative log-probability (:class:`LabelLoss`).
            Default: 1.
        comm: the ranks that hold equal shards of the vocabulary, in the order of the columns. Collective over it in
            forward: for each chunk an all-gather of three numbers a token, at the end an all-reduce of the gradient of
            ``hidden``, which is then equal on all ranks. Backward communicates nothing.
        chunk_tokens: tokens of a chunk. Default: ``width``, so that a chunk's logits take as much memory as the weight,
            or more where 16 MiB hold more.

    Returns: float32 (float64 for float64), the same on all ranks of ``comm``.

    Raises:
        InvalidUsage: shapes, types or numbers that do not fit; a label outside the vocabulary (on CUDA such a token's
            loss is NaN); a second backward through the same result.
    """
    hidden, weight, bias = _in_autocast_type(hidden, weight, bias)
    label_loss = None if weights is None or isinstance(weights, Tensor) else weights
    factors = weights if isinstance(weights, Tensor) else None
    _check(hidden, weight, labels, bias, factors)
    job = _job_of(weight, options, comm, chunk_tokens)
    if label_loss is not None:
        assert label_loss.temperature is not None
        job = replace(job, label_loss=label_loss, temperature=label_loss.temperature)
    flat = None if factors is None else factors.detach().reshape(-1).contiguous()
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, labels.reshape(-1).contiguous(), flat, job)  # type: ignore[no-untyped-call]
    return loss


def loss_of_log_probs(logits: Tensor, labels: Tensor, label_loss: LabelLoss, *, part: slice | None = None) -> Tensor:
    """The summed loss of labels by :class:`LabelLoss`, from logits, or other outputs, ``[tokens, columns]`` that exist;
    a scalar. Local.

    Args:
        logits: before the temperature of ``label_loss``, which divides them here.
        part: which labels these are, where they are a chunk. Default: all.
    """
    logits = logits.to(_wide(logits.dtype))
    if label_loss.temperature not in (None, 1.0):
        logits = logits / label_loss.temperature
    has = labels != IGNORE
    if label_loss.temperature is None:
        logs = torch.where(has[:, None], logits, 0.0)
        log_probs = logs[:, 0] if logs.shape[1] == 1 else logs
    else:
        logs = torch.where(has[:, None], logits.log_softmax(-1), 0.0)
        log_probs = logs.gather(1, torch.where(has, labels, 0)[:, None])[:, 0]
    entropies = None
    if label_loss.entropy:
        entropies = -torch.where(has[:, None] & logs.isfinite(), logs.exp() * logs, 0.0).sum(1)
    part = slice(0, len(labels)) if part is None else part
    if label_loss.ranked is not None:
        label_loss.ranked(log_probs.detach() >= logs.detach().amax(1), part)
    losses, by_log_probs, by_entropies = label_loss.function(
        log_probs.detach(), None if entropies is None else entropies.detach(), part
    )
    # a value of 0 with the derivatives that the loss has told
    total = losses.sum() + (by_log_probs * (log_probs - log_probs.detach())).sum()
    if entropies is not None and by_entropies is not None:
        total = total + (by_entropies * (entropies - entropies.detach())).sum()
    return total


@dataclass(frozen=True, slots=True)
class _Job:
    shard: VocabularyShard
    options: LossOptions
    chunk: int
    wants_gradients: bool
    label_loss: LabelLoss | None = None
    temperature: float = 1.0


def _in_autocast_type(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if not torch.is_autocast_enabled(autocast_type(hidden)):
        return hidden, weight, bias
    low = torch.get_autocast_dtype(autocast_type(hidden))
    return hidden.to(low), weight.to(low), None if bias is None else bias.to(low)


def _job_of(
    weight: Tensor,
    options: LossOptions | None,
    comm: Communicator | None,
    chunk_tokens: int | None,
) -> _Job:
    options = LossOptions() if options is None else options
    check_type("linear_cross_entropy", "options", options, LossOptions)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InvalidUsage(f"chunk_tokens is {chunk_tokens}; at least 1 was expected, or None")
    columns = weight.shape[0]
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    if columns < 1:
        raise InvalidUsage(f"weight {tuple(weight.shape)} has no row; a vocabulary has at least one column")
    return _Job(
        VocabularyShard(rank * columns, size * columns, comm if size > 1 else None),
        options, chunk_tokens or default_chunk_tokens(weight), torch.is_grad_enabled(),
    )  # fmt: skip


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factors: Tensor | None, job: _Job
    ) -> Tensor:
        wanted = [job.wants_gradients and needed for needed in ctx.needs_input_grad[:3]]
        losses, ctx.gradients = _chunks(hidden, weight, bias, labels, factors, job, wanted)
        return losses.sum()

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise InvalidUsage(
                "backward went through linear_cross_entropy a second time, but the first one took its gradients; call "
                "linear_cross_entropy again instead of retain_graph=True"
            )
        ctx.gradients = None  # autograd may then keep them as they are, without a copy
        return (*(None if gradient is None else gradient.mul_(upstream[0]) for gradient in gradients), None, None, None)


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factors: Tensor | None,
    job: _Job,
    wanted: list[bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """(losses ``[tokens]``, gradients of hidden, weight and bias, where wanted), a chunk of logits at a time."""
    tokens = hidden.shape[0]
    losses = torch.empty(tokens, dtype=_wide(hidden.dtype), device=hidden.device)
    chunks = -(-tokens // job.chunk)
    gradients = _Gradients(hidden, weight, bias, wanted, chunks)
    # chunks of equal size: the last one of many would else be small
    size = -(-tokens // chunks) if chunks else 0
    memory = hidden.new_empty(size, weight.shape[0])
    with torch.autocast(autocast_type(hidden), enabled=False):
        for start in range(0, tokens, max(1, size)):
            part = slice(start, min(tokens, start + size))
            logits = _logits(hidden[part], weight, bias, job, memory)
            rows = LogitRows(logits, labels[part], None if factors is None else factors[part], job.shard)
            losses[part] = rows.losses if job.label_loss is None else _label_losses(rows, job.label_loss, part)
            del rows.stats  # before there are gradients
            if any(wanted):
                gradients.add(part, hidden[part], weight, _logit_gradient(rows, logits, job))
        return losses, gradients.finish(job.shard.comm)


def _label_losses(rows: LogitRows, label_loss: LabelLoss, part: slice) -> Tensor:
    log_probs = rows.losses.neg().add_(0.0)  # no -0.0
    if label_loss.ranked is not None:
        label_loss.ranked(rows.stats[:, 2].sum(0) >= rows.stats[:, 0].amax(0), part)
    entropies = rows.entropies() if label_loss.entropy else None
    losses, by_log_probs, by_entropies = label_loss.function(log_probs, entropies, part)
    rows.weigh(-by_log_probs, by_entropies)
    return losses


class _Gradients:
    """The gradients of hidden, weight and bias, summed over the chunks: in float32 at least where there are several."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], chunks: int) -> None:
        self._types = weight.dtype, None if bias is None else bias.dtype
        self._once = chunks == 1
        wide = weight.dtype if self._once else _wide(weight.dtype)
        new = torch.empty if self._once else torch.zeros
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = new(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        self.bias = None if bias is None or not wanted[2] else torch.zeros(bias.shape, dtype=wide, device=bias.device)

    def add(self, part: slice, hidden: Tensor, weight: Tensor, logits: Tensor) -> None:
        """``logits``: the gradient of the chunk's logits."""
        if self.hidden is not None:
            torch.mm(logits, weight, out=self.hidden[part])
        if self.weight is not None:
            if self.weight.dtype == logits.dtype:
                self.weight.addmm_(logits.t(), hidden, beta=0 if self._once else 1)
            else:  # a product in the narrow type, and on CPUs its copy in the wide one: of some rows at a time
                rows = max(1, _PRODUCT_ELEMENTS // max(1, hidden.shape[1]))
                for own, columns in zip(torch.split(self.weight, rows), torch.split(logits, rows, dim=1), strict=True):
                    own += columns.t() @ hidden
        if self.bias is not None:
            self.bias += logits.sum(0, dtype=self.bias.dtype)

    def finish(self, comm: Communicator | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the types of the tensors that they belong to. Collective over ``comm`` where hidden has a gradient."""
        if comm is not None and self.hidden is not None and self.hidden.numel():
            comm.all_reduce(self.hidden)
        bias = None if self.bias is None else self.bias.to(self._types[1])
        return self.hidden, None if self.weight is None else self.weight.to(self._types[0]), bias


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job, memory: Tensor) -> Tensor:
    options, logits = job.options, memory[: hidden.shape[0]]
    torch.mm(hidden, weight.t(), out=logits)
    if bias is not None:
        logits += bias
    if options.scale != 1.0:
        logits *= options.scale
    if options.softcap:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    if job.temperature != 1.0:
        logits /= job.temperature
    return logits


def _logit_gradient(rows: LogitRows, logits: Tensor, job: _Job) -> Tensor:
    """Gradient of the linear layer's own result; takes the logits' memory where nothing else needs them."""
    options = job.options
    gradient = rows.gradient(options.scale / job.temperature, in_place=not options.softcap)
    if options.softcap:  # the derivative of softcap * tanh(x / softcap), from its result
        gradient *= logits.mul_(job.temperature / options.softcap).square_().neg_().add_(1.0)
    return gradient


def default_chunk_tokens(weight: Tensor) -> int:
    """Tokens of a chunk, the same on all ranks with equal shards of the vocabulary."""
    return max(weight.shape[1], _SMALL_CHUNK // max(1, weight.shape[0] * weight.element_size()), 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, weights: Tensor | None) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise InvalidUsage(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: [..., width] and [columns, width] were "
            "expected"
        )
    if (
        not hidden.is_floating_point()
        or hidden.dtype != weight.dtype
        or (bias is not None and bias.dtype != hidden.dtype)
    ):
        raise InvalidUsage(
            f"hidden is {hidden.dtype}, weight {weight.dtype}{'' if bias is None else f', bias {bias.dtype}'}; one "
            "floating-point type was expected (or autocast)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidUsage(f"bias {tuple(bias.shape)}; expected one for each row of weight {tuple(weight.shape)}")
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise InvalidUsage(
            f"labels {tuple(labels.shape)} of {labels.dtype}; expected int64, one for each token of hidden "
            f"{tuple(hidden.shape)}"
        )
    types = (torch.float32, torch.float64) if hidden.dtype == torch.float64 else (torch.float32,)
    if weights is not None and (weights.shape != labels.shape or weights.dtype not in types):
        raise InvalidUsage(
            f"weights {tuple(weights.shape)} of {weights.dtype}; expected float32, one for each label: "
            f"{tuple(labels.shape)}"
        )
    for tensor in (weight, bias, labels, weights):
        if tensor is not None and tensor.device != hidden.device:
            raise InvalidUsage(f"hidden is on {hidden.device}, another argument on {tensor.device}; move one")
