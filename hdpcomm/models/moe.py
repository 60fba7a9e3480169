"""The feed-forward part of a mixture-of-experts Llama: Mixtral's layer (arXiv 2401.04088, section 2.1), and the losses
of routers.

Switch Transformer's loss (Fedus et al., arXiv 2101.03961, equations 4 to 6) is a product of two means over tokens, so
it does not add up over micro-batches: its value would depend on the plan. Here the means are those of each sequence,
whoever holds it, and every trained token adds its own sequence's loss; so the sum over ranks and micro-batches is the
same for every plan, and for a batch of one sequence it is transformers' own loss.

A sequence in slices has one loss, too. Its derivative by a token's probabilities takes the counts of all slices, so it
is worked out in backward passes, which begin when all forward passes have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hdpcomm.attention import SequenceSlice
from hdpcomm.attention.pack_context import current_routes
from hdpcomm.attention.packs import CuSeqlens, as_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative
from hdpcomm.kernels.transfers import to_device
from hdpcomm.models.expert_group import ExpertGroup, ExpertLoad, chosen_before, mixture
from hdpcomm.models.lean import gate_halves

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["MixtureOfExperts", "expert_blocks", "holds_experts", "refuse_trees", "router_loss", "router_losses"]


class MixtureOfExperts(nn.Module):
    """Each token's ``top_k`` of ``experts`` SwiGLU layers, weighted by the softmax over the chosen ones' logits.

    Attributes:
        router: logits ``[tokens, experts]``.
        gate_up, out: the experts on this rank, ``[experts, 2 x ffn, hidden]`` and ``[experts, hidden, ffn]``.
        group: the ranks that hold the experts together; see :func:`hdpcomm.parallel.expert_parallel`.
    """

    def __init__(
        self, hidden: int, ffn: int, experts: int, top_k: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False, dtype=dtype, device=device)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, hidden, dtype=dtype, device=device))
        self.out = nn.Parameter(torch.empty(experts, hidden, ffn, dtype=dtype, device=device))
        self.group: ExpertGroup | None = None
        self.load = ExpertLoad(experts)
        self.router_place: Any = None
        """Which of the model's routers it is; see :mod:`hdpcomm.models.routes`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x: [tokens, hidden]``, maybe empty: the result alike, and the router's logits ``[tokens, experts]``.

        Collective over the group, if there is one, in forward and in backward.
        """
        logits = self.router(x)
        shares = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        before, routes = chosen_before(), current_routes()
        if before is not None:
            chosen = before
        elif routes is None:
            chosen = self._best(shares)
        else:
            chosen = routes.choose(self.router_place, lambda: self._best(shares))
        weights = shares.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return mixture(x, chosen, weights, self._run, self.load, self.group), logits

    def _best(self, shares: Tensor) -> Tensor:
        return shares.detach().topk(self.top_k, dim=-1).indices

    def _run(self, rows: Tensor, experts: Tensor, counts: Callable[[], Sequence[int]]) -> Tensor:
        if rows.shape[0] and _has_grouped_product(rows, self.gate_up):
            own = torch.arange(self.out.shape[0], device=rows.device)
            ends = torch.searchsorted(experts, own, right=True, out_int32=True)
            mixed = gate_halves(nn.functional.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends), "silu")
            results: Tensor = nn.functional.grouped_mm(mixed, self.out.transpose(1, 2), offs=ends)
            return results
        made = []
        for part, gate_up, out in zip(
            torch.split(rows, list(counts())), self.gate_up.unbind(), self.out.unbind(), strict=True
        ):
            mixed = gate_halves(nn.functional.linear(part, gate_up), "silu")
            made.append(nn.functional.linear(mixed, out))
        return torch.cat(made)


def _has_grouped_product(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch has one kernel for the products of all experts: in bf16, with rows of whole 16 bytes."""
    if not hasattr(nn.functional, "grouped_mm") or not _multiplies_groups(rows.device):
        return False
    return rows.dtype == weights.dtype == torch.bfloat16 and not any(n % 16 for n in weights.shape[1:])


def _multiplies_groups(device: torch.device) -> bool:
    """On Hopper and Blackwell; elsewhere torch has a loop of its own, for which the host waits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def holds_experts(module: nn.Module) -> bool:
    """Whether it is a module of transformers 5 with one tensor for all experts of a layer. Local.

    They are marked by ``@use_experts_implementation``: forward(hidden_states, top_k_index, top_k_weights).
    """
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and any(True for _ in module.parameters())


def expert_blocks(model: nn.Module) -> set[str]:
    """Names of the modules that have experts (:func:`holds_experts`), a router, and maybe experts for all tokens: what
    they give for a token depends on that token only. Local."""
    return {name.rpartition(".")[0] for name, module in model.named_modules() if holds_experts(module)}


def refuse_trees(given: bool) -> None:
    """Raises InvalidUsage if trees, or slices of some, were given, for which routers' losses have no meaning. Local."""
    if given:
        raise InvalidUsage(
            "the losses of routers are means over sequences, and a tree was given, whose tokens belong to several: set "
            "router_aux_loss and router_z_loss of LlamaConfig to 0, or output_router_logits=False in the configuration "
            "of a model of transformers; or train on plain sequences"
        )


def router_losses(
    router_logits: Sequence[Tensor],
    trained: Tensor,
    *,
    aux: float,
    z: float,
    top_k: int,
    layers: int,
    cu_seqlens: CuSeqlens,
    comm: Communicator,
) -> Tensor:
    """This rank's share of the sum over all trained tokens of their routers' losses; differentiable.

    Both are means over the model's layers: ``aux`` times the load-balancing loss of the token's sequence in each
    (:func:`hdpcomm.models.moe.router_loss`), and ``z`` times the squared log-sum-exp of the token's logits
    (ST-MoE, arXiv 2202.08906, equation 5). Collective over ``comm`` unless ``aux`` is 0.

    Args:
        router_logits: of each layer that is here ``[local tokens, experts]``.
        trained: ``[local tokens]`` bool, tokens that have a label.
        layers: of the whole model; stages of a pipeline have some of them each, and their losses add up.

    Raises: InvalidUsage for a tree, unless both factors are 0.
    """
    if aux or z:
        refuse_trees(as_pack(cu_seqlens).branched)
    total = router_logits[0].new_zeros((), dtype=torch.promote_types(router_logits[0].dtype, torch.float32))
    if aux:
        total = total + aux / layers * router_loss(
            router_logits, trained, top_k=top_k, experts=router_logits[0].shape[-1], cu_seqlens=cu_seqlens, comm=comm,
            by_layer=True,
        )  # fmt: skip
    if z:
        squares = [logits.to(total.dtype).logsumexp(-1).square() for logits in router_logits]
        total = total + z / layers * (torch.stack(squares).sum(0) * trained).sum()
    return total


def router_loss(
    router_logits: Sequence[Tensor],
    trained: Tensor,
    *,
    top_k: int,
    experts: int,
    cu_seqlens: CuSeqlens,
    comm: Communicator | None,
    by_layer: bool = False,
    before: Tensor | None = None,
    ends: bool = True,
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
        before: result of the stage before.
        ends: whether no stage follows. Else the result are sums of this stage's layers and those before, fp64
            ``[2, sequences, experts]``: p_e of this rank, differentiable, and f_e. Local then.

    Raises: InvalidUsage for a tree or a slice of one.
    """
    pack = as_pack(cu_seqlens)
    refuse_trees(pack.branched)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    firsts, device = pack.first_tokens(), trained.device
    sequence = torch.from_numpy(np.searchsorted(firsts, pack.places(rank, size).numpy(), side="right") - 1)
    sequence = to_device(sequence, device)
    groups = [[logits] for logits in router_logits] if by_layer else [router_logits]
    sums = [_sums(group, sequence, len(firsts), experts, top_k) for group in groups]
    both = torch.cat(sums, dim=2) if before is None else sums[0] + before
    if not ends:
        return both
    labels = torch.zeros(len(firsts), dtype=both.dtype, device=device).index_add_(0, sequence, trained.double())
    stats = torch.cat((labels[:, None], both[1].detach()), dim=1)
    if pack.keeps:
        loss: Tensor = _SliceLoss.apply(both[0], stats, experts, top_k, pack, comm)  # type: ignore[no-untyped-call]
        return loss
    if comm is not None and size > 1:
        comm.all_reduce(stats)
    return (_slopes(stats, experts, top_k) * both[0]).sum()


def _sums(router_logits: Sequence[Tensor], sequence: Tensor, sequences: int, experts: int, top_k: int) -> Tensor:
    """Probabilities and choices of local tokens, fp64 ``[2, sequences, experts]``; ``sequence``: of each token."""
    total = torch.zeros(2, sequences, experts, dtype=torch.float64, device=sequence.device)
    for logits in router_logits:
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        best = weights.detach().topk(top_k, dim=-1).indices
        both = torch.stack((weights, torch.zeros_like(weights).scatter_(1, best, 1.0)))
        total = total + both.new_zeros(total.shape).index_add(1, sequence, both)
    return total


def _slopes(stats: Tensor, experts: int, top_k: int) -> Tensor:
    """Derivatives of the losses of sequences by the sums of probabilities, fp64 ``[sequences, groups x experts]``.

    Args:
        stats: of each sequence its labels, and how often each expert was chosen, in each group of layers.
    """
    labels, counts = stats[:, :1], stats[:, 1:]
    rows = counts.sum(1, keepdim=True) / (counts.shape[1] // experts * top_k)  # tokens times layers of a group
    return experts * counts * (labels / rows.clamp(min=1).square())


class _Counted:
    """Statistics of the slices of a sequence for a loss of routers: counts of all ranks, and sums of probabilities
    of this one."""

    def __init__(self, slices: int) -> None:
        self.stats: list[Tensor | None] = [None] * slices
        self.sums: list[Tensor | None] = [None] * slices

    def slopes(self, experts: int, top_k: int) -> Tensor:
        """Gradients by the whole sequence.

        Raises: InvalidUsage: a slice has not run.
        """
        known = [each for each in self.stats if each is not None]
        if len(known) < len(self.stats):
            raise InvalidUsage(
                f"the routers' auxiliary loss is a mean over a sequence, and {len(known)} of its {len(self.stats)} "
                "slices have run: run the forward passes of all slices before the first backward pass"
            )
        return _slopes(torch.stack(known).sum(0), experts, top_k)


class _SliceLoss(torch.autograd.Function):
    """From the sums of probabilities of a slice: the loss of the sequence if it is the last one, else 0."""

    @staticmethod
    def forward(
        ctx: Any,
        sums: Tensor,
        stats: Tensor,
        experts: int,
        top_k: int,
        part: SequenceSlice,
        comm: Communicator | None,
    ) -> Tensor:
        counted, number = part.sequence.store.entry(part.forward_pass, _Counted), part.number
        ctx.counted, ctx.slopes_of = counted, (experts, top_k)
        if counted.stats[number] is None:
            if comm is not None and comm.size > 1:
                comm.all_reduce(stats)
            counted.stats[number], counted.sums[number] = stats, sums.detach()
        if number < len(part.sequence) - 1:
            return sums.new_zeros(())
        slopes = counted.slopes(experts, top_k)
        return (slopes * torch.stack([each for each in counted.sums if each is not None]).sum(0)).sum()

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return upstream[0] * ctx.counted.slopes(*ctx.slopes_of), None, None, None, None, None
