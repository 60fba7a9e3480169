"""Shared fixtures. Ranks are kept between tests: starting them costs far more than a test."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from hdpcomm.testing import RankPool

torch.set_num_threads(1)

# Tokens that a test makes are not those of the user of this machine.
_CACHE = tempfile.TemporaryDirectory(prefix="hdpcomm-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# What the user of this machine has calibrated chooses no algorithm of a test.
os.environ["HDPCOMM_COSTS"] = str(Path(__file__).with_name("no_costs.json"))

# Machines may be busy, and no test asserts a time.
settings.register_profile("hdpcomm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hdpcomm")


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


def _leaves_no_group() -> None:
    """The processes are shared: the next test would find the default group of torch.distributed there."""
    assert not torch.distributed.is_initialized()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Iterator[Callable[..., list[Any]]]:
    """``ranks(n, fn, *args, timeout=60)``: runs a module-level function on n processes that are shared by all tests."""
    used: dict[int, RankPool] = {}

    def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        pool = _pools.get(world_size)
        if pool is None or not pool.healthy:
            pool = _pools[world_size] = RankPool(world_size)
        used[world_size] = pool
        return pool.run(fn, *args, timeout=timeout)

    yield run
    for pool in used.values():
        if pool.healthy:
            pool.run(_leaves_no_group, timeout=60)


@pytest.fixture
def nothing_left_in_shm() -> Iterator[None]:
    """What the test puts into /dev/shm is gone after it; what a test beside it has there goes when that one ends."""
    before = set(os.listdir("/dev/shm"))
    yield
    limit = time.monotonic() + 60
    while left := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < limit, f"left in /dev/shm: {left}"
        time.sleep(0.1)
