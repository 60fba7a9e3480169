"""The planner: lengths in, :class:`StepPlan` out."""

from __future__ import annotations

import contextlib
import copy
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product, starmap
from typing import Any, NamedTuple

import numpy as np

from hdpcomm._core import planner as core
from hdpcomm.arguments import check_type, check_whole
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.cost import CostModel, core_cost
from hdpcomm.plan.fragments import Jobs, jobs_of, squares_by_id
from hdpcomm.plan.memory import MemoryModel
from hdpcomm.plan.specs import ClusterSpec, ModelSpec
from hdpcomm.plan.step import StepPlan
from hdpcomm.plan.table import COLUMNS, MicroBatch, PlanTable, SequenceFragment, SequenceInfo
from hdpcomm.plan.tree import Tree
from hdpcomm.plan.waves import PipelineSchedule, in_waves, plan_waves, sorted_for_waves, wave_times_in_order

__all__ = ["LONGEST_MEASURED", "POLICIES", "Planner"]

MOST_SLICES = 64
POLICIES = ("balanced", "pipeline", "naive", "pow2", "static")
LONGEST_MEASURED = 512
"""Tokens of the longest sequence that is measured where nobody says: enough to tell the square term."""


class _Solved(NamedTuple):
    """Results of the solver; see :class:`StepPlan`."""

    table: PlanTable
    makespan: float
    lower_bound: float
    idle_share: float
    queued: int = 0
    queue_pools: int = 1
    made_by: str = ""
    slices: Sequence[SequenceFragment] = ()
    """The micro-batches that are slices, in the plan's order."""


class Planner:
    """Plans steps for one model on one cluster. Local: every rank that plans the same lengths gets the same plan.

    Args:
        model: may be ``None`` when ``cost_model`` and the cluster's capacity are given.
        cluster: ranks and capacity.
        policy: ``balanced`` (near the lower bound, with pipelines for the 1F1B schedule that runs; never worse than
            the others), ``naive`` (the paper's Algorithm 1), ``pow2`` (groups of 2^k ranks on aligned places) or
            ``static`` (a fixed DP x CP mesh). ``pipeline`` is another name of ``balanced``.
        cost_model: default :meth:`CostModel.analytic`.
        context: longest sequence that a static mesh has to hold; 0: the longest of each step.
        context_ranks: size of the static groups; 0: the smallest divisor of the ranks that holds the context.
        memory: what a rank can hold; default :meth:`MemoryModel.of` (give measured figures of a run here).
        queue: sequences that fit one rank wait in a queue (:attr:`StepPlan.queued`) in small micro-batches, from which
            ranks take when they are free, so that a rank that is late or was thought faster does less. A
            step in which that would take longer has none. For ``balanced`` without pipelines and expert ranks.
        slices: the most slices of tokens that a long sequence or tree may run in, one after the other on the same ranks
            (:class:`hdpcomm.plan.SequenceFragment`); 1: none. In pipelines where that makes the step shorter. Without a
            pipeline where a sequence fits the ranks no other way: each slice but the last then runs forward twice. For
            ``balanced``.

    Examples:
        >>> planner = Planner(None, ClusterSpec(ranks=4, capacity=1024), cost_model=CostModel(1e-9, 1e-6))
        >>> plan = planner.plan([3000, 200, 900])
        >>> [len(plan.for_rank(rank)) > 0 for rank in range(4)]
        [True, True, True, True]
    """

    def __init__(
        self,
        model: ModelSpec | None,
        cluster: ClusterSpec,
        policy: str = "balanced",
        cost_model: CostModel | None = None,
        *,
        context: int = 0,
        context_ranks: int = 0,
        memory: MemoryModel | None = None,
        queue: bool = False,
        slices: int = 1,
    ) -> None:
        if policy not in POLICIES:
            raise InvalidUsage(f"policy is {policy!r}, expected one of {', '.join(POLICIES)}")
        check_type("Planner", "cluster", cluster, ClusterSpec)
        kinds = {"model": (model, ModelSpec), "cost_model": (cost_model, CostModel), "memory": (memory, MemoryModel)}
        for name, (value, kind) in kinds.items():
            if value is not None:
                check_type("Planner", name, value, kind)
        check_whole("Planner", "context", context, least=0)
        check_whole("Planner", "context_ranks", context_ranks, least=0)
        check_type("Planner", "queue", queue, bool)
        if queue and (policy not in ("balanced", "pipeline") or cluster.pipeline > 1 or cluster.expert > 1):
            raise InvalidUsage(
                f"queue was given with policy {policy!r}, {cluster.pipeline} device(s) of a pipeline and "
                f"{cluster.expert} expert rank(s): only plans of the policy 'balanced' have one, without pipelines and "
                "ranks that share experts"
            )
        check_whole("Planner", "slices", slices, least=1, most=MOST_SLICES)
        if slices > 1 and policy not in ("balanced", "pipeline"):
            raise InvalidUsage(
                f"slices={slices} was given with policy {policy!r}, which runs whole sequences only: give 1"
            )
        if cost_model is None:
            if model is None:
                raise InvalidUsage("neither a model nor a cost_model is given: one of them has to say what tokens cost")
            cost_model = CostModel.analytic(model, cluster)
        self.model = model
        self.cluster = cluster
        self.policy = policy
        self.cost_model = cost_model
        self.memory = memory or MemoryModel.of(model, cluster)
        self.context = context
        self.context_ranks = context_ranks
        self.queue = queue
        self.slices = slices
        self._make_cores()

    def _make_cores(self) -> None:
        cost, memory, cluster, slices = self.cost_model, self.memory, self.cluster, self.slices
        devices = cluster.ranks * cluster.pipeline * cluster.tensor
        self._spare = 0.0 if cluster.cores is None else max(0.0, 1 - cluster.cores / devices)
        self._in_waves = cluster.expert > 1 and cluster.pipeline == 1
        self._core = core_cost(cost, memory, cluster, slices)
        resident = replace(memory, offloadable=0.0, copy_s=0.0, host_tokens=0.0)
        self._without_offload = core_cost(cost, resident, cluster, slices) if memory.offloadable else None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: all but what the core makes of it."""
        made = ("_core", "_without_offload")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_cores()

    @classmethod
    def measured(
        cls,
        model: Any,
        comm: Any,
        *,
        capacity: int,
        longest: int = LONGEST_MEASURED,
        policy: str = "balanced",
        queue: bool = False,
        slices: int = 1,
        spec: ModelSpec | None = None,
        offload: Any = None,
    ) -> Planner:
        """A planner by what ``model`` takes on these ranks, measured now (:func:`hdpcomm.measure.profile_cost_model`).

        Collective over ``comm``; takes about as long as training on 15 times ``longest`` tokens a rank.

        Args:
            model: of :class:`hdpcomm.train.Trainer`, on its device; whole, or cut for the mesh.
            comm: the ranks that train together, or a :class:`hdpcomm.Mesh` of them without pipelines.
            capacity: most tokens that a rank can hold in a micro-batch, without offload.
            longest: tokens of the longest sequence that is measured on one rank, where the capacity is not less.
            policy, queue, slices: of :class:`Planner`.
            spec: the model's sizes, which say what slices keep for later ones; slices need them.
            offload: the :class:`hdpcomm.offload.ActivationOffload` of the model that the trainer gets; what it is
                worth is measured, too.

        Raises: InvalidUsage: a mesh with pipelines, of which no rank has a whole model to run; slices without ``spec``.

        Examples:
            >>> import hdpcomm as hdp
            >>> model = hdp.models.Llama(hdp.models.LlamaConfig(layers=1, hidden=16, ffn=32))
            >>> with hdp.init() as comm:
            ...     planner = hdp.Planner.measured(model, comm, capacity=64)
            >>> planner.cluster.ranks
            1
        """
        check_whole("Planner.measured()", "capacity", capacity, least=1)
        check_whole("Planner.measured()", "longest", longest, least=1)
        # The one call upwards: planning does without torch, and running a model does not.
        measure: Any = importlib.import_module("hdpcomm.measure")
        planner: Planner = measure.measured_planner(
            model, comm, capacity=capacity, longest=longest, policy=policy, queue=queue, slices=slices, spec=spec,
            offload=offload,
        )  # fmt: skip
        return planner

    def with_costs(self, cost_model: CostModel, cluster: ClusterSpec) -> Planner:
        """A planner of the same policy, memory and limits, by other costs and speeds."""
        return self._changed(cost_model=cost_model, cluster=cluster)

    def with_capacity(self, capacity: int) -> Planner:
        """A planner of the same policy, costs and limits, for ranks that hold ``capacity`` tokens without offload."""
        cluster, memory = (replace(each, capacity=capacity) for each in (self.cluster, self.memory))
        return self._changed(cluster=cluster, memory=memory)

    def _changed(self, **values: Any) -> Planner:
        other = copy.copy(self)
        other.__dict__.update(values)
        other._make_cores()
        return other

    @property
    def max_length(self) -> int:
        """Longest sequence that fits without offload: capacity x ranks."""
        return self.memory.capacity * self.cluster.ranks

    def plan(self, lengths: Sequence[int | Tree]) -> StepPlan:
        """Plans one step.

        Args:
            lengths: tokens of each sequence, or in its place a tree; the ids in the plan are positions in this list. A
                tree costs what its tokens and its pairs of queries and keys cost. One that is larger than a rank's
                capacity is cut where that costs less than more ranks, or where it does not fit the cluster.

        Raises:
            InvalidUsage: a length that is no whole number or below 1, or a sequence that the cluster cannot hold.
        """
        start = time.perf_counter()
        jobs = self._jobs(lengths)
        if long := self._too_long(jobs):
            return self._plan_in_slices(jobs, long, start)
        solved = self._solve(self._core, jobs)
        lower_bound = self._bound_on_cores(jobs, solved.lower_bound)
        if self._in_waves:
            return self._made(jobs, start, self._solved_in_waves(jobs, solved))
        if self.policy == "balanced" and self._spare:
            return self._plan_for_shared_cores(jobs, self._shorter_waves(jobs, solved, start), lower_bound, start)
        solved = self._shorter_waves(jobs, self._or_without_offload(jobs, solved), start)
        if self._spare:
            solved = self._priced_on_cores(solved)
        return self._made(jobs, start, solved._replace(lower_bound=lower_bound))

    def _or_without_offload(self, jobs: Jobs, solved: _Solved) -> _Solved:
        """The plan, or a shorter one without offload: heuristics may find it with fewer choices."""
        least = self._bound_on_cores(jobs, solved.lower_bound) * (1 + 1e-9)
        if self._without_offload and solved.makespan > least and max(jobs.tokens, default=0) <= self.max_length:
            with contextlib.suppress(InvalidUsage):  # policies that round group sizes up may not fit without offload
                plain = self._solve(self._without_offload, jobs)
                if plain.makespan < solved.makespan:
                    return plain._replace(made_by=f"{plain.made_by}, without offload")
        return solved

    def _made(self, jobs: Jobs, start: float, solved: _Solved) -> StepPlan:
        return StepPlan.of_table(
            solved.table,
            policy=self.policy,
            num_ranks=self.cluster.ranks,
            makespan_s=solved.makespan,
            lower_bound_s=solved.lower_bound,
            planning_s=time.perf_counter() - start,
            idle_share=solved.idle_share,
            queued=solved.queued,
            queue_pools=solved.queue_pools,
            made_by=solved.made_by,
            key_limit=self.cost_model.limit[0],
            limited=self.cost_model.limit[1],
            fragments=(*jobs.fragments, *solved.slices),
        )

    def _too_long(self, jobs: Jobs) -> dict[int, tuple[int, float]]:
        """(slices, offload ratio) that the jobs need that fit the ranks no other way, by place."""
        most = self.memory.token_limit(1.0 if self.memory.copy_s else 0.0) * self.cluster.ranks
        if self.slices == 1 or self.cluster.pipeline > 1 or max(jobs.tokens, default=0) <= most:
            return {}
        found, ranks, capacity = {}, self.cluster.ranks, self.memory.capacity
        for place, tokens in enumerate(jobs.tokens):
            if tokens <= most:
                continue
            ways = []
            for ratio in (0.0, 1.0) if self.memory.offloads else (0.0,):
                room = self.memory.room_of_slices(-(-tokens // ranks), ratio)
                ways.append((-(-tokens // (room * ranks)) if room > 0 else MOST_SLICES + 1, ratio))
            needed, ratio = next((way for way in ways if way[0] <= self.slices), min(ways))
            if needed > self.slices:
                what = f"{'tree' if place in jobs.trees else 'sequence'} {place} of {tokens} tokens"
                raise InvalidUsage(
                    f"{what} does not fit {ranks} ranks of {capacity} tokens"
                    + (
                        f" in {self.slices} slices, beside the keys and values of all of it: it needs {needed}"
                        if needed <= MOST_SLICES
                        else ", and not in slices, either"
                    )
                    + ": raise capacity, ranks or slices, "
                    + ("or the host memory" if self.memory.offloads else "plan with offload")
                    + ", or cut the sequence"
                )
            found[place] = needed, ratio
        return found

    def _plan_in_slices(self, jobs: Jobs, long: Mapping[int, tuple[int, float]], start: float) -> StepPlan:
        """The slices of sequences that are too long for all ranks, on all of them, then the plan of the others."""
        ids = jobs.ids or range(len(jobs.tokens))
        others = [place for place in range(len(jobs.tokens)) if place not in long]
        rest = Jobs(
            [jobs.tokens[place] for place in others],
            [jobs.squares[place] for place in others] if jobs.squares else [],
            jobs.fragments,
            [ids[place] for place in others],
            {number: jobs.trees[place] for number, place in enumerate(others) if place in jobs.trees},
        )
        solved = self._solve(self._core, rest)
        if self._in_waves:
            solved = self._solved_in_waves(rest, solved)
        next_id = max(ids) + 1
        ranks = tuple(range(self.cluster.ranks))
        batches: list[MicroBatch] = []
        slices = []
        for place, (count, ratio) in long.items():
            tokens = jobs.tokens[place]
            bounds = [tokens * k // count for k in range(count + 1)]
            for first, end in pairwise(bounds):
                slices.append(SequenceFragment(ids[place], first, end))
                held = (SequenceInfo(next_id + len(batches), end - first),)
                batches.append(MicroBatch(len(batches), ranks, held, ratio, 0.0))
        table = PlanTable.of(batches).followed_by(solved.table)
        solved = solved._replace(
            table=table, slices=slices, lower_bound=max(solved.lower_bound, self._least_mean(jobs))
        )
        plan = self._made(rest, start, solved)
        found = self.simulate(plan, self._squares_by_id(jobs, plan))
        seconds = np.bincount(found["which"][:, 0], weights=found["times"] @ (-1.0, 1.0), minlength=len(table))
        columns = dict(zip(COLUMNS, table.columns(), strict=True))
        columns["predicted_s"] = np.where(np.arange(len(table)) < len(batches), seconds, table.predicted_s)
        makespan = found["makespan"]
        idle = 1 - float(found["busy"].sum()) / (makespan * self.cluster.ranks) if makespan else 0.0
        made_by = f"slices + {solved.made_by}" if others else "slices"
        solved = solved._replace(
            table=PlanTable(**columns), makespan=makespan, idle_share=max(0.0, idle), made_by=made_by
        )
        return self._made(rest, start, solved)

    def _plan_for_shared_cores(self, jobs: Jobs, balanced: _Solved, lower_bound: float, start: float) -> StepPlan:
        """The plan in which the ranks together have the least to do: idle ranks leave their cores to others.

        Costs are those of ranks that all work at once. Then a step takes the mean of the ranks' times, but never less
        than the plan would take if each device had a core of its own: its ranks and its stages wait for each other.
        """
        found = []
        costs = [self._core] if self._without_offload is None else [self._core, self._without_offload]
        for policy, cost in [("balanced", None), *product(("naive", "static"), costs)]:
            with contextlib.suppress(InvalidUsage):  # a mesh may not hold what the balanced plan does
                found.append(self._priced_on_cores(balanced if cost is None else self._solve(cost, jobs, policy)))
        best = min(found, key=lambda solved: solved.makespan)
        return self._made(jobs, start, best._replace(lower_bound=lower_bound))

    def _priced_on_cores(self, solved: _Solved) -> _Solved:
        """Reprices a solved plan for ranks that share cores."""
        seconds = np.repeat(solved.table.predicted_s, solved.table.group_sizes())
        mean = float(seconds.sum()) / self.cluster.ranks
        makespan = self._on_shared_cores(mean, solved.makespan)
        return solved._replace(makespan=makespan, idle_share=1 - mean / makespan if makespan else 0.0)

    def _on_shared_cores(self, mean: float, makespan: float) -> float:
        """Seconds of a step: ``mean`` is the work of its devices, ``makespan`` what it takes if each is as slow as
        while all others work, too."""
        return max(mean, (1 - self._spare) * makespan)

    def _solved_in_waves(self, jobs: Jobs, balanced: _Solved) -> _Solved:
        """The plan whose waves end first: of the micro-batches as they are and the longest first, for ``balanced`` also
        of those of the other policies. Ranks that share processors leave theirs to others while they wait."""
        found = []
        others = ("naive", "pow2", "static") if self.policy in ("balanced", "pipeline") else ()
        for policy in (None, *others):
            with contextlib.suppress(InvalidUsage):  # a mesh may not hold what the balanced plan does
                solved = balanced if policy is None else self._solve(self._core, jobs, policy)
                table = solved.table
                for longest_first in (False, True):
                    order = np.argsort(-table.predicted_s, kind="stable") if longest_first else np.arange(len(table))
                    end, mean = wave_times_in_order(table, order, self.cost_model, self.cluster)
                    found.append((self._on_shared_cores(mean, end), mean, solved, longest_first))
        makespan, mean, best, longest_first = min(found, key=lambda one: one[0])
        table, made_by = best.table, best.made_by
        if longest_first:
            table, made_by = PlanTable.of(sorted_for_waves(table.micro_batches())), f"{made_by}, longest first"
        idle_share = 1 - mean / makespan if makespan else 0.0
        return _Solved(table, makespan, self._bound_in_waves(jobs), idle_share, made_by=made_by)

    def _shorter_waves(self, jobs: Jobs, solved: _Solved, start: float) -> _Solved:
        """The plan; where it has slices and ranks share experts, one without if its waves end earlier: ranks that wait
        for each other wait longer where one has a sequence in slices."""
        if self.cluster.expert == 1 or not solved.slices:
            return solved
        other = self._changed(slices=1)
        whole = other._or_without_offload(jobs, other._solve(other._core, jobs))
        seconds = []
        for each in (solved, whole):
            plan = self._made(jobs, start, each)
            found, index = self.simulate(plan, self._squares_by_id(jobs, plan)), plan.table.index.tolist()
            spans = zip(found["which"].tolist(), (found["times"] @ (-1.0, 1.0)).tolist(), strict=True)
            took = {(index[row], kind): span for (row, _, kind), span in spans}
            waves = plan_waves(plan, self.cluster.expert, self.memory.offloadable)
            seconds.append(waves.seconds(self.schedule(waves.plan), took, self.cluster.expert))
        return solved if seconds[0] < seconds[1] else whole

    def _bound_on_cores(self, jobs: Jobs, bound: float) -> float:
        """``bound`` is that of devices with a core each."""
        return max((1 - self._spare) * bound, self._least_mean(jobs)) if self._spare else bound

    def _least_mean(self, jobs: Jobs) -> float:
        """Least work of the ranks, without the fixed costs of micro-batches: the mean."""
        cost = self.cost_model
        squares = sum(jobs.squares or [float(tokens) ** 2 for tokens in jobs.tokens])
        return (cost.attention * squares + (cost.linear + cost.piece) * sum(jobs.tokens)) / self.cluster.ranks

    def _bound_in_waves(self, jobs: Jobs) -> float:
        """No wave ends before the longest of its micro-batches would without experts; nor does a step before the mean
        of what its ranks have to do."""
        cost = self.cost_model
        dense = replace(cost, linear=max(0.0, cost.linear - cost.experts), experts=0.0)
        each = jobs.squares or [float(tokens) ** 2 for tokens in jobs.tokens]
        squares = sum(each)
        memory = self.memory
        if memory.copy_s and jobs.tokens:
            # The experts' work hides copies, too: as much as hides behind the least dense part that a token has.
            pairs = min(square / tokens for square, tokens in zip(each, jobs.tokens, strict=True))
            rest = cost.attention * pairs + cost.piece
            whole = rest + cost.linear + cost.experts * (self.cluster.expert_imbalance - 1)
            share = (rest + dense.linear) / whole if whole > 0 else 1.0
            memory = replace(memory, copy_s=memory.copy_s * max(share, 1e-9))
        bound = core.lower_bound(core_cost(dense, memory, self.cluster), jobs.tokens, squares=jobs.squares)
        linear = cost.linear + cost.experts * (self.cluster.expert_imbalance - 1)
        limit = self.memory.token_limit(1.0 if self.memory.copy_s else 0.0)
        # What short pieces lose, on as few ranks as memory asks for.
        pieces = sum(tokens * min(-(-tokens // limit), self.cluster.ranks) for tokens in jobs.tokens)
        work = cost.attention * squares + linear * sum(jobs.tokens) + cost.piece * pieces
        return max((1 - self._spare) * bound, work / self.cluster.ranks)

    def _solve(self, cost: core.CostModel, jobs: Jobs, policy: str | None = None) -> _Solved:
        """``policy``: another one, without a queue."""
        options = (policy or self.policy, self.context, self.context_ranks)
        queue = self.queue and policy is None
        next_id = max(jobs.ids, default=len(jobs.tokens) - 1) + 1
        trees = [
            (place, tree.rows.tolist(), tree.starts.tolist()) for place, tree in jobs.trees.items() if self.slices > 1
        ]
        found = core.solve(
            cost, jobs.tokens, *options, squares=jobs.squares, ids=jobs.ids, queue=queue, next_id=next_id, trees=trees
        )
        *columns, slices = found[0]
        return _Solved(
            PlanTable(*columns), *found[1:], slices=tuple(starmap(SequenceFragment, slices.reshape(-1, 3).tolist()))
        )

    def schedule(self, plan: StepPlan) -> PipelineSchedule:
        """The order in which the stages of all ranks run the passes of a plan; ranks that plan alike get the same one.

        Raises: InvalidUsage if the plan cannot run on this cluster; rings are those of the plan that ``plan`` has the
            waves of, and are not looked at.
        """
        check_type("schedule()", "plan", plan, StepPlan)
        self._check_ranks(plan)
        plan.validate(memory=self.memory)
        found = self.simulate(plan)
        spans, times = found["which"], found["times"]
        index = plan.table.index.astype(np.int32)
        passes = spans.copy()
        passes[:, 0] = index[spans[:, 0]] if len(index) else 0
        handed = np.maximum(np.searchsorted(times[:, 0], times[:, 1]), np.arange(1, len(passes) + 1))
        chunks = self.cluster.chunks
        return PipelineSchedule(self.cluster.pipeline * chunks, passes, handed, found["alone"], chunks)

    def simulate(self, plan: StepPlan, squares: Mapping[int, float] | None = None) -> dict[str, Any]:
        """The passes and times of the simulated step (:func:`hdpcomm.sim.simulate_step` makes a report of them).

        ``squares``: by id, of trees and fragments (:meth:`CostModel.item_squares`); a sequence that is not in it costs
        what its length does, a slice what one of a plain sequence does.
        """
        table = plan.table
        of_sequences = self.cost_model.squares(table.lengths.astype(np.float64))
        for each in plan.slices.values():
            place = table.sequence_bounds[each.rows[each.number]]
            of_sequences[place] = self.cost_model.item_squares(each.bounds[-1], each.start, each.stop)
        if squares:
            places = np.flatnonzero(np.isin(table.ids, list(squares)))
            of_sequences[places] = [squares[number] for number in table.ids[places].tolist()]
        slices = [(each.rows[each.number], each.start, each.stop, not each.last) for each in plan.slices.values()]
        found = core.simulate(self._core, table.columns(), of_sequences, slices)
        if self._in_waves:
            found = in_waves(found, plan.micro_batches, self.cost_model, self.cluster, plan.slices)
        if not self._spare:
            return found
        kinds = ("busy",) if self._in_waves else ("busy", "exposed", "stalled")  # those of waves hold all of it
        worked = sum(float(found[kind].sum()) for kind in kinds)
        devices = self.cluster.ranks * self.cluster.pipeline
        return found | {"makespan": self._on_shared_cores(worked / devices, found["makespan"])}

    def _squares_by_id(self, jobs: Jobs, plan: StepPlan) -> dict[int, float]:
        """Attention costs for :meth:`simulate`, of the trees among the jobs and their slices."""
        ids = jobs.ids or range(len(jobs.tokens))
        return squares_by_id(plan, {ids[place]: tree for place, tree in jobs.trees.items()}, self.cost_model)

    def _jobs(self, lengths: Sequence[int | Tree]) -> Jobs:
        return jobs_of(lengths, self.cost_model, self.cluster, self.memory.capacity)

    def lower_bound(self, lengths: Sequence[int | Tree]) -> float:
        """Seconds below which no plan of these lengths can be (docs/bound.md), trees cut as :meth:`plan` does."""
        jobs = self._jobs(lengths)
        if self._in_waves:
            return self._bound_in_waves(jobs)
        return self._bound_on_cores(jobs, core.lower_bound(self._core, jobs.tokens, squares=jobs.squares))

    def validate(self, plan: StepPlan, lengths: Sequence[int | Tree] | None = None) -> None:
        """:meth:`StepPlan.validate` with this planner's memory and number of ranks."""
        check_type("validate()", "plan", plan, StepPlan)
        self._check_ranks(plan)
        plan.validate(lengths, memory=self.memory, pipeline=self.cluster.pipeline)

    def _check_ranks(self, plan: StepPlan) -> None:
        if plan.num_ranks != self.cluster.ranks:
            raise InvalidUsage(
                f"the plan is for {plan.num_ranks} ranks, the cluster has {self.cluster.ranks}: plan again"
            )
