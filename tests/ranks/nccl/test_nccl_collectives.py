"""Collectives and messages by the nccl transport on a fake NCCL: the cases of the other transports, and their bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.device.communicator import DeviceCommunicator
from tests.harness.fakes import run_threads
from tests.harness.native import _testing
from tests.ranks.comm.test_collectives import everything
from tests.ranks.device.test_device_collectives import bits, in_the_background

TWO_HOSTS = (0, 0, 1, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_threads(world_size: int) -> None:
    run_threads(everything, world_size, (tuple(range(world_size)),), transport="nccl")


@pytest.mark.parametrize(("world_size", "count"), [(2, 5000), (3, 777), (4, 3001)])
def test_named_algorithms_give_the_bits_of_shared_memory(world_size: int, count: int) -> None:
    shm = run_threads(bits, world_size, count)
    assert run_threads(bits, world_size, count, transport="nccl") == shm
    if world_size == 4:
        two_hosts = run_threads(bits, 4, count, transport="nccl", hosts=TWO_HOSTS)
        assert two_hosts == run_threads(bits, 4, count, hosts=TWO_HOSTS)


@pytest.mark.parametrize("hosts", [(), (0, 1, 1)])
def test_many_in_flight_on_overlapping_subsets(hosts: tuple[int, ...]) -> None:
    def run() -> None:
        with hdp.init() as comm:
            in_the_background(comm)

    run_threads(run, 3, transport="nccl", hosts=hosts)


def mix(seed: int, count: int) -> None:
    """Random operations on random subsets, some waited for later; the same on all ranks."""
    generator = random.Random(seed)
    with hdp.init() as world:
        waiting: list[tuple[hdp.Work, torch.Tensor, float]] = []
        for index in range(count):
            ranks = generator.sample(range(world.size), generator.randint(1, world.size))
            size, op = generator.choice([1, 7, 3000]), generator.choice(["all_reduce", "all_gather", "ring"])
            algorithm, later = generator.choice(["auto", "ring", "direct"]), generator.random() < 0.5
            comm = world.subset(ranks)
            if comm is None:
                continue
            x = torch.full((size,), float(comm.rank + index))
            if op == "all_reduce":
                work = comm.all_reduce(x, algorithm=algorithm, async_op=True)
                expected, out = sum(range(comm.size)) + comm.size * index, x
            elif op == "all_gather":
                out = torch.zeros(comm.size * size)
                work = comm.all_gather(out, x, algorithm=algorithm, async_op=True)
                out, expected = out[-size:], comm.size - 1 + index
            else:
                out = torch.zeros(size)
                to, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                work, expected = comm.exchange([(x, to)], [(out, back)], async_op=True), back + index
            if later:
                waiting.append((work, out, float(expected)))
            else:
                work.wait()
                assert (out == expected).all(), (seed, index)
        for work, out, value in waiting:
            work.wait()
            assert (out == value).all(), seed


@pytest.mark.parametrize("hosts", [(), (0, 1, 0, 1, 2)])
def test_random_mixes(hosts: tuple[int, ...]) -> None:
    for seed in range(6):
        run_threads(mix, 5, seed, 40, transport="nccl", hosts=hosts)


def traffic() -> dict[str, int]:
    with hdp.init() as comm:
        assert isinstance(comm, DeviceCommunicator)
        assert comm.transport == "nccl"
        assert comm.landing_zone(torch.zeros(1)) is None
        before = comm.stats()
        comm.all_gather(torch.zeros(4 * 1000), torch.zeros(1000), algorithm="ring")
        return {name: n - before[name] for name, n in comm.stats().items() if "bytes" in name} | {
            "peers": comm.stats()["peers"],
            "buffers": comm.stats()["predicted_buffer_bytes"],
        }


def test_traffic_peers_and_predicted_memory() -> None:
    one_host = run_threads(traffic, 4, transport="nccl")
    assert [stats["bytes_sent"] for stats in one_host] == [3 * 4000] * 4
    assert [stats["remote_bytes_sent"] for stats in one_host] == [0] * 4
    assert [stats["peers"] for stats in one_host] == [3] * 4  # the joining of the host world counts too
    assert [stats["buffers"] for stats in one_host] == [_testing.nccl_buffer_bytes(2, 32)] * 4  # the neighbours
    two_hosts = run_threads(traffic, 4, transport="nccl", hosts=TWO_HOSTS)
    assert [stats["buffers"] for stats in two_hosts] == [_testing.nccl_buffer_bytes(1, 32)] * 4
    assert [stats["remote_bytes_sent"] for stats in two_hosts] == [0, 3 * 4000, 0, 3 * 4000]


def test_peers_are_connected_up_to_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted() -> Any:
        with hdp.init() as comm:
            return comm.stats()["predicted_buffer_bytes"]

    for distance, peers in (("0", 0), ("1", 2), ("2", 4), ("9", 5)):
        monkeypatch.setenv("HDPCOMM_NCCL_CONNECT", distance)
        assert run_threads(predicted, 6, transport="nccl") == [_testing.nccl_buffer_bytes(peers, 32)] * 6
    monkeypatch.setenv("HDPCOMM_NCCL_CONNECT", "far")
    with pytest.raises(hdp.InvalidUsage, match="HDPCOMM_NCCL_CONNECT='far'"):
        run_threads(predicted, 2, transport="nccl")


def test_two_worlds_after_each_other_and_at_once() -> None:
    def twice() -> float:
        with hdp.init() as comm:
            x = torch.ones(10)
            comm.all_reduce(x)
            comm.synchronize()
            return float(x[0])

    assert run_threads(twice, 3, transport="nccl") == [3.0] * 3
    assert run_threads(twice, 2, transport="nccl") == [2.0] * 2
