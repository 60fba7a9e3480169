"""A short profile of forward and backward on this machine, from which every rank gets the same cost model."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hdpcomm.comm import Communicator
from hdpcomm.comm.topology import domain_block, node_block
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.timing import call_s
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.models.indexers import key_limit
from hdpcomm.models.recompute import WeightGradients
from hdpcomm.offload.layers import find_layers
from hdpcomm.plan import CostModel, CostSample
from hdpcomm.train.losses.functions import next_token_labels
from hdpcomm.train.losses.shards import PackedShard, empty_shard, micro_batch_loss, pack_of, sequences_shard
from hdpcomm.train.step.metrics import processor_seconds

__all__ = [
    "forward_backward",
    "profile_cost_model",
    "profile_samples",
    "weights_share",
]

_REPEATS = 3
_STRIDE = 7919  # between the numbers of neighbouring tokens; prime, so that all numbers come


def profile_cost_model(
    model: nn.Module, comm: Communicator, *, longest: int, everyone: Communicator | None = None
) -> CostModel:
    """Measures forward and backward of ``model`` for some lengths and numbers of ranks, and fits the cost model to it.

    Collective over ``everyone``. All ranks work at once, as they do in training, so that what they take from each other
    (cores, memory bandwidth, links) is in the figures; their times are averaged over all ranks, so every rank fits the
    same model. On several hosts, groups inside a host tell what compute costs, and groups that cross hosts what their
    links do. The model keeps its parameters; gradients are dropped.

    Args:
        model: called as the model of :class:`hdpcomm.train.Trainer`.
        comm: the HDP ranks that this one is among.
        everyone: all ranks that are to get the same model; default: those of ``comm``. With tensor parallelism they are
            more, and those that share layers must be at the same place of theirs.
        longest: the longest length to measure on one rank, in tokens; the others are parts of it. Takes about as long
            as training on fifteen times as many tokens per rank.
    """
    return CostModel.fit(profile_samples(model, comm, longest=longest, everyone=everyone))


def profile_samples(
    model: nn.Module,
    comm: Communicator,
    *,
    longest: int,
    repeats: int = _REPEATS,
    everyone: Communicator | None = None,
    split_backward: bool = False,
    domains: Sequence[int] | None = None,
) -> list[CostSample]:
    """The measurements of :func:`profile_cost_model`, equal on every rank: of each, the median of ``repeats``.

    Each turn measures all cases once, so that what else the machine does meanwhile falls on all of them alike. The
    median, and not the fastest, is what a step takes that has many micro-batches. Collective over ``everyone``.

    ``split_backward``: backward passes leave weight gradients of the model's layers for later, which follow at once.
    ``domains``: the domain of each position in ``comm`` (:func:`hdpcomm.comm.topology.domains_of`); groups across hosts
    of one domain are then measured beside groups across domains.
    """
    if longest < 1:
        raise InvalidUsage(f"longest is {longest}; it must be at least 1 token")
    everyone = comm if everyone is None else everyone
    local = node_block(comm)
    shared = getattr(model, "expert", None)
    expert = shared.comm if isinstance(shared, ExpertGroup) else None
    alone = None if expert is None else cast("Communicator", comm.subset([comm.rank]))
    near = domain_block(comm, domains) or local
    cases = [_Case(ranks, lengths) for ranks, lengths in _cases(comm.size, local, longest, near)]
    if expert is not None:
        cases.append(_Case(1, [longest], expert.size))
    groups = [
        None if expert is not None and case.expert > 1 and expert.rank else _group_of(comm, case.ranks)
        for case in cases
    ]
    rings = max(place for place, case in enumerate(cases) if case.expert == 1)
    later = WeightGradients() if split_backward else None
    if later is not None:
        later.watch(find_layers(model))
    for place in (rings, 0):  # warms up rings and kernels
        _seconds(model, groups[place], cases[place].lengths, alone, later)
    found: dict[int, list[tuple[float, float, float]]] = {}
    for _ in range(repeats):
        for place, (case, group) in enumerate(zip(cases, groups, strict=True)):
            everyone.barrier()
            begun = processor_seconds()
            seconds, of_weights = _seconds(model, group, case.lengths, alone, later)
            found.setdefault(place, []).append((seconds, processor_seconds() - begun, of_weights))
    if later is not None:
        later.leave(find_layers(model))
    measured = torch.zeros(len(cases), 4, dtype=torch.float64)
    for place, group in enumerate(groups):
        if group is not None and _is_as_far(comm, group, local, domains, near):
            middle = [statistics.median(column) for column in zip(*found[place], strict=True)]
            measured[place] = torch.tensor([*middle, 1.0], dtype=torch.float64)
    model.zero_grad(set_to_none=True)
    everyone.all_reduce(measured)
    on_processors = everyone.device.type == "cpu"
    limit = key_limit(model)
    return [
        CostSample(
            case.ranks,
            tuple(case.lengths),
            seconds / count,
            one_node=case.ranks <= local,
            one_domain=local < case.ranks <= near,
            processor_s=processor / count if on_processors else 0.0,
            expert=case.expert,
            weights_s=of_weights / count,
            key_limit=limit[0],
            limited=limit[1],
        )
        for case, (seconds, processor, of_weights, count) in zip(cases, measured.tolist(), strict=True)
        if count
    ]


class _Case(NamedTuple):
    ranks: int
    lengths: list[int]
    expert: int = 1
    """Above 1: of as many ranks one has tokens."""


def weights_share(samples: Iterable[CostSample], costs: CostModel) -> float:
    """:attr:`CostModel.weights` of split passes that were measured: of most tokens on one rank, 0 if there are none."""
    alone = [sample for sample in samples if sample.ranks == 1 and sample.expert == 1]
    tokens = max((sum(sample.lengths) for sample in alone), default=0)
    longest = [sample.weights_s for sample in alone if sum(sample.lengths) == tokens]
    dense = (costs.linear - costs.experts) * tokens
    return min(1.0, statistics.median(longest) / dense) if dense > 0 else 0.0


def _cases(size: int, local: int, longest: int, near: int) -> list[tuple[int, list[int]]]:
    """(ranks, lengths) to measure: single sequences and packs of short ones, on one rank and on several.

    ``local``: as many neighbouring ranks share a host; that of all ranks crosses hosts where there are several.
    ``near``: as many share a domain, at least those of a host.
    """
    cases = []
    sizes = {1, min(2, local), local, near, size} | ({2 * local} if 2 * local < size else set())
    sizes |= {2 * near} if near > local and 2 * near < size else set()
    for ranks in sorted(sizes):
        cases += [(ranks, [max(1, longest >> shift)]) for shift in ((0, 2, 4) if ranks == 1 else (0, 2))]
        # Most micro-batches of a step are packs of as many tokens as a rank holds.
        cases += [(ranks, [max(1, longest >> shift)] * (1 << shift)) for shift in ((2, 4) if ranks == 1 else (4,))]
    return cases


def _group_of(comm: Communicator, size: int) -> Communicator | None:
    """This rank's group when all ranks are dealt in groups of ``size``; None for those left over."""
    first = comm.rank // size * size
    return comm.subset(range(first, first + size)) if first + size <= comm.size else None


def _is_as_far(comm: Communicator, group: Communicator, local: int, domains: Sequence[int] | None, near: int) -> bool:
    """Whether a group lies on one host or in one domain if it fits into one, else on several."""
    if group.size <= local:
        return True
    if node_block(group) == group.size:
        return False
    if domains is None or near == local:
        return True
    first = comm.rank // group.size * group.size
    return (len(set(domains[first : first + group.size])) == 1) == (group.size <= near)


def _seconds(
    model: nn.Module,
    group: Communicator | None,
    lengths: list[int],
    alone: Communicator | None,
    later: WeightGradients | None = None,
) -> tuple[float, float]:
    """Seconds of both passes, and the part of them that computes the gradients left for ``later``.

    ``alone``: this rank, where one without a group runs a pass without tokens, since others need its experts.
    """

    def run() -> float:
        if group is not None:
            return forward_backward(model, group, lengths)
        return 0.0 if alone is None else _forward_backward(model, alone, empty_shard(alone.device))

    if later is None:
        return run(), 0.0
    with later.put_off(0):
        seconds = run()
    of_weights = call_s(next(model.parameters()).device, lambda: later.compute(0))
    return seconds + of_weights, of_weights


def forward_backward(
    model: nn.Module, group: Communicator, lengths: list[int], *, context: AbstractContextManager[object] | None = None
) -> float:
    """Seconds of one forward and backward of a pack of sequences on ``group``; ``context``: round the forward pass."""
    device, vocabulary = next(model.parameters()).device, _rows(model, "embedding", "last_layer")

    def fetch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(i, i + lengths[i]) * _STRIDE % vocabulary
        return tokens, next_token_labels(tokens).clamp(max=_rows(model, "last_layer", "embedding") - 1)

    packed = sequences_shard(
        pack_of(lengths, group.size, key_limit(model)),
        dict(enumerate(lengths)),
        fetch,
        comm=group,
        device=device,
    )
    return _forward_backward(model, group, packed, context)


def _rows(model: nn.Module, *layers: str) -> int:
    """How many different tokens, or labels, there are: routers send equal tokens to the same experts."""
    for name in layers:
        weight = getattr(getattr(model, name, None), "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            return weight.shape[0]
    return 2


def _forward_backward(
    model: nn.Module,
    group: Communicator,
    packed: PackedShard,
    context: AbstractContextManager[object] | None = None,
) -> float:
    def run() -> None:
        with context or nullcontext():
            loss = micro_batch_loss(model, packed, group)
        loss.backward()  # type: ignore[no-untyped-call]

    weight = next(model.parameters())
    groups = weight.is_meta and weight.dtype != torch.bfloat16
    with _MetaGroups() if groups else nullcontext():  # type: ignore[no-untyped-call]
        return call_s(packed.tokens.device, run)


class _MetaGroups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of groups on the meta device, where torch has those of bfloat16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        a, b, ends = args[:3]
        groups = ends.shape if a.dim() == b.dim() == 2 else ()
        return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
