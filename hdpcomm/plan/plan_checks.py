"""Whether a plan can be run: checks of its table, the first wrong micro-batch named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.memory import MemoryModel
from hdpcomm.plan.table import MicroBatch, PlannedSlice, PlanTable, SequenceFragment
from hdpcomm.plan.tree import Tree, TreeFragment

__all__ = ["check_batches", "check_queue", "check_sequences", "check_slices_fit", "check_values", "slices_of"]

_MOST_RANKS = 1 << 24
_MOST_TOKENS = 1 << 40  # of a sequence, as the planner takes


def check_values(table: PlanTable, values: dict[str, Any]) -> None:
    """Raises InvalidUsage for numbers that no plan has; for plans that were read from outside.

    ``values``: the plan's plain attributes by name.
    """
    if not 1 <= values["num_ranks"] <= _MOST_RANKS:
        raise InvalidUsage(f"the plan is for {values['num_ranks']} ranks, expected 1 to {_MOST_RANKS}")
    for name in ("makespan_s", "lower_bound_s", "planning_s", "idle_share"):
        if not 0 <= values[name] < math.inf:
            raise InvalidUsage(f"the plan's {name} is {values[name]}, expected a number of at least 0")
    key_limit, limited = values["key_limit"], values["limited"]
    if not 0 <= limited <= 1 or not (1 if limited else 0) <= key_limit < math.inf:
        raise InvalidUsage(
            f"the plan's key_limit is {key_limit} and limited {limited}, expected a share and at least one key"
        )
    for name, column, wrong in (
        ("predicted_s", table.predicted_s, ~((table.predicted_s >= 0) & (table.predicted_s < math.inf))),
        ("ids", table.ids, table.ids < 0),
        ("lengths", table.lengths, (table.lengths < 1) | (table.lengths > _MOST_TOKENS)),
    ):
        if wrong.any():
            raise InvalidUsage(f"{name} of the plan's table has {column[np.argmax(wrong)]}, which no plan has")


def check_batches(table: PlanTable, num_ranks: int, memory: MemoryModel | None) -> None:
    """Raises InvalidUsage for indices that do not rise, and for a micro-batch that no group of the ranks can run."""
    wrong = _wrong_rows(table, num_ranks)
    limits = None
    if memory is not None:
        ratios, which = np.unique(table.offload_ratio, return_inverse=True)
        known = [memory.token_limit(ratio) if 0 <= ratio <= 1 else 0 for ratio in ratios.tolist()]
        limits = np.minimum(np.array(known, dtype=np.float64), 2.0**62).astype(np.int64)[which]
        wrong |= table.tokens_held() > limits
    if not wrong.any():
        return
    row = int(np.argmax(wrong))
    batch = table.micro_batches(row, row + 1)[0]
    previous = int(table.index[row - 1]) if row else -1
    if batch.index <= previous:
        raise InvalidUsage(
            f"micro-batch {batch.index} follows {previous}: indices have to rise, since they are the global order"
        )
    _refuse_batch(batch, num_ranks)
    assert memory is not None
    assert limits is not None
    raise InvalidUsage(
        f"micro-batch {batch.index} puts {batch.tokens_held} tokens on a rank, expected at most {limits[row]} "
        f"(capacity {memory.capacity}, offload ratio {batch.offload_ratio:.2f}, host memory for "
        f"{memory.host_tokens:.0f} tokens): give it more ranks or fewer sequences"
    )


def check_queue(table: PlanTable, num_ranks: int, queued: int, pools: int) -> None:
    """Raises InvalidUsage unless the last ``queued`` micro-batches can wait in the queues of so many pools of ranks."""
    if not 0 <= queued <= len(table):
        raise InvalidUsage(f"the plan's queued is {queued}, expected 0 to {len(table)}, as it has micro-batches")
    if not 1 <= pools <= num_ranks or (pools > 1 and not queued):
        most = num_ranks if queued else 1
        raise InvalidUsage(f"the plan's queue_pools is {pools}, expected 1 to {most}")
    first = len(table) - queued
    wrong = (table.group_sizes()[first:] != 1) | (table.offload_ratio[first:] != 0)
    if wrong.any():
        batch = table.micro_batches(first + int(np.argmax(wrong)), first + int(np.argmax(wrong)) + 1)[0]
        raise InvalidUsage(
            f"micro-batch {batch.index} is in the queue, with ranks {batch.ranks} and offload ratio "
            f"{batch.offload_ratio}: those have one rank and no offload"
        )


def _wrong_rows(table: PlanTable, num_ranks: int) -> NDArray[np.bool_]:
    """For each micro-batch, whether :func:`_refuse_batch` refuses it or its index does not rise."""
    wrong = np.ones(len(table), dtype=np.bool_)
    wrong[1:] = table.index[1:] <= table.index[:-1]
    wrong[:1] = table.index[:1] < 0
    wrong |= (table.group_sizes() == 0) | (np.diff(table.sequence_bounds) == 0)
    wrong |= ~((table.offload_ratio >= 0) & (table.offload_ratio <= 1))
    rows = table.rows_of_ranks()
    outside = (table.ranks < 0) | (table.ranks >= num_ranks)
    wrong[rows[outside]] = True
    keys = np.sort(rows * (2**31) + np.where(outside, 0, table.ranks))
    twice = keys[1:][keys[1:] == keys[:-1]] // 2**31
    wrong[twice] = True
    return wrong


def _refuse_batch(batch: MicroBatch, num_ranks: int) -> None:
    name = f"micro-batch {batch.index}"
    if not batch.ranks or not batch.sequences:
        raise InvalidUsage(f"{name} has {len(batch.ranks)} ranks and {len(batch.sequences)} sequences: none is empty")
    if min(batch.ranks) < 0 or max(batch.ranks) >= num_ranks:
        raise InvalidUsage(f"{name} has ranks {batch.ranks}, expected 0 to {num_ranks - 1}")
    if len(set(batch.ranks)) != len(batch.ranks):
        raise InvalidUsage(f"{name} has ranks {batch.ranks}, expected each once")
    if not 0 <= batch.offload_ratio <= 1:
        raise InvalidUsage(f"{name} has offload ratio {batch.offload_ratio}, expected 0 to 1")


def slices_of(table: PlanTable, fragments: Sequence[TreeFragment | SequenceFragment]) -> dict[int, PlannedSlice]:
    """The micro-batches that are slices of sequences, by their index.

    Raises:
        InvalidUsage: the slices of a sequence do not cover it in order, are not alone in their micro-batches, or do not
            follow each other on the same ranks.
    """
    parts: dict[int, list[int]] = {}
    for number, fragment in enumerate(fragments):
        if isinstance(fragment, SequenceFragment):
            parts.setdefault(fragment.sequence, []).append(number)
    if not parts:
        return {}
    first = int(table.ids.max(initial=-1)) + 1 - len(fragments)
    row_of = dict(zip(table.ids.tolist(), table.rows_of_sequences().tolist(), strict=True))
    last_row: dict[int, int] = {}
    """The row before the one that is looked at, by rank; in the plan's order."""
    before = np.empty(len(table.ranks), dtype=np.int64)
    rows = table.rows_of_ranks().tolist()
    for place, (row, rank) in enumerate(zip(rows, table.ranks.tolist(), strict=True)):
        before[place] = last_row.get(rank, -1)
        last_row[rank] = row
    found: dict[int, PlannedSlice] = {}
    for sequence, numbers in parts.items():
        name = f"the slices of sequence {sequence}"
        given = [
            (each.start, each.stop) for each in (fragments[n] for n in numbers) if isinstance(each, SequenceFragment)
        ]
        bounds = (0, *(stop for _, stop in given))
        if [start for start, _ in given] != list(bounds[:-1]) or any(a >= b for a, b in pairwise(bounds)):
            raise InvalidUsage(f"{name} are {given}; expected parts that follow each other from its first token on")
        if missing := [n for n in numbers if first + n not in row_of]:
            raise InvalidUsage(f"{name} have no micro-batch for tokens {given[numbers.index(missing[0])]}: plan again")
        own = tuple(row_of[first + n] for n in numbers)
        ranks = [table.ranks[table.rank_bounds[row] : table.rank_bounds[row + 1]] for row in own]
        for number, row in enumerate(own):
            index = int(table.index[row])
            if table.sequence_bounds[row + 1] - table.sequence_bounds[row] != 1:
                raise InvalidUsage(
                    f"micro-batch {index} has a slice of sequence {sequence} and others: slices are alone"
                )
            on_ranks = slice(table.rank_bounds[row], table.rank_bounds[row + 1])
            follows = number == 0 or bool((before[on_ranks] == own[number - 1]).all())
            if not np.array_equal(ranks[number], ranks[0]) or not follows:
                raise InvalidUsage(
                    f"micro-batch {index} is slice {number} of sequence {sequence} on ranks {ranks[number].tolist()}; "
                    f"expected ranks {ranks[0].tolist()}, with nothing between it and the slice before it"
                )
            found[index] = PlannedSlice(sequence, number, bounds, own)
    return found


def check_slices_fit(table: PlanTable, slices: Mapping[int, PlannedSlice], memory: MemoryModel, pipeline: int) -> None:
    """Raises InvalidUsage unless memory has room for the slices of each sequence.

    A device of a pipeline holds all of them at a time, at most as much as a full micro-batch for each device; without
    pipelines a rank holds the activations of one, and what all of them keep.
    """
    held, ratios = table.tokens_held(), table.offload_ratio
    for planned in slices.values():
        if planned.number:
            continue
        rows = list(planned.rows)
        tokens = held[rows]
        if pipeline > 1:
            name, most = "all its slices", float(memory.capacity * pipeline)
            given = float((tokens * (1 - ratios[rows] * memory.offloadable)).sum())
        else:
            name, given, ranks = "a slice", float(tokens.max()), int(table.group_sizes()[rows[0]])
            kept = -(-planned.bounds[-1] // ranks)
            most = float(min(memory.room_of_slices(kept, ratio) for ratio in set(ratios[rows].tolist())))
        if given > most * (1 + 1e-9):
            raise InvalidUsage(
                f"sequence {planned.sequence} puts {given:.0f} tokens of {name} on a rank that has room for {most:.0f} "
                f"(capacity {memory.capacity}, {pipeline} device(s)): give it more ranks"
            )


def check_sequences(
    table: PlanTable, fragments: Sequence[TreeFragment | SequenceFragment], lengths: Sequence[int | Tree]
) -> None:
    """Raises InvalidUsage unless each sequence of the step appears once with its length, the fragments of a tree that
    was cut train each of its segments once, and slices are of a sequence or tree of their length, or part of one."""
    tokens = [item.num_tokens if isinstance(item, Tree) else item for item in lengths]
    trained = [Counter[int]() for _ in lengths] if fragments else []
    sliced: dict[int, int] = {}
    for fragment in fragments:
        if isinstance(fragment, SequenceFragment):
            tokens.append(fragment.stop - fragment.start)
            sliced[fragment.sequence] = fragment.stop
            continue
        item = lengths[fragment.tree] if 0 <= fragment.tree < len(lengths) else None
        if not isinstance(item, Tree):
            raise InvalidUsage(
                f"the plan has a fragment of tree {fragment.tree}, which is not among the {len(lengths)} given items: "
                "plan these again"
            )
        tokens.append(item.part(fragment.segments).num_tokens)
        new = zip(fragment.segments, fragment.repeated, strict=True)
        trained[fragment.tree].update(segment for segment, repeated in new if not repeated)
    for sequence, length in sliced.items():
        known = 0 <= sequence < len(tokens)
        if known and sequence >= len(lengths):
            known = isinstance(fragments[sequence - len(lengths)], TreeFragment)
        if not known or tokens[sequence] != length:
            raise InvalidUsage(
                f"the plan has slices of a sequence {sequence} of {length} tokens, which is not among the "
                f"{len(lengths)} given items: plan these again"
            )
    trees = {fragment.tree for fragment in fragments if isinstance(fragment, TreeFragment)}
    cut = trees | sliced.keys()
    for tree in trees:
        if any(trained[tree][segment] != 1 for segment in range(len(lengths[tree]))):  # type: ignore[arg-type]
            raise InvalidUsage(f"the fragments of tree {tree} do not train each of its segments once")
    inside = (table.ids >= 0) & (table.ids < len(tokens))
    seen = np.bincount(table.ids[inside], minlength=len(tokens))
    wanted = np.ones(len(tokens), dtype=np.int64)
    wanted[list(cut)] = 0
    if (seen != wanted).any():
        sequence = int(np.argmax(seen != wanted))
        raise InvalidUsage(
            f"sequence {sequence} appears {seen[sequence]} times in the plan, expected "
            f"{'once' if wanted[sequence] else 'never, as its fragments do'}"
        )
    right = inside.copy()
    right[inside] = table.lengths[inside] == np.array(tokens)[table.ids[inside]]
    if not right.all():
        place = int(np.argmin(right))
        raise InvalidUsage(
            f"micro-batch {table.index[table.rows_of_sequences()[place]]} has sequence {table.ids[place]} of "
            f"{table.lengths[place]} tokens, which is not one of the {len(tokens)} given ones: plan these lengths again"
        )
