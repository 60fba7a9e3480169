"""The auxiliary load-balancing loss of mixture-of-experts models, token by token.

Switch Transformer's loss (Fedus et al., arXiv 2101.03961, equations 4 to 6) is a product of two means over tokens, so
it does not add up over micro-batches: its value would depend on the plan. Here the means are those of each sequence,
whoever holds it, and every trained token adds its own sequence's loss; so the sum over ranks and micro-batches is the
same for every plan, and for a batch of one sequence it is transformers' own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.attention import local_cu_seqlens
from hdpcomm.attention.layout import CuSeqlens, as_cu_seqlens
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import Tree

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
    the sum of its probabilities: ``experts * sum_e (f_e / N) (p_e / N)``.

    Args:
        router_logits: of each layer ``[local tokens, experts]``.
        trained: ``[local tokens]`` bool, tokens that have a label.
        cu_seqlens: of the whole pack, which must be no tree.
        comm: the ranks that share the pack. Collective over it: one all-reduce of ``experts`` numbers and
            one a sequence, ``by_layer`` for each layer.
        by_layer: the sum over the layers of the losses of each alone, in place of that of their common means.

    Raises: InvalidUsage for a tree.
    """
    if isinstance(cu_seqlens, Tree):
        raise InvalidUsage(
            "a router's auxiliary loss is a mean over each sequence, and a tree was given, whose tokens belong to "
            "several: set output_router_logits=False in the model's configuration, or train on plain sequences"
        )
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    device, experts = router_logits[0].device, router_logits[0].shape[-1]
    lengths = torch.from_numpy(as_cu_seqlens(cu_seqlens)).diff().to(device)
    counts = local_cu_seqlens(cu_seqlens, rank=rank, size=size).diff()
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
    if comm is not None and size > 1:
        comm.all_reduce(stats)
    rows = (lengths * len(groups[0])).double()
    factors = experts * stats[:, 1:] * (stats[:, :1] / rows[:, None].square())
    return (factors.to(wide) * torch.cat(probabilities, dim=1)).sum()
