"""One-sided messages over the fake: what is put arrives when it may, and what NCCL's rules forbid is found."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

import hdpcomm as hdp
from tests.harness.native import _testing
from tests.harness.nccl_ranks import Operation, World

Message = tuple[int, int, int, int | None]
HALF = 1 << 14  # of a window: the first is for what arrives, the second for what is sent


class Windows(World):
    """Ranks with windows."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = [member.open_window(2 * HALF) for member in self.members]
        assert self.fake.run(0) == ""
        self.bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * (2 * HALF)).from_address(at)) for at in self.at]

    def exchange(self, sent: list[tuple[int, int, int, int]]) -> dict[int, tuple[list[Message], list[Message]]]:
        """One exchange of all ranks: (source, target, place, bytes) of each message; some are not put."""
        calls: dict[int, tuple[list[Message], list[Message]]] = {rank: ([], []) for rank in range(len(self.at))}
        for index, (source, target, place, size) in enumerate(sent):
            put = place if index % 3 else None
            calls[source][0].append((self.at[source] + HALF + place, size, target, put))
            calls[target][1].append((self.at[target] + place, size, source, put))
        return calls


def plan(generator: random.Random, size: int) -> list[tuple[int, int, int, int]]:
    """Messages between random ranks; what a rank gets lies side by side."""
    used = [0] * size
    sent = []
    for _ in range(generator.randint(1, 2 * size)):
        source, target = generator.sample(range(size), 2)
        count = generator.randint(1, 900)
        if used[target] + count <= HALF:
            sent.append((source, target, used[target], count))
            used[target] += count
    return sent


@pytest.mark.parametrize("size", [2, 3, 8])
def test_random_exchanges_with_collectives_between(size: int) -> None:
    for seed in range(40):
        generator = random.Random(seed)
        world = Windows(size)
        for step in range(4):
            sent = plan(generator, size)
            values = np.random.default_rng(seed + step)
            for rank in range(size):
                world.bytes[rank][HALF:] = values.integers(0, 256, HALF)
                world.bytes[rank][:HALF] = 0
            operation = Operation("all_gather", list(range(size)), 3, algorithm="ring")
            for rank, (sends, recvs) in world.exchange(sent).items():
                world.fake.label(rank, f"exchange {step}")
                world.members[rank].exchange(sends, recvs)
            world.enqueue([operation])
            assert world.fake.run(seed) == ""
            operation.check()
            for source, target, place, count in sent:
                got = world.bytes[target][place : place + count]
                assert (got == world.bytes[source][HALF + place : HALF + place + count]).all(), (seed, step)


def test_a_place_is_not_written_before_it_is_free() -> None:
    """A ring passes blocks on from where they arrived, with one buffer each for odd and even steps."""
    size, count = 5, 1000
    for seed in range(60):
        world = Windows(size)
        for rank in range(size):
            world.bytes[rank][:count] = rank
        for step in range(1, size):
            source, target = ((step - 1) % 2) * 4096, (step % 2) * 4096
            for rank, member in enumerate(world.members):
                member.exchange(
                    [(world.at[rank] + source, count, (rank + 1) % size, target)],
                    [(world.at[rank] + target, count, (rank - 1) % size, target)],
                )
        assert world.fake.run(seed) == ""
        for rank in range(size):
            assert (world.bytes[rank][((size - 1) % 2) * 4096 :][:count] == (rank + 1) % size).all()


def test_puts_count_as_messages_and_connect_nobody() -> None:
    world = Windows(4)
    for rank, member in enumerate(world.members):
        member.exchange([(world.at[rank] + HALF, 64, (rank + 1) % 4, 0)], [(world.at[rank], 64, (rank - 1) % 4, 0)])
    assert world.fake.run(1) == ""
    stats = world.members[0].stats()
    assert (stats["messages_sent"], stats["bytes_sent"], stats["peers"]) == (1, 64, 2)
    assert stats["predicted_buffer_bytes"] == 0


def test_waits_for_signals_that_never_come() -> None:
    world = Windows(2)
    world.members[0].exchange([(world.at[0] + HALF, 64, 1, 0)], [])
    assert "rank 0 in an operation waits for signals of 1" in world.fake.run(0)
    world = Windows(2)
    world.fake.label(1, "a message that nobody sends")
    world.members[1].exchange([], [(world.at[1], 64, 0, 0)])
    assert "rank 1 in a message that nobody sends waits for signals of 0" in world.fake.run(0)


def test_bad_puts() -> None:
    outside = np.zeros(8, np.uint8)
    cases = [
        (0, HALF, 2 * HALF - 4, 8, "beyond the window's end"),
        (0, HALF, 2 * HALF + 1, 0, "beyond the window's end"),
        (outside.ctypes.data, 0, 0, 8, "lie in no window"),
        (0, 2 * HALF - 4, 0, 8, "lie in no window"),
    ]
    for base, offset, place, size, text in cases:
        world = Windows(2)
        world.members[1].exchange([], [(world.at[1], size, 0, 0)])  # rank 0 does not wait for ever
        address = (base or world.at[0]) + offset
        with pytest.raises(hdp.DeviceError, match=f"ncclPutSignal failed on rank 0: invalid argument .*{text}"):
            world.members[0].exchange([(address, size, 1, place)], [])


@pytest.mark.parametrize("function", ["ncclSignal", "ncclPutSignal", "ncclWaitSignal"])
def test_failures_of_calls(function: str) -> None:
    world = Windows(2)
    world.fake.fail_next(function, 1, 3)
    with pytest.raises(hdp.DeviceError, match=rf"{function} failed on rank 1: internal error \(planted"):
        world.members[1].exchange([(world.at[1] + HALF, 4, 0, 0)], [(world.at[1], 4, 0, 0)])


@pytest.mark.parametrize("function", ["ncclMemAlloc", "ncclCommWindowRegister", "ncclCommQueryProperties"])
def test_failures_of_opening(function: str) -> None:
    world = World(2)
    member = world.members[1]
    world.fake.fail_next(function, -1 if function == "ncclMemAlloc" else 1, 1)
    with pytest.raises(hdp.DeviceError, match=rf"{function} failed on rank 1: unhandled cuda error"):
        member.puts_missing() and member.open_window(64) if "Query" in function else member.open_window(64)


def test_windows_that_differ() -> None:
    world = World(2)
    world.members[0].open_window(128)
    with pytest.raises(hdp.DeviceError, match="windows of 64 and 128 bytes"):
        world.members[1].open_window(64)


def test_a_window_can_be_closed() -> None:
    world = Windows(2)
    for member in world.members:
        member.close_window()
        member.close_window()  # nothing more
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    world.members[0].exchange([(x.ctypes.data, 16, 1, None)], [])
    world.members[1].exchange([], [(y.ctypes.data, 16, 0, None)])
    assert world.fake.run(0) == ""
    assert (y == 1).all()
    assert world.fake.complaints() == []


def test_what_is_missing() -> None:
    assert World(2).members[0].puts_missing() == ""
    world = World(2)
    world.fake.without_puts()
    assert "devices and networks do not support it" in world.members[0].puts_missing()
    old = _testing.FakeNccl(1, version=22902).join(0)
    assert old.puts_missing() == "the fake NCCL is NCCL 2.29.2, and at least 2.29.7 is needed"
