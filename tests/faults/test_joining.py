"""Ranks that die, give up, are interrupted or do not come while the others join: who hears of it, and what is said."""

from __future__ import annotations

import datetime
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm import bootstrap
from hdpcomm.comm.bootstrap import Joining, wait_for_all
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.secret import Secret
from hdpcomm.comm.torch_store import SignedStore
from hdpcomm.errors import PeerLost
from hdpcomm.testing import RankPool, spawn

OURS = Secret("the secret of this job")
LONG_S = 60.0
"""A deadline that no test waits for: where it is given, something else has to end the wait."""


def dies(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_when_ready(segment: _core.comm.ShmSegment, rank: int, **options: Any) -> None:
    threading.Timer(0.5, dies).start()
    _core.comm.join_shm_world(segment, rank, **options)


def stays_away(heard: str, *_: Any, **__: Any) -> None:
    """Alive, and not there before another rank has given up."""
    until = time.monotonic() + LONG_S
    while not os.path.exists(heard) and time.monotonic() < until:
        time.sleep(0.02)
    os._exit(0)


def joins_with_one_that_dies(folder: str, ways: dict[int, Callable[..., Any]], transport: str) -> None:
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        if rank in ways:
            patch.setattr(bootstrap, "_core", Core(ways[rank]))
        with pytest.raises(hdp.PeerLost, match=r"rank [12] (died \(process \d+\)|gave up).* joined the") as info:
            hdp.init(transport, timeout=LONG_S)
    assert info.value.op == "init"
    Path(folder, str(rank)).write_text(str(info.value))


class Core:
    """hdpcomm._core with another way to join a segment."""

    def __init__(self, way: Callable[..., Any]) -> None:
        self.way = way

    def __getattr__(self, name: str) -> Any:
        return self if name == "comm" else getattr(_core.comm, name, getattr(_core, name, None))

    def join_shm_world(self, segment: Any, rank: int, **options: Any) -> Any:
        return self.way(segment, rank, **options)


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_one_that_dies_before_it_is_there(tmp_path: Path, transport: str) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 2 ended by signal SIGKILL"):
        spawn(joins_with_one_that_dies, 3, str(tmp_path), {2: dies}, transport, timeout=LONG_S)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_one_that_dies_while_another_is_awaited(tmp_path: Path) -> None:
    ways = {1: functools.partial(stays_away, str(tmp_path / "0")), 2: dies_when_ready}
    with pytest.raises(hdp.PeerLost, match=r"rank [12] ended"):
        spawn(joins_with_one_that_dies, 3, str(tmp_path), ways, "shm", timeout=LONG_S)
    assert "rank 2 died" in (tmp_path / "0").read_text()


def dies_before_the_segment(folder: str) -> None:
    """Rank 0 has told who it is, and never makes the segment."""
    if os.environ["RANK"] == "0":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bootstrap, "_join_shm", dies)
            patch.setattr(bootstrap, "_JOINS", {})
            hdp.init("shm", timeout=LONG_S)
    with pytest.raises(hdp.Error, match=r"rank 0 (died|ended)|did rank 0 end"):
        hdp.init("shm", timeout=LONG_S)
    Path(folder, os.environ["RANK"]).touch()


def test_one_that_dies_at_the_store(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 0 ended by signal SIGKILL"):
        spawn(dies_before_the_segment, 3, str(tmp_path), timeout=LONG_S)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


@contextmanager
def interrupt_soon() -> Iterator[None]:
    """Ctrl-C on the main thread a moment later."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


def joining(store: Any, rank: int, size: int, **fields: Any) -> Joining:
    return Joining(store, "world", rank, size, LONG_S, time.monotonic() + LONG_S, **fields)


def join_segment(segment: _core.comm.ShmSegment, rank: int, seconds: float, pids: tuple[int, ...] = ()) -> Communicator:
    world = _core.comm.join_shm_world(segment, rank, timeout=LONG_S, joining=seconds, pids=pids)
    return Communicator(world.communicator(), world.rank, world.size)


def test_ctrl_c_in_the_segment_ends_the_wait_of_all() -> None:
    segment = _core.transport.create_segment(3)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join_segment, segment, 1, LONG_S)
        with interrupt_soon():
            join_segment(segment, 0, LONG_S)
        with pytest.raises(hdp.PeerLost, match="rank 0 gave up; its last words: it was interrupted while") as info:
            other.result()
    assert (info.value.rank, info.value.peer, info.value.op) == (1, 0, "init")


def test_ctrl_c_at_the_store() -> None:
    store = dist.HashStore()
    with interrupt_soon():
        wait_for_all(store, ["a/1"], time.monotonic() + LONG_S, LONG_S, 0)


def test_who_does_not_come_is_named_by_all_whose_time_is_over() -> None:
    """Also by those that wait longer than one that has given up; a latecomer hears of both when it needs them."""
    segment = _core.transport.create_segment(3)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(join_segment, segment, rank, seconds) for rank, seconds in ((0, 0.3), (1, 1.2))]
        for rank, future in enumerate(futures):
            with pytest.raises(hdp.CommTimeout, match="ranks 2 did not join") as info:
                future.result()
            assert (info.value.rank, info.value.peer) == (rank, 2)
    late = join_segment(segment, 2, LONG_S)
    with pytest.raises(hdp.PeerLost, match=r"rank 0 closed its communicator.*last words: ranks 2 did not join"):
        late.recv(torch.zeros(1), 0)
    late.close()


def test_ranks_that_never_reached_the_store_are_named() -> None:
    inner = dist.HashStore()
    stores = [SignedStore(inner, OURS, rank, seconds=LONG_S) for rank in (0, 2)]
    for store in stores:
        store.show_secret()
    keys = [f"here/{rank}" for rank in range(1, 46)]
    with pytest.raises(hdp.CommTimeout) as info:
        wait_for_all(stores[0], keys, time.monotonic() + 0.2, 0.2, 0)
    listed = ", ".join(str(rank) for rank in range(1, 46) if rank != 2)[: len("1, 3, 4")]
    assert re.search(
        rf"in init\(\) for: 1, 2, 3, .* and 13 more .*; never at the job's store: {listed}, .* and 12 more \(not",
        str(info.value),
    )


def test_an_ended_process_is_named_before_it_was_there() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(hdp.PeerLost, match=rf"rank 1 died \(process {gone.pid}\) while the ranks joined the shared"):
        join_segment(_core.transport.create_segment(2), 0, LONG_S, (os.getpid(), gone.pid))
    with pytest.raises(
        hdp.PeerLost, match=rf"rank 1 died \(process {gone.pid}\) while the ranks joined the wor"
    ) as info:
        joining(dist.HashStore(), 0, 2, pids=(os.getpid(), gone.pid)).wait("a/1")
    assert (info.value.rank, info.value.peer, info.value.op) == (0, 1, "init")
    assert _core.comm.process_runs(os.getpid())


def ends_for(rank: int, store: Any, ends: Callable[[], None]) -> None:
    """One of four ranks comes to its end; the others wait for it."""
    place = joining(store, rank, 4)
    with place.reporting_failure():
        if rank == 2:
            ends()
        place.from_all("host", "")


@pytest.mark.parametrize(
    ("error", "peer", "words"),
    [
        (KeyError("no such host"), 2, r"rank 2 gave up while.*last words: KeyError: 'no such host' \(told by rank 2\)"),
        (hdp.InvalidUsage("a bad name"), 2, r"rank 2 gave up while.*: InvalidUsage: a bad name \(told by rank 2\)"),
        (KeyboardInterrupt(), 2, r"rank 2 gave up while.*last words: KeyboardInterrupt \(told by rank 2\)"),
        (hdp.PeerLost("rank 3 died: look for its error", peer=3), 3, r"^rank 3 died \(told by rank 2\): look for its"),
    ],
)
def test_all_ranks_hear_of_one_that_gives_up(error: BaseException, peer: int, words: str) -> None:
    store = dist.HashStore()

    def ends() -> None:
        raise error

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ends_for, rank, store, ends) for rank in range(3)]
        for rank, future in enumerate(futures):
            if rank == 2:
                assert future.exception() is error
            else:
                with pytest.raises(hdp.PeerLost, match=words) as info:
                    future.result()
                assert (info.value.rank, info.value.peer, info.value.op) == (rank, peer, "init")


def test_a_timeout_is_not_told() -> None:
    """Each rank finds out for itself whom it misses."""
    store = dist.HashStore()
    with pytest.raises(hdp.CommTimeout), joining(store, 0, 2).reporting_failure():
        raise hdp.CommTimeout("rank 0 waited")
    joining(store, 1, 2).check_peers()


def test_who_left_after_all_had_come_is_no_error_of_joining() -> None:
    segment = _core.transport.create_segment(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join_segment, segment, 0, LONG_S)
        second = join_segment(segment, 1, LONG_S)
        first.result().close()
    with pytest.raises(hdp.PeerLost, match="rank 0 closed its communicator"):
        second.recv(torch.zeros(1), 0)
    second.close()


class SlowStore:
    """Its keys appear in the given order, one with each question."""

    def __init__(self, order: list[str]) -> None:
        self.order, self.there, self.asked = order, 0, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += len(keys)
        self.there += 1
        return all(key in self.order[: self.there] for key in keys)


@settings(max_examples=30)
@given(st.permutations([f"key/{i}" for i in range(24)]), st.integers(0, 24))
def test_all_keys_are_waited_for_in_whatever_order_they_come(order: list[str], absent: int) -> None:
    store = SlowStore(order[absent:])
    keys = sorted(order)
    deadline = time.monotonic() + (LONG_S if absent == 0 else 0.05)
    if absent == 0:
        wait_for_all(store, keys, deadline, LONG_S, 3)
        assert store.there >= len(keys)
    else:
        store.there = len(order)
        with pytest.raises(hdp.CommTimeout) as info:
            wait_for_all(store, keys, deadline, 0.05, 3)
        named = str(info.value).split("for: ")[1].split(" (")[0].split(", ")
        assert named == [key.split("/")[1] for key in keys if key in order[:absent]]


def test_a_store_of_many_ranks_is_asked_for_little() -> None:
    """The last of 1024 comes late: polling for it is a question for one key."""
    keys = [f"key/{i}" for i in range(1024)]
    store = SlowStore([])
    store.order = keys[:-1]
    store.there = len(keys)
    with pytest.raises(hdp.CommTimeout, match="for: 1023 "):
        wait_for_all(store, keys, time.monotonic() + 0.3, 0.3, 0)
    polls = 300  # one each 1 ms at the most
    assert store.asked < 2 * 1024 + polls + 1024 + 2 * 1024


def test_a_store_that_is_lost_is_said() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=datetime.timedelta(seconds=5))
    client = dist.TCPStore("127.0.0.1", store.port, timeout=datetime.timedelta(seconds=5))
    del store
    with pytest.raises(hdp.Error, match=r"rank 1 lost the job's store in init.*did rank 0 end"):
        wait_for_all(client, ["a/1"], time.monotonic() + LONG_S, LONG_S, 1)


LATE = """
import os, time
import hdpcomm as hdp
from hdpcomm.comm import torch_store

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(6)  # the interpreter ends, and the late thread comes back from torch

slow, torch_store._LAST_S = Slow(), 0.0
try:
    hdp.init("shm", timeout=0.5)
except hdp.CommTimeout:
    print("told", flush=True)
raise SystemExit(5)
"""


def test_a_late_call_of_torch_leaves_the_exit_code() -> None:
    """Python ends such a thread inside of torch's bindings, which was SIGABRT (134)."""
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        places |= {"MASTER_PORT": str(unused.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        done = subprocess.run(
            [sys.executable, "-c", LATE], env={**os.environ, **places}, capture_output=True, text=True
        )
    assert (done.returncode, done.stdout) == (5, "told\n"), done.stderr


def gone_after_its_world_was_made() -> str:
    if os.environ["RANK"] == "1":

        def told(joining: Joining, key: str, make: Callable[[], Any]) -> Any:
            if key == "costs":
                raise PeerLost("rank 7 died while the ranks joined", rank=1, peer=7)
            return from_rank_0(joining, key, make)

        from_rank_0 = Joining.from_rank_0
        Joining.from_rank_0 = told  # type: ignore[method-assign]
    try:
        with hdp.init() as comm:
            comm.all_reduce(torch.ones(1))
    except PeerLost as error:
        return str(error)
    finally:
        if os.environ["RANK"] == "1":
            Joining.from_rank_0 = from_rank_0  # type: ignore[method-assign]
    return ""


def test_those_that_have_joined_hear_why_another_one_has_not() -> None:
    with RankPool(2) as pool:
        for told in pool.run(gone_after_its_world_was_made, timeout=60):
            assert "rank 7 died while the ranks joined" in told
