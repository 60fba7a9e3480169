"""A whole training run on a corpus: what ``hdpcomm train`` does on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from hdpcomm.comm.launchers import local_place
from hdpcomm.data import BatchSampler, Corpus, GlobalBatch
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import POLICIES, ClusterSpec, MemoryModel, PlanAhead, Planner
from hdpcomm.train.activation_profile import profile_activations
from hdpcomm.train.metrics import StepMetrics
from hdpcomm.train.profile import profile_cost_model
from hdpcomm.train.trainer import Trainer

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["RunConfig", "RunResult", "check_limits", "learning_rate", "run"]


SMALLEST_OFFLOAD = 4096  # bytes; smaller tensors are not worth a copy
PROFILE_TOKENS = 4096  # the longest sequence of the profile; enough to see the square in a few seconds


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What to train and how.

    Attributes:
        policies: each trains a model of its own, all from the same weights on the same batches.
        capacity: tokens that a rank holds at once.
        tokens_per_step: budget of a global batch.
        learning_rate: the highest; it rises over the first tenth of the steps and then falls along a cosine to a tenth
            of it.
        max_grad_norm: global L2 norm above which gradients are scaled down.
        offload_bytes: pinned host memory of a rank for activations; 0: no offload.
    """

    model: LlamaConfig = field(default_factory=LlamaConfig)
    policies: tuple[str, ...] = ("balanced",)
    steps: int = 20
    capacity: int = 4096
    tokens_per_step: int = 32768
    seed: int = 0
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    offload_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "capacity", "tokens_per_step"):
            if getattr(self, name) < 1:
                raise InvalidUsage(f"{name} is {getattr(self, name)}; at least 1 was expected")
        if not self.policies or any(policy not in POLICIES for policy in self.policies):
            raise InvalidUsage(f"policies is {self.policies}; choose from {', '.join(POLICIES)}")
        if self.offload_bytes < 0:
            raise InvalidUsage(f"offload_bytes is {self.offload_bytes}; it must be 0 (no offload) or more")
        if self.offload_bytes and self.model.layers <= 2:
            raise InvalidUsage(
                f"offload was asked for and the model has {self.model.layers} layers, of which the last two always "
                "stay on the device; give at least 3 layers (--layers)"
            )
        if self.learning_rate <= 0:
            raise InvalidUsage(f"learning_rate is {self.learning_rate}; it must be above 0")


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of :func:`run`, equal on every rank but for the clock.

    Attributes:
        steps: by policy, in the order of ``RunConfig.policies``.
        parameters: of the model, tied ones counted once.
    """

    ranks: int
    transport: str
    parameters: int
    steps: dict[str, list[StepMetrics]]


def learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of a step: a rise over the first tenth of the steps, then half a cosine down to a tenth."""
    rise = max(1, config.steps // 10)
    if step < rise:
        return config.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, config.steps - rise)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def check_limits(corpus: Corpus, config: RunConfig, *, ranks: int) -> None:
    """Raises InvalidUsage if a sequence fits no batch, or not all ranks together; says which limit to raise. Local."""
    longest, room = int(corpus.lengths.max()), config.capacity * ranks
    if longest > room and not config.offload_bytes:  # with offload the planner knows, once it is measured
        raise InvalidUsage(
            f"the longest sequence has {longest:,} tokens, and {ranks} ranks with a capacity of {config.capacity:,} "
            f"tokens hold {room:,}; raise --capacity to at least {-(-longest // ranks):,} or --ranks to "
            f"{-(-longest // config.capacity):,}, or lower --context to {room:,}"
        )
    _sampler(corpus, config)


def run(
    comm: Communicator, corpus: Corpus, config: RunConfig, *, on_step: Callable[[str, StepMetrics], None] | None = None
) -> RunResult:
    """Trains ``config.steps`` steps with each policy. Collective over ``comm``: equal arguments on every rank.

    Plans are made in the background, while the steps before run. The policies take turns, step by step, each with
    weights of its own: what else the machine does slows all alike.

    Args:
        corpus: every rank reads only the sequences that it works on.
        on_step: called on this rank after every step with the policy and the metrics.

    Raises:
        InvalidUsage: of :func:`check_limits`.
        Error: of the step, see :meth:`hdpcomm.train.Trainer.step`.
    """
    check_limits(corpus, config, ranks=comm.size)
    longest = int(corpus.lengths.max())
    sampler = _sampler(corpus, config)
    cost_model = profile_cost_model(
        Llama(config.model, seed=config.seed).to(comm.device),
        comm,
        longest=min(longest, config.capacity, PROFILE_TOKENS),
    )
    cluster = ClusterSpec(ranks=comm.size, capacity=config.capacity, offload=config.offload_bytes > 0)
    pool, memory = _host_memory(comm, config)
    planners = {
        policy: Planner(None, cluster, policy, cost_model, context=longest, memory=memory) for policy in config.policies
    }
    trainers: dict[str, Trainer] = {}
    steps: dict[str, list[StepMetrics]] = {policy: [] for policy in planners}
    with ExitStack() as stack:
        # From here on, so that the first step's plan is made while the models are.
        plans = {
            policy: stack.enter_context(PlanAhead(planner, _lengths(corpus, config)))
            for policy, planner in planners.items()
        }
        for policy, planner in planners.items():
            model = Llama(config.model, seed=config.seed).to(comm.device)
            trainers[policy] = Trainer(
                model,
                _optimizer(model, config),
                planner,
                comm,
                max_grad_norm=config.max_grad_norm,
                offload=None if pool is None else ActivationOffload(pool, model, min_bytes=SMALLEST_OFFLOAD),
            )
        for step in range(config.steps):
            batch = sampler.batch(step)
            for policy, trainer in trainers.items():
                for group in trainer.optimizer.param_groups:
                    group["lr"] = learning_rate(config, step)
                metrics = trainer.step(next(plans[policy]), partial(_read, corpus, batch))
                steps[policy].append(metrics)
                if on_step is not None:
                    on_step(policy, metrics)
    parameters = sum(parameter.numel() for parameter in trainers[config.policies[0]].model.parameters())
    return RunResult(ranks=comm.size, transport=comm.transport, parameters=parameters, steps=steps)


def _host_memory(comm: Communicator, config: RunConfig) -> tuple[PinnedPool | None, MemoryModel | None]:
    """The pool, and what it allows a rank to hold, as measured. Collective over ``comm``."""
    if not config.offload_bytes:
        return None, None
    _, sharers = local_place(comm.rank, comm.size)
    model = Llama(config.model, seed=config.seed).to(comm.device)
    pool = PinnedPool(config.offload_bytes, device=next(model.parameters()).device, sharers=sharers)
    offload = ActivationOffload(pool, model, min_bytes=SMALLEST_OFFLOAD)
    profile = profile_activations(model, offload, comm, tokens=max(2, min(config.capacity, PROFILE_TOKENS // 8)))
    return pool, profile.memory_model(config.capacity, config.offload_bytes)


def _sampler(corpus: Corpus, config: RunConfig) -> BatchSampler:
    return BatchSampler(corpus.lengths, tokens=config.tokens_per_step, seed=config.seed)


def _lengths(corpus: Corpus, config: RunConfig) -> Iterator[Sequence[int]]:
    """Of each step's sequences; for a thread of its own, so with a sampler of its own."""
    sampler = _sampler(corpus, config)
    return (sampler.batch(step).lengths for step in range(config.steps))


def _read(corpus: Corpus, batch: GlobalBatch, place: int) -> torch.Tensor:
    return corpus.read(batch.ids[place])


def _optimizer(model: Llama, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW that does not pull the norms' weights towards zero."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
