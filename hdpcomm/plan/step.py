"""The plan of one training step: :class:`StepPlan`, a list of :class:`MicroBatch`."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hdpcomm.arguments import check_whole
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import Tree, TreeFragment

if TYPE_CHECKING:
    from hdpcomm.plan.cost import MemoryModel

__all__ = ["MicroBatch", "SequenceInfo", "StepPlan", "format_ranks"]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as ranges: ``0-3,7``."""
    parts: list[str] = []
    ordered = sorted(ranks)
    start = previous = ordered[0]
    for rank in [*ordered[1:], -2]:
        if rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ",".join(parts)


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence of the step: its position in the planned lengths, and its tokens.

    Positions after the last one are those of the plan's fragments of trees.
    """

    id: int
    length: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that a group of ranks runs together, as one pack.

    Attributes:
        index: place in the global order of the step.
        ranks: global ranks in ring order; a rank's position in this tuple is its position in the zigzag.
        sequences: the sequences of the pack, in order.
        offload_ratio: share of the activations (of all layers but two) that goes to host memory, in [0, 1].
        predicted_s: predicted seconds of forward and backward pass.
    """

    index: int
    ranks: tuple[int, ...]
    sequences: tuple[SequenceInfo, ...]
    offload_ratio: float
    predicted_s: float

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(sequence.length for sequence in self.sequences)

    @property
    def tokens_held(self) -> int:
        """The most tokens that one of the ranks holds."""
        return sum(-(-sequence.length // len(self.ranks)) for sequence in self.sequences)

    def describe(self, start_s: float) -> str:
        """One line for people; ``start_s``: when the micro-batch starts."""
        several = len(self.sequences) > 1
        what = f"{len(self.sequences)} sequences" if several else f"sequence {self.sequences[0].id}"
        offload = f", offload {self.offload_ratio:.2f}" if self.offload_ratio else ""
        return (
            f"#{self.index}: {what}, {self.tokens:,} tokens on {len(self.ranks)} ranks ({format_ranks(self.ranks)}), "
            f"{start_s:.6g} to {start_s + self.predicted_s:.6g} s{offload}"
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which ranks run which sequences in one step. Each rank runs its micro-batches by rising ``index``, so ranks
    cannot wait for each other in a circle.

    Attributes:
        policy: the policy that made the plan.
        num_ranks: ranks of the cluster.
        micro_batches: all micro-batches, by rising index.
        makespan_s: predicted seconds until the last rank is done, without the reduction of the gradients.
        lower_bound_s: seconds that no plan can beat under the same cost model (docs/planner.md).
        planning_s: seconds that planning took; not part of the hash.
        idle_share: share of ranks x makespan in which ranks wait or are done.
        fragments: parts of trees that were cut; number i has the id ``len(lengths) + i``, and its tree none.
    """

    policy: str
    num_ranks: int
    micro_batches: tuple[MicroBatch, ...]
    makespan_s: float
    lower_bound_s: float
    planning_s: float
    idle_share: float
    fragments: tuple[TreeFragment, ...] = ()
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound: 0.02 means 2%."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(batch.tokens for batch in self.micro_batches)

    def for_rank(self, rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a rank, in the order in which it runs them.

        Raises:
            InvalidUsage: the plan has no such rank.
        """
        check_whole("for_rank()", "rank", rank)
        by_rank = self._cache.get("by_rank")
        if by_rank is None:
            lists: list[list[MicroBatch]] = [[] for _ in range(self.num_ranks)]
            for batch in self.micro_batches:
                for member in batch.ranks:
                    lists[member].append(batch)
            by_rank = self._cache["by_rank"] = [tuple(batches) for batches in lists]
        if not 0 <= rank < self.num_ranks:
            raise InvalidUsage(
                f"rank {rank} asked of a plan for {self.num_ranks} ranks: give 0 to {self.num_ranks - 1}"
            )
        result: tuple[MicroBatch, ...] = by_rank[rank]
        return result

    @property
    def hash(self) -> str:
        """SHA-256 over all that is executed; ranks compare it before a step starts."""
        found: str | None = self._cache.get("hash")
        if found is None:
            digest = hashlib.sha256(f"{self.policy},{self.num_ranks}".encode())
            for batch in self.micro_batches:
                sequences = [(sequence.id, sequence.length) for sequence in batch.sequences]
                line = f"{batch.index};{batch.ranks};{sequences};{batch.offload_ratio!r}\n"
                digest.update(line.encode())
            for fragment in self.fragments:
                digest.update(f"{fragment.tree};{fragment.segments};{fragment.repeated}\n".encode())
            found = self._cache["hash"] = digest.hexdigest()
        return found

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
        ready = [0.0] * self.num_ranks
        starts = []
        for batch in self.micro_batches:
            start = max(ready[rank] for rank in batch.ranks)
            starts.append(start)
            for rank in batch.ranks:
                ready[rank] = start + batch.predicted_s
        return starts

    def explain(self, *, max_rows: int = 20) -> str:
        """The plan as text: totals, then its micro-batches (the largest ``max_rows`` if there are more)."""
        counts = [len(self.for_rank(rank)) for rank in range(self.num_ranks)]
        peers = max((len(self.peers(rank)) for rank in range(self.num_ranks)), default=0)
        widest = max((len(batch.ranks) for batch in self.micro_batches), default=0)
        ring_tokens = sum((len(batch.ranks) - 1) * batch.tokens for batch in self.micro_batches)
        lines = [
            f"policy {self.policy} on {self.num_ranks} ranks: {self.tokens:,} tokens in {len(self.micro_batches)} "
            f"micro-batches, {min(counts)} to {max(counts)} a rank",
            f"predicted {self.makespan_s:.6g} s, lower bound {self.lower_bound_s:.6g} s (gap {100 * self.gap:.2f}%), "
            f"idle {100 * self.idle_share:.2f}%, planned in {1e3 * self.planning_s:.1f} ms",
            f"widest group {widest} ranks, at most {peers} ring peers a rank, KV of {ring_tokens:,} tokens passed on "
            "per layer and pass",
        ]
        rows = list(zip(self.micro_batches, self.timeline(), strict=True))
        if len(rows) > max_rows:
            rows = sorted(rows, key=lambda row: -row[0].tokens)[:max_rows]
            lines.append(f"the {max_rows} largest micro-batches:")
        return "\n".join([*lines, *(f"  {batch.describe(start)}" for batch, start in rows)])

    def to_json(self) -> str:
        """One JSON object; :meth:`from_json` reads it back."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The JSON form as plain Python objects."""
        return {
            "policy": self.policy,
            "ranks": self.num_ranks,
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "planning_s": self.planning_s,
            "idle_share": self.idle_share,
            "hash": self.hash,
            "fragments": [
                {"tree": f.tree, "segments": list(f.segments), "repeated": list(f.repeated)} for f in self.fragments
            ],
            "micro_batches": [
                {
                    "index": batch.index,
                    "ranks": list(batch.ranks),
                    "sequences": [{"id": s.id, "length": s.length} for s in batch.sequences],
                    "offload_ratio": batch.offload_ratio,
                    "predicted_s": batch.predicted_s,
                }
                for batch in self.micro_batches
            ],
        }

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """Reads :meth:`to_json` back and checks the order of the micro-batches and the hash.

        Raises:
            InvalidUsage: not a plan, one that cannot run, or one that was changed since it was written.
        """
        try:
            data = json.loads(text)
            batches = tuple(
                MicroBatch(
                    index=int(item["index"]),
                    ranks=tuple(int(rank) for rank in item["ranks"]),
                    sequences=tuple(SequenceInfo(int(s["id"]), int(s["length"])) for s in item["sequences"]),
                    offload_ratio=float(item["offload_ratio"]),
                    # Plans written before the field had its present name say "seconds".
                    predicted_s=float(item["predicted_s"] if "predicted_s" in item else item["seconds"]),
                )
                for item in data["micro_batches"]
            )
            plan = cls(
                policy=str(data["policy"]),
                num_ranks=int(data["ranks"]),
                micro_batches=batches,
                makespan_s=float(data["makespan_s"]),
                lower_bound_s=float(data["lower_bound_s"]),
                planning_s=float(data["planning_s"]),
                idle_share=float(data["idle_share"]),
                fragments=tuple(
                    TreeFragment(int(f["tree"]), tuple(map(int, f["segments"])), tuple(map(bool, f["repeated"])))
                    for f in data.get("fragments", ())
                ),
            )
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise InvalidUsage(
                f"{reprlib.repr(text)} is no step plan ({type(error).__name__}: {error}): expected the output of "
                "StepPlan.to_json"
            ) from error
        plan.validate()
        if "hash" in data and data["hash"] != plan.hash:
            raise InvalidUsage(
                f"the plan's hash is {plan.hash[:16]} and the file says {str(data['hash'])[:16]}: it was changed"
            )
        return plan

    def validate(self, lengths: Sequence[int | Tree] | None = None, *, memory: MemoryModel | None = None) -> None:
        """Checks that the plan can be run.

        Args:
            lengths: the lengths of the step; each sequence has to appear exactly once, with its length.
            memory: what a rank can hold.

        Raises:
            InvalidUsage: says which micro-batch is wrong, and why.
        """
        previous = -1
        for batch in self.micro_batches:
            name = f"micro-batch {batch.index}"
            if batch.index <= previous:
                raise InvalidUsage(f"{name} follows {previous}: indices have to rise, since they are the global order")
            previous = batch.index
            self._check_batch(batch, name)
            if memory is None:
                continue
            limit = memory.token_limit(batch.offload_ratio)
            if batch.tokens_held > limit:
                raise InvalidUsage(
                    f"{name} puts {batch.tokens_held} tokens on a rank, expected at most {limit} (capacity "
                    f"{memory.capacity}, offload ratio {batch.offload_ratio:.2f}, host memory for "
                    f"{memory.host_tokens:.0f} tokens): give it more ranks or fewer sequences"
                )
        if lengths is not None:
            self._check_sequences(lengths)

    def _check_batch(self, batch: MicroBatch, name: str) -> None:
        if not batch.ranks or not batch.sequences:
            raise InvalidUsage(
                f"{name} has {len(batch.ranks)} ranks and {len(batch.sequences)} sequences: none is empty"
            )
        if min(batch.ranks) < 0 or max(batch.ranks) >= self.num_ranks:
            raise InvalidUsage(f"{name} has ranks {batch.ranks}, expected 0 to {self.num_ranks - 1}")
        if len(set(batch.ranks)) != len(batch.ranks):
            raise InvalidUsage(f"{name} has ranks {batch.ranks}, expected each once")
        if not 0 <= batch.offload_ratio <= 1:
            raise InvalidUsage(f"{name} has offload ratio {batch.offload_ratio}, expected 0 to 1")

    def _check_sequences(self, lengths: Sequence[int | Tree]) -> None:
        tokens = [item.num_tokens if isinstance(item, Tree) else item for item in lengths]
        trained = [Counter[int]() for _ in lengths] if self.fragments else []
        for fragment in self.fragments:
            item = lengths[fragment.tree] if 0 <= fragment.tree < len(lengths) else None
            if not isinstance(item, Tree):
                raise InvalidUsage(
                    f"the plan has a fragment of tree {fragment.tree}, which is not among the {len(lengths)} given "
                    "items: plan these again"
                )
            tokens.append(item.part(fragment.segments).num_tokens)
            new = zip(fragment.segments, fragment.repeated, strict=True)
            trained[fragment.tree].update(segment for segment, repeated in new if not repeated)
        cut = {fragment.tree for fragment in self.fragments}
        for tree in cut:
            if any(trained[tree][segment] != 1 for segment in range(len(lengths[tree]))):  # type: ignore[arg-type]
                raise InvalidUsage(f"the fragments of tree {tree} do not train each of its segments once")
        seen = Counter(sequence.id for batch in self.micro_batches for sequence in batch.sequences)
        for sequence in range(len(tokens)):
            wanted = 0 if sequence in cut else 1
            if seen[sequence] != wanted:
                raise InvalidUsage(
                    f"sequence {sequence} appears {seen[sequence]} times in the plan, expected "
                    f"{'once' if wanted else 'never, as its fragments do'}"
                )
        for batch in self.micro_batches:
            for info in batch.sequences:
                if not 0 <= info.id < len(tokens) or info.length != tokens[info.id]:
                    raise InvalidUsage(
                        f"micro-batch {batch.index} has sequence {info.id} of {info.length} tokens, which is not one "
                        f"of the {len(tokens)} given ones: plan these lengths again"
                    )
