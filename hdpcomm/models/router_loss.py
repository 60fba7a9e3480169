"""The auxiliary load-balancing loss of mixture-of-experts models, token by token.

Switch Transformer's loss (Fedus et al., arXiv 2101.03961, equations 4 to 6) is a product of two means over tokens, so
it does not add up over micro-batches: its value would depend on the plan. Here the means are those of each sequence,
whoever holds it, and every trained token adds its own sequence's loss; so the sum over ranks and micro-batches is the
same for every plan, and for a batch of one sequence it is transformers' own loss.

A sequence in slices has one loss, too. Its derivative by a token's probabilities takes the counts of all slices, so it
is worked out in backward passes, which begin when all forward passes have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.attention import SequenceSlice
from hdpcomm.attention.packs import CuSeqlens, as_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["router_loss"]


def router_loss(
    router_logits: Sequence[Tensor],
    trained: Tensor,
    *,
    top_k: int,
    cu_seqlens: CuSeqlens,
    comm: Communicator | None,
    by_layer: bool = False,
) -> Tensor:
    """This rank's share of the sum over all trained tokens of their sequence's loss; differentiable.

    With N tokens and layers of a sequence, f_e the number of times that expert e is among the ``top_k`` of one, and p_e
    the sum of its probabilities: ``experts * sum_e (f_e / N) (p_e / N)``. The last slice of a sequence gives all of
    that, the others 0; each has the gradients of its own tokens.

    Args:
        router_logits: of each layer ``[local tokens, experts]``.
        trained: ``[local tokens]`` bool, tokens that have a label.
        cu_seqlens: of the whole pack, which must be no tree; or a slice.
        comm: the ranks that share the pack. Collective over it: one all-reduce of ``experts`` numbers and
            one a sequence, ``by_layer`` for each layer; none where a slice runs again.
        by_layer: the sum over the layers of the losses of each alone, in place of that of their common means.

    Raises: InvalidUsage for a tree or a slice of one.
    """
    pack = as_pack(cu_seqlens)
    if pack.branched:
        raise InvalidUsage(
            "a router's auxiliary loss is a mean over each sequence, and a tree was given, whose tokens belong to "
            "several: set output_router_logits=False in the model's configuration, or train on plain sequences"
        )
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    device, experts = router_logits[0].device, router_logits[0].shape[-1]
    lengths, counts = pack.tokens_by_sequence(rank, size)
    # On the host, where the counts are: a device would tell it the size of the result, and it would wait.
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts).to(device)
    wide = torch.promote_types(router_logits[0].dtype, torch.float32)
    groups = [[logits] for logits in router_logits] if by_layer else [router_logits]
    stats = torch.zeros(len(lengths), 1 + len(groups) * experts, dtype=torch.float64, device=device)
    stats[:, 0].index_add_(0, sequence, trained.double())
    probabilities = []
    for place, group in enumerate(groups):
        sums = torch.zeros(len(lengths), experts, dtype=wide, device=device)
        for logits in group:
            weights = logits.to(wide).softmax(-1)
            sums = sums.index_add(0, sequence, weights)
            chosen = weights.detach().topk(top_k, dim=-1).indices + 1 + place * experts
            cells = (sequence[:, None] * stats.shape[1] + chosen).flatten()
            stats.view(-1).index_add_(0, cells, stats.new_ones(chosen.numel()))
        probabilities.append(sums)
    rows = lengths.to(device) * len(groups[0])
    mine = torch.cat(probabilities, dim=1)
    if pack.keeps:
        loss: Tensor = _SliceLoss.apply(mine, stats, rows, experts, pack, comm)  # type: ignore[no-untyped-call]
        return loss
    if comm is not None and size > 1:
        comm.all_reduce(stats)
    return (_slopes(stats, rows, experts).to(wide) * mine).sum()


def _slopes(stats: Tensor, rows: Tensor, experts: int) -> Tensor:
    """Derivatives of the losses of sequences by the sums of probabilities, fp64 ``[sequences, groups x experts]``.

    Args:
        stats: of each sequence its labels, and how often each expert was chosen, in each group of layers.
        rows: ``[sequences]``, tokens times layers of a group.
    """
    return experts * stats[:, 1:] * (stats[:, :1] / rows.double()[:, None].square())


class _Counted:
    """Statistics of the slices of a sequence for a loss of routers: counts of all ranks, and sums of probabilities
    of this one."""

    def __init__(self, slices: int) -> None:
        self.stats: list[Tensor | None] = [None] * slices
        self.sums: list[Tensor | None] = [None] * slices

    def slopes(self, rows: Tensor, experts: int) -> Tensor:
        """Gradients by the whole sequence.

        Raises: InvalidUsage: a slice has not run.
        """
        known = [each for each in self.stats if each is not None]
        if len(known) < len(self.stats):
            raise InvalidUsage(
                f"the routers' auxiliary loss is a mean over a sequence, and {len(known)} of its {len(self.stats)} "
                "slices have run: run the forward passes of all slices before the first backward pass"
            )
        return _slopes(torch.stack(known).sum(0), rows, experts)


class _SliceLoss(torch.autograd.Function):
    """From the sums of probabilities of a slice: the loss of the sequence if it is the last one, else 0."""

    @staticmethod
    def forward(
        ctx: Any,
        sums: Tensor,
        stats: Tensor,
        rows: Tensor,
        experts: int,
        part: SequenceSlice,
        comm: Communicator | None,
    ) -> Tensor:
        counted, number = part.sequence.store.entry(part.forward_pass, _Counted), part.number
        ctx.counted, ctx.rows, ctx.experts = counted, rows, experts
        if counted.stats[number] is None:
            if comm is not None and comm.size > 1:
                comm.all_reduce(stats)
            counted.stats[number], counted.sums[number] = stats, sums.detach()
        if number < len(part.sequence) - 1:
            return sums.new_zeros(())
        slopes = counted.slopes(rows, experts)
        return (slopes.to(sums.dtype) * torch.stack([each for each in counted.sums if each is not None]).sum(0)).sum()

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        slopes = ctx.counted.slopes(ctx.rows, ctx.experts).to(upstream[0].dtype)
        return upstream[0] * slopes, None, None, None, None, None
