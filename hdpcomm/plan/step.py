"""The plan of one training step: :class:`StepPlan`, a list of :class:`MicroBatch`."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.arguments import check_whole, ranks_text
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text, write_whole
from hdpcomm.plan.memory import MemoryModel
from hdpcomm.plan.plan_checks import (
    check_batches,
    check_queue,
    check_sequences,
    check_slices_fit,
    check_values,
    slices_of,
)
from hdpcomm.plan.table import (
    COLUMNS,
    MicroBatch,
    PlannedSlice,
    PlanTable,
    SequenceFragment,
    SequenceInfo,
    format_ranks,
)
from hdpcomm.plan.tree import Tree, TreeFragment

__all__ = [
    "MicroBatch",
    "SequenceFragment",
    "SequenceInfo",
    "StepPlan",
    "as_run",
    "fixed_for_rank",
    "format_ranks",
    "pool_rows",
]


@dataclass(frozen=True)
class StepPlan:
    """Which ranks run which sequences in one step. Each rank runs its micro-batches by rising ``index``, so ranks
    cannot wait for each other in a circle.

    A plan of a :class:`Planner` or of a file is arrays (:attr:`table`): its objects are made when they are looked at,
    those of one rank without the others. It is equal to the same plan made of objects in every respect.

    Attributes:
        policy: the policy that made the plan.
        num_ranks: ranks of the cluster.
        micro_batches: all micro-batches, by rising index.
        makespan_s: predicted seconds until the last rank is done, without the reduction of the gradients.
        lower_bound_s: seconds that no plan can beat under the same cost model (docs/bound.md).
        planning_s: seconds that planning took; not part of the hash.
        idle_share: share of ranks x makespan in which ranks wait or are done.
        queued: micro-batches at the end of the plan that wait in a queue, each for one rank and without offload. A rank
            runs what is bound to it, then takes the next one of the queue until none is left. The rank that the plan
            names for it is the one that would take it if all went as predicted; a plan may also be run so.
        queue_pools: queues that there are: a micro-batch is for the ranks that are equal to its own one modulo this
            number (:func:`pool_rows`).
        made_by: what of the policy made the plan, as "waves + local search" (docs/policies.md); not part of the hash.
        fragments: parts of trees that were cut, and slices of sequences; number i has the id ``len(lengths) + i``, and
            its tree or sequence none.
        key_limit, limited: of the cost model (:attr:`CostModel.limit`): shards over several ranks follow them.
    """

    policy: str
    num_ranks: int
    micro_batches: tuple[MicroBatch, ...]
    makespan_s: float
    lower_bound_s: float
    planning_s: float
    idle_share: float
    fragments: tuple[TreeFragment | SequenceFragment, ...] = ()
    queued: int = 0
    queue_pools: int = 1
    made_by: str = ""
    key_limit: float = 0.0
    limited: float = 0.0

    @classmethod
    def of_table(
        cls, table: PlanTable, *, fragments: tuple[TreeFragment | SequenceFragment, ...] = (), **values: Any
    ) -> StepPlan:
        """A plan of the micro-batches in ``table``; ``values``: the other attributes, by name."""
        plan = cls(micro_batches=(), fragments=fragments, **values)
        del plan.__dict__["micro_batches"]  # from then on __getattr__ makes them
        plan.__dict__["table"] = table
        return plan

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Makes all micro-batches when they are looked at for the first time."""
            if name != "micro_batches":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            batches = tuple(self._made.get(row, batch) for row, batch in enumerate(self.table.micro_batches()))
            return self.__dict__.setdefault("micro_batches", batches)  # of two threads, the first one's

    def __getstate__(self) -> dict[str, Any]:
        kept = (*_VALUES, "fragments", "table" if "table" in self.__dict__ else "micro_batches")
        return {name: self.__dict__[name] for name in kept}

    @cached_property
    def table(self) -> PlanTable:
        """The micro-batches as arrays.

        Raises:
            InvalidUsage: a plan made by hand holds something that is no number, or one that no array holds.
        """
        return PlanTable.of(self.micro_batches)

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound: 0.02 means 2%."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return int(self.table.lengths.sum())

    def sequences(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of each sequence of the step, those in slices as one, and the ranks that it runs on; int64
        ``[sequences]`` both."""
        table = self.table
        lengths, ranks = table.lengths, table.group_sizes()[table.rows_of_sequences()]
        if self.slices:
            whole = np.ones(len(lengths), dtype=np.bool_)
            lengths = lengths.copy()
            for each in self.slices.values():
                place = table.sequence_bounds[each.rows[each.number]]
                whole[place] = each.number == 0
                lengths[place] = each.bounds[-1]
            lengths, ranks = lengths[whole], ranks[whole]
        return lengths, ranks

    def longest(self) -> tuple[int, int]:
        """Tokens of the longest sequence, and on how many ranks it runs, the most if there are several."""
        lengths, ranks = self.sequences()
        tokens = int(lengths.max(initial=0))
        return tokens, int(ranks[lengths == tokens].max(initial=0))

    def sequences_on_ranks(self) -> dict[int, int]:
        """How many sequences run on 1, 2, ... ranks; numbers of ranks without any are left out."""
        sizes, counts = np.unique(self.sequences()[1], return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))

    def longest_of(self, batch: MicroBatch) -> int:
        """Tokens of the longest sequence of a micro-batch; of one that is a slice, its whole sequence."""
        planned = self.slices.get(batch.index)
        return max(each.length for each in batch.sequences) if planned is None else planned.bounds[-1]

    def with_table(self, table: PlanTable) -> StepPlan:
        """The plan with other micro-batches, all else as it is."""
        return StepPlan.of_table(table, fragments=self.fragments, **{name: getattr(self, name) for name in _VALUES})

    def micro_batch(self, row: int) -> MicroBatch:
        """The micro-batch of a row of :attr:`table`; makes no others."""
        return self._batch(range(len(self.table))[row])

    def for_rank(self, rank: int, *, rows: int | None = None) -> tuple[MicroBatch, ...]:
        """The micro-batches of a rank, in the order in which it runs them; with ``rows`` only those of the table's
        first so many.

        Raises:
            InvalidUsage: the plan has no such rank.
        """
        check_whole("for_rank()", "rank", rank)
        if not 0 <= rank < self.num_ranks:
            raise InvalidUsage(
                f"rank {rank} asked of a plan for {self.num_ranks} ranks: give 0 to {self.num_ranks - 1}"
            )
        found, bounds = self._rows_by_rank
        own = found[bounds[rank] : bounds[rank + 1]].tolist()
        return tuple(self._batch(row) for row in own if rows is None or row < rows)

    @cached_property
    def _rows_by_rank(self) -> tuple[Any, Any]:
        return self.table.rows_by_rank(self.num_ranks)

    @cached_property
    def _made(self) -> dict[int, MicroBatch]:
        """By row, the micro-batches that were made one by one."""
        return {}

    def _batch(self, row: int) -> MicroBatch:
        """One micro-batch; makes no others."""
        batches: tuple[MicroBatch, ...] | None = self.__dict__.get("micro_batches")
        if batches is not None:
            return batches[row]
        return self._made.get(row) or self._made.setdefault(row, self.table.micro_batches(row, row + 1)[0])

    @cached_property
    def hash(self) -> str:
        """SHA-256 over all that is executed; ranks compare it before a step starts."""
        digest = hashlib.sha256(f"{self.policy},{self.num_ranks},{len(self.table)}".encode())
        for name in COLUMNS:
            if name != "predicted_s":
                digest.update(getattr(self.table, name))
        if self.limited:
            digest.update(f"limit {self.limit}\n".encode())
        if self.queued:
            digest.update(f"queue {self.queued} {self.queue_pools}\n".encode())
        for fragment in self.fragments:
            if isinstance(fragment, TreeFragment):
                digest.update(f"{fragment.tree};{fragment.segments};{fragment.repeated}\n".encode())
            else:
                digest.update(f"slice {fragment.sequence};{fragment.start};{fragment.stop}\n".encode())
        return digest.hexdigest()

    @property
    def limit(self) -> tuple[float, float]:
        """``key_limit`` and ``limited``."""
        return self.key_limit, self.limited

    @cached_property
    def slices(self) -> Mapping[int, PlannedSlice]:
        """The micro-batches that are slices of sequences, by their index. Raises InvalidUsage where they cannot run."""
        return slices_of(self.table, self.fragments)

    def peers(self, rank: int) -> frozenset[int]:
        """Global ranks that ``rank`` sends to or receives from in its rings."""
        found: set[int] = set()
        for batch in self.for_rank(rank):
            if len(batch.ranks) > 1:
                place = batch.ranks.index(rank)
                found.update((batch.ranks[place - 1], batch.ranks[(place + 1) % len(batch.ranks)]))
        return frozenset(found)

    def timeline(self) -> list[float]:
        """Predicted start of each micro-batch: when the last of its ranks is free."""
        return self.table.timeline(self.num_ranks)

    def explain(self, *, max_rows: int = 20) -> str:
        """The plan as text: totals, then its micro-batches (the largest ``max_rows`` if there are more)."""
        table = self.table
        counts = np.diff(self._rows_by_rank[1])
        tokens = table.tokens()
        ring_tokens = int(((table.group_sizes() - 1) * tokens).sum())
        widest = ranks_text(int(table.group_sizes().max(initial=0)))
        made_by = f" by {self.made_by}" if self.made_by not in ("", self.policy) else ""
        lines = [
            f"policy {self.policy} on {ranks_text(self.num_ranks)}: {self.tokens:,} tokens in {len(table)} "
            f"micro-batches, {counts.min()} to {counts.max()} a rank",
            f"predicted {self.makespan_s:.6g} s, lower bound {self.lower_bound_s:.6g} s "
            f"(gap {100 * self.gap:.2f}%), idle {100 * self.idle_share:.2f}%, "
            f"planned in {1e3 * self.planning_s:.1f} ms{made_by}",
            f"widest group {widest}, at most {table.most_peers()} ring peers a rank, "
            f"KV of {ring_tokens:,} tokens passed on per layer and pass",
        ]
        rows = range(len(table))
        if len(rows) > max_rows:
            rows = np.argsort(-tokens, kind="stable")[:max_rows].tolist()
            lines.append(f"the {max_rows} largest micro-batches:")
        if self.queued:
            pools = "" if self.queue_pools == 1 else f", one for each of {self.queue_pools} pools of ranks"
            lines.insert(1, f"{self.queued} of them wait in a queue{pools}: who is free takes the next one")
        starts = self.timeline()
        described = (self._batch(row) for row in rows)
        told = (
            each.describe(starts[row], self.slices.get(each.index)) for row, each in zip(rows, described, strict=True)
        )
        return "\n".join([*lines, *(f"  {each}" for each in told)])

    def to_json(self) -> str:
        """One JSON object; :meth:`from_json` reads it back."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The JSON form as plain Python objects; values of a queue and of a limit of keys only where there is one."""
        rare = (*(_QUEUE_VALUES if self.queued else ()), *(_LIMIT_VALUES if self.limited else ()))
        return {
            "policy": self.policy,
            "ranks": self.num_ranks,
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "planning_s": self.planning_s,
            "idle_share": self.idle_share,
            "made_by": self.made_by,
            **{name: getattr(self, name) for name in rare},
            "sha256": self.hash,
            "fragments": [asdict(each) for each in self.fragments],
            "micro_batches": self.table.to_dicts(),
        }

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """Reads :meth:`to_json` back and checks the order of the micro-batches and the hash.

        Raises:
            InvalidUsage: not a plan, one that cannot run, or one that was changed since it was written.
        """
        try:
            data = json.loads(text)
            plan = cls.of_table(
                PlanTable.of_dicts(data["micro_batches"]),
                fragments=tuple(map(_fragment, data.get("fragments", ()))),
                policy=str(data["policy"]),
                num_ranks=int(data["ranks"]),
                **{name: float(data[name]) for name in _SECONDS},
                **{name: type(before)(data.get(name, before)) for name, before in _LATER.items()},
            )
            plan.policy.encode()  # as its hash does: JSON may hold what is no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise InvalidUsage(
                f"{reprlib.repr(text)} is no step plan ({type(error).__name__}: {error}): expected the output of "
                "StepPlan.to_json"
            ) from error
        check_values(plan.table, {name: getattr(plan, name) for name in _VALUES})
        plan.validate()
        if "sha256" in data and data["sha256"] != plan.hash:  # files from before that have a hash of another kind
            raise InvalidUsage(
                f"the plan's hash is {plan.hash[:16]} and the file says {str(data['sha256'])[:16]}: it was changed"
            )
        return plan

    def save(self, path: Path | str) -> None:
        """Writes :meth:`to_json`. A reader sees the old file or all of the new one.

        Raises:
            InvalidUsage: a file that cannot be written.
        """
        try:
            write_whole(Path(path), (self.to_json() + "\n").encode())
        except OSError as error:
            raise InvalidUsage(f"cannot write the plan {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path | str) -> StepPlan:
        """Reads a file of :meth:`save`, and checks all of it.

        Raises:
            InvalidUsage: a file that cannot be read, is damaged, or holds no plan that can run.
        """
        try:
            text = read_text(Path(path), most=_PLAN_BYTES)
        except (OSError, ValueError) as error:
            raise InvalidUsage(f"cannot read the plan {path}: {error}") from error
        return cls.from_json(text)

    def validate(
        self,
        lengths: Sequence[int | Tree] | None = None,
        *,
        memory: MemoryModel | None = None,
        pipeline: int | None = None,
    ) -> None:
        """Checks that the plan can be run.

        Args:
            lengths: the lengths of the step; each sequence has to appear exactly once, with its length.
            memory: what a rank can hold.
            pipeline: devices of each rank's pipeline; with it and ``memory``, sequences in slices have to fit, of which
                a rank holds more than one micro-batch at a time.

        Raises:
            InvalidUsage: says which micro-batch is wrong, and why.
        """
        check_batches(self.table, self.num_ranks, memory)
        check_queue(self.table, self.num_ranks, self.queued, self.queue_pools)
        slices = self.slices  # which checks them
        if memory is not None and pipeline is not None:
            check_slices_fit(self.table, slices, memory, pipeline)
        if lengths is not None:
            check_sequences(self.table, self.fragments, lengths)


_PLAN_BYTES = 1 << 31  # the most that is read
_QUEUE_VALUES, _LIMIT_VALUES = ("queued", "queue_pools"), ("key_limit", "limited")
_SECONDS = ("makespan_s", "lower_bound_s", "planning_s", "idle_share")
# Values that files may lack, and what they are there.
_LATER: dict[str, float | int | str] = {
    "queued": 0, "queue_pools": 1, "made_by": "", "key_limit": 0.0, "limited": 0.0,
}  # fmt: skip
_VALUES = ("policy", "num_ranks", *_SECONDS, *_LATER)


def _fragment(values: Mapping[str, Any]) -> TreeFragment | SequenceFragment:
    """From the JSON form."""
    if "tree" in values:
        segments, repeated = tuple(map(int, values["segments"])), tuple(map(bool, values["repeated"]))
        return TreeFragment(int(values["tree"]), segments, repeated)
    return SequenceFragment(*(int(values[name]) for name in ("sequence", "start", "stop")))


def pool_rows(plan: StepPlan, pool: int) -> NDArray[np.int64]:
    """Rows of the plan's table that the ranks of a pool take, in this order: int64 ``[queued in the pool]``."""
    named = plan.table.ranks[len(plan.table.ranks) - plan.queued :]  # those of the queue have one rank each
    return len(plan.table) - plan.queued + np.flatnonzero(named % plan.queue_pools == pool)


def fixed_for_rank(plan: StepPlan, rank: int) -> tuple[MicroBatch, ...]:
    """:meth:`StepPlan.for_rank` without those of the queue: what the plan binds to the rank, in order."""
    first = len(plan.table) - plan.queued
    return plan.for_rank(rank, rows=first)


def as_run(plan: StepPlan, takers: NDArray[Any]) -> StepPlan:
    """The plan with the ranks that have run the micro-batches of its queue in the place of those that it names.

    ``takers``: whole numbers ``[queued]``, in the order of the table; each of the pool of the micro-batch.
    """
    ranks = plan.table.ranks.copy()
    ranks[len(ranks) - plan.queued :] = takers
    return plan.with_table(replace(plan.table, ranks=ranks))
