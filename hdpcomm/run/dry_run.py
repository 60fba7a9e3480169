"""A run without training: what the first steps would take, and the memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdpcomm.comm.topology import by_host
from hdpcomm.data import BatchSampler, Corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.recompute import recomputed_layers
from hdpcomm.plan import Planner
from hdpcomm.plan.memory import StepMemory
from hdpcomm.run.config import RunConfig
from hdpcomm.run.costs import make_planner, measure_costs, measure_memory, within_memory
from hdpcomm.run.loop import check_limits
from hdpcomm.run.model import new_model
from hdpcomm.sim import StepReport, simulate_step

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["DryRun", "RankMemory", "dry_run"]

STEPS = 4


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Predicted most bytes of a rank over the planned steps.

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
    for name in ("tensor", "expert"):
        if getattr(config, name) > 1:
            raise InvalidUsage(
                f"{name} is {getattr(config, name)}, and a dry run measures the memory of whole layers: leave out "
                f"--dry-run or --{name}"
            )
    comm = by_host(comm)
    check_limits(corpus, config, ranks=comm.size)
    config, capacity, found = within_memory(comm, config)
    step_memory = found or measure_memory(comm, config)
    costs = measure_costs(comm, config, longest=int(corpus.lengths.max()), capacity=capacity)
    model = new_model(config.model, device=comm.device, seed=config.seed, recompute=config.recompute, check=False)
    parameters = sum(p.numel() for p in model.parameters())
    recompute = min(recomputed_layers(model), config.stage_model.layers)
    sampler = BatchSampler(corpus.lengths, tokens=config.tokens_per_step, seed=config.seed)
    batches = [sampler.batch(step).lengths for step in range(min(STEPS, config.steps))]
    reports: dict[str, list[StepReport]] = {}
    memory: dict[str, list[RankMemory]] = {}
    for policy in config.policies:
        planner = make_planner(comm, corpus, config, costs, policy)
        reports[policy] = [simulate_step(planner, lengths) for lengths in batches]
        memory[policy] = _memory(reports[policy], planner, step_memory, recompute)
    return DryRun(comm.size, parameters, step_memory.line(recompute).token, reports, memory)


def _memory(reports: list[StepReport], planner: Planner, memory: StepMemory, recompute: int) -> list[RankMemory]:
    most = [max(float(report.rank_peak_tokens[rank]) for report in reports) for rank in range(planner.cluster.ranks)]
    return [RankMemory(round(tokens), memory.states, memory.activation_bytes(tokens, recompute)) for tokens in most]
