"""Options of a run for saving and messages, and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import Calibration
from hdpcomm.plan.memory import StepMemory
from hdpcomm.run.evaluation import Evaluation
from hdpcomm.run.peer_saves import KeptCheckpoint, PeerSaves
from hdpcomm.train import StepMetrics

__all__ = ["RunResult", "Saving", "Watching"]


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run keeps its checkpoints, and where it goes on from.

    Attributes:
        folder: of the checkpoints; made if need be.
        every: steps between two; one more is made at the end, and when the run is asked to stop. 0: only these.
        every_s: seconds between two, in place of steps; 0: none by time.
        keep: how many of the newest stay.
        keep_every: those of steps that are multiples of it stay, too; 0: none of them.
        keep_best: whether the one with the least loss on held-out text so far stays, too, which is then saved whenever
            that becomes less.
        until: a moment (``time.time()``) before which the run ends, saved, judged by what its steps and its saves took;
            ``RunResult.stopped_by`` is then SIGALRM. ``None``: no limit.
        resume: ``None``: start anew; ``"auto"``: the newest sound checkpoint of ``folder``, if there is any; else the
            path of a checkpoint, or of a folder of checkpoints; or what the ranks have in memory.
        writes: whether checkpoints are written at all, or the run only goes on from one.
        peers: where each rank keeps copies of the states of the newest steps, its own and others'.
    """

    folder: Path
    every: int = 0
    every_s: float = 0.0
    keep: int = 3
    keep_every: int = 0
    keep_best: bool = False
    until: float | None = None
    resume: str | KeptCheckpoint | None = None
    writes: bool = True
    peers: PeerSaves | None = None

    def __post_init__(self) -> None:
        if min(self.every, self.every_s, self.keep_every) < 0:
            told = f"every is {self.every}, every_s {self.every_s} and keep_every {self.keep_every}"
            raise InvalidUsage(f"{told}; give the steps or seconds between two checkpoints, or 0")
        if self.keep < 1:
            raise InvalidUsage(f"keep is {self.keep}; at least 1 checkpoint has to stay")


@dataclass(frozen=True, slots=True)
class Watching:
    """Callbacks of a run. Functions are called on the rank that gave them, as things are done.

    Attributes:
        on_step: (policy, metrics, costs of :func:`hdpcomm.run.step_record.step_costs`) after every step.
        on_evaluation: (policy, evaluation).
        on_timeline: a step as planned and as measured, see :func:`hdpcomm.run.step_record.timeline_row`; about ten
            times in a run.
        timelines: whether timelines are collected; equal on every rank.
        trace: collects the timeline of each of the first 50 steps of the call; equal on every rank.
        on_costs: what the first policy's plans are made from, before the first step, when nothing speaks against the
            run any more.
        on_event: (kind, facts) of what is no figure of a step: ``start``, ``save``, ``skip``, ``slow``, ``spike``,
            ``rise``, ``end``; a save is told by the thread that has written it.
    """

    on_step: Callable[[str, StepMetrics, Mapping[str, float]], None] | None = None
    on_evaluation: Callable[[str, Evaluation], None] | None = None
    on_timeline: Callable[[dict[str, Any]], None] | None = None
    timelines: bool = False
    trace: bool = False
    on_costs: Callable[[Calibration], None] | None = None
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of :func:`train`, equal on every rank but for the clock.

    Attributes:
        steps: by policy, in the order of ``RunConfig.policies``; those of this call, from ``first_step`` on.
        parameters: of the model, tied ones counted once.
        first_step: 0, or where the checkpoint was taken.
        stopped_by: the signal that ended the run before its last step (SIGALRM: ``Saving.until``), or 0.
        saved: the last checkpoint, if there is one.
        evaluations: by policy, those of this call.
        left_out: by policy, the steps that were not taken, as their loss or gradient was no finite number.
        recompute, step_memory: what ``recompute="auto"`` has become, and the memory of a rank that said so, or of each
            device of a pipeline.
    """

    ranks: int
    transport: str
    parameters: int
    steps: dict[str, list[StepMetrics]]
    first_step: int = 0
    stopped_by: int = 0
    saved: Path | None = None
    evaluations: dict[str, list[Evaluation]] = field(default_factory=dict)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    recompute: str | int | tuple[int, ...] = "none"
    step_memory: tuple[StepMemory, ...] = ()
