"""Random programs of sends and receives: each message goes where the rules of matching say, as on gloo."""

from __future__ import annotations

import uuid
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.torch_groups import torch_ranks
from tests.harness.torch_programs import check, make_program, members_of, run_program

Got = dict[int, int | None]


def run_all(programs: list[list[list[Any]]], backend: str, key: str) -> list[Got]:
    """A rank's part in several programs, one after the other on the same groups."""
    with torch_ranks(backend, key=key, timeout=150) as (rank, size):
        members = members_of(size)
        groups = [dist.group.WORLD, *(dist.new_group(each, sort_ranks=False) for each in members[1:])]
        got = []
        for events in programs:
            got.append(run_program(events[rank], groups))
            dist.barrier()  # a send that was dropped ends when its receiver has it
        return got


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs(ranks: Any, size: int) -> None:
    # Seeds: to draw each choice of a program by itself takes hypothesis far longer than to run it.
    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, 2**32), min_size=5, max_size=5))
    def run(seeds: list[int]) -> None:
        programs = [make_program(Random(seed), size, 50) for seed in seeds]
        got = ranks(size, run_all, [each.events for each in programs], "hdpcomm", "programs", timeout=200)
        for i, program in enumerate(programs):
            check(program, [each[i] for each in got])

    run()


@pytest.mark.parametrize("size", [2, 4])
def test_same_as_gloo(ranks: Any, size: int) -> None:
    programs = [make_program(Random(seed), size, 40, plain=True) for seed in range(6)]
    events = [each.events for each in programs]
    ours = ranks(size, run_all, events, "hdpcomm", uuid.uuid4().hex, timeout=200)
    gloo = ranks(size, run_all, events, "gloo", uuid.uuid4().hex, timeout=200)
    for i, program in enumerate(programs):
        check(program, [each[i] for each in ours])
        check(program, [each[i] for each in gloo])
