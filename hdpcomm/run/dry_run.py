"""A run without training: what the first steps would take, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hdpcomm.comm.topology import by_host, domains_of
from hdpcomm.data import Corpus
from hdpcomm.plan.memory import StepMemory
from hdpcomm.run.config import RunConfig
from hdpcomm.run.costs import make_planner, measure_costs
from hdpcomm.run.limits import check_limits
from hdpcomm.run.memory import measure_memory, within_memory
from hdpcomm.run.model import model_on_meta
from hdpcomm.run.pipelines import recompute_by_device
from hdpcomm.sim import StepReport, simulate_step

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["DryRun", "RankMemory", "dry_run"]

STEPS = 4


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Predicted most bytes of a rank over the planned steps; of a pipeline, on the device that is fullest.

    Attributes:
        states: parameters, gradients, master weights and the optimizer.
        activations: the most that a pass over the tokens that the rank holds at a time adds.
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
    comm = by_host(comm, domains_of(comm))
    check_limits(corpus, config, ranks=comm.size)
    config, capacity, found = within_memory(comm, config)
    devices = found or measure_memory(comm, config)
    costs = measure_costs(comm, config, longest=int(corpus.lengths.max()), capacity=capacity)
    parameters = sum(p.numel() for p in model_on_meta(config.model).parameters())
    recompute = recompute_by_device(config)
    sampler = corpus.sampler(tokens=config.tokens_per_step, seed=config.seed)
    batches = [sampler.batch(step).lengths for step in range(min(STEPS, config.steps))]
    reports: dict[str, list[StepReport]] = {}
    memory: dict[str, list[RankMemory]] = {}
    for policy in config.policies:
        planner = make_planner(comm, corpus, config, costs, policy)
        reports[policy] = [simulate_step(planner, lengths) for lengths in batches]
        most = [
            max(float(report.rank_peak_tokens[rank]) for report in reports[policy])
            for rank in range(planner.cluster.ranks)
        ]
        memory[policy] = [rank_memory(tokens, config.capacity, devices, recompute) for tokens in most]
    token_bytes = max(each.line(count).token for each, count in zip(devices, recompute, strict=True))
    return DryRun(comm.size, parameters, token_bytes, reports, memory)


def rank_memory(tokens: float, capacity: int, devices: Sequence[StepMemory], recompute: Sequence[int]) -> RankMemory:
    """Memory of the fullest device of a rank. Local.

    Args:
        tokens: the most that the first device holds at once, of all micro-batches in flight.
        capacity: the most of one micro-batch.
        devices, recompute: of each device, what it takes and how many layers it recomputes.
    """
    found = []
    one = min(tokens, float(capacity))
    for memory, count in zip(devices, recompute, strict=True):
        held = tokens * memory.in_flight / devices[0].in_flight
        here = replace(
            memory,
            in_flight=max(1.0, held / one if one else 1.0),
            owing=memory.owing * tokens / devices[0].in_flight / one if one else 0.0,
        )
        found.append(RankMemory(round(held), memory.states, here.activation_bytes(one, count)))
    return max(found, key=lambda each: each.states + each.activations)
