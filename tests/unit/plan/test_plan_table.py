"""Plans of arrays are those of objects: equal in every respect, and made only as far as somebody looks."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import struct
import threading
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm._core import planner as core
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, MicroBatch, PlanTable, SequenceInfo, StepPlan
from hdpcomm.plan.cost import core_cost
from tests.harness.plan_cases import CASES, large_plan, no_objects, random_plan


def of_objects(plan: StepPlan) -> StepPlan:
    """The same plan made by hand, from plain numbers."""
    table = plan.table
    batches = []
    for row in range(len(table)):
        ranks = slice(int(table.rank_bounds[row]), int(table.rank_bounds[row + 1]))
        sequences = slice(int(table.sequence_bounds[row]), int(table.sequence_bounds[row + 1]))
        pairs = zip(table.ids[sequences].tolist(), table.lengths[sequences].tolist(), strict=True)
        batches.append(
            MicroBatch(
                int(table.index[row]),
                tuple(table.ranks[ranks].tolist()),
                tuple(SequenceInfo(number, length) for number, length in pairs),
                float(table.offload_ratio[row]),
                float(table.predicted_s[row]),
            )
        )
    values = {
        each.name: getattr(plan, each.name) for each in fields(plan) if each.init and each.name != "micro_batches"
    }
    return StepPlan(micro_batches=tuple(batches), **values)


def hash_of_objects(plan: StepPlan) -> str:
    """SHA-256 of the numbers of all micro-batches, column by column."""
    batches = plan.micro_batches
    groups, packs = [batch.ranks for batch in batches], [batch.sequences for batch in batches]
    sequences = [each for pack in packs for each in pack]
    digest = hashlib.sha256(f"{plan.policy},{plan.num_ranks},{len(batches)}".encode())
    for code, column in (
        ("q", [batch.index for batch in batches]),
        ("q", [0, *accumulate(map(len, groups))]),
        ("i", [rank for group in groups for rank in group]),
        ("q", [0, *accumulate(map(len, packs))]),
        ("q", [each.id for each in sequences]),
        ("q", [each.length for each in sequences]),
        ("d", [batch.offload_ratio for batch in batches]),
    ):
        digest.update(struct.pack(f"<{len(column)}{code}", *column))
    for fragment in plan.fragments:
        digest.update(f"{fragment.tree};{fragment.segments};{fragment.repeated}\n".encode())
    return digest.hexdigest()


@settings(max_examples=CASES, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_plan_of_arrays_is_the_one_of_objects(seed: int) -> None:
    plan = random_plan(seed)
    by_hand = of_objects(plan)
    assert no_objects(plan)
    assert plan.hash == by_hand.hash == hash_of_objects(by_hand)
    assert plan.to_json() == by_hand.to_json()
    assert plan.explain() == by_hand.explain()
    assert plan.tokens == sum(batch.tokens for batch in by_hand.micro_batches)
    members = [[batch for batch in by_hand.micro_batches if rank in batch.ranks] for rank in range(plan.num_ranks)]
    assert pickle.loads(pickle.dumps(plan)) == by_hand
    assert copy.deepcopy(plan) == by_hand
    assert [list(plan.for_rank(rank)) for rank in range(plan.num_ranks)] == members
    peers = [len(plan.peers(rank)) for rank in range(plan.num_ranks)]
    assert f"at most {max(peers)} ring peers" in plan.explain()
    ready = [0.0] * plan.num_ranks
    for batch, start in zip(by_hand.micro_batches, plan.timeline(), strict=True):
        assert start == max(ready[rank] for rank in batch.ranks)
        for rank in batch.ranks:
            ready[rank] = start + batch.predicted_s
    if plan.micro_batches:
        longest = max((s.length, len(batch.ranks)) for batch in by_hand.micro_batches for s in batch.sequences)
        assert plan.longest() == longest
    assert plan.table.tokens().tolist() == [batch.tokens for batch in by_hand.micro_batches]
    assert plan.table.tokens_held().tolist() == [batch.tokens_held for batch in by_hand.micro_batches]
    assert plan == by_hand
    assert hash(plan) == hash(by_hand)
    assert repr(plan) == repr(by_hand)
    assert replace(plan, policy="x") == replace(by_hand, policy="x")
    assert replace(plan, policy="x") != plan
    again = StepPlan.from_json(by_hand.to_json())
    assert again == by_hand
    with_another_hash = {key: value for key, value in by_hand.to_dict().items() if key != "sha256"} | {"hash": "0" * 64}
    assert StepPlan.from_json(json.dumps(with_another_hash)) == by_hand
    assert all(
        type(number) is int
        for batch in again.micro_batches
        for number in (batch.index, *batch.ranks, *(n for s in batch.sequences for n in (s.id, s.length)))
    )


def test_a_rank_makes_its_own_micro_batches_only() -> None:
    plan = large_plan()
    own = plan.for_rank(63)
    assert 0 < len(own) < len(plan.table) / 10
    assert isinstance(plan.peers(63), frozenset)
    assert plan.explain()
    assert len(plan.hash) == 64
    plan.validate()
    copied = pickle.loads(pickle.dumps(plan))
    assert no_objects(plan)
    assert no_objects(copied)
    assert len(pickle.dumps(plan)) < len(plan.to_json()) * 0.6
    assert all(mine is plan.micro_batches[mine.index] for mine in own)
    assert all(mine is plan.micro_batches[mine.index] for mine in plan.for_rank(5))


def test_threads_get_the_same_objects() -> None:
    plan = large_plan()
    found: list[tuple[MicroBatch, ...]] = []
    barrier = threading.Barrier(4)

    def look() -> None:
        barrier.wait(30)
        found.append(plan.micro_batches)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert all(batches is found[0] for batches in found)


def test_the_arrays_are_read_only() -> None:
    plan = large_plan()
    with pytest.raises(ValueError, match="read-only"):
        plan.table.ranks[0] = 5
    with pytest.raises(AttributeError):
        plan.micro_batches = ()  # type: ignore[misc]
    with pytest.raises(AttributeError, match="no attribute 'batches'"):
        plan.batches  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": np.zeros(3, np.int64)}, "ranks of a plan's table is .* expected a contiguous array of int32"),
        ({"ids": [0, 1]}, "ids of a plan's table is"),
        ({"lengths": np.zeros((2, 1), np.int64)}, "lengths of a plan's table is"),
        ({"index": np.arange(4)[::2]}, "index of a plan's table is"),
        ({"predicted_s": np.zeros(3)}, "lengths that do not belong together"),
        ({"lengths": np.ones(5, np.int64)}, "lengths that do not belong together"),
        ({"rank_bounds": np.array([0, 3])}, "rank_bounds of a plan's table do not rise"),
        ({"rank_bounds": np.array([0, 2, 2])}, "rank_bounds of a plan's table do not rise from 0 to 3 over 2"),
        ({"rank_bounds": np.array([0, 5, 3])}, "rank_bounds of a plan's table do not rise"),
        ({"sequence_bounds": np.array([-1, 1, 2])}, "sequence_bounds of a plan's table do not rise"),
    ],
)
def test_arrays_that_do_not_belong_together(changed: dict[str, Any], message: str) -> None:
    batches = [
        MicroBatch(0, (0, 1), (SequenceInfo(0, 5),), 0.0, 1.0),
        MicroBatch(1, (1,), (SequenceInfo(1, 7),), 0.5, 2.0),
    ]
    table = PlanTable.of(batches)
    assert table.micro_batches() == tuple(batches)
    assert table.micro_batches(1, 2) == (batches[1],)
    with pytest.raises(InvalidUsage, match=message):
        replace(table, **changed)


def test_the_core_reads_nothing_outside_of_its_arrays() -> None:
    columns = list(PlanTable.of([MicroBatch(0, (0, 1), (SequenceInfo(0, 5),), 0.0, 1.0)]).columns())
    cost = core_cost(CostModel(1e-9, 1e-6), MemoryModel(100), ClusterSpec(2, capacity=100))
    squares = np.array([25.0])
    wrong: list[tuple[int, Any, str]] = [
        (1, np.array([0, 9]), "row 0 of a plan's table lies at 0 to 9 of 2 entries"),
        (1, np.array([-5, 2]), "lies at -5 to 2"),
        (3, np.array([1, 0]), "lies at 1 to 0"),
        (1, np.array([0, 2, 2]), "do not belong together"),
        (6, np.zeros(2), "do not belong together"),
    ]
    for place, array, message in wrong:
        damaged = (*columns[:place], array, *columns[place + 1 :])
        with pytest.raises(InvalidUsage, match=message):
            core.simulate(cost, damaged, squares)
    assert len(core.simulate(cost, tuple(columns), squares)["which"]) == 2


def test_ranks_that_a_cluster_does_not_have() -> None:
    table = PlanTable.of([MicroBatch(0, (0, 1), (SequenceInfo(0, 5),), 0.0, 1.0)])
    with pytest.raises(InvalidUsage, match="micro-batch 0 has rank 1, expected 0 to 0"):
        table.rows_by_rank(1)


@pytest.mark.parametrize(
    "batch",
    [
        MicroBatch(0, (0.5,), (SequenceInfo(0, 5),), 0.0, 1.0),  # type: ignore[arg-type]
        MicroBatch(0, (2**31,), (SequenceInfo(0, 5),), 0.0, 1.0),
        MicroBatch(0, (0,), (SequenceInfo(0, 2**63),), 0.0, 1.0),
        MicroBatch(0, (0,), (SequenceInfo(0, 5),), "much", 1.0),  # type: ignore[arg-type]
        MicroBatch(0, (0,), (5,), 0.0, 1.0),  # type: ignore[arg-type]
    ],
)
def test_plans_by_hand_of_what_is_no_number(batch: MicroBatch) -> None:
    plan = StepPlan("by hand", 2, (batch,), 1.0, 1.0, 0.0, 0.0)
    for call in (plan.validate, lambda: plan.hash, lambda: plan.for_rank(0), plan.to_json):
        with pytest.raises(InvalidUsage, match="hold what no plan does"):
            call()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert repr(plan) == repr(StepPlan("by hand", 2, (batch,), 1.0, 1.0, 0.0, 0.0))


def test_numbers_of_numpy_are_plain_ones_in_json() -> None:
    numbers = np.arange(3)
    batch = MicroBatch(numbers[0], (numbers[1],), (SequenceInfo(numbers[2], numbers[2]),), np.float32(0), 1)  # type: ignore[arg-type]
    plan = StepPlan("by hand", 2, (batch,), 1.0, 1.0, 0.0, 0.0)
    assert StepPlan.from_json(plan.to_json()) == plan


@settings(max_examples=CASES, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_files_hold_the_plan(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    plan, path = random_plan(seed), tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    read = StepPlan.load(path)
    assert no_objects(read)
    assert (read.hash, read.to_json()) == (plan.hash, plan.to_json())
    assert read == plan


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for content in (b"", b"{}", b"\xff" * 100, b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(InvalidUsage, match=r"no step plan|cannot read"):
            StepPlan.load(path)
    plan = random_plan(2)
    with pytest.raises(InvalidUsage, match="cannot read the plan"):
        StepPlan.load(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InvalidUsage, match=r"cannot read the plan|no plain file"):
        StepPlan.load(tmp_path / "folder.json")
    for name in ("folder.json", "none/plan.json"):
        with pytest.raises(InvalidUsage, match="cannot write the plan"):
            plan.save(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidUsage, match="a folder, pipe, socket or device"):
        StepPlan.load(tmp_path / "pipe")
