"""The feed-forward part of a mixture-of-experts Llama: Mixtral's layer (arXiv 2401.04088, section 2.1), and the losses
of routers.

Switch Transformer's loss (Fedus et al., arXiv 2101.03961, equations 4 to 6) is a product of two means over tokens, so
it does not add up over micro-batches: its value would depend on the plan. Here the means are those of each sequence,
whoever holds it, and every trained token adds its own sequence's loss; so the sum over ranks and micro-batches is the
same for every plan, and for a batch of one sequence it is transformers' own loss. A token of a tree counts in each
sequence that it is part of, and a loss that weighs sequences by their labels weighs these losses alike.

A sequence in slices has one loss, too. Its derivative by a token's probabilities takes the counts of all slices, so it
is worked out in backward passes, which begin when all forward passes have ended.

Routers may also balance themselves without a loss: by a bias on the scores by which a router chooses, moved after each
step against its experts' loads (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_number
from hdpcomm.attention import SequenceSlice
from hdpcomm.attention.pack_context import current_routes, find_pack
from hdpcomm.attention.packs import CuSeqlens, as_pack
from hdpcomm.comm import Communicator, Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import to_device, without_second_derivative
from hdpcomm.models.expert_group import ExpertGroup, ExpertLoad, chosen_before, counts_of, mixture
from hdpcomm.models.lean import gate_halves

__all__ = [
    "AddedLosses",
    "MixtureOfExperts",
    "RouterLosses",
    "RouterWeights",
    "balance_routers",
    "expert_blocks",
    "holds_experts",
    "loads_on_mesh",
    "path_sums",
    "router_loss",
    "settle_loads",
]


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
        parameters = (self.gate_up, self.out)
        return mixture(x, chosen, weights, self._run, self.load, self.group, parameters), logits

    def _best(self, shares: Tensor) -> Tensor:
        return shares.detach().topk(self.top_k, dim=-1).indices

    def _run(
        self, rows: Tensor, experts: Tensor, counts: Callable[[], Sequence[int]], replicas: Sequence[Tensor]
    ) -> Tensor:
        gate_up, out = replicas or (self.gate_up, self.out)
        if rows.shape[0] and _has_grouped_product(rows, gate_up):
            own = torch.arange(out.shape[0], device=rows.device)
            ends = torch.searchsorted(experts, own, right=True, out_int32=True)
            mixed = gate_halves(nn.functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends), "silu")
            results: Tensor = nn.functional.grouped_mm(mixed, out.transpose(1, 2), offs=ends)
            return results
        made = []
        for part, *expert in zip(torch.split(rows, list(counts())), gate_up.unbind(), out.unbind(), strict=True):
            mixed = gate_halves(nn.functional.linear(part, expert[0]), "silu")
            made.append(nn.functional.linear(mixed, expert[1]))
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


@dataclass(frozen=True, slots=True, eq=False)
class RouterWeights:
    """By how much the losses of routers count in a shard.

    Attributes:
        tokens: fp64 ``[local tokens]``, labels of each token, each as often as the loss counts it.
        sequences: of a tree, fp64 ``[segments]``, labels of the sequences that end with each segment, on one rank and
            in one slice; ``None``: of plain sequences, the sums of their tokens'.
    """

    tokens: Tensor
    sequences: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """Factors of the losses that routers add for each trained token, each the mean over the layers with routers.

    Attributes:
        balance: of the load-balancing loss of the token's sequence (:func:`hdpcomm.models.moe.router_loss`). Where
            routers score by the sigmoid, probabilities are the scores divided by their sum, so DeepSeek-V3's
            sequence-wise loss (arXiv 2412.19437, equations 17 to 20) is this one by ``top_k``. It counts the
            ``top_k`` highest scores, without biases and groups.
        z: of the squared log-sum-exp of the token's logits (ST-MoE, arXiv 2202.08906, equation 5).
    """

    balance: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for name in ("balance", "z"):
            check_number("RouterLosses", name, getattr(self, name), least=0)


@dataclass(frozen=True, slots=True)
class AddedLosses:
    """Losses that the routers of a model add.

    Attributes:
        layers: of the whole model that have routers; 0: the balance loss is one of the common means of all layers, as
            transformers has it, and there is no other.
        sigmoid: whether routers score by it, and not by the softmax.
    """

    losses: RouterLosses
    layers: int
    top_k: int
    experts: int
    sigmoid: bool = False

    def carried_shape(self, sequences: int) -> tuple[int, ...]:
        """Shape of what a stage of a pipeline gives the next one (``before`` of :meth:`total`)."""
        return () if self.layers else (2, sequences, self.experts)

    def total(
        self, router_logits: Sequence[Tensor], weights: RouterWeights, cu_seqlens: CuSeqlens,
        comm: Communicator | None, *, before: Tensor | None = None, last: bool = True,
    ) -> Tensor:  # fmt: skip
        """The losses of a stage's routers and of those before: this rank's share of the sum over all trained tokens.
        Where one multiplies sums over all layers and the stage is not the ``last``, these sums. Collective over
        ``comm`` as :func:`router_loss`."""
        losses, layers = self.losses, self.layers
        scores = router_logits
        if self.sigmoid:  # the softmax of these are the shares of the sigmoids
            scores = [nn.functional.logsigmoid(logits) for logits in router_logits]
        options: dict[str, Any] = {"top_k": self.top_k, "experts": self.experts, "cu_seqlens": cu_seqlens, "comm": comm}
        if not layers:
            found = router_loss(scores, weights, before=before, last=last, **options)
            return losses.balance * found if last else found
        total = weights.tokens.new_zeros(()) if before is None else before
        if losses.balance and scores:
            total = total + losses.balance / layers * router_loss(scores, weights, by_layer=True, **options)
        for logits in router_logits if losses.z else ():
            lse = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
            total = total + losses.z / layers * (lse.square() * weights.tokens).sum()
        return total


def path_sums(x: Tensor, ends: npt.NDArray[np.int64] | None) -> Tensor:
    """For each segment of a tree, the sum of ``x: [..., segments, n]`` over the way from the root to it. Local.

    Args:
        ends: of the tree (:attr:`hdpcomm.plan.Tree.ends`); ``None``: plain sequences, each its own way.
    """
    if ends is None:
        return x
    left = x.new_zeros(*x.shape[:-2], len(ends) + 1, x.shape[-1])
    left = left.index_add(-2, to_device(torch.tensor(ends), x.device), x)
    return (x - left[..., :-1, :]).cumsum(-2)


def router_loss(
    router_logits: Sequence[Tensor],
    weights: RouterWeights,
    *,
    top_k: int,
    experts: int,
    cu_seqlens: CuSeqlens,
    comm: Communicator | None,
    by_layer: bool = False,
    before: Tensor | None = None,
    last: bool = True,
) -> Tensor:
    """This rank's share of the sum over all trained tokens of their sequence's loss; differentiable.

    With N tokens and layers of a sequence, f_e the number of times that expert e is among the ``top_k`` of one, and p_e
    the sum of its probabilities: ``experts * sum_e (f_e / N) (p_e / N)``. The last slice of a sequence gives all of
    that, the others 0; each has the gradients of its own tokens.

    Args:
        router_logits: of each layer ``[local tokens, experts]``.
        cu_seqlens: of the whole pack, or a slice.
        comm: the ranks that share the pack. Collective over it: one all-reduce of ``experts`` numbers and
            one a sequence, ``by_layer`` for each layer; none where a slice runs again.
        by_layer: the sum over the layers of the losses of each alone, in place of that of their common means.
        before: result of the stage before.
        last: whether no stage follows. Else the result are sums of this stage's layers and those before, fp64
            ``[2, sequences, experts]``: p_e of this rank, differentiable, and f_e; of a tree for each segment. Local
            then.

    Raises: InvalidUsage for a mask.
    """
    pack = as_pack(cu_seqlens)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    (firsts, ends), device = pack.segments(), weights.tokens.device
    sequence = torch.from_numpy(np.searchsorted(firsts, pack.places(rank, size).numpy(), side="right") - 1)
    sequence = to_device(sequence, device)
    groups = [[logits] for logits in router_logits] if by_layer else [router_logits]
    sums = [_sums(group, sequence, len(firsts), experts, top_k) for group in groups]
    both = torch.cat(sums, dim=2) if before is None else sums[0] + before
    if not last:
        return both
    both, labels = path_sums(both, ends), weights.sequences
    if labels is None:
        labels = torch.zeros(len(firsts), dtype=both.dtype, device=device).index_add_(0, sequence, weights.tokens)
    stats = torch.cat((labels[:, None], both[1].detach()), dim=1)

    def slopes_of(stats: Tensor) -> Tensor:
        rows = stats[:, 1:].sum(1, keepdim=True) / (len(sums) * top_k)  # tokens times layers of a group
        return experts * stats[:, 1:] * (stats[:, :1] / rows.clamp(min=1).square())

    if isinstance(pack, SequenceSlice):
        return _slice_loss(both[0], stats, slopes_of, pack, comm)
    if comm is not None and size > 1:
        comm.all_reduce(stats)
    return (slopes_of(stats) * both[0]).sum()


def _sums(router_logits: Sequence[Tensor], sequence: Tensor, sequences: int, experts: int, top_k: int) -> Tensor:
    """Probabilities and choices of local tokens, fp64 ``[2, sequences, experts]``; ``sequence``: of each token."""
    total = counts = torch.zeros(sequences, experts, dtype=torch.float64, device=sequence.device)
    for logits in router_logits:
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        best = weights.detach().topk(top_k, dim=-1).indices
        zero = weights.new_zeros(total.shape)
        total = total + zero.index_add(0, sequence, weights)
        counts = counts + zero.index_add(0, sequence, torch.zeros_like(weights).scatter_(1, best, 1.0))
    return torch.stack((total, counts))


def _slice_loss(
    sums: Tensor, stats: Tensor, slopes_of: Callable[[Tensor], Tensor], part: SequenceSlice, comm: Communicator | None
) -> Tensor:
    """From the sums of probabilities of a slice: the loss of the sequence if it is the last one, else 0."""
    count, number = len(part.sequence), part.number
    known = part.sequence.store.entry(part.forward_pass, lambda _: dict[int, tuple[Tensor, Tensor]]())
    """By slice: counts of all ranks, and sums of probabilities of this one."""
    if number not in known:
        if comm is not None and comm.size > 1:
            comm.all_reduce(stats)
        known[number] = stats, sums.detach()

    def slopes() -> Tensor:
        if len(known) < count:
            raise InvalidUsage(
                f"the routers' auxiliary loss is a mean over a sequence, and {len(known)} of its {count} slices have "
                "run: run the forward passes of all slices before the first backward pass"
            )
        return slopes_of(torch.stack([stats for stats, _ in known.values()]).sum(0))

    value = sums.new_zeros(())
    if number == count - 1:
        value = (slopes() * torch.stack([each for _, each in known.values()]).sum(0)).sum()
    loss: Tensor = _LaterSlopes.apply(sums, value, slopes)  # type: ignore[no-untyped-call]
    return loss


class _LaterSlopes(torch.autograd.Function):
    """``value``, whose derivative by ``sums`` is what ``slopes()`` gives in the backward pass."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, value: Tensor, slopes: Callable[[], Tensor]) -> Tensor:  # noqa: ARG004
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return upstream[0] * ctx.slopes(), None, None


_NAMES = ("e_score_correction_bias", "expert_bias")
"""Names of the bias in the models of transformers: a buffer, or a parameter that is not trained."""


@dataclass(frozen=True, slots=True, eq=False)
class RouterBias:
    """A router's bias, and by how much a step moves it."""

    router: nn.Module
    name: str
    rate: float

    def move(self, counts: Tensor) -> None:
        """Up for experts with fewer tokens than the mean, down for those with more.

        Args:
            counts: int64 ``[experts]`` on the CPU.
        """
        bias = getattr(self.router, self.name)
        direction = torch.sign(counts.sum() - counts.numel() * counts).to(bias.device, bias.dtype)
        bias.detach().view(-1).add_(direction, alpha=self.rate)


def balance_routers(model: nn.Module, rate: float = 0.001) -> int:
    """Lets each training step move the biases of routers that have one by ``rate``, against the loads of their experts
    in the whole step; returns how many there are. Local.

    For DeepSeek-V3 and models like it (GLM-4.5, Kimi-K2, MiniMax-M2, ...), in transformers 5. A bias only chooses: the
    weights of a token's experts are made of scores without it. Biases are in fp32 at least from then on, are saved with
    the model, and are the same on all ranks to the bit. Call it before the trainer is made, on a model of transformers
    or after :func:`hdpcomm.models.adapt`, and once more for another rate; 0: biases stay as they are.

    Raises:
        InvalidUsage: a negative rate, or no router with a bias.
    """
    check_number("balance_routers()", "rate", rate, least=0)
    count = 0
    for block in model.modules():
        experts = next((each for each in block.children() if holds_experts(each)), None)
        place = None if experts is None else _bias_of(block)
        if experts is None or place is None:
            continue
        router, name = place
        values = getattr(router, name)
        values.data = values.data.to(torch.promote_types(values.dtype, torch.float32))
        load: Any = getattr(experts, "load", None)
        if not isinstance(load, ExpertLoad):
            experts.load = load = ExpertLoad(values.numel())  # type: ignore[assignment]
            experts.register_forward_pre_hook(_count_rows, with_kwargs=True)
        load.bias = RouterBias(router, name, float(rate)) if rate else None
        count += 1
    if not count:
        raise InvalidUsage(
            f"{type(model).__name__} has no router with a bias ({', '.join(_NAMES)}) beside experts in one module, as "
            "DeepSeek-V3 of transformers 5 has; train it without a rate for the biases"
        )
    return count


def _bias_of(block: nn.Module) -> tuple[nn.Module, str] | None:
    for module in block.modules():
        for name in _NAMES:
            if isinstance(getattr(module, name, None), Tensor):
                return module, name
    return None


def _count_rows(experts: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Pre-hook of a module of experts: counts the rows of tokens, wherever an exchange does not count them."""
    load: ExpertLoad = experts.load
    if load.group is not None or torch.compiler.is_compiling():
        return
    pack = find_pack()
    chosen = args[1] if len(args) > 1 else options["top_k_index"]
    counts = counts_of(chosen[: None if pack is None else pack.token_rows], load.routed.shape[0])
    load.add(counts, counts, 0)


def loads_on_mesh(loads: Sequence[ExpertLoad], mesh: Mesh) -> Tensor:
    """Rows sent to the experts of layers and got by them, of all ranks that share the layers: int64 ``[layers, 2,
    experts]`` on the CPU. Collective over the ranks of a stage."""
    table = torch.stack([torch.stack((load.routed, load.computed)) for load in loads]).cpu()
    for comm in (mesh.hdp_comm, mesh.tensor_comm):  # over both together lie the tokens of a batch
        comm.all_reduce(table)
    return table


def settle_loads(loads: Sequence[ExpertLoad], rows: Tensor) -> None:
    """Moves the biases of routers by their experts' loads in a step, as of :func:`loads_on_mesh`, and chooses the
    replicas of the next one. Local."""
    for load, counts in zip(loads, rows[:, 0], strict=True):
        if load.bias is not None:
            load.bias.move(counts)
        load.place(counts)
