"""Connections between ranks over TCP: who gets in, how frames are cut, and what a peer that ends leaves behind."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm._core import transport
from hdpcomm.comm import connections
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.connections import Connections, listen
from hdpcomm.comm.machine import listening_address
from hdpcomm.comm.secret import Secret
from tests.harness.fault_cases import LONG_S
from tests.harness.native import _testing
from tests.ranks.scale.test_network_faults import linked, together

OURS, THEIRS = Secret("o" * 20), Secret("t" * 20)
WORLD = secrets.token_bytes(connections.WORLD_BYTES)
HEADER_BYTES = 80


class Pair:
    """Two ranks of one process, joined over the loopback."""

    def __init__(self, known: tuple[Secret, Secret] = (OURS, OURS)) -> None:
        self.links, self.comms = linked()
        self.listeners = [listen("127.0.0.1") for _ in range(2)]
        self.places = [("127.0.0.1", int(each.getsockname()[1])) for each in self.listeners]
        self.carriers = [
            Connections(link, listener, self.places, WORLD, secret)
            for link, listener, secret in zip(self.links, self.listeners, known, strict=True)
        ]

    def close(self) -> None:
        for comm in self.comms:
            comm.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()
    assert all(each.join() for each in made.carriers)


def exchanged(comm: Communicator, sizes: tuple[int, ...] = (0, 1, 30_000, 3_000_000)) -> None:
    for size in sizes:
        mine, theirs = torch.arange(size) + comm.rank, torch.empty(size, dtype=torch.int64)
        comm.exchange([(mine, 1 - comm.rank)], [(theirs, 1 - comm.rank)])
        assert torch.equal(theirs, torch.arange(size) + 1 - comm.rank)


def test_messages_both_ways() -> None:
    pair = Pair()
    assert together(pair.comms, exchanged) == [None, None]
    pair.close()
    assert all(each.join() for each in pair.carriers)


def test_a_large_unexpected_message_waits_in_its_window(pair: Pair) -> None:
    x = torch.arange(4_000_000.0)  # 16 MB; a window has 8 MiB
    work = pair.comms[0].send(x, 1, async_op=True)
    time.sleep(0.5)
    assert not work.done()
    y = torch.zeros_like(x)
    pair.comms[1].recv(y, 0)
    work.wait()
    assert torch.equal(x, y)


@pytest.mark.parametrize("known", [(OURS, THEIRS), (THEIRS, OURS)])
def test_ranks_that_do_not_know_the_same_secret(known: tuple[Secret, Secret]) -> None:
    pair = Pair(known)
    errors = together(pair.comms, exchanged)
    for rank, error in enumerate(errors):
        assert isinstance(error, hdp.PeerLost)
        assert f"who answered as rank {1 - rank} does not know the job's secret" in str(error)
    pair.close()


def hello(world: bytes = WORLD, sender: int = 1, receiver: int = 0, magic: bytes = b"hdpcomm1") -> bytes:
    return struct.pack(">8s16sII32s", magic, world, sender, receiver, secrets.token_bytes(32))


STRANGERS = {
    "says nothing": b"",
    "says anything": b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
    "is of another world": hello(world=bytes(16)),
    "is of another version": hello(magic=b"hdpcomm0"),
    "wants another rank": hello(receiver=1),
    "is no rank": hello(sender=2),
    "is this rank": hello(sender=0),
    "says that it is rank 1": hello(),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_strangers_are_turned_away(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PROOF_S", 0.5)
    pair = Pair((OURS, OURS))
    with socket.create_connection(pair.places[0]) as stranger:
        stranger.sendall(said)
        assert together(pair.comms, exchanged) == [None, None]
        with contextlib.suppress(ConnectionError):
            stranger.sendall(bytes(connections.MAC_BYTES))
        stranger.settimeout(LONG_S)
        found = b"?"
        while found:  # an answer at most, then the end
            try:
                found = stranger.recv(1000)
            except ConnectionResetError:
                break
    pair.close()
    assert all(each.join() for each in pair.carriers)


def test_more_strangers_than_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PROOF_S", 1.0)
    monkeypatch.setattr(connections, "_MOST_PROVING", 3)
    pair = Pair()
    strangers = [socket.create_connection(pair.places[0]) for _ in range(8)]
    assert together(pair.comms, exchanged) == [None, None]  # tried again when there is room
    for each in strangers:
        each.close()
    pair.close()


def test_strangers_cost_no_threads(pair: Pair) -> None:
    before = set(threading.enumerate())
    strangers = [socket.create_connection(place) for place in pair.places for _ in range(100)]
    for each in strangers[::2]:
        each.sendall(hello())
    for each in strangers[:100:2]:
        assert len(each.recv(64, socket.MSG_WAITALL)) == 64  # all before have been accepted by now
    assert set(threading.enumerate()) <= before  # one of a test before this may end meanwhile
    assert together(pair.comms, exchanged) == [None, None]
    for each in strangers:
        each.close()


def test_a_crowd_is_looked_at_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers do not wake the rank's process one by one, and ranks find each other among them."""
    pauses: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(connections.time, "sleep", noted)
    strangers = [socket.create_connection(pair.places[0]) for _ in range(connections._CROWD - 2)]
    assert together(pair.comms, exchanged) == [None, None]
    assert connections._CROWD_S not in pauses
    strangers += [socket.create_connection(pair.places[0]) for _ in range(100)]
    strangers[-1].sendall(hello())
    assert len(strangers[-1].recv(64, socket.MSG_WAITALL)) == 64
    assert connections._CROWD_S in pauses
    for each in strangers:
        each.close()


def test_a_flood_while_no_thread_can_be_started(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = [socket.create_connection(place) for place in pair.places for _ in range(150)]
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("hdpcomm-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert together(pair.comms, exchanged) == [None, None]
    for each in strangers:
        each.close()


def test_a_flood_until_no_descriptor_is_left(pair: Pair) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                strangers.append(socket.socket())
                strangers[-1].connect(pair.places[len(strangers) % 2])
        time.sleep(0.3)
        for each in strangers:
            each.close()
        assert together(pair.comms, exchanged) == [None, None]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_second_connection_of_a_rank_is_closed(pair: Pair) -> None:
    assert together(pair.comms, exchanged) == [None, None]
    with socket.create_connection(pair.places[0]) as second:
        second.sendall(hello() + bytes(connections.MAC_BYTES))
        second.settimeout(LONG_S)
        assert len(second.recv(64, socket.MSG_WAITALL)) == 64
        assert second.recv(1) == b""
    assert together(pair.comms, exchanged) == [None, None]


def test_no_one_listens() -> None:
    pair = Pair()
    pair.listeners[1].shutdown(socket.SHUT_RDWR)
    pair.listeners[1].close()
    with pytest.raises(
        hdp.PeerLost, match=r"rank 1 was lost .*no connection to 127.0.0.1 port \d+: Connection refused; "
    ):
        pair.comms[0].send(torch.ones(1_000_000), 1)
    pair.close()


def test_what_a_rank_sent_before_it_left_comes(pair: Pair) -> None:
    """Small messages of collectives do not wait for their receiver."""
    parts = [[torch.full((8000,), float(100 * k + rank)) for k in range(50)] for rank in range(2)]
    gathered = [[torch.empty(16_000) for _ in range(50)] for _ in range(2)]
    works = [pair.comms[1].all_gather(gathered[1][k], parts[1][k], async_op=True) for k in range(50)]
    for k in range(50):
        pair.comms[0].all_gather(gathered[0][k], parts[0][k])
    pair.comms[0].close()
    assert pair.carriers[0].join()
    for k in range(50):
        works[k].wait()
        assert all(torch.equal(each[k], torch.cat([parts[0][k], parts[1][k]])) for each in gathered)
    with pytest.raises(hdp.PeerLost, match="rank 0 closed its communicator"):
        pair.comms[1].recv(torch.empty(1), 0)


def test_a_peer_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GRACE_S", 0.3)
    links, comms = linked()
    carrier = transport.SocketCarrier(links[0], 0.3)
    ours, theirs = socket.socketpair()
    carrier.connected(1, ours.detach())
    comms[0].send(torch.ones(100_000_000), 1, async_op=True)
    comms[0].close()
    assert carrier.join(LONG_S)
    theirs.close()
    comms[1].close()


# --- bytes in pieces of any size


def serialized(frame: _testing.Frame) -> bytes:
    """A frame as it goes over a connection: its header, and the payload that this counts."""
    head = bytes(frame.head)
    piece = struct.unpack_from("=I", head, 40)[0]
    return head[:HEADER_BYTES] + (bytes(frame.bulk) if frame.bulk_bytes else head[HEADER_BYTES : HEADER_BYTES + piece])


@pytest.mark.parametrize("seed", range(6))
def test_frames_come_in_pieces_of_any_size(seed: int) -> None:
    draw = random.Random(seed)
    links, comms = linked()
    sizes = [draw.choice([0, 1, 7, 900, 944, 945, 4000, 70_000, 524_288, 900_000]) for _ in range(12)]
    sent = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    carrier = transport.SocketCarrier(links[1], 0.3)
    ours, theirs = socket.socketpair()
    assert carrier.accepted(0, theirs.detach())
    got = [torch.empty_like(each) for each in sent]
    receives = [comms[1].recv(each, 0, async_op=True) for each in got]
    sends = [comms[0].send(each, 1, async_op=True) for each in sent]
    limit = time.monotonic() + LONG_S
    while not all(each.done() for each in receives):
        assert time.monotonic() < limit
        data = b"".join(serialized(frame) for frame in _testing.waiting_frames(links[0], 1))
        while data:
            count = draw.choice([1, 3, 79, 80, 81, 1000, 16_384, 16_385, 1 << 20])
            ours.sendall(data[:count])
            data = data[count:]
        for frame in _testing.waiting_frames(links[1], 0):  # what it answers, which has no connection here
            _testing.deliver_frame(links[0], 1, frame)
        all(each.done() for each in sends)
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
    ours.close()
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("seed", range(3))
def test_frames_go_to_a_socket_that_takes_little(seed: int) -> None:
    draw = random.Random(seed)
    links, comms = linked()
    carrier = transport.SocketCarrier(links[0], 0.3)
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        each.setblocking(False)
    x = torch.randint(0, 255, (1_500_000,), dtype=torch.uint8)
    comms[0].send(x, 1, async_op=True)
    comms[0].send(torch.ones(3), 1, async_op=True)
    assert carrier.wanted() == 1
    carrier.connected(1, ours.detach())
    want = bytes(x.numpy().data) + bytes(torch.ones(3).numpy().data)
    found, payload = bytearray(), b""
    limit = time.monotonic() + LONG_S
    while len(payload) < len(want):
        assert time.monotonic() < limit
        select.select([theirs], [], [], 1)
        with contextlib.suppress(BlockingIOError):
            found += theirs.recv(draw.choice([1, 100, 5000, 1 << 20]))
        while len(found) >= HEADER_BYTES:
            piece = struct.unpack_from("=I", found, 40)[0]
            if len(found) < HEADER_BYTES + piece:
                break
            if found[4] == 0:  # pings come, too
                payload += found[HEADER_BYTES : HEADER_BYTES + piece]
            del found[: HEADER_BYTES + piece]
    assert payload == want
    theirs.close()
    for comm in comms:
        comm.close()


# --- peers that write what no rank writes, or end


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (bytes(HEADER_BYTES), "received bytes that are no frame of this version"),
        (secrets.token_bytes(5000), "received bytes that are no frame of this version"),
        (b"", "it closed the connection"),
        (bytes(40), "it closed the connection"),
    ],
)
def test_bytes_that_are_no_frames(said: bytes, told: str) -> None:
    links, comms = linked()
    carrier = transport.SocketCarrier(links[0], 0.3)
    ours, theirs = socket.socketpair()
    assert carrier.accepted(1, theirs.detach())
    assert not carrier.accepted(1, os.dup(ours.fileno()))
    ours.sendall(said)
    ours.close()
    with pytest.raises(hdp.PeerLost, match=f"rank 1 was lost while rank 0 waited for it: {told}"):
        comms[0].recv(torch.zeros(3), 1)
    for comm in comms:
        comm.close()
    assert carrier.join(LONG_S)


def test_a_carrier_that_is_dropped_ends() -> None:
    links, comms = linked()
    carrier = transport.SocketCarrier(links[0], 100.0)
    ours, theirs = socket.socketpair()
    assert carrier.accepted(1, theirs.detach())
    del carrier
    ours.settimeout(LONG_S)
    assert ours.recv(1) == b""
    ours.close()
    for comm in comms:
        comm.close()


def test_forked_children_hold_no_connection(pair: Pair) -> None:
    assert together(pair.comms, exchanged) == [None, None]
    places = set(pair.places)
    answer, asked = os.pipe()
    child = os.fork()
    if child == 0:
        held = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                copy = socket.socket(fileno=os.dup(int(name)))
                own = copy.getsockname()
                held += own in places or (copy.type == socket.SOCK_STREAM and copy.getpeername() in places)
            except (OSError, TypeError):
                continue
        os.write(asked, bytes([held]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(answer, 1) == b"\0"
    os.close(answer)
    os.close(asked)


# --- addresses


def test_the_interface_to_listen_at(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert listening_address(store) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(
        hdp.Error, match=r"interface 'nosuch0' of GLOO_SOCKET_IFNAME has no address here; name one of .*lo"
    ):
        listening_address(store)
