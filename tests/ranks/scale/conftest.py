"""Ranks whose ``init()`` joins over TCP, kept between tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hdpcomm.testing import RankPool
from tests.harness.warm_python import PRELOAD


@pytest.fixture(scope="session")
def _tcp_pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def tcp_ranks(_tcp_pools: dict[int, RankPool], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """As ``ranks`` of the suite; the processes have ``HDPCOMM_TRANSPORT=tcp``."""

    def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        pool = _tcp_pools.get(world_size)
        if pool is None or not pool.healthy:
            with monkeypatch.context() as patch:
                patch.setenv("HDPCOMM_TRANSPORT", "tcp")
                pool = _tcp_pools[world_size] = RankPool(world_size, preload=PRELOAD)
            assert os.environ.get("HDPCOMM_TRANSPORT") != "tcp"
        return pool.run(fn, *args, timeout=timeout)

    return run
