"""A run without training: what the first steps would take, and the memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hdpcomm.data import BatchSampler, Corpus
from hdpcomm.offload import MemoryMeter
from hdpcomm.plan import Planner
from hdpcomm.run.config import RunConfig
from hdpcomm.run.costs import DTYPES, PROFILE_TOKENS, make_planner, measure_costs, within_memory
from hdpcomm.run.loop import check_limits
from hdpcomm.run.model import new_model
from hdpcomm.sim import StepReport, simulate_step
from hdpcomm.train.profile import forward_backward

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["DryRun", "RankMemory", "dry_run", "state_bytes"]

STEPS = 4


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Predicted most bytes of a rank over the planned steps.

    Attributes:
        states: parameters, gradients, masters and optimizer, see :func:`state_bytes`.
        activations: of the most tokens that the rank holds at a time.
    """

    tokens: int
    states: float
    activations: float


@dataclass(frozen=True, slots=True)
class DryRun:
    """Outcome of :func:`dry_run`, equal on every rank.

    Attributes:
        reports: by policy, the simulated steps.
        memory: by policy, by rank.
        token_bytes: activations of a token, as measured.
    """

    ranks: int
    parameters: int
    token_bytes: float
    reports: dict[str, list[StepReport]]
    memory: dict[str, list[RankMemory]]


def dry_run(comm: Communicator, corpus: Corpus, config: RunConfig) -> DryRun:
    """Measures the model as a run would, and plans and simulates its first steps. Collective over ``comm``.

    Nothing is trained or written. Raises: InvalidUsage as :func:`hdpcomm.run.train`.
    """
    check_limits(corpus, config, ranks=comm.size)
    config, capacity, _ = within_memory(comm, config)
    costs = measure_costs(comm, corpus, config, capacity=capacity)
    model = new_model(config.model, device=comm.device, seed=config.seed, recompute=config.recompute, check=False)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    states = state_bytes(parameters, trained, config, ranks=comm.size)
    token_bytes = _token_bytes(model.to(DTYPES[config.dtype]), comm, config)
    sampler = BatchSampler(corpus.lengths, tokens=config.tokens_per_step, seed=config.seed)
    batches = [sampler.batch(step).lengths for step in range(min(STEPS, config.steps))]
    reports: dict[str, list[StepReport]] = {}
    memory: dict[str, list[RankMemory]] = {}
    for policy in config.policies:
        planner = make_planner(comm, corpus, config, costs, policy)
        reports[policy] = [simulate_step(planner, lengths) for lengths in batches]
        memory[policy] = _memory(reports[policy], planner, states, token_bytes)
    return DryRun(comm.size, parameters, token_bytes, reports, memory)


def state_bytes(parameters: int, trained: int, config: RunConfig, *, ranks: int) -> float:
    """Bytes of parameters, gradients, masters and AdamW's moments on a rank (the table of docs/training.md)."""
    wide = config.dtype == "fp32"
    sharded = (8 if wide else 12) / (ranks if config.zero else 1)
    return parameters * (4 if wide else 2) + trained * (4 + sharded)


def _token_bytes(model: torch.nn.Module, comm: Communicator, config: RunConfig) -> float:
    """Activations of a token: the mean over the ranks, each of which runs two passes by itself. Collective."""
    alone = comm.subset([comm.rank])
    assert alone is not None
    tokens = max(2, min(config.capacity, PROFILE_TOKENS // 8))
    forward_backward(model, alone, [tokens])  # makes the gradients, which stay
    peaks = []
    for length in (tokens // 2, tokens):
        with MemoryMeter(comm.device) as meter:
            forward_backward(model, alone, [length])
        peaks.append(meter.peak)
    measured = torch.tensor([(peaks[1] - peaks[0]) / (tokens - tokens // 2)], dtype=torch.float64)
    comm.all_reduce(measured)
    return max(0.0, float(measured) / comm.size)


def _memory(reports: list[StepReport], planner: Planner, states: float, token_bytes: float) -> list[RankMemory]:
    most = [max(float(report.rank_peak_tokens[rank]) for report in reports) for rank in range(planner.cluster.ranks)]
    return [RankMemory(round(tokens), states, tokens * token_bytes) for tokens in most]
