"""Memory of ``comm.empty()``: messages from it arrive like any other, blocks are given back, it outlives the world."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads

SIZES = (0, 1, 4096, 8192, 8193, 100_001, 3_000_000)


def exchange_all_sizes() -> None:
    with hdp.init() as comm:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for size in SIZES:
            x = comm.empty(size, dtype=torch.uint8).copy_(torch.arange(size) * 7 + comm.rank)
            y = torch.zeros(size, dtype=torch.uint8)
            comm.exchange([(x, after)], [(y, before)])
            assert torch.equal(y, (torch.arange(size) * 7 + before).to(torch.uint8)), size
            part = x[size // 3 :]  # a part of a block
            z = comm.empty(part.numel(), dtype=torch.uint8)
            comm.exchange([(part, after)], [(z, before)])
            assert torch.equal(z, y[size // 3 :]), size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_from_shared_memory(ranks: Any, size: int) -> None:
    ranks(size, exchange_all_sizes)


def test_messages_between_threads() -> None:
    run_threads(exchange_all_sizes, 3)


def reduce_from_shared() -> None:
    with hdp.init() as comm:
        for algorithm in comm.algorithms("all_reduce"):
            x = comm.empty(3, 5001, dtype=torch.float64).copy_(torch.arange(15003).view(3, 5001) + comm.rank)
            comm.all_reduce(x, algorithm=algorithm)
            assert torch.equal(x, (torch.arange(15003) * comm.size + sum(range(comm.size))).view(3, 5001).double())


def test_reductions_read_shared_memory(ranks: Any) -> None:
    ranks(3, reduce_from_shared)


def blocks_come_and_go() -> tuple[int, int]:
    process = psutil.Process()
    with hdp.init() as comm:
        addresses = set()
        fds = 0
        for turn in range(200):
            x = comm.empty(1 << 20, dtype=torch.uint8).fill_(turn % 251)
            addresses.add(x.data_ptr())
            y = torch.empty_like(x)
            comm.exchange([(x, 1 - comm.rank)], [(y, 1 - comm.rank)])
            assert int(y[0]) == int(y[-1]) == turn % 251
            del x
            if turn == 20:
                fds = process.num_fds()
        return len(addresses), process.num_fds() - fds


def test_blocks_are_used_again(ranks: Any) -> None:
    assert ranks(2, blocks_come_and_go) == [(1, 0), (1, 0)]


def large_blocks_leave() -> int:
    process = psutil.Process()
    with hdp.init() as comm:
        before = process.memory_info().shared
        blocks = [comm.empty(100 << 20, dtype=torch.uint8).fill_(1) for _ in range(4)]
        del blocks
        gc.collect()
        return process.memory_info().shared - before


def test_freed_memory_goes_back_to_the_system(ranks: Any) -> None:
    assert ranks(1, large_blocks_leave)[0] <= 300 << 20  # of 400 MiB at most 256 are kept


def outlive() -> float:
    with hdp.init() as comm:
        x = comm.empty(1000, dtype=torch.float32).fill_(2.0)
    return float(x.sum())


def test_a_tensor_outlives_its_communicator(ranks: Any) -> None:
    assert ranks(2, outlive) == [2000.0, 2000.0]


def test_bad_sizes_and_closed_communicators() -> None:
    comm = hdp.init()
    with pytest.raises(InvalidUsage, match="is -1, expected a whole number of at least 0"):
        comm.empty(2, -1)
    with pytest.raises(InvalidUsage, match="a rank's shared memory holds"):
        comm.empty(1 << 40, dtype=torch.uint8)
    assert comm.empty(3, 0).shape == (3, 0)
    comm.close()
    with pytest.raises(InvalidUsage, match="closed"):
        comm.empty(1)
