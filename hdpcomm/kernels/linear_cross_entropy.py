"""The last linear layer and its cross-entropy in one, in chunks of tokens: the logits of a chunk exist at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.arguments import check_type
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels._logit_rows import FusedRows, LogitRows, PlainRows, VocabularyShard
from hdpcomm.kernels.cross_entropy import CROSS_ENTROPY_DTYPES
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["LossOptions", "default_chunk_tokens", "linear_cross_entropy"]

_SMALL_CHUNK = 16 << 20
"""Bytes of logits up to which a larger chunk costs nothing worth saving."""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How the last layer's product becomes logits, and logits become a loss; from a model's configuration.

    Attributes:
        scale: factor of the logits.
        softcap: the logits become ``softcap * tanh(logits / softcap)``, after ``scale``; 0: they stay.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to a token's loss (PaLM, arXiv 2204.02311, section 5).

    Raises: InvalidUsage for numbers that are not finite, and for ``softcap`` or ``z_loss`` below 0.
    """

    scale: float = 1.0
    softcap: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise InvalidUsage(
                f"scale is {self.scale} and softcap {self.softcap}; expected finite numbers, softcap not below 0"
            )
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0):
            raise InvalidUsage(f"z_loss is {self.z_loss}; expected a finite number that is not below 0")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions | None = None,
    weights: Tensor | None = None,
    ignore_index: int = -100,
    comm: Communicator | None = None,
    shard: tuple[int, int] | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The summed cross-entropy of ``hidden @ weight.T``, whose logits never exist as a whole; a scalar.

    The forward pass takes the tokens in chunks: logits, loss, and at once the gradients of ``hidden``, ``weight`` and
    ``bias``, so that backward only scales them. Beside its inputs it needs the gradients (that of ``weight`` is summed
    in at least fp32) and the logits of one chunk (two with ``softcap``), however many tokens there are.

    Args:
        hidden: ``[..., width]`` floating point; equal on all ranks of ``comm``.
        weight: ``[columns, width]``, of the type of ``hidden``; the columns of the vocabulary that this rank holds.
        labels: ``[...]`` int64, columns of the whole vocabulary, or ``ignore_index`` for a token without a loss.
        bias: ``[columns]``.
        options: scale and soft cap of the logits, z-loss. Default: none of them.
        weights: ``[...]`` float32, factors of the tokens' losses; not differentiated. Default: 1.
        comm: the ranks that hold shards of the vocabulary, in the order of the columns. Collective over it in forward:
            for each chunk an all-gather of three numbers a token, at the end an all-reduce of the gradient of
            ``hidden``, which is then equal on all ranks. Backward communicates nothing.
        shard: (first column of this rank, columns of the whole vocabulary). Default: equal shards in the ranks' order.
        chunk_tokens: tokens of a chunk. Default: ``width``, so that a chunk's logits take as much memory as the weight,
            or more where 16 MiB hold more.

    Returns: float32 (float64 for float64), the same on all ranks of ``comm``.

    Raises:
        InvalidUsage: shapes, types or numbers that do not fit; a label outside the vocabulary (on CUDA such a token's
            loss is NaN); a second backward through the same result.
    """
    if torch.is_autocast_enabled(_autocast_type(hidden)):
        low = torch.get_autocast_dtype(_autocast_type(hidden))
        hidden, weight, bias = hidden.to(low), weight.to(low), None if bias is None else bias.to(low)
    _check(hidden, weight, labels, bias, weights)
    options = LossOptions() if options is None else options
    check_type("linear_cross_entropy", "options", options, LossOptions)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InvalidUsage(f"chunk_tokens is {chunk_tokens}; at least 1 was expected, or None")
    columns = weight.shape[0]
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    first, total = shard if shard is not None else (rank * columns, size * columns)
    if total < 1:
        raise InvalidUsage(f"weight {tuple(weight.shape)} has no row; a vocabulary has at least one column")
    job = _Job(
        VocabularyShard(first, total, ignore_index, comm if size > 1 else None),
        options, chunk_tokens or default_chunk_tokens(weight, -(-total // size)), torch.is_grad_enabled(),
    )  # fmt: skip
    factors = None if weights is None else weights.detach().reshape(-1).contiguous()
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, labels.reshape(-1).contiguous(), factors, job)  # type: ignore[no-untyped-call]
    return loss


@dataclass(frozen=True, slots=True)
class _Job:
    shard: VocabularyShard
    options: LossOptions
    chunk: int
    wants_gradients: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factors: Tensor | None, job: _Job
    ) -> Tensor:
        wanted = [job.wants_gradients and needed for needed in ctx.needs_input_grad[:3]]
        rows_type = FusedRows if hidden.dtype in CROSS_ENTROPY_DTYPES else PlainRows
        gradients = _Gradients(hidden, weight, bias, wanted)
        tokens = hidden.shape[0]
        losses = torch.empty(tokens, dtype=_wide(hidden.dtype), device=hidden.device)
        chunks = -(-tokens // job.chunk)
        # chunks of equal size: the last one of many would else be small
        size = -(-tokens // chunks) if chunks else 0
        memory = hidden.new_empty(size, weight.shape[0])
        with torch.autocast(_autocast_type(hidden), enabled=False):
            for start in range(0, tokens, max(1, size)):
                part = slice(start, min(tokens, start + size))
                logits = _logits(hidden[part], weight, bias, job.options, memory)
                rows = rows_type(
                    logits, labels[part], None if factors is None else factors[part], job.shard, job.options.z_loss
                )
                losses[part] = rows.losses
                if any(wanted):
                    gradients.add(part, hidden[part], weight, _logit_gradient(rows, logits, job.options))
            ctx.gradients = gradients.finish(job.shard.comm)
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


class _Gradients:
    """The gradients of hidden, weight and bias, summed over the chunks."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> None:
        self._types = weight.dtype, None if bias is None else bias.dtype
        wide = _wide(weight.dtype)
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        self.bias = None if bias is None or not wanted[2] else torch.zeros(bias.shape, dtype=wide, device=bias.device)

    def add(self, part: slice, hidden: Tensor, weight: Tensor, logits: Tensor) -> None:
        """``logits``: the gradient of the chunk's logits."""
        if self.hidden is not None:
            torch.mm(logits, weight, out=self.hidden[part])
        if self.weight is not None:
            if self.weight.dtype == logits.dtype:
                self.weight.addmm_(logits.t(), hidden)
            else:
                self.weight += logits.t() @ hidden
        if self.bias is not None:
            self.bias += logits.sum(0, dtype=self.bias.dtype)

    def finish(self, comm: Communicator | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the types of the tensors that they belong to. Collective over ``comm`` where hidden has a gradient."""
        if comm is not None and self.hidden is not None and self.hidden.numel():
            comm.all_reduce(self.hidden)
        bias = None if self.bias is None else self.bias.to(self._types[1])
        return self.hidden, None if self.weight is None else self.weight.to(self._types[0]), bias


def _autocast_type(tensor: Tensor) -> str:
    return "cpu" if tensor.is_meta else tensor.device.type  # torch knows no autocast on the meta device


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions, memory: Tensor) -> Tensor:
    logits = memory[: hidden.shape[0]]
    torch.mm(hidden, weight.t(), out=logits)
    if bias is not None:
        logits += bias
    if options.scale != 1.0:
        logits *= options.scale
    if options.softcap:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    return logits


def _logit_gradient(rows: LogitRows, logits: Tensor, options: LossOptions) -> Tensor:
    """Gradient of the linear layer's own result; takes the logits' memory where nothing else needs them."""
    gradient = rows.gradient(options.scale, in_place=not options.softcap)
    if options.softcap:  # the derivative of softcap * tanh(x / softcap), from its result
        gradient *= logits.div_(options.softcap).square_().neg_().add_(1.0)
    return gradient


def default_chunk_tokens(weight: Tensor, columns: int) -> int:
    """Tokens of a chunk, the same on all ranks: ``columns`` are those of an equal shard of the vocabulary."""
    return max(weight.shape[1], _SMALL_CHUNK // max(1, columns * weight.element_size()), 1)


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
    if weights is not None and (weights.shape != labels.shape or weights.dtype != torch.float32):
        raise InvalidUsage(
            f"weights {tuple(weights.shape)} of {weights.dtype}; expected float32, one for each label: "
            f"{tuple(labels.shape)}"
        )
    for tensor in (weight, bias, labels, weights):
        if tensor is not None and tensor.device != hidden.device:
            raise InvalidUsage(f"hidden is on {hidden.device}, another argument on {tensor.device}; move one")
