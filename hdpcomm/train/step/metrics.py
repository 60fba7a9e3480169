"""Metrics of a training step over all ranks, and the timeline of a rank's last step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.models.expert_group import ExpertLoad
from hdpcomm.offload import ActivationOffload, MemoryMeter
from hdpcomm.plan import MemoryModel

__all__ = [
    "PHASES",
    "OffloadedStep",
    "Span",
    "StepMetrics",
    "Timeline",
    "Totals",
    "add_expert_load",
    "expert_loads",
    "processor_seconds",
    "totals",
    "uncounted",
]

PHASES = ("encoder", "micro-batch", "wait for others", "gradients", "optimizer")
"""Kinds of spans, in the order of a step: forward and backward of one micro-batch; until all ranks have ended theirs;
reducing and clipping gradients; the optimizer's step with the gathering of what other ranks updated."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step on this rank.

    Attributes:
        phase: one of :data:`PHASES`.
        index: of the micro-batch in the plan; -1 for the other phases.
        start_s, end_s: seconds since the ranks agreed on the plan.
        wait_s: of these, seconds in which this rank waited for messages.
        bytes_sent: by this rank.
        stall_s: seconds in which it waited for copies of offloaded activations; 0 where the device does not tell.
        processor_s: processor time of :func:`processor_seconds`.
    """

    phase: str
    index: int
    start_s: float
    end_s: float
    wait_s: float
    bytes_sent: int
    stall_s: float = 0.0
    processor_s: float = 0.0
    shared_s: float = 0.0
    """The part of ``wait_s`` inside layers, for the ranks that share them (tensor parallelism)."""
    apart_s: float = 0.0
    """The part of ``wait_s`` for other stages of a pipeline and for ranks that share experts."""

    @property
    def idle_s(self) -> float:
        """Seconds without work: until all ranks have ended theirs, and for other stages or ranks that share experts."""
        if self.phase == "wait for others":
            return self.end_s - self.start_s
        return self.apart_s if self.phase == "micro-batch" else 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of waiting for messages that no compute hid: of rings, of ranks that share a layer, of gradients."""
        return 0.0 if self.phase == "wait for others" else max(0.0, self.wait_s - self.idle_s)

    @property
    def busy_s(self) -> float:
        """Seconds of compute, or of the optimizer."""
        return max(0.0, self.end_s - self.start_s - self.idle_s - self.exposed_s - self.stall_s)


def processor_seconds() -> float:
    """Processor time of this rank so far: of its own thread, or of the process where torch computes on several. Local.

    Threads that plan, load or save meanwhile are left out where torch has one thread.
    """
    return time.thread_time() if torch.get_num_threads() == 1 else time.process_time()


class Timeline:
    """The spans of one step at a time; a span begins where the one before ended. Local.

    On a GPU a span ends when the device gets there, which the host need not wait for: it issues the next micro-batch
    meanwhile. Counts are those of the host.

    Args:
        stalled: seconds of waiting for copies so far.
        waits: seconds of waiting so far that count as ``shared_s`` and as ``apart_s`` of a span.
        device: that runs the step; the host's clock without one.
    """

    def __init__(
        self,
        comm: Communicator,
        stalled: Callable[[], float] = lambda: 0.0,
        waits: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        device: torch.device | None = None,
    ) -> None:
        self._comm = comm
        self._stalled = stalled
        self._waits = waits
        self._device = device
        self.origin = 0.0  # of time.perf_counter()
        self._begin: float | torch.cuda.Event = 0.0
        self._counts: tuple[float, ...] = ()
        self._ended: list[tuple[str, int, float | torch.cuda.Event, tuple[float, ...]]] = []

    def _now(self) -> float | torch.cuda.Event:
        if self._device is None or self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _since_begin(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            return mark - cast("float", self._begin)
        mark.synchronize()
        milliseconds: float = cast("torch.cuda.Event", self._begin).elapsed_time(mark)
        return 1e-3 * milliseconds

    def _read(self) -> tuple[float, ...]:
        """Counts up to now, in the order of the attributes of :class:`Span`."""
        stats = self._comm.stats()
        counts = stats["wait_ns"] * 1e-9, stats["bytes_sent"], self._stalled(), processor_seconds()
        return (*counts, *self._waits())

    def begin(self) -> None:
        """Forgets the step before; called right after a collective, so that all ranks count from the same moment."""
        self._ended = []
        self._counts = self._read()
        self.origin, self._begin = time.perf_counter(), self._now()

    def end(self, phase: str, index: int = -1) -> None:
        """Ends a span now, which also tells the others that this rank has got on."""
        self._comm.tick()
        before, self._counts = self._counts, self._read()
        counts = tuple(after - earlier for earlier, after in zip(before, self._counts, strict=True))
        self._ended.append((phase, index, self._now(), counts))

    @property
    def spans(self) -> list[Span]:
        """The spans that have ended; on a GPU this waits for the last of them."""
        spans, start_s = [], 0.0
        for phase, index, mark, (wait_s, sent, *others) in self._ended:
            end_s = self._since_begin(mark)
            spans.append(Span(phase, index, start_s, end_s, wait_s, int(sent), *others))
            start_s = end_s
        return spans


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step over all ranks; equal on every rank.

    Attributes:
        step: number of the step, from 0.
        loss: mean over all tokens of the global batch that have a label, in nats.
        tokens: tokens of the global batch.
        seconds: wall-clock time of the step, planning and the optimizer included.
        bytes_sent: bytes that ranks sent to each other, all ranks together, gradients included.
        idle_share: share of the ranks' time without work, 0 to 1: other ranks were not done with their micro-batches,
            or other stages of a pipeline or ranks that share experts were waited for. Waiting for messages that no
            compute hid is none of it (:attr:`Span.exposed_s`).
        grad_norm: global L2 norm of the gradient before clipping.
        longest: tokens of the longest sequence.
        longest_ranks: ranks that worked on it.
        micro_batches: micro-batches of the step, all ranks together.
        predicted_s: what the plan expected for forward and backward of all micro-batches.
        planning_s: what the solver took.
        processor_s: the most processor time that a rank's process took for the step, 0 where nobody measured it.
        plan_wait_s: what the step waited for its plan, mean over the ranks: ``planning_s`` when it was made inside the
            step, about nothing when it was made while the step before ran (:class:`hdpcomm.plan.PlanAhead`), or, for
            the first one of :func:`run`, while the models were made.
        sequences_on_ranks: how many of the step's sequences ran on 1, 2, ... ranks.
        expert_tokens_mean, expert_tokens_max: tokens that went to an expert of a layer, and to the busiest one of all
            layers; 0 without experts.
        expert_tokens_dropped: tokens that a router has sent to an expert and that it has not got, of the worst layer.
        expert_imbalance: rows that the busiest rank of an expert group computes in a layer and micro-batch, over the
            mean, as ``ClusterSpec(expert_imbalance=)`` takes it; 0 without expert ranks.
        expert_imbalance_before: what it would be without replicas of experts.
        mtp_loss: mean over all labels further ahead and depths of multi-token prediction, in nats; 0 without it.
        queued: of the micro-batches, those that were bound to no rank (:attr:`hdpcomm.plan.StepPlan.queued`).
        moved: of these, those that ran on another rank than the one on which they would have run if all had gone as
            predicted.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    bytes_sent: int
    idle_share: float
    grad_norm: float
    longest: int
    longest_ranks: int
    micro_batches: int
    predicted_s: float
    planning_s: float
    plan_wait_s: float
    processor_s: float = 0.0
    offload_ratio: float = 0.0
    offloaded_bytes: int = 0
    memory_bytes: int = 0
    predicted_memory_bytes: int = 0
    expert_tokens_mean: float = 0.0
    expert_tokens_max: int = 0
    expert_tokens_dropped: int = 0
    expert_imbalance: float = 0.0
    expert_imbalance_before: float = 0.0
    mtp_loss: float = 0.0
    queued: int = 0
    moved: int = 0
    sequences_on_ranks: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Totals:
    """A whole run.

    Attributes:
        first_loss, last_loss: means over the first and the last tenth of the steps (at least one), so that one odd
            batch does not count.
        tokens_per_s: all tokens over all seconds.
        idle_share: mean over the run's time.
        planning_s, plan_wait_s, processor_s, sequences_on_ranks: sums over the steps.
    """

    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    bytes_sent: int
    idle_share: float
    planning_s: float
    plan_wait_s: float
    processor_s: float
    first_loss: float
    last_loss: float
    sequences_on_ranks: Mapping[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def totals(steps: Sequence[StepMetrics]) -> Totals:
    """Sums up a run of at least one step."""
    tenth = max(1, len(steps) // 10)
    seconds = sum(step.seconds for step in steps)
    tokens = sum(step.tokens for step in steps)
    sequences: Counter[int] = Counter()
    for step in steps:
        sequences.update(step.sequences_on_ranks)
    return Totals(
        steps=len(steps),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        bytes_sent=sum(step.bytes_sent for step in steps),
        idle_share=sum(step.idle_share * step.seconds for step in steps) / seconds if seconds else 0.0,
        planning_s=sum(step.planning_s for step in steps),
        plan_wait_s=sum(step.plan_wait_s for step in steps),
        processor_s=sum(step.processor_s for step in steps),
        first_loss=sum(step.loss for step in steps[:tenth]) / tenth,
        last_loss=sum(step.loss for step in steps[-tenth:]) / tenth,
        sequences_on_ranks=dict(sorted(sequences.items())),
    )


def expert_loads(model: nn.Module) -> list[ExpertLoad]:
    """Loads of the model's layers with experts. Local."""
    return [load for module in model.modules() if isinstance(load := getattr(module, "load", None), ExpertLoad)]


@contextmanager
def uncounted(loads: Sequence[ExpertLoad]) -> Iterator[None]:
    """Context of passes that will run again, or train nothing. Local."""
    before = [load.counts for load in loads]
    for load in loads:
        load.counts = False
    try:
        yield
    finally:
        for load, counts in zip(loads, before, strict=True):
            load.counts = counts


def add_expert_load(metrics: StepMetrics, rows: Tensor | None, loads: Sequence[ExpertLoad], mesh: Mesh) -> StepMetrics:
    """The metrics with those of the experts. Collective over the mesh.

    Args:
        rows: of :meth:`hdpcomm.train.step.runner.Runner.expert_rows`, for these loads.
    """
    most = torch.zeros(3, dtype=torch.float64)
    if rows is not None:
        routed, computed = rows.unbind(1)  # [layers, experts]
        dropped = (routed.sum(1) - computed.sum(1)).max()
        most = torch.stack((computed.double().mean(), computed.max().double(), dropped.double()))
    mesh.comm.all_reduce(most, "max")
    mean, busiest, dropped = most.tolist()
    if mesh.expert > 1:
        sums = torch.zeros(3, dtype=torch.float64)  # rows of the busiest ranks of all passes, and the means
        if passes := [each for load in loads for each in load.passes or ()]:
            table = torch.stack(passes).cpu()  # [passes, 2, ranks]
            mesh.expert_comm.all_reduce(table)
            sums = torch.cat((table.amax(2).sum(0), table[:, 1].sum()[None] / mesh.expert)).double()
        mesh.comm.all_reduce(sums)
        before, after = (sums[:2] / sums[2].clamp(min=1)).tolist()
        metrics = replace(metrics, expert_imbalance=after, expert_imbalance_before=before)
    return replace(metrics, expert_tokens_mean=mean, expert_tokens_max=int(busiest), expert_tokens_dropped=int(dropped))


class OffloadedStep:
    """A step's micro-batches at their ratios, with the device memory and the bytes that they took on this rank.

    Attributes:
        meter: context of the passes; ``None`` without offload.
    """

    def __init__(self, offload: ActivationOffload | None, memory: MemoryModel, device: torch.device) -> None:
        self._offload = offload
        self._memory = memory
        self.meter = None if offload is None else MemoryMeter(device)
        self._before = 0 if offload is None else offload.stats().stored_bytes
        self._ratio = self._predicted = 0.0

    def micro_batch(self, ratio: float, tokens: int, kept: int = 0) -> AbstractContextManager[None]:
        """Context of the forward pass of a micro-batch with ``tokens`` tokens on this rank; ``kept``: of a slice, those
        of it and all before it."""
        if self._offload is None:
            return nullcontext()
        held = tokens * (1 - ratio * self._memory.offloadable) + self._memory.kept_at(ratio) * kept
        self._ratio = max(self._ratio, ratio)
        self._predicted = max(self._predicted, self._memory.bytes_held(held) or 0.0)
        return self._offload.micro_batch(ratio, tokens=tokens)

    def add_to(self, metrics: StepMetrics, comm: Communicator) -> StepMetrics:
        """The step's metrics with those of offload. Collective over ``comm``, if there is offload."""
        if self._offload is None or self.meter is None:
            return metrics
        most = torch.tensor([self._ratio, self.meter.peak, self._predicted], dtype=torch.float64)
        comm.all_reduce(most, "max")
        stored = torch.tensor([self._offload.stats().stored_bytes - self._before], dtype=torch.float64)
        comm.all_reduce(stored)
        ratio, memory, predicted = most.tolist()
        return replace(
            metrics,
            offload_ratio=ratio,
            offloaded_bytes=int(stored[0]),
            memory_bytes=int(memory),
            predicted_memory_bytes=int(predicted),
        )
