"""A peer that writes what no rank writes: frames and slots made by hand, segments of others. It is lost, and named; no
byte beside a buffer changes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm._core import comm as core_comm
from hdpcomm._core import transport
from hdpcomm.comm.communicator import Communicator, SharedCounter
from hdpcomm.testing import spawn
from tests.harness.fault_cases import LONG_S, caught, wait_for, works_again
from tests.harness.native import _testing

HUGE = 2**63 + 5
GUARD = 4096  # elements on either side of a buffer


class Guarded:
    """A buffer of ``count`` floats between others that must not change."""

    def __init__(self, count: int) -> None:
        self.all = torch.full((count + 2 * GUARD,), -1.0)
        self.buffer = self.all[GUARD : GUARD + count]

    def check(self) -> None:
        assert (self.all[:GUARD] == -1).all()
        assert (self.all[-GUARD:] == -1).all()


# --- frames

FIELDS = [
    "magic",
    "kind",
    "detail",
    "cause",
    "consumed",
    "index",
    "bytes",
    "offset",
    "piece",
    "flags",
    "number",
    "other",
]
HEAD = struct.Struct("<IBBhQQQQIIII")
DATA, ACCEPTED, FAILURE, GOODBYE, FETCH, FETCHED, HEARD_GOODBYE = 0, 1, 3, 7, 9, 10, 11


def changed(frame: _testing.Frame, **values: int) -> None:
    head = dict(zip(FIELDS, HEAD.unpack_from(frame.head), strict=True))
    assert head.keys() >= values.keys()
    HEAD.pack_into(frame.head, 0, *(head | values).values())


def framed_pair() -> tuple[list[transport.FrameLink], list[Communicator]]:
    links = [transport.FrameLink(rank, 2) for rank in range(2)]
    worlds = [core_comm.join_framed_world(link, 5.0) for link in links]
    return links, [Communicator(world.communicator(), world.rank, world.size) for world in worlds]


@pytest.mark.parametrize("count", [4, 400_000], ids=["one frame", "pieces"])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("magic", {"magic": 7}),
        ("kind", {"kind": 12}),
        ("kind", {"kind": 255}),
        ("index", {"index": 1}),
        ("index", {"index": HUGE}),
        ("offset", {"offset": HUGE}),
        ("offset", {"offset": 1 << 20, "bytes": 8}),
        ("piece", {"offset": 8}),
        ("piece", {"piece": 12}),
        ("piece", {"piece": 2**32 - 1}),
        ("piece", {"bytes": 3}),
        ("text length", {"kind": GOODBYE, "piece": 900}),
        ("error kind or cause", {"kind": FAILURE, "piece": 16, "detail": 99}),
        ("error kind or cause", {"kind": FAILURE, "piece": 16, "cause": 2}),
        ("error kind or cause", {"kind": FAILURE, "piece": 16, "cause": -2}),
        ("consumed more", {"consumed": HUGE}),
    ],
)
def test_frames(count: int, field: str, values: dict[str, int]) -> None:
    links, comms = framed_pair()
    work = comms[1].send(torch.ones(count), 0, async_op=True)
    frame = _testing.next_frame(links[1], 0)
    assert frame is not None
    guarded = Guarded(count)
    changed(frame, **values)
    _testing.deliver_frame(links[0], 1, frame)
    error = caught(lambda: comms[0].recv(guarded.buffer, 1))
    guarded.check()
    assert isinstance(error, hdp.PeerLost)
    assert error.peer == 1
    assert "rank 1 was cut off" in str(error)
    assert field in str(error) or (count > 4 and "the index of" in str(error))
    assert not _testing.deliver_frame(links[0], 1, frame)  # nothing more of it is taken
    for comm in comms:
        comm.close()
    assert isinstance(caught(work.wait), hdp.Error)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("index", {"index": 1}),
        ("offset", {"offset": 2 << 19}),
        ("piece", {"offset": HUGE}),
        ("size", {"bytes": 3 << 19}),
        ("number or call", {"number": 9}),
    ],
)
def test_later_pieces(field: str, values: dict[str, int]) -> None:
    links, comms = framed_pair()
    count = (2 << 20) // 4
    comms[1].send(torch.ones(count), 0, async_op=True)
    guarded = Guarded(count)
    for i in range(2):
        frame = _testing.next_frame(links[1], 0)
        assert frame is not None
        if i == 1:
            changed(frame, **values)
        _testing.deliver_frame(links[0], 1, frame)
    error = caught(lambda: comms[0].recv(guarded.buffer, 1))
    guarded.check()
    assert isinstance(error, hdp.PeerLost)
    assert "cut off" in str(error)
    assert field in str(error) or "offset" in str(error)
    for comm in comms:
        comm.close()


def test_more_than_the_window() -> None:
    links, comms = framed_pair()
    comms[1].send(torch.ones((512 << 10) // 4), 0, async_op=True)
    frame = _testing.next_frame(links[1], 0)
    assert frame is not None
    for index in range(17):
        copy = _testing.Frame()
        copy.head[:] = frame.head
        changed(copy, index=index)
        copy.expect_bulk()
        _testing.deliver_frame(links[0], 1, copy)

    def receive() -> None:
        for _ in range(17):
            comms[0].recv(torch.zeros((512 << 10) // 4), 1)

    error = caught(receive)
    assert isinstance(error, hdp.PeerLost)
    assert "more than may be under way" in str(error)
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("kind", [DATA, FAILURE, ACCEPTED])
def test_small_frames_do_not_fill_the_memory(kind: int) -> None:
    """Nothing is taken from a peer meanwhile; a frame without bytes takes 1 kB."""
    links, comms = framed_pair()
    most, before = 2 * (8 << 20), resident_bytes()
    sent = 0
    while _testing.deliver_frame(links[0], 1, made(kind, index=sent, number=sent, cause=-1)):
        sent += 1
        assert sent < 300_000
    assert sent > 1000
    assert resident_bytes() - before < 2 * most
    error = caught(lambda: comms[0].recv(torch.zeros(4), 1))
    assert isinstance(error, hdp.Error)
    assert kind != ACCEPTED or "more than may be under way" in str(error)
    for comm in comms:
        comm.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- counters between hosts


def counting_pair() -> tuple[list[transport.FrameLink], list[Communicator], list[SharedCounter]]:
    """Rank 0 owns a counter, and rank 1 counts on it."""
    links, comms = framed_pair()
    own = core_comm.open_counter(comms[0]._core)
    other = core_comm.join_counter(comms[1]._core, own.word, own.generation)
    return links, comms, [SharedCounter(own), SharedCounter(other)]


def made(kind: int, **values: int) -> _testing.Frame:
    frame = _testing.Frame()
    HEAD.pack_into(frame.head, 0, _testing.FRAME_MAGIC, kind, *[values.get(name, 0) for name in FIELDS[2:]])
    return frame


@pytest.mark.parametrize(
    ("told", "values"),
    [
        ("the counter of its frame is 16", {"number": 16}),
        ("the counter of its frame is 4294967295", {"number": 2**32 - 1}),
        ("the amount of its frame is 0", {"bytes": 0}),
        ("the amount of its frame is 4294967296", {"bytes": 2**32}),
        ("the amount of its frame is 18446744073709551615", {"bytes": 2**64 - 1}),
        ("the piece of its frame is 8", {"piece": 8}),
        ("it asked for a counter out of order", {"index": 1}),
        ("it asked for a counter out of order", {"index": HUGE}),
    ],
)
def test_fetches(told: str, values: dict[str, int]) -> None:
    links, comms, counters = counting_pair()
    assert not _testing.deliver_frame(links[0], 1, made(FETCH, **({"other": 1, "bytes": 1} | values)))
    error = caught(lambda: comms[0].recv(torch.zeros(1), 1))
    assert isinstance(error, hdp.PeerLost)
    assert f"rank 1 was cut off: {told}" in str(error).replace(" while rank 0 waited for it", "")
    assert counters[0].fetch_add() == 0
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("other", [0, 2, 2**32 - 1])
def test_fetches_of_counters_that_are_not_there(other: int) -> None:
    """No generation but the present one is counted; the answer says so, and the peer stays."""
    links, comms, counters = counting_pair()
    for number in (0, 15):
        assert _testing.deliver_frame(links[0], 1, made(FETCH, other=other, bytes=7, number=number, index=number // 15))
        answer = _testing.next_frame(links[0], 1)
        assert answer is not None
        head = dict(zip(FIELDS, HEAD.unpack_from(answer.head), strict=True))
        assert (head["kind"], head["detail"], head["index"], head["number"]) == (FETCHED, 1, number // 15, 0)
    assert counters[0].fetch_add() == 0
    for comm in comms:
        comm.close()


def test_fetches_whose_answers_nobody_takes() -> None:
    links, comms, counters = counting_pair()
    for index in range(64):
        assert _testing.deliver_frame(links[0], 1, made(FETCH, other=1, bytes=1, index=index))
    assert not _testing.deliver_frame(links[0], 1, made(FETCH, other=1, bytes=1, index=64))
    assert "asks for counters and takes no answers" in str(caught(lambda: comms[0].recv(torch.zeros(1), 1)))
    assert counters[0].fetch_add() == 64
    for comm in comms:
        comm.close()


@pytest.mark.parametrize(
    ("told", "values"),
    [
        ("answered for a counter that nobody asked for", {"index": 1}),
        ("answered for a counter that nobody asked for", {"index": HUGE}),
        ("the detail of its frame is 4", {"detail": 4}),
        ("the detail of its frame is 255", {"detail": 255}),
        ("the piece of its frame is 3", {"piece": 3}),
    ],
)
def test_answers(told: str, values: dict[str, int]) -> None:
    links, comms, counters = counting_pair()
    with ThreadPoolExecutor(1) as pool:
        fetches = pool.submit(caught, counters[1].fetch_add)
        frame = _testing.next_frame(links[1], 0)
        assert frame is not None
        assert _testing.deliver_frame(links[0], 1, frame)
        answer = _testing.next_frame(links[0], 1)
        assert answer is not None
        changed(answer, **values)
        assert not _testing.deliver_frame(links[1], 0, answer)
        error = fetches.result()
    assert isinstance(error, hdp.PeerLost)
    assert f"rank 0 was cut off: {told}" in str(error).replace("cut off: it answered", "cut off: answered")
    assert counters[0].fetch_add() == 1
    for comm in comms:
        comm.close()


def test_an_answer_to_no_question() -> None:
    links, comms, counters = counting_pair()
    assert not _testing.deliver_frame(links[1], 0, made(FETCHED))
    error = caught(counters[1].fetch_add)
    assert isinstance(error, hdp.PeerLost)
    assert "rank 0 was cut off: it answered for a counter that nobody asked for" in str(error)
    for comm in comms:
        comm.close()


def test_who_hears_a_goodbye_that_nobody_said() -> None:
    links, comms = framed_pair()
    assert not _testing.deliver_frame(links[0], 1, made(HEARD_GOODBYE))
    error = caught(lambda: comms[0].recv(torch.zeros(1), 1))
    assert isinstance(error, hdp.PeerLost)
    assert "it heard a goodbye that nobody said" in str(error)
    for comm in comms:
        comm.close()


# --- slots

MAGIC = 0x68647063_6F6D6D34
KINDS = {"inline": 0, "eager": 1, "direct": 2, "shared": 3, "fragment": 4, "failure": 5}
COUNTS = {"inline": 2, "eager": 500, "direct": 100_000, "shared": 100_000, "fragment": 100_000}
SLOT_FIELDS = {"bytes": (32, 8), "address": (40, 8), "fragment": (48, 8), "kind": (62, 1), "detail": (63, 1)}
SLOT_FIELDS |= {"root": (28, 2), "number": (56, 4)}
MARKER = 6


def segments() -> dict[str, int]:
    """Where the shared segments lie that this process has mapped, by inode."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [line for line in lines if line[5:] == ["/memfd:hdpcomm", "(deleted)"]]
    return {line[4]: min(int(each[0].split("-")[0], 16) for each in mapped if each[4] == line[4]) for line in mapped}


class Channel:
    """The channel from rank ``src`` to ``dst`` of the segment that was mapped after ``before`` was taken.

    Those of worlds that were left before may still be mapped, and inodes do not tell which is the newest: each core has
    a range of its own.
    """

    def __init__(self, before: Collection[str], src: int, dst: int, size: int = 2) -> None:
        (start,) = (at for inode, at in segments().items() if inode not in before)
        assert self.word(start, 8) == MAGIC
        payload = self.word(start + 12, 4)
        self.at = start + _testing.channel_offset(size, payload, src, dst)

    @staticmethod
    def word(address: int, size: int, value: int | None = None) -> int:
        kind = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[size]
        word: Any = kind.from_address(address)
        if value is not None:
            word.value = value
        return int(word.value)

    def first_slot(self) -> int:
        return self.at + 64


def hostile_slot(folder: str, way: str, values: dict[str, int]) -> str:
    before = segments()
    comm = hdp.init("shm", timeout=LONG_S)
    count = COUNTS[way]
    written, over = Path(folder, "written"), Path(folder, "over")
    if comm.rank == 1:
        x = comm.empty(count).fill_(1.0) if way == "shared" else torch.ones(count)
        comm.send(x, 0, async_op=True)
        channel = Channel(before, 1, 0)
        slot = channel.first_slot()
        assert channel.word(slot, 8) == 1
        assert channel.word(slot + 62, 1) == KINDS[way]
        for name, value in values.items():
            offset, size = SLOT_FIELDS[name]
            channel.word(slot + offset, size, value % 2 ** (8 * size))
        written.touch()
        wait_for(over)
        comm.abort()
        return ""
    guarded = Guarded(count)
    wait_for(written)
    error = caught(lambda: comm.recv(guarded.buffer, 1))
    guarded.check()
    assert error.peer == 1
    if isinstance(error, hdp.PeerLost):  # it stays lost, for messages in both directions
        again = caught(lambda: comm.exchange([(torch.zeros(count), 1)], [(guarded.buffer, 1)]))
        assert isinstance(again, hdp.Error)
        assert again.peer == 1
    over.touch()
    return f"{type(error).__name__}: {error}"


def forged_marker(folder: str, attempts: tuple[int, int]) -> None:
    before = segments()
    with hdp.init("shm", timeout=LONG_S) as comm:
        written = Path(folder, "written")
        if comm.rank == 1:
            work = comm.send(torch.ones(4), 0, async_op=True)
            channel = Channel(before, 1, 0)
            for name, value in zip(("number", "bytes", "kind"), (*attempts, MARKER), strict=True):
                offset, size = SLOT_FIELDS[name]
                channel.word(channel.first_slot() + offset, size, value)
            written.touch()
            with contextlib.suppress(hdp.Error):  # rank 0 has consumed it
                work.wait()
        else:
            wait_for(written)
            assert "rank 1 called resync()" in str(caught(lambda: comm.recv(torch.zeros(4), 1)))
        works_again(comm)


@pytest.mark.parametrize("attempts", [(0, 0), (9, 1), (2**32 - 1, 2**64 - 1)])
def test_a_marker_that_no_resync_sent(ranks: Any, tmp_path: Path, attempts: tuple[int, int]) -> None:
    """It puts the pair out of step, and a resync of both ranks ends that.

    But not if it bears the number of the peer's next attempt, which no rank of this version has used before: then the
    resync may end at its deadline, as it does where a peer does not call it.
    """
    ranks(2, forged_marker, str(tmp_path), attempts)


@pytest.mark.parametrize(
    ("way", "values", "told"),
    [
        ("inline", {"kind": 7}, "kind of its message is 7"),
        ("inline", {"kind": 255}, "kind of its message is 255"),
        ("eager", {"kind": 0}, "size .* is 2000"),
        ("eager", {"address": 2**62 - 64}, "place in the payload ring"),
        ("eager", {"address": 7}, "place in the payload ring"),
        ("eager", {"kind": 5, "detail": 1, "fragment": 2**40}, "failure notice"),
        ("eager", {"kind": 5, "detail": 1, "fragment": 769}, "failure notice"),
        ("eager", {"kind": 5, "detail": 77, "fragment": 16}, "failure notice"),
        ("eager", {"kind": 5, "detail": 1, "fragment": 16, "root": 2}, "failure notice"),
        ("eager", {"kind": 5, "detail": 1, "fragment": 700, "address": -64}, "failure notice"),
        ("eager", {"kind": 4, "fragment": 2004}, "fragment size"),
        ("inline", {"kind": 4, "fragment": 2**63}, "fragment size"),
        ("shared", {"address": HUGE}, "address in the shared heap"),
        ("fragment", {"fragment": 2**40}, "fragment size"),
        ("fragment", {"fragment": 1}, "fragment size"),
        ("fragment", {"address": -64}, "place in the payload ring"),
        ("fragment", {"kind": 0}, "size .* is 400000"),
        ("fragment", {"kind": 1}, "place in the payload ring"),
    ],
)
def test_slots(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, values: dict[str, int], told: str
) -> None:
    if way == "fragment":
        monkeypatch.setenv("HDPCOMM_SHM_CMA", "0")
        monkeypatch.setenv("HDPCOMM_SHM_PAYLOAD_BYTES", "65536")
        text = spawn(hostile_slot, 2, str(tmp_path), way, values, timeout=60)[0]
    else:
        text = ranks(2, hostile_slot, str(tmp_path), way, values)[0]
    assert text.startswith("PeerLost: rank 1 was cut off: ")
    assert re.search(told, text), text


@pytest.mark.parametrize(
    ("way", "values", "kind"),
    [
        ("direct", {"address": 8}, "Error"),
        ("direct", {"bytes": 2**62}, "Mismatch"),
        ("eager", {"bytes": 2004}, "Mismatch"),
    ],
)
def test_slots_with_wrong_sizes_and_addresses(
    ranks: Any, tmp_path: Path, way: str, values: dict[str, int], kind: str
) -> None:
    text = ranks(2, hostile_slot, str(tmp_path), way, values)[0]
    assert text.startswith(f"{kind}: ")


def hostile_counts(folder: str, offset: int) -> str:
    """Rank 1 says that it has consumed what was never sent to it."""
    before = segments()
    comm = hdp.init("shm", timeout=LONG_S)
    written, over = Path(folder, "written"), Path(folder, "over")
    if comm.rank == 1:
        channel = Channel(before, 0, 1)
        channel.word(channel.at + offset, 8, HUGE)
        written.touch()
        wait_for(over)
        comm.abort()
        return ""
    wait_for(written)

    def send() -> None:
        x = torch.ones(500)
        works = [comm.send(x, 1, async_op=True) for _ in range(100)]  # more than a ring of either kind holds
        for work in works:
            work.wait()

    error = caught(send)
    over.touch()
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("offset", "told"), [(0, "consumed messages"), (8, "consumed payload")])
def test_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, told: str) -> None:
    monkeypatch.setenv("HDPCOMM_SHM_PAYLOAD_BYTES", "65536")
    (text, _) = spawn(hostile_counts, 2, str(tmp_path), offset, timeout=60)
    assert text.startswith(f"PeerLost: rank 1 was cut off: the count of {told} of its message is {HUGE}")


# --- segments


def memory_file(write: bytes, *, size: int = 1 << 20, seal: bool = True) -> int:
    fd = os.memfd_create("hdpcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, write, 0)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def header(num_ranks: int = 2, payload: int = 65536) -> bytes:
    return struct.pack("<QII", MAGIC, num_ranks, payload)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: memory_file(b"nothing"), "is none of this version"),
        (lambda: memory_file(header(), seal=False), "no memory file of sealed size"),
        (lambda: memory_file(header(3)), "was made for 3 ranks, this rank expects 2"),
        (lambda: memory_file(header()), "65536 bytes of payload, but has 1048576 bytes"),
        (lambda: memory_file(header(payload=4096)), "4096 bytes of payload"),
        (lambda: memory_file(header(payload=2**32 - 4096)), "4294963200 bytes of payload"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "no memory file|another user|is none"),
    ],
)
def test_segments(make: Callable[[], int], told: str) -> None:
    fd = make()
    try:
        with pytest.raises(hdp.Error, match=told):
            _core.transport.open_segment(f"{os.getpid()}:{fd}", 2)
    finally:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_segment_of_another_user() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(12345, 12345, 12345)
            fd = memory_file(header(), size=16 << 20)
            os.write(write, f"{os.getpid()}:{fd}".encode())
            time.sleep(30)
        finally:
            os._exit(0)
    try:
        address = os.read(read, 100).decode()
        with pytest.raises(hdp.Error, match="belongs to user 12345, this process to user 0"):
            _core.transport.open_segment(address, 2)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
