"""TCP under the suite that shared memory passes: results, disagreements, ends."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.faults import test_comm_errors as faults
from tests.harness.fault_cases import bad_arguments, exit_by_exception
from tests.ranks.comm import test_collectives as collectives
from tests.ranks.comm import test_subsets as subsets


def test_collectives(tcp_ranks: Any) -> None:
    tcp_ranks(3, collectives.everything, ((0, 1, 2),), timeout=180)


@pytest.mark.parametrize("name", faults.DISAGREEMENTS)
def test_both_sides_raise_mismatch(tcp_ranks: Any, name: str) -> None:
    messages = tcp_ranks(2, faults.disagree, name)
    if name == "size":
        assert all("4 x float32" in message and "5 x float32" in message for message in messages)


@pytest.mark.parametrize(
    ("world_size", "fn"),
    [
        (3, faults.one_of_three_disagrees),
        (2, bad_arguments),
        (3, faults.aborts),
        (3, faults.third_rank_is_absent),
        (2, faults.stale_message),
        (2, faults.withdrawn_before_another),
        (3, faults.failure_behind_a_message),
        (2, faults.leave_early),
        (2, faults.interrupted),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_errors(tcp_ranks: Any, world_size: int, fn: Any, tmp_path: Any) -> None:
    tcp_ranks(world_size, fn, *([str(tmp_path)] if inspect.signature(fn).parameters else []))


def test_reason_of_a_rank_that_failed_is_told(tcp_ranks: Any) -> None:
    tcp_ranks(2, exit_by_exception, "auto")


def test_timeout_reaches_the_late_rank(tcp_ranks: Any, tmp_path: Path) -> None:
    tcp_ranks(2, faults.late_rank, str(tmp_path))


def test_order_and_nesting(tcp_ranks: Any) -> None:
    tcp_ranks(4, subsets.order_and_nesting)


def test_stats_count_the_peers_that_were_used(tcp_ranks: Any) -> None:
    assert tcp_ranks(3, subsets.talk_to_one) == [[0, 1], [0, 0], [0, 1]]


def test_subsets_leave_nothing_behind(tcp_ranks: Any) -> None:
    for before, after in tcp_ranks(3, subsets.churn, 200):
        assert all(late <= early for early, late in zip(before, after, strict=True))


def test_random_mixes(tcp_ranks: Any) -> None:
    tcp_ranks(4, subsets.random_mix, 0, 300)
