"""How frames go through process groups: bytes are asked for early, answers overtake what is sent the other way."""

from __future__ import annotations

import resource
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm._core import comm as core
from hdpcomm._core import transport
from hdpcomm.comm import addresses, group_carrier
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.group_carrier import GroupCarrier
from hdpcomm.comm.secret import Secret
from tests.harness.fault_cases import LONG_S
from tests.ranks.scale.test_torch_faults import SECRET, QueueGroup, UnprovenCarrier, Wires, together

BULK_BYTES = 512 << 10
CREDIT = 4  # the kind of a frame that only tells what its sender has consumed


def linked() -> tuple[list[transport.FrameLink], list[Communicator]]:
    links = [transport.FrameLink(rank, 2) for rank in range(2)]
    joined = [core.join_framed_world(link, "torch", LONG_S) for link in links]
    return links, [Communicator(world.communicator(), world.rank, world.size) for world in joined]


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def kind(frame: transport.Frame) -> int:
    return int(struct.unpack_from("=B", frame.head, 4)[0])


def test_two_groups_carry_a_direction_each() -> None:
    links, comms = linked()
    wires: list[dict[tuple[int, int, int], Any]] = [Wires() for _ in range(2)]
    carriers = [
        GroupCarrier([QueueGroup(each, rank) for each in wires], link, owned=False, secret=SECRET)
        for rank, link in enumerate(links)
    ]
    sizes = [0, 1, 100_000, BULK_BYTES // 4, 3_000_000]  # the last is more than a window

    def both_ways(comm: Communicator) -> None:
        for size in sizes:
            mine, theirs = torch.arange(size) + comm.rank, torch.empty(size, dtype=torch.int64)
            comm.exchange([(mine, 1 - comm.rank)], [(theirs, 1 - comm.rank)])
            assert torch.equal(theirs, torch.arange(size) + 1 - comm.rank)

    assert together(comms, both_ways) == [None, None]
    for comm in comms:
        comm.close()
    assert all(carrier.join() for carrier in carriers)
    proofs = {group_carrier._PROOF_TAG, group_carrier._PROOF_TAG + 1}
    ways = [{key[:2] for key in each if key[2] not in proofs} for each in wires]
    assert ways == [{(0, 1)}, {(1, 0)}]
    proven = {(0, 1), (1, 0)}
    assert [{key[:2] for key in each if key[2] in proofs} for each in wires] == [proven, proven]


def test_a_group_whose_peer_does_not_prove_itself_carries_nothing() -> None:
    """Who knows the secret in one group may not be who answers in the other."""
    links, comms = linked()
    right, wrong = (Secret(text * 16) for text in ("r", "w"))
    wires: list[dict[Any, Any]] = [Wires() for _ in range(2)]

    class Impostor(GroupCarrier):
        def _prove(self, secret: Secret, peer: int) -> None:
            self._prove_over(self._groups[0], secret, peer)
            self._prove_over(self._groups[1], wrong, peer)

    for rank, made in enumerate((GroupCarrier, Impostor)):
        made([QueueGroup(each, rank) for each in wires], links[rank], owned=False, secret=right)
    with pytest.raises(hdp.PeerLost, match=r"who answered as rank 1 does not know the job's secret"):
        comms[0].recv(torch.zeros(3), 1)
    assert {key[2] for key in wires[0]} | {key[2] for key in wires[1]} == {
        group_carrier._PROOF_TAG,
        group_carrier._PROOF_TAG + 1,
    }
    for comm in comms:
        comm.close()


class HeldWork:
    """Work that :class:`HeldGroup` returns; ends when the message has come."""

    def __init__(self, come: threading.Event) -> None:
        self.come = come

    def wait(self, timeout: timedelta) -> None:
        assert self.come.wait(timeout.total_seconds())


class HeldGroup:
    """Receives what the test gives it; frames come in pairs of head and bulk."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, torch.Tensor, threading.Event]] = []

    def recv(self, tensors: list[torch.Tensor], _: int, tag: int) -> HeldWork:
        come = threading.Event()
        self.asked.append((tag, tensors[0], come))
        return HeldWork(come)

    def send(self, *_: Any) -> HeldWork:
        come = threading.Event()
        come.set()
        return HeldWork(come)

    def bulks(self) -> list[tuple[int, torch.Tensor, threading.Event]]:
        return [each for each in self.asked if each[1].numel() == BULK_BYTES]


def test_bulks_are_asked_for_while_others_are_on_their_way() -> None:
    links, comms = linked()
    group = HeldGroup()
    UnprovenCarrier([group], links[1], owned=True, secret=SECRET)
    x, y = torch.arange(BULK_BYTES), torch.empty(BULK_BYTES, dtype=torch.int64)  # eight frames
    sent = comms[0].send(x, 1, async_op=True)
    frames = [links[0].next(1) for _ in range(8)]
    assert [frame is not None and frame.more for frame in frames] == [True] * 7 + [False]
    wait_until(lambda: len(group.asked) == group_carrier._DEPTH)
    for number, frame in enumerate(frames, 1):
        assert frame is not None
        _, target, come = group.asked[number - 1]
        target.copy_(torch.frombuffer(frame.head, dtype=torch.uint8))
        come.set()
        wait_until(lambda number=number: len(group.bulks()) == number)  # and none has come
    for (_, target, come), frame in zip(group.bulks(), frames, strict=True):
        assert frame is not None
        target.copy_(torch.frombuffer(frame.bulk, dtype=torch.uint8))
        come.set()
    comms[1].recv(y, 0)
    assert torch.equal(x, y)
    assert len({tag for tag, _, _ in group.bulks()}) == 8
    del sent
    for comm in comms:
        comm.close()


def test_credits_overtake_messages() -> None:
    links, comms = linked()
    large = torch.ones(8 * BULK_BYTES, dtype=torch.uint8)
    back = comms[1].send(large, 0, async_op=True)  # fills the outbox
    works = [comms[0].send(large, 1, async_op=True)]
    received = comms[1].recv(torch.zeros_like(large), 0, async_op=True)
    for _ in range(8):
        frame = links[0].next(1)
        assert frame is not None
        links[1].deliver(0, frame)
    wait_until(received.done)
    kinds = []
    for _ in range(9):
        frame = links[1].next(0)
        assert frame is not None
        kinds.append(kind(frame))
    assert CREDIT in kinds[:2]
    assert kinds.count(0) >= 7  # the rest of the outbox are data
    del back, works
    for comm in comms:
        comm.close()


def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, changed = [(100, 4096)], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, value: changed.append(value))
    addresses.allow_sockets(3, 2)
    before = changed[-1][0] if changed else 100
    addresses.allow_sockets(3, 1000)
    assert changed[-1][1] == 4096
    assert changed[-1][0] > max(1000, before)
    with pytest.raises(hdp.Error, match=r"rank 3 needs \d+ open files.* may have 4096: raise the hard limit"):
        addresses.allow_sockets(3, 5000)
    changed.clear()
    limits[0] = (10_000, 10_000)
    addresses.allow_sockets(3, 5000)
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    addresses.allow_sockets(3, 10**9)
    limits[0] = (100, resource.RLIM_INFINITY)
    assert changed == []
    addresses.allow_sockets(3, 10**6)
    assert changed[0][0] > 10**6
