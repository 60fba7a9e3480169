"""Measured runs: what they return, and that wrong data is found. Never checks times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Communicator
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.ops import OPERATIONS
from hdpcomm.perf.results import Report
from hdpcomm.perf.runner import check, run_rank


def sweep(world: Communicator, op: str, changes: dict[str, Any]) -> list[Any]:
    """A small sweep; the rows."""
    config = PerfConfig(op, **{"min_bytes": 1, "max_bytes": 5000, "step_factor": 70, "iters": 2} | changes)
    check(config, world.size)
    return run_rank(config, Report(""), world=world).rows


def every_operation(changes: dict[str, Any]) -> dict[str, list[Any]]:
    with hdp.init() as world:
        return {op: sweep(world, op, changes) for op in OPERATIONS}


@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_operation_is_right(ranks: Any, world: int) -> None:
    for op, rows in ranks(world, every_operation, {"per_iter": True, "unalign": 1, "register": True})[0].items():
        sizes = [row.point.size for row in rows]
        assert sizes == sorted(set(sizes))
        for row in rows:
            assert (row.in_place is not None) == OPERATIONS[op].in_place
            for _, side in row.sides():
                assert side.wrong == 0
                assert side.time_us > 0
                assert side.busbw == pytest.approx(side.algbw * OPERATIONS[op].bus_factor(world))
                assert len(side.stats.times_us) == 2
                assert len(side.stats.per_process_max_times_us) == world
                assert side.algbw == pytest.approx(row.point.size / side.time_us / 1e3)


MODES: list[dict[str, Any]] = [
    {"dtypes": ("bfloat16", "half", "uint64"), "redops": ("sum", "prod", "max", "min", "avg")},
    {"algorithm": "ring", "cycles": 2},
    {"subsets": ((2, 0), (1,))},
]


def every_mode() -> list[list[Any]]:
    with hdp.init() as world:
        return [sweep(world, "all_reduce", changes) for changes in MODES]


def test_modes(ranks: Any) -> None:
    for changes, rows in zip(MODES, ranks(3, every_mode)[0], strict=True):
        assert all(side.wrong == 0 for row in rows for _, side in row.sides())
        assert {row.point.ranks for row in rows} == set(changes.get("subsets", ((0, 1, 2),)))
        if "redops" in changes:
            assert {(row.point.kind.name, row.point.redop) for row in rows} == {
                (t, o) for t in changes["dtypes"] for o in changes["redops"] if (t, o) != ("uint64", "avg")
            }


SPOILED = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
}


def wrong_counts_with(place: int) -> dict[str, list[int]]:
    """Spoils one element of one rank's output after each operation: element ``place``, or beside it if below 0."""
    counts = {}
    with hdp.init() as world:
        for op, method in SPOILED.items():
            original = getattr(Communicator, method)

            def spoiling(self: Communicator, *args: Any, call: Any = original, **options: Any) -> Any:
                work = call(self, *args, **options)
                target = options.get("out", args[0])
                if self.rank == self.size - 1 and target.dtype == torch.float32:
                    target.as_strided((1,), (1,), target.storage_offset() + place).add_(1)
                return work

            setattr(Communicator, method, spoiling)
            try:
                rows = sweep(world, op, {"min_bytes": 4096})
            finally:
                setattr(Communicator, method, original)
            counts[op] = [side.wrong for row in rows for _, side in row.sides()]
    return counts


@pytest.mark.parametrize("place", [0, 17, -1])
def test_one_planted_error_is_found(ranks: Any, place: int) -> None:
    for op, counts in ranks(3, wrong_counts_with, place)[0].items():
        assert counts, op
        # In place, memory beside an output may be an input, which the operation may change.
        assert counts == [1] * len(counts) if place >= 0 else counts[0] == 1, op
