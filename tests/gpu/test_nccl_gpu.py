"""The nccl transport with the real library: a world of one on any GPU; two ranks where NCCL lets them share a GPU, or
two GPUs are there. Bodies of tests/ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import nccl
from hdpcomm.testing import run_threads, spawn
from tests.ranks.device.test_device_collectives import bits, messages

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not nccl.describe()[0], reason="no NCCL"),
]
MULTI_RANK = 23003  # NCCL 2.30.3 has NCCL_MULTI_RANK_GPU_ENABLE


def sharing(fn: Callable[..., Any], *args: Any) -> Any:
    """A rank that may share its GPU with another."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ.setdefault("NCCL_MAX_CTAS", "4")
    return fn(*args)


def several() -> bool:
    return torch.cuda.device_count() > 1 or nccl.load().version >= MULTI_RANK


def test_a_world_of_one() -> None:
    spawn(messages, 1, transport="nccl")
    assert spawn(bits, 1, 5000, transport="nccl") == run_threads(bits, 1, 5000)


@pytest.mark.parametrize("count", [777, 1_000_003])
def test_two_ranks(count: int) -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    spawn(sharing, 2, messages, transport="nccl")
    assert spawn(sharing, 2, bits, count, transport="nccl") == run_threads(bits, 2, count)


def whole_world() -> list[float]:
    with hdp.init(timeout=60) as comm:
        x = torch.full((1000,), comm.rank + 1.0, device=comm.device)
        comm.all_reduce(x)
        y = torch.empty(2000, device=comm.device)
        comm.all_gather(y, torch.full((1000,), float(comm.rank), device=comm.device))
        comm.broadcast(x, 1)
        return [float(x[0]), float(y[0]), float(y[-1])]


def test_the_whole_world_by_nccls_own_collectives() -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    assert spawn(sharing, 2, whole_world, transport="nccl") == [[3.0, 0.0, 1.0]] * 2


def test_ranks_that_may_not_share_a_gpu_hear_of_it() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank has its GPU")
    with pytest.raises(hdp.Error, match=r"ncclCommInitRankConfig failed on rank \d|closed its communicator"):
        spawn(whole_world, 2, transport="nccl")
