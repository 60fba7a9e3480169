"""A short profile of forward and backward on this machine, from which every rank gets the same cost model."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.attention import positions, shard
from hdpcomm.comm.topology import node_block
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import CostModel, CostSample
from hdpcomm.train.loss import next_token_labels
from hdpcomm.train.micro_batch import micro_batch_loss
from hdpcomm.train.shards import PackedShard

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["forward_backward", "profile_cost_model", "profile_samples"]

_REPEATS = 2  # the faster one counts, what else the machine does only ever slows down


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
        longest: the longest length to measure on one rank, in tokens; the others are halves of it. Takes about as long
            as training on six times as many tokens per rank.
    """
    return CostModel.fit(profile_samples(model, comm, longest=longest, everyone=everyone))


def profile_samples(
    model: nn.Module,
    comm: Communicator,
    *,
    longest: int,
    repeats: int = _REPEATS,
    everyone: Communicator | None = None,
) -> list[CostSample]:
    """The measurements of :func:`profile_cost_model`, equal on every rank: of each, the fastest of ``repeats``.

    Collective over ``everyone``.
    """
    if longest < 1:
        raise InvalidUsage(f"longest is {longest}; it must be at least 1 token")
    everyone = comm if everyone is None else everyone
    local = node_block(comm)
    cases = _cases(comm.size, local, longest)
    groups = {ranks: _group_of(comm, ranks) for ranks, _ in cases}
    for ranks, lengths in cases[-1:] + cases[:1]:  # warms up the rings and the kernels
        _seconds(model, groups[ranks], lengths)
    measured = torch.zeros(len(cases), 2, dtype=torch.float64)
    for case, (ranks, lengths) in enumerate(cases):
        group = groups[ranks]
        took = float("inf")
        for _ in range(repeats):
            everyone.barrier()
            if group is not None:
                took = min(took, _seconds(model, group, lengths))
        if group is not None and (ranks <= local or _on_several_hosts(group)):
            measured[case, 0], measured[case, 1] = took, 1.0
    model.zero_grad(set_to_none=True)
    everyone.all_reduce(measured)
    return [
        CostSample(ranks, tuple(lengths), total / count, one_node=ranks <= local)
        for (ranks, lengths), (total, count) in zip(cases, measured.tolist(), strict=True)
        if count
    ]


def _cases(size: int, local: int, longest: int) -> list[tuple[int, list[int]]]:
    """(ranks, lengths) to measure: single sequences and packs of short ones, on one rank and on several.

    ``local``: as many neighbouring ranks share a host; that of all ranks crosses hosts where there are several.
    """
    cases = []
    sizes = {1, min(2, local), local, size} | ({2 * local} if 2 * local < size else set())
    for ranks in sorted(sizes):
        cases += [(ranks, [max(1, longest >> shift)]) for shift in ((0, 1, 2, 4) if ranks == 1 else (0, 2))]
        cases.append((ranks, [max(1, longest >> 4)] * 8))
    return cases


def _group_of(comm: Communicator, size: int) -> Communicator | None:
    """This rank's group when all ranks are dealt in groups of ``size``; None for those left over."""
    first = comm.rank // size * size
    return comm.subset(range(first, first + size)) if first + size <= comm.size else None


def _on_several_hosts(group: Communicator) -> bool:
    return node_block(group) < group.size


def _seconds(model: nn.Module, group: Communicator | None, lengths: list[int]) -> float:
    return 0.0 if group is None else forward_backward(model, group, lengths)


def forward_backward(
    model: nn.Module, group: Communicator, lengths: list[int], *, context: AbstractContextManager[object] | None = None
) -> float:
    """Seconds of one forward and backward of a pack of sequences on ``group``; ``context``: round the forward pass."""
    device = next(model.parameters()).device
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    rank, size = group.rank, group.size
    whole = torch.arange(sum(lengths)) % 2
    packed = PackedShard(
        tokens=shard(whole, cu_seqlens, rank=rank, size=size).to(device),
        labels=shard(next_token_labels(whole), cu_seqlens, rank=rank, size=size).to(device),
        positions=positions(cu_seqlens, rank=rank, size=size, device=device),
        cu_seqlens=cu_seqlens,
    )
    started = time.perf_counter()
    with context or nullcontext():
        loss = micro_batch_loss(model, packed, group)
    loss.backward()  # type: ignore[no-untyped-call]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
