"""Times of each micro-batch of a step on each of its ranks, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostLearner, CostModel, PlanAhead, Planner, RankTimes, StepPlan
from hdpcomm.train import Trainer
from hdpcomm.train.step.metrics import Span

__all__ = ["PlanLearning", "rank_speeds", "rank_times", "slowest_rank", "times_of"]


def times_of(spans: Sequence[Span], plan: StepPlan, rank: int) -> list[float]:
    """This device's figures of its micro-batches: seconds of compute of each, over all of its passes, then of waiting
    for its ring, of equal number on all ranks of the plan; then when its last pass ended. Local.

    What tensor ranks wait for each other inside layers is compute. Waiting for copies of offloaded activations, for
    other stages of a pipeline, and for ranks that share experts is neither.

    Args:
        rank: of the plan; on a mesh the HDP rank.
    """
    most = max((len(plan.for_rank(each)) for each in range(plan.num_ranks)), default=0)
    places = {batch.index: place for place, batch in enumerate(plan.for_rank(rank))}
    compute, waits, end = [0.0] * most, [0.0] * most, 0.0
    for span in spans:
        if span.phase != "micro-batch":
            continue
        end = max(end, span.end_s)
        if (place := places.get(span.index)) is not None:
            compute[place] += span.busy_s + span.shared_s
            waits[place] += max(0.0, span.wait_s - span.shared_s - span.apart_s)
    return [*compute, *waits, end]


def rank_times(rows: Tensor, plan: StepPlan, positions: Tensor | None = None) -> list[RankTimes]:
    """The figures of the plan's ranks, from what each device got of :func:`times_of`: ``[devices, figures]``. Local.

    An HDP rank's figures are those of the device that computed longest in the step, among its stages and tensor ranks:
    the others of its pipeline wait for it.

    Args:
        positions: of a mesh (:attr:`hdpcomm.Mesh.positions`); default: each rank is one device.
    """
    half = (rows.shape[1] - 1) // 2
    found = []
    devices = torch.arange(len(rows)).view(1, -1, 1) if positions is None else positions
    for rank in range(plan.num_ranks):
        own = rows[devices[:, rank].flatten()]
        row = own[int(own[:, :half].sum(1).argmax())].tolist()
        count = len(plan.for_rank(rank))
        found.append(RankTimes(tuple(row[:count]), tuple(row[half : half + count])))
    return found


def rank_speeds(plan: StepPlan, times: Sequence[RankTimes], cost_model: CostModel) -> dict[int, float]:
    """The speed of each rank that had work, as a share of the median of the others', by what a cost model says of its
    compute. Local; equal times give the same on every rank."""
    speeds = {}
    for rank, own in enumerate(times):
        took = expected = 0.0
        for batch, compute_s in zip(plan.for_rank(rank), own.compute_s, strict=False):
            if batch.index in plan.slices:  # which cost what others do not
                continue
            took += compute_s
            squares, tokens = sum(cost_model.item_squares(s.length) for s in batch.sequences), batch.tokens
            size = len(batch.ranks)
            expected += cost_model.attention * squares / size + cost_model.linear * tokens / size + cost_model.fixed
            expected += cost_model.piece * tokens + cost_model.ring_step * (size - 1)
        if took > 0 and expected > 0:
            speeds[rank] = expected / took
    if len(speeds) < 2:
        return dict.fromkeys(speeds, 1.0)
    return {
        rank: speed / median(other for each, other in speeds.items() if each != rank) for rank, speed in speeds.items()
    }


def slowest_rank(speeds: Mapping[int, float]) -> tuple[int, float]:
    """The slowest rank and its speed; without any, rank 0 at full speed."""
    return min(speeds.items(), key=lambda each: (each[1], each[0]), default=(0, 1.0))


class PlanLearning:
    """The closed loop of one policy: plans follow what the steps before took. Local; as every rank gives the same
    times, every rank plans alike.

    The plan of a step is made while the one before runs, by what the steps before that one took.

    Args:
        found: :meth:`to_dict` of the run that goes on.
    """

    def __init__(self, trainer: Trainer, plans: PlanAhead, found: Any = None) -> None:
        self._trainer = trainer
        self._plans = plans
        planner = trainer.planner
        if found is not None:
            planner = _resumed(planner, found)
            trainer.planner = plans.planner = planner
        self._learner = CostLearner(planner.cost_model, planner.cluster)

    def add(self, plan: StepPlan, times: Sequence[RankTimes]) -> None:
        """Takes in a step that ran."""
        self._learner.add(plan, times)
        planner = self._trainer.planner.with_costs(self._learner.cost_model, self._learner.cluster)
        self._trainer.planner = self._plans.planner = planner

    def slowest(self) -> tuple[int, float]:
        """The slowest rank so far, and its speed as a share of the fastest one's."""
        speeds = self._learner.speeds
        if speeds is None:
            return 0, 1.0
        slowest = min(range(len(speeds)), key=speeds.__getitem__)
        return slowest, speeds[slowest]

    def to_dict(self) -> dict[str, Any]:
        """Learned costs, for a checkpoint."""
        return {"cost_model": asdict(self._learner.cost_model), "speeds": self._learner.speeds}


def _resumed(planner: Planner, found: Any) -> Planner:
    cluster: ClusterSpec = planner.cluster
    try:
        cost_model, speeds = CostModel.from_dict(found["cost_model"]), found["speeds"]
        if speeds is not None and len(speeds) == cluster.ranks:  # on other ranks, they start anew
            cluster = cluster.with_speeds(tuple(map(float, speeds)))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidUsage(
            f"the checkpoint holds no learned costs ({type(error).__name__}: {error}); go on without --learn-costs"
        ) from error
    return planner.with_costs(cost_model, cluster)
