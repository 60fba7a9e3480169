"""The nccl transport over the fake: every schedule is right and ends, order matters, every error path is driven."""

from __future__ import annotations

import random

import numpy as np
import pytest

import hdpcomm as hdp
from hdpcomm._core import comm
from tests.harness.native import _testing
from tests.harness.nccl_ranks import ROOTED, Operation, World

CASES = [(op, algorithm) for op in comm.OPS if op != "send/recv" for algorithm in comm.algorithms_of(comm.OPS[op])]


@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_every_collective_and_algorithm(op: str, algorithm: str) -> None:
    for size in range(2, 34):
        world = World(size)
        counts = (0, 1, 7) if size < 6 else (3,)
        operations = [
            Operation(op, list(range(size)), count, algorithm=algorithm, root=(size // 2) if op in ROOTED else 0)
            for count in counts
        ]
        world.enqueue(operations)
        assert world.fake.run(size) == "", (op, algorithm, size)
        for operation in operations:
            operation.check()


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"])
def test_hosts_with_any_number_of_members(op: str) -> None:
    """Ranks of a small host have fewer steps than those of a large one, and must not wait in them for each other."""
    generator = random.Random(5)
    layouts = [[0, 0, 1, 2, 2, 2], [0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2], [0, 1, 2, 2, 2, 3, 3]]
    layouts += [[generator.randrange(5) for _ in range(generator.randint(2, 14))] for _ in range(60)]
    for seed, hosts in enumerate(layouts):
        world = World(len(hosts))
        ranks = list(range(len(hosts)))
        operations = [
            Operation(op, ranks, count, algorithm="hierarchical", root=len(hosts) // 2, redop="avg", hosts=hosts)
            for count in (0, 1, 20)
        ]
        world.enqueue(operations)
        assert world.fake.run(seed) == "", hosts
        for operation in operations:
            operation.check()


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_the_whole_world_takes_nccls_own_collectives(size: int) -> None:
    world = World(size)
    ranks = list(range(size))
    operations = [
        Operation("all_reduce", ranks, 9, redop="max"),
        Operation("all_reduce", ranks, 9, redop="avg"),
        Operation("all_gather", ranks, 4),
        Operation("reduce_scatter", ranks, 4),
        Operation("broadcast", ranks, 5, root=size - 1),
        Operation("gather", ranks, 2),  # NCCL has none: a schedule
    ]
    world.enqueue(operations)
    assert world.fake.run(0) == ""
    for operation in operations:
        operation.check()
    stats = world.members[0].stats()
    assert stats["nccl_whole_world_ops"] == 5
    assert stats["messages_sent"] == 0
    assert stats["peers"] == size - 1


def mix(generator: random.Random, size: int, count: int) -> list[Operation]:
    operations = []
    for _ in range(count):
        op, algorithm = generator.choice(CASES)
        ranks = generator.sample(range(size), generator.randint(1, min(size, 8)))
        operations.append(
            Operation(
                op,
                ranks,
                generator.randint(0, 6),
                algorithm=generator.choice([algorithm, "auto"]),
                root=generator.randrange(len(ranks)),
                redop=generator.choice(["sum", "max", "avg"]),
            )
        )
    return operations


def test_a_thousand_random_mixes_of_overlapping_subsets() -> None:
    generator = random.Random(11)
    for seed in range(1000):
        size = generator.choice([2, 3, 4, 6, 9]) if seed % 200 else 64
        world = World(size)
        operations = mix(generator, size, 6 if seed % 200 else 40)
        world.enqueue(operations)
        assert world.fake.run(seed) == "", seed
        for operation in operations:
            operation.check()


def test_a_rank_with_another_order_is_named() -> None:
    found = 0
    for seed in range(40):
        generator = random.Random(seed)
        world = World(5)
        operations = [
            Operation(generator.choice(["all_gather", "all_reduce"]), [0, 1, 2, 3, 4], 2 + i, algorithm="ring")
            for i in range(4)
        ]
        rank = generator.randrange(5)
        world.enqueue(operations, swap=(rank, generator.randrange(3)))
        wrong = world.fake.run(seed)
        assert f"the order of rank {rank} differs from the others'" in wrong, wrong
        assert "sends" in wrong or "wait for each other" in wrong
        found += 1
    assert found == 40


def test_ring_exchanges_with_compute_between() -> None:
    """KV that goes round a ring of a subset, as ring attention sends it: one exchange a step, all ranks at once."""
    for ranks in ([0, 1], [5, 2, 7], [3, 1, 4, 0, 6]):
        world = World(8)
        n = len(ranks)
        kv = {rank: [np.full(33, rank, np.float32), np.zeros(33, np.float32)] for rank in ranks}
        for step in range(n - 1):
            for i, rank in enumerate(ranks):
                sent, received = kv[rank][step % 2], kv[rank][(step + 1) % 2]
                world.fake.label(rank, f"step {step}")
                world.members[rank].exchange(
                    [(sent.ctypes.data, sent.nbytes, ranks[(i + 1) % n])],
                    [(received.ctypes.data, received.nbytes, ranks[(i - 1) % n])],
                )
        assert world.fake.run(3) == ""
        for i, rank in enumerate(ranks):
            assert (kv[rank][(n - 1) % 2] == ranks[(i + 1) % n]).all()
            assert world.members[rank].stats()["peers"] == min(n - 1, 2)


def test_ungrouped_sends_deadlock_and_are_found() -> None:
    world = World(2)
    x, y = np.zeros(4, np.float32), np.zeros(4, np.float32)
    for rank in range(2):
        world.members[rank].exchange([(x.ctypes.data, 16, 1 - rank)], [])  # both send first
        world.members[rank].exchange([], [(y.ctypes.data, 16, 1 - rank)])
    assert "wait for each other for ever: rank 0" in world.fake.run(0)


def test_peers_are_connected_ahead_and_counted() -> None:
    world = World(6)
    for member in world.members:
        member.connect_ahead(1)
    assert world.fake.run(0) == ""
    for member in world.members:
        stats = member.stats()
        assert stats["peers"] == 2
        assert stats["predicted_buffer_bytes"] == 2 * _testing.nccl_buffer_bytes(1, 32) == 2 * 32 * 12_582_912
    ring = Operation("all_gather", list(range(6)), 4, algorithm="ring")
    world.enqueue([ring])
    assert world.fake.run(1) == ""
    assert world.members[0].stats()["peers"] == 2  # the ring's neighbours were connected


@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_no_group_is_too_large(op: str, algorithm: str) -> None:
    assert _testing.nccl_groups(comm.OPS[op], comm.ALGORITHMS[algorithm], 150, 1) <= 256


def test_too_large_an_exchange_is_refused() -> None:
    world = World(2)
    x = np.zeros(1, np.float32)
    with pytest.raises(hdp.InvalidUsage, match="200 sends and 100 receives; NCCL takes 256"):
        world.members[0].exchange([(x.ctypes.data, 4, 1)] * 200, [(x.ctypes.data, 4, 1)] * 100)
    test_peers_are_connected_ahead_and_counted()  # the next world works


CALLS = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize(("code", "text"), [(1, "unhandled cuda error"), (5, "invalid usage")])
def test_failures_of_calls(function: str, code: int, text: str) -> None:
    world = World(3)
    rank = -1 if "Group" in function else 1
    world.fake.fail_next(function, rank, code)
    operation = Operation("all_gather", [0, 1, 2], 4, algorithm="ring")
    with pytest.raises(hdp.DeviceError, match=rf"{function} failed on rank \d: {text} \(planted in {function}\)"):
        world.enqueue([operation])


def test_failures_of_whole_world_collectives() -> None:
    names = {"all_reduce": "AllReduce", "all_gather": "AllGather"}
    names |= {"reduce_scatter": "ReduceScatter", "broadcast": "Broadcast"}
    for op, name in names.items():
        world = World(2)
        world.fake.fail_next(f"nccl{name}", 1, 3)
        with pytest.raises(hdp.DeviceError, match=f"nccl{name} failed on rank 1: internal error"):
            world.enqueue([Operation(op, [0, 1], 4)])


def test_asynchronous_errors() -> None:
    world = World(2)
    world.members[0].check_async()
    world.fake.set_async_error(0, 6)
    with pytest.raises(hdp.PeerLost, match="an operation of NCCL failed on rank 0: remote error"):
        world.members[0].check_async()
    world.members[0].abort()
    for call in (world.members[0].check_async, lambda: world.members[0].connect_ahead(1)):
        with pytest.raises(hdp.Aborted, match="make a new one"):
            call()
    world.members[1].check_async()


def test_initialisation_has_a_deadline_and_says_what_failed() -> None:
    fake = _testing.FakeNccl(2)
    fake.stall_init()
    with pytest.raises(hdp.CommTimeout, match=r"rank 1 waited 0\.05.* communicator of 2 ranks"):
        fake.join(1, 0.05)
    fake = _testing.FakeNccl(2)
    fake.fail_next("ncclCommInitRankConfig", 0, 2)
    with pytest.raises(hdp.DeviceError, match="ncclCommInitRankConfig failed on rank 0: system error"):
        fake.join(0)
    fake.fail_next("ncclGetUniqueId", -1, 2)
    with pytest.raises(hdp.DeviceError, match="ncclGetUniqueId failed: system error"):
        fake.join(0)
    fake.join(0)
    with pytest.raises(hdp.DeviceError, match="invalid argument"):
        fake.join(0)  # twice


def test_different_whole_world_calls_are_named() -> None:
    world = World(3)
    operations = [Operation("all_gather", [0, 1, 2], 4), Operation("all_reduce", [0, 1, 2], 5)]
    world.enqueue(operations, swap=(2, 0))
    wrong = world.fake.run(0)
    assert "rank 2 called ncclAllReduce(5) where rank 0 called ncclAllGather(4)" in wrong
    assert "the order of rank 2 differs from the others'" in wrong
