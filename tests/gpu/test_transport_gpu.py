"""The device transport on a GPU that several ranks share: functions of tests/ranks/device, and CUDA's own features."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, ring_attention, shard
from hdpcomm.measure.topology import measure_topology
from hdpcomm.testing import run_threads, spawn
from tests.harness.worlds import small_slots
from tests.ranks.device.test_device_collectives import bits, messages
from tests.ranks.device.test_device_peer_reads import WAYS, drawn
from tests.ranks.device.test_device_peer_reads import run as peer_run
from tests.ranks.device.test_device_training import training

# The clients of MPS share its queues, and with 32 of them each four ranks find no memory, or no device.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "16"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("world_size", [1, 2])
def test_messages(world_size: int) -> None:
    spawn(messages, world_size, transport="cuda")


def messages_in_small_slots() -> None:
    with small_slots():
        messages()


@pytest.mark.parametrize("world_size", [1, 2])
def test_messages_of_many_pieces(world_size: int) -> None:
    spawn(messages_in_small_slots, world_size, transport="cuda")


@pytest.mark.parametrize(("world_size", "count"), [(2, 5000), (2, 1_000_003)])
def test_the_same_bits_as_shared_memory(world_size: int, count: int) -> None:
    want = run_threads(bits, world_size, count, transport="shm")
    assert spawn(bits, world_size, count, transport="cuda") == want


def peer_bits(count: int, named: bool) -> dict[tuple[str, str], bytes]:
    """Results of sums of two ranks, where every order gives the same bits; operands in a tensor and in the landing
    zone."""
    with hdp.init() as comm:
        results = {}
        zone = comm.landing_zone(torch.empty(0, device=comm.device))
        for way in WAYS:
            blocks = comm.size if way[0] == "reduce_scatter" else 1
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                x = drawn(blocks * count, comm.rank, dtype).to(comm.device)
                num_bytes = x.numel() * x.element_size()
                if zone is not None and num_bytes <= zone.memory.numel():
                    landed = zone.memory[:num_bytes].view(dtype).copy_(x)
                    got = peer_run(comm, way, landed, "sum", in_place=False)
                    results["landed " + way[0] + way[1], str(dtype)] = got.cpu().view(torch.uint8).numpy().tobytes()
                    torch.cuda.synchronize()
                    comm.barrier()
                got = peer_run(comm, way if named else (way[0], "auto"), x, "sum", in_place=True)
                results[way[0] + way[1], str(dtype)] = got.cpu().view(torch.uint8).numpy().tobytes()
        return results


@pytest.mark.parametrize("count", [1, 5001, 9_000_001])
def test_peer_reads_give_the_bits_of_shared_memory(count: int) -> None:
    want = run_threads(peer_bits, 2, count, False, transport="shm")
    for got, expected in zip(spawn(peer_bits, 2, count, True, transport="cuda"), want, strict=True):
        for (name, dtype), value in got.items():
            assert value == expected[name.removeprefix("landed "), dtype], (name, dtype)


def test_ranks_that_are_threads_are_refused() -> None:
    with pytest.raises(hdp.InvalidUsage, match="each rank is a process"):
        run_threads(messages, 2, transport="cuda")
    run_threads(messages, 1, transport="cuda")


def long_messages() -> None:
    """More pieces each way than a driver holds operations."""
    with hdp.init() as comm:
        n = 3 << 28
        x = torch.full((n,), comm.rank + 1, dtype=torch.uint8, device=comm.device)
        y = torch.zeros_like(x)
        comm.exchange([(x, 1 - comm.rank)], [(y, 1 - comm.rank)])
        assert bool((y == 2 - comm.rank).all())


def in_slots_of_one_mib(fn: Any) -> None:
    with mock.patch.dict(os.environ, {"HDPCOMM_DEVICE_SLOT_BYTES": str(1 << 20)}):
        fn()


def test_messages_longer_than_a_queue() -> None:
    spawn(in_slots_of_one_mib, 2, long_messages, transport="cuda")


def host_tensors() -> None:
    with hdp.init() as comm:
        x = torch.full((7,), float(comm.rank))
        comm.all_reduce(x)  # by shared memory
        assert (x == sum(range(comm.size))).all()
        with pytest.raises(hdp.InvalidUsage, match="in host memory and on a device"):
            comm.all_gather(x.new_zeros(7 * comm.size, device=comm.device), x)


def test_host_tensors_go_by_the_host() -> None:
    spawn(host_tensors, 2, transport="cuda")


def topology() -> None:
    with hdp.init() as comm:
        kind = type(comm)
        with mock.patch.object(kind, "send", autospec=True, side_effect=kind.send) as sent:
            found = measure_topology(comm)
        assert {call.args[1].device.type for call in sent.call_args_list} == {"cuda"}
        assert found.transport == comm.transport


def test_the_topology_measures_device_memory() -> None:
    spawn(topology, 2, transport="cuda")


def on_streams() -> None:
    """Operations follow the current stream, and the host does not wait for them."""
    with hdp.init() as comm:
        x, y = (torch.zeros(1 << 20, device=comm.device) for _ in range(2))
        to, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for turn in range(1, 20):
            with torch.cuda.stream(torch.cuda.Stream()):
                x.fill_(turn * (comm.rank + 1))
                work = comm.exchange([(x, to)], [(y, back)], async_op=turn % 2 == 0)
                work.wait()
                expected = turn * (back + 1)
                assert bool((y == expected).all())
                torch.cuda.current_stream().synchronize()


def test_current_stream() -> None:
    spawn(on_streams, 2, transport="cuda")


def graphs() -> None:
    with hdp.init() as comm:
        to, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        zone = comm.landing_zone(torch.empty(0, device=comm.device))
        assert zone is not None
        landed = zone.memory[:8192].view(torch.float32)
        x = torch.zeros(2048, device=comm.device)
        y, total, shot, twice = (torch.empty_like(x) for _ in range(4))

        def step() -> None:
            comm.exchange([(x, to)], [(y, back)])
            comm.all_reduce(x, out=total, algorithm="ring")
            comm.all_reduce(x, out=shot, algorithm="one_shot")
            comm.all_reduce(total, out=twice, algorithm="two_shot")
            work = comm.exchange([(x, to, 0)], [(landed, back, 0)], async_op=True)
            work.wait()
            y.add_(landed)

        step()
        comm.synchronize()
        torch.cuda.synchronize()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        for turn in range(1, 8):
            x.fill_(turn * (comm.rank + 1))
            graph.replay()
            torch.cuda.synchronize()
            assert bool((y == 2 * turn * (back + 1)).all())
            everyone = turn * sum(range(1, comm.size + 1))
            assert bool((total == everyone).all())
            assert bool((shot == everyone).all())
            assert bool((twice == comm.size * everyone).all())


def test_graphs_of_exchange_collective_and_ring_step() -> None:
    spawn(graphs, 2, transport="cuda")


def attention(transport: str) -> list[torch.Tensor]:
    with hdp.init(transport=transport) as comm:
        dtype = torch.bfloat16 if comm.device.type == "cuda" else torch.float32
        cu = torch.tensor([0, 700, 1024], dtype=torch.int32)
        generator = torch.Generator().manual_seed(3)
        leaves = [
            shard(torch.randn(1024, heads, 64, generator=generator), cu, rank=comm.rank, size=comm.size)
            .to(comm.device, dtype)
            .requires_grad_()
            for heads in (8, 2, 2)
        ]
        out = ring_attention(*leaves, comm=comm, cu_seqlens=cu, options=AttentionOptions(variant="ring"))
        assert isinstance(out, torch.Tensor)
        out.float().square().sum().backward()
        return [out.detach().float().cpu(), *(leaf.grad.float().cpu() for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ring_attention_to_bf16_tolerance(world_size: int) -> None:
    for got, want in zip(spawn(attention, world_size, "cuda"), run_threads(attention, world_size, "shm"), strict=True):
        for mine, expected in zip(got, want, strict=True):
            assert float((mine - expected).norm() / expected.norm()) < 2e-2


def test_trainer() -> None:
    first, *others = spawn(training, 2, transport="cuda")
    for losses, weights in others:
        assert losses == first[0]
        assert torch.equal(weights, first[1])


def disagree() -> str:
    comm = hdp.init(timeout=20)
    x = torch.zeros(1000 + comm.rank, device=comm.device)

    def reduce_and_look() -> None:
        comm.all_reduce(x)
        comm.synchronize()

    with pytest.raises(hdp.Mismatch) as info:
        reduce_and_look()
    with pytest.raises(hdp.Aborted, match="make a new one"):
        comm.all_reduce(x)
    return str(info.value)


def test_mismatch_releases_the_streams() -> None:
    messages: list[Any] = spawn(disagree, 2, transport="cuda")
    assert all("1000 x float32" in message and "1001 x float32" in message for message in messages)
