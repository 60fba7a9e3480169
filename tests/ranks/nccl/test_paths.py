"""Links inside hosts and NCCL between them in one world: simulated devices, a fake NCCL, ranks told that they are on
several hosts. The results of shared memory, and every byte the way that its peer has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.costs import cost_names
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.comm.machine import Machine
from hdpcomm.testing import spawn
from tests.harness.attention_oracle import GRADS, Case
from tests.harness.fakes import run_threads
from tests.harness.machines import joining_on
from tests.harness.native import _testing
from tests.harness.random_mix import random_mix
from tests.harness.worlds import small_slots
from tests.ranks.comm.test_collectives import check_reductions, everything
from tests.ranks.device.test_device_collectives import bits, messages
from tests.ranks.device.test_device_training import MASKS, attention, training

PATHS = "cuda+nccl"
TWO, THREE = (0, 0, 0, 1, 1), (0, 0, 1, 2, 2, 2)


@pytest.fixture(autouse=True)
def pieces() -> Iterator[None]:
    """Messages of some KB go through slots in pieces."""
    with small_slots():
        yield


@pytest.mark.parametrize("subset", [(0, 1), (2, 0), (3, 1, 0)])
def test_every_collective_and_algorithm(subset: tuple[int, ...]) -> None:
    """Subsets inside a host, across hosts, in any order. One at a time: operations that go from thread to thread take
    ten times as long beside two busy processes, since each hand-over waits for their time slices."""
    run_threads(everything, 4, (subset,), transport=PATHS, hosts=(0, 0, 1, 0))


def rounds(subset: tuple[int, ...], seeds: range) -> None:
    with hdp.init() as world:
        comm = world.subset(subset)
        for seed in seeds if comm is not None else ():
            assert comm is not None
            if comm.rank == 0:
                _testing.TestDevice.pause_at_random(seed, most_us=(50, 200, 1000)[seed % 3])
            check_reductions(comm, (33, 11, 700)[seed % 3], torch.float32, "sum")


@pytest.mark.parametrize("subset", [(3, 1, 0), (2, 0), (1, 2, 3)])
def test_streams_that_pause_anywhere(subset: tuple[int, ...]) -> None:
    """Threads of streams pause at submissions, operations, waits and flags. A reduce_scatter of 33 elements on the
    first subset did not end once in some hundred runs of all tests. HDPCOMM_TEST_PAUSED_ROUNDS: how many (10)."""
    count = int(os.environ.get("HDPCOMM_TEST_PAUSED_ROUNDS", "10"))
    try:
        devices = {"hosts": (0, 0, 1, 0), "opens": _testing.TestDevice}
        run_threads(rounds, 4, subset, range(count), transport=PATHS, timeout=60.0 + count, **devices)
    finally:
        _testing.TestDevice.pause_at_random(0, most_us=0)


@pytest.mark.parametrize(("hosts", "count"), [(TWO, 3001), (THREE, 777), ((0, 1, 0, 1, 1), 5000), ((0, 1, 1), 1)])
def test_named_algorithms_give_the_bits_of_shared_memory(hosts: tuple[int, ...], count: int) -> None:
    by_paths = run_threads(bits, len(hosts), count, transport=PATHS, hosts=hosts)
    assert by_paths == run_threads(bits, len(hosts), count, hosts=hosts)


@pytest.mark.parametrize("hosts", [TWO, THREE])
def test_exchanges_with_all_at_once(hosts: tuple[int, ...]) -> None:
    run_threads(messages, len(hosts), transport=PATHS, hosts=hosts)


def mixes(seeds: range) -> None:
    with hdp.init() as world:
        for seed in seeds:
            random_mix(seed, 8, world)


@pytest.mark.parametrize("hosts", [TWO, THREE, (0, 1, 0, 2, 1, 0)])
def test_random_mixes(hosts: tuple[int, ...]) -> None:
    """A hundred mixes a layout, of overlapping subsets, some operations in the background."""
    for begin in range(0, 100, 20):
        run_threads(mixes, len(hosts), range(begin, begin + 20), transport=PATHS, hosts=hosts)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1)])
@pytest.mark.parametrize("mask", MASKS)
def test_ring_attention(mask: str, hosts: tuple[int, ...]) -> None:
    """Blocks land where the next rank shares the host, and go by NCCL where the ring crosses."""
    options: dict[str, Any] = {"variant": "ring"}
    case = Case(4, [150, 7, 1, 61], heads=4, kv_heads=4, dtype=torch.float32, **MASKS[mask], options=options)
    by_paths = run_threads(attention, 4, case, transport=PATHS, hosts=hosts)
    for (got, messages_sent), (want, _) in zip(by_paths, run_threads(attention, 4, case), strict=True):
        assert messages_sent > 0
        for name in GRADS:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("variant", ["gather", "ulysses"])
def test_other_attention(variant: str) -> None:
    case = Case(4, [150, 7, 61], heads=4, kv_heads=4, dtype=torch.float32, options={"variant": variant})
    by_paths = run_threads(attention, 4, case, transport=PATHS, hosts=(0, 0, 0, 1))
    for (got, _), (want, _) in zip(by_paths, run_threads(attention, 4, case), strict=True):
        for name in GRADS:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_training() -> None:
    by_paths = run_threads(training, 3, transport=PATHS, hosts=(0, 0, 1))
    for (losses, weights), (want_losses, want_weights) in zip(by_paths, run_threads(training, 3), strict=True):
        assert losses == pytest.approx(want_losses, rel=1e-5)
        torch.testing.assert_close(weights, want_weights, rtol=1e-4, atol=1e-4)


# --- which way ------------------------------------------------------------------------------------------------------


COUNT = 12 * 1024
SUBSETS = ((0, 1, 2, 3, 4), (4, 0, 2), (0, 3), (2, 4, 1, 3), (1, 2), (4, 3), (0, 2, 1))


def run(comm: hdp.Communicator, op: str, algorithm: str) -> None:
    """One collective of about COUNT float32 in the whole buffer, checked."""
    n, part = comm.size, COUNT // comm.size
    out = torch.full((part * n,), float(comm.rank))
    if op == "all_gather":
        comm.all_gather(out, torch.full((part,), float(comm.rank)), algorithm=algorithm)
        assert torch.equal(out, torch.arange(float(n)).repeat_interleave(part))
    elif op == "reduce_scatter":
        comm.reduce_scatter(got := torch.empty(part), out, algorithm=algorithm)
        assert (got == n * (n - 1) / 2).all()
    elif op == "all_reduce":
        comm.all_reduce(out, algorithm=algorithm)
        assert (out == n * (n - 1) / 2).all()
    else:
        comm.broadcast(out, n - 1, algorithm=algorithm)
        assert (out == n - 1).all()


Counts = dict[tuple[str, tuple[int, ...]], dict[str, int]]


def traffic() -> Counts:
    """What each collective adds to this rank's counts."""
    found: Counts = {}
    with hdp.init() as world:
        for ranks in SUBSETS:
            comm = world.subset(ranks)
            algorithm = "hierarchical" if len({TWO[rank] for rank in ranks}) > 1 else "auto"
            for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
                before = world.stats()
                if comm is not None:
                    run(comm, op, algorithm)
                found[op, ranks] = {name: n - before[name] for name, n in world.stats().items()}
    return found


def crossing_minimum(op: str, ranks: tuple[int, ...]) -> int:
    """Bytes that must cross between the two hosts, in both directions together."""
    part = COUNT // len(ranks) * 4
    sizes = [sum(TWO[rank] == host for rank in ranks) for host in (0, 1)]
    if min(sizes) == 0:
        return 0
    whole = part * len(ranks)
    return {"all_gather": whole, "reduce_scatter": whole, "all_reduce": 2 * whole, "broadcast": whole}[op]


def test_what_crosses_crosses_once_and_nothing_else_goes_by_nccl() -> None:
    found = run_threads(traffic, 5, transport=PATHS, hosts=TWO)
    for op, ranks in found[0]:
        counts = [found[rank][op, ranks] for rank in ranks]
        minimum = crossing_minimum(op, ranks)
        remote = sum(each["remote_bytes_sent"] for each in counts)
        # Calls are told over the host world where hosts differ: 100 bytes or so for each pair.
        assert minimum <= remote <= 1.01 * minimum + (4000 if minimum else 0), (op, ranks, remote, minimum)
        groups = sum(each["nccl_groups"] for each in counts)
        assert (groups > 0) == (minimum > 0), (op, ranks, groups)
        if minimum == 0:
            assert sum(each["bytes_sent"] for each in counts) >= COUNT, (op, ranks)


def chosen() -> list[Any]:
    with hdp.init() as world:
        inside, across = world.subset([1, 0]), world.subset([1, 2])
        found: list[Any] = []
        if inside is not None:
            assert inside.algorithms("all_reduce")[-2:] == ("one_shot", "two_shot")
            for algorithm in ("one_shot", "two_shot", "auto"):
                inside.all_reduce(x := torch.ones(700), algorithm=algorithm)
                assert (x == 2).all()
        if across is not None:
            assert "one_shot" not in across.algorithms("all_reduce")
            with pytest.raises(hdp.InvalidUsage, match="one_shot"):
                across.all_reduce(torch.ones(7), algorithm="one_shot")
        assert isinstance(world, DeviceCommunicator)
        return [*found, world.transport, [world.lands(peer) for peer in range(3)]]


def test_reading_peers_inside_a_host_only() -> None:
    found = run_threads(chosen, 3, transport=PATHS, hosts=(0, 0, 1))
    assert found == [["sim+nccl", [True, True, False]]] * 2 + [["sim+nccl", [False, False, False]]]


def test_the_whole_world_goes_to_nccls_own_collectives() -> None:
    def whole() -> tuple[int, int]:
        with hdp.init() as world:
            assert isinstance(world, DeviceCommunicator)
            before = world.streams.stats()["nccl_whole_world_ops"]
            world.all_reduce(x := torch.full((9,), float(world.rank)))
            assert (x == 3).all()
            named = world.streams.stats()["nccl_whole_world_ops"]
            world.all_reduce(x, algorithm="ring")
            return named - before, world.streams.stats()["nccl_whole_world_ops"] - named

    assert run_threads(whole, 3, transport=PATHS, hosts=(0, 1, 1)) == [(1, 0)] * 3


def landings() -> int:
    """A block passed round the ring; where it may land, it does."""
    with hdp.init() as world:
        zone = world.landing_zone(torch.empty(0))
        to, back = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        block = torch.full((500,), float(world.rank))
        got = torch.zeros(500)
        if zone is not None:
            got = zone.memory[4096:6096].view(torch.float32)
        send = (block, to, 4096) if world.lands(to) else (block, to)
        recv = (got, back, 4096) if world.lands(back) else (got, back)
        world.exchange([send], [recv])
        assert (got == back).all()
        world.exchange([send], [recv], async_op=True).wait()
        if not world.lands(to):
            with pytest.raises(hdp.InvalidUsage, match=rf"with rank {to}, to which rank {world.rank} has no link"):
                world.exchange([(block, to, 0)], [])
        if not world.lands(back):
            with pytest.raises(hdp.InvalidUsage, match=r"has no link: give one only where Communicator\.lands"):
                world.exchange([], [(got, back, 0)])
        world.exchange([send], [recv])
        with pytest.raises(hdp.InvalidUsage):
            world.lands(world.size)
        return 0 if zone is None else zone.memory.numel()


def test_landing_zones_are_for_the_peers_of_the_host() -> None:
    assert run_threads(landings, 4, transport=PATHS, hosts=(0, 0, 1, 1)) == [1 << 20] * 4
    assert run_threads(landings, 3, transport=PATHS, hosts=(0, 1, 1)) == [0, 1 << 20, 1 << 20]


def memory() -> tuple[str, int, int]:
    with hdp.init() as world:
        assert isinstance(world, DeviceCommunicator)
        return world.transport, _testing.arena_bytes(world.streams), world.stats()["predicted_buffer_bytes"]


def test_memory_does_not_grow_with_the_number_of_hosts() -> None:
    """The arena of a rank does not grow, and NCCL is only connected to ranks without a link."""
    two = run_threads(memory, 4, transport=PATHS, hosts=(0, 0, 1, 1))
    many = run_threads(memory, 12, transport=PATHS, hosts=tuple(rank // 2 for rank in range(12)))
    assert {found[1] for found in two} == {found[1] for found in many}
    assert two[0][1] < (1 << 20) + 8192 + 3 * 4 * 4096 + 8192 + 2 * 4 * 8192  # small messages have slots of their own
    assert {found[2] for found in (*two, *many)} == {0}  # peers of other hosts share buffers
    alone = run_threads(memory, 3, transport=PATHS, hosts=(0, 1, 1))
    assert alone[0][1] == 0
    assert alone[1][1] == two[0][1]


# --- GPUs that do not reach each other, and worlds of one kind --------------------------------------------------------


def test_two_islands_of_a_host() -> None:
    def on_islands(fn: Callable[..., Any], *args: Any) -> list[Any]:
        return run_threads(fn, 4, *args, transport=PATHS, reaches=lambda own, other: own // 2 == other // 2)

    assert on_islands(bits, 900) == run_threads(bits, 4, 900)
    on_islands(mixes, range(10))

    def what() -> list[bool]:
        with hdp.init() as world:
            assert world.transport == "sim+nccl"
            pair, rest = world.subset([2, 3]), world.subset([1, 2])
            assert pair is None or "one_shot" in pair.algorithms("all_gather")
            assert rest is None or "one_shot" not in rest.algorithms("all_gather")
            return [world.lands(peer) for peer in range(4)]

    assert on_islands(what) == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


def test_reach_that_is_not_transitive() -> None:
    """0 and 2 reach 1 but not each other, on one of two hosts; and 3 reaches 4, but not the other way round."""
    hosts = (0, 0, 0, 1, 1)

    def apart(fn: Callable[..., Any], *args: Any) -> list[Any]:
        def reaches(own: int, other: int) -> bool:
            return {own, other} != {0, 2} and (own, other) != (4, 3)

        return run_threads(fn, 5, *args, transport=PATHS, hosts=hosts, reaches=reaches)

    assert apart(bits, 333) == run_threads(bits, 5, 333, hosts=hosts)
    apart(mixes, range(10))
    case = Case(5, [150, 7, 61], heads=2, kv_heads=2, dtype=torch.float32, options={"variant": "ring"})
    by_paths = apart(attention, case)
    for (got, _), (want, _) in zip(by_paths, run_threads(attention, 5, case), strict=True):
        assert all(torch.equal(got[name], want[name]) for name in GRADS)


def test_the_cuda_transport_alone_says_what_is_missing() -> None:
    def alone() -> None:
        with pytest.raises(hdp.InvalidUsage, match=r"device \d of rank \d cannot read .* take transport='auto'"):
            hdp.init(timeout=5)

    run_threads(alone, 2, transport="sim", reaches=lambda own, other: own == other)


@pytest.mark.parametrize(
    ("size", "hosts", "name"), [(1, (), "sim"), (3, (), "sim"), (3, (0, 1, 2), "nccl"), (3, (0, 1, 1), "sim+nccl")]
)
def test_what_a_world_comes_to(size: int, hosts: tuple[int, ...], name: str) -> None:
    """NCCL is opened where some pair needs it, and only there."""
    opened = []

    class Fake(_testing.FakeNccl):
        def library(self, rank: int, device: Any) -> Any:
            opened.append(rank)
            return super().library(rank, device)

    def what() -> tuple[str, float]:
        with hdp.init() as world:
            world.all_reduce(x := torch.ones(3))
            return world.transport, float(x[0])

    found = run_threads(what, size, transport=PATHS, hosts=hosts, fake_nccl=Fake(size))
    assert found == [(name, float(size))] * size
    assert sorted(opened) == ([] if name == "sim" else list(range(size)))


def as_processes() -> tuple[str, float, str]:
    """On one host; then told that they are on two, where NCCL is needed, and missing."""

    class WithoutNccl(Machine):
        def device(self, transport: str, rank: int, size: int) -> Any:
            del transport, size
            return _core.device.open_sim(rank)

        def nccl(self, rank: int, device: Any) -> Any:
            del rank, device
            raise hdp.DeviceError("NCCL is not here")

    with joining_on(WithoutNccl()):
        with hdp.init(PATHS, timeout=20) as world:
            world.all_reduce(x := torch.ones(70_000))
            found = world.transport, float(x[-1])
        os.environ["HDPCOMM_HOSTID"] = str(int(os.environ["RANK"]) // 2)
        with pytest.raises(hdp.DeviceError, match="NCCL is not here") as info:
            hdp.init(PATHS, timeout=20)
    return *found, str(info.value)


def test_processes() -> None:
    assert spawn(as_processes, 3) == [("sim", 3.0, "NCCL is not here")] * 3


def test_costs_of_both_kinds() -> None:
    assert cost_names("cuda+nccl") == ("cuda", "nccl between nodes")
    assert cost_names("sim+nccl") == ("sim", "nccl between nodes")
    assert cost_names("nccl") == ("nccl", "nccl between nodes")
    assert cost_names("shm+tcp") == ("shm", "tcp")
    assert cost_names("cuda") == ("cuda", "cuda")
