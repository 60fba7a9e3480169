"""Messages of a few KiB, which are one kernel of an exchange: what arrives, in which order, and how much is enqueued.

The kernels themselves: tests/unit/kernels/test_small_messages_emulated.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import testing
from hdpcomm._core import settings
from hdpcomm.testing.device_check import check
from tests.harness.fakes import FakeMachine
from tests.harness.native import _testing
from tests.harness.ring_program import annotated
from tests.harness.stream_programs import joined
from tests.harness.worlds import small_slots


def numbered() -> None:
    """Each message says its number; the first ones are sent beside the caller's stream, and the others come back to the
    slots of these."""
    with joined() as rank:
        r, count = rank.comm.rank, 12
        tensors = [torch.zeros(3) for _ in range(count)]
        if r == 0:
            for i, x in enumerate(tensors):
                rank.device.fill(x.data_ptr(), i + 1, bytes=12, stream=rank.stream)
        works = []
        for i, x in enumerate(tensors):
            message = [(x, 1 - r, None)]
            works.append(rank.exchange(*((message, []) if r == 0 else ([], message)), background=i % 6 == r))
        for work in works:
            work.wait_on(rank.stream)
        for i, x in enumerate(tensors):
            copy = torch.empty_like(x)
            rank.device.copy(copy.data_ptr(), x.data_ptr(), bytes=12, stream=rank.stream)
            rank.device.synchronize_stream(rank.stream)
            rank.device.annotate_read(copy.data_ptr(), 12)
            assert set(copy.view(torch.uint8).tolist()) == {i + 1}


def test_messages_keep_their_order_whatever_their_streams() -> None:
    with small_slots(), annotated():
        check(numbered, 2, seeds=range(150), transport="sim")


def drawn(seed: int) -> None:
    """Messages of all sizes around the limits, several to a peer, beside collectives of subsets; equal on all ranks."""
    with hdp.init() as comm:
        n, r = comm.size, comm.rank
        source = random.Random(seed)
        for turn in range(12):
            sizes = {
                (a, b): [source.choice((0, 1, 63, 64, 65, 2000, 2048, 2049, 5000)) for _ in range(source.randint(0, 6))]
                for a in range(n)
                for b in range(n)
            }
            values = {
                (a, b, k): torch.arange(size, dtype=torch.float32) + 100 * a + 10 * b + k + turn
                for (a, b), each in sizes.items()
                for k, size in enumerate(each)
            }
            sends = [(x, b) for (a, b, _), x in values.items() if a == r]
            wanted = [(x, a) for (a, b, _), x in values.items() if b == r]
            recvs = [(torch.zeros_like(x), a) for x, a in wanted]
            work = comm.exchange(sends, recvs, async_op=source.random() < 0.5)
            members = sorted(source.sample(range(n), source.randint(2, n)), key=lambda _: source.random())
            count = source.choice((1, 2, 64, 2048, 2049))
            algorithm = source.choice(("one_shot", "two_shot", "ring", "auto"))
            group = comm.subset(members)
            if group is not None:
                x = torch.arange(count, dtype=torch.float32) + r
                want = len(members) * torch.arange(count, dtype=torch.float32) + sum(members)
                out = torch.empty(count)
                group.all_reduce(x, out=out, algorithm=algorithm)
                assert torch.equal(out, want), algorithm
                group.all_reduce(x, algorithm=algorithm)
                assert torch.equal(x, want), algorithm
                whole = torch.empty(count * group.size)
                group.all_gather(whole, out + group.rank, algorithm="one_shot")
                assert torch.equal(whole.view(group.size, count)[:, 0], want[0] + torch.arange(group.size))
                part = torch.empty(count)
                group.reduce_scatter(part, whole, algorithm="one_shot")
                assert torch.equal(part, group.size * (want + group.rank))
                group.broadcast(part, group.size - 1)
                assert torch.equal(part, group.size * (want + group.size - 1))
            if work is not None:
                work.wait()
            for (got, _), (want, _) in zip(recvs, wanted, strict=True):
                assert torch.equal(got, want)


def test_drawn_messages_and_collectives() -> None:
    for seed in range(6):
        testing.run_threads(drawn, 2 + seed % 3, seed, transport="sim")


def test_none_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_DEVICE_SMALL_BYTES", "0")
    testing.run_threads(drawn, 3, 1, transport="sim")


def late_receives() -> None:
    """A receive in the background for which the peer is late holds up no send, no other peer, and no later exchange's
    sends."""
    with hdp.init() as comm:
        r, (a, b, c, d) = comm.rank, (torch.full((4,), float(k)) for k in range(4))
        got = [torch.zeros(4) for _ in range(3)]
        if r == 0:
            first = comm.recv(got[0], 1, async_op=True)
            second = comm.recv(got[1], 2, async_op=True)
            second.wait()
            comm.exchange([(a, 1)], [(got[2], 1)])
            first.wait()
            assert [x[0].item() for x in got] == [1.0, 2.0, 3.0]
        elif r == 1:
            comm.recv(got[0], 0)
            comm.send(b, 0)
            comm.send(d, 0)
        else:
            comm.send(c, 0)
        # More sends in the background than there are slots, of which the first ones are awaited elsewhere.
        if r == 0:
            works = [comm.send(torch.full((4,), float(k)), 1, async_op=True) for k in range(6)]
            comm.exchange([(a, 1), (b, 2)], [])
            for work in works:
                work.wait()
        elif r == 1:
            comm.recv(got[0], 2)
            assert got[0][0] == 2.0
            for k in (*range(6), 0):
                comm.recv(got[0], 0)
                assert got[0][0] == k
        else:
            comm.recv(got[0], 0)
            comm.send(c, 1)


def test_late_receives_hold_up_nothing_else() -> None:
    testing.run_threads(late_receives, 3, transport="sim", timeout=30)
    with small_slots(), annotated():
        check(late_receives, 3, seeds=range(30), transport="sim")


def limits(seed: int) -> None:
    del seed
    hdp.init()


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_DEVICE_SMALL_BYTES", "8193")
    with pytest.raises(hdp.InvalidUsage, match="from 0 to 8192"):
        testing.run_threads(limits, 2, 0, transport="sim")
    monkeypatch.setenv("HDPCOMM_DEVICE_SMALL_BYTES", "100")
    assert settings().device_small_bytes == 100


# --- what is enqueued

MIB = 1 << 20


def counted(what: str) -> dict[str, int]:
    """What rank 0 gives its device for the second call, by kind."""
    with hdp.init() as comm:
        peer = 1 - comm.rank
        zone = comm.landing_zone(torch.empty(0))
        assert zone is not None
        landed = zone.memory[: 64 * MIB]
        small, large = torch.zeros(8, dtype=torch.uint8), torch.zeros(64 * MIB, dtype=torch.uint8)
        calls: dict[str, Callable[[], Any]] = {
            "8 B": lambda: (comm.send if comm.rank == 0 else comm.recv)(small, peer),
            "exchange of 8 B": lambda: comm.exchange([(small, peer)], [(torch.zeros_like(small), peer)]),
            "64 MiB to a landing place": lambda: comm.exchange(
                [(large, peer, 0)] if comm.rank == 0 else [], [] if comm.rank == 0 else [(landed, peer, 0)]
            ),
            "ring step": lambda: comm.exchange([(large, peer, 0)], [(landed, peer, 0)]),
            "ring step in the background": lambda: comm.exchange(
                [(large, peer, 0)], [(landed, peer, 0)], async_op=True
            ),
            "all_reduce of 8 B": lambda: comm.all_reduce(torch.zeros(2), algorithm="one_shot"),
            "all_reduce of 64 MiB": lambda: comm.all_reduce(torch.zeros(16 * MIB), algorithm="two_shot"),
        }
        device = comm.streams.device  # type: ignore[attr-defined]
        calls[what]()
        comm.synchronize()
        device.count_calls()
        calls[what]()
        found: dict[str, int] = device.counted_calls()
        comm.synchronize()
        return found


def far_ahead(count: int) -> int:
    """How often rank 0 asks for an event while it posts receives for which nothing comes yet."""
    with hdp.init() as comm:
        if comm.rank == 1:
            for _ in range(count):
                comm.recv(torch.zeros(1), 0)
            for _ in range(count):
                comm.send(torch.zeros(1), 0)
            return 0
        device = comm.streams.device  # type: ignore[attr-defined]
        device.count_calls()
        works = [comm.recv(torch.zeros(1), 1, async_op=True) for _ in range(count)]
        asked: int = device.counted_calls().get("query", 0)
        for _ in range(count):
            comm.send(torch.zeros(1), 1)
        for work in works:
            work.wait()
        return asked


def test_a_host_that_is_far_ahead_asks_for_few_events() -> None:
    """It asked for those of all operations under way, before each."""
    count = 120
    machine = FakeMachine(2, opens=_testing.TestDevice)
    asked = testing.run_threads(machine.ranks(far_ahead), 2, count, transport="sim", timeout=60)[0]
    assert asked <= 8 * count


def enqueued(
    what: str, small: int, opens: Callable[[int, list[int]], _testing.TestDevice] = _testing.TestDevice
) -> list[dict[str, int]]:
    machine = FakeMachine(2, opens=opens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HDPCOMM_DEVICE_SMALL_BYTES", str(small))
        return testing.run_threads(machine.ranks(counted), 2, what, transport="sim", timeout=60)


#: Calls of the driver (on rank 0, on rank 1) for each, without kernels that wait and with them.
CALLS = {
    "8 B": ((6, 6), (3, 3)),
    "exchange of 8 B": ((11, 11), (3, 3)),
    "64 MiB to a landing place": ((5, 3), (5, 3)),
    "ring step": ((5, 5), (5, 5)),
    "ring step in the background": ((10, 10), (10, 10)),
    "all_reduce of 8 B": ((10, 10), (3, 3)),
    "all_reduce of 64 MiB": ((17, 17), (17, 17)),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_of_the_driver(what: str) -> None:
    """docs/stream-transport.md has this table."""
    found = tuple(
        tuple(sum(rank[call] for call in rank.keys() - {"query", "createEvent"}) for rank in enqueued(what, small))
        for small in (0, 8192)
    )
    assert found == CALLS[what], [enqueued(what, small) for small in (0, 8192)]


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_share_a_device_by_turns_have_no_kernels_that_wait(shared: bool) -> None:
    def opened(ordinal: int, out_of_reach: list[int]) -> _testing.TestDevice:
        device = _testing.TestDevice(ordinal, out_of_reach)
        device.take_turns_as("0000:0d:00.0" if shared else f"0000:{ordinal}d:00.0")
        return device

    for found in enqueued("exchange of 8 B", 8192, opened):
        assert ("flagOps" in found) == shared
