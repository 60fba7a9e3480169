"""Random programs: the checker finds a race or a deadlock exactly where some order of the operations has one.

The oracle uses no vector clocks: it visits all states that a program can reach (how far the host and each stream have
come). Two operations race if both come next in some state and they use one cell; a state before the end from which
nothing can continue is a deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm._core.device import open_sim
from hdpcomm.errors import CommTimeout
from tests.harness.native import _testing

STREAMS, EVENTS, CELLS, FLAGS = 3, 2, 1, 2


@dataclass(frozen=True)
class Op:
    """One operation of a program; ``stream`` -1 is the host."""

    kind: str  # write, read, record, wait, signal, await, sync_stream, sync_event
    stream: int
    arg: int  # cell, event, flag or stream


def _op() -> st.SearchStrategy[Op]:
    stream = st.integers(0, STREAMS - 1)
    access = st.builds(Op, st.sampled_from(["write", "read"]), st.integers(-1, STREAMS - 1), st.integers(0, CELLS - 1))
    event = st.builds(Op, st.sampled_from(["record", "wait"]), stream, st.integers(0, EVENTS - 1))
    flag = st.builds(Op, st.sampled_from(["signal", "await"]), stream, st.integers(0, FLAGS - 1))
    sync = st.one_of(
        st.builds(Op, st.just("sync_stream"), st.just(-1), stream),
        st.builds(Op, st.just("sync_event"), st.just(-1), st.integers(0, EVENTS - 1)),
    )
    return st.one_of(access, access, access, event, event, flag, sync)


def _programs() -> st.SearchStrategy[list[Op]]:
    def one_signal_a_flag(ops: list[Op]) -> list[Op]:
        seen: set[int] = set()
        kept = []
        for op in ops:
            if op.kind == "signal" and op.arg in seen:
                continue
            seen |= {op.arg} if op.kind == "signal" else set()
            kept.append(op)
        return kept

    return st.lists(_op(), min_size=2, max_size=10).map(one_signal_a_flag)


class Oracle:
    """Explores all states. A state: (host's next operation, how many each stream has done, flags that are set)."""

    def __init__(self, program: list[Op]) -> None:
        self.program = program
        self.race = False
        self.deadlock = False
        # For each wait for an event or a stream, the operations that must be done first, by the order of the calls.
        self.targets: dict[int, tuple[int, int]] = {}
        counts, records = [0] * STREAMS, {}
        for i, op in enumerate(program):
            if op.kind in ("wait", "sync_event") and op.arg in records:
                self.targets[i] = records[op.arg]
            elif op.kind == "sync_stream":
                self.targets[i] = (op.arg, counts[op.arg])
            if op.stream >= 0:
                counts[op.stream] += 1
            if op.kind == "record":
                records[op.arg] = (op.stream, counts[op.stream])
        self.of_stream = [[i for i, op in enumerate(program) if op.stream == s] for s in range(STREAMS)]
        self.seen: set[tuple[int, tuple[int, ...], frozenset[int]]] = set()
        self._explore()

    def _ready(self, i: int, done: tuple[int, ...], flags: frozenset[int]) -> bool:
        op = self.program[i]
        if op.kind == "await":
            return op.arg in flags
        stream, count = self.targets.get(i, (0, 0))
        return done[stream] >= count

    def _explore(self) -> None:
        todo = [(0, (0,) * STREAMS, frozenset[int]())]
        while todo:
            state = todo.pop()
            if state in self.seen:
                continue
            self.seen.add(state)
            host, done, flags = state
            nexts = []  # operations that could run now, and the state after each
            pending = False
            if host < len(self.program):
                op = self.program[host]
                pending = True
                if op.stream >= 0 or self._ready(host, done, flags):
                    nexts.append((host if op.stream < 0 else None, (host + 1, done, flags)))
            for stream in range(STREAMS):
                mine = self.of_stream[stream]
                if done[stream] == len(mine) or mine[done[stream]] >= host:
                    continue
                pending = True
                i = mine[done[stream]]
                if self._ready(i, done, flags):
                    after = tuple(d + (s == stream) for s, d in enumerate(done))
                    signal = {self.program[i].arg} if self.program[i].kind == "signal" else set()
                    nexts.append((i, (host, after, flags | signal)))
            self.deadlock |= pending and not nexts
            accesses = [self.program[i] for i, _ in nexts if i is not None]
            accesses = [op for op in accesses if op.kind in ("read", "write")]
            for n, a in enumerate(accesses):
                self.race |= any(a.arg == b.arg and "write" in (a.kind, b.kind) for b in accesses[n + 1 :])
            todo.extend(after for _, after in nexts)


def _run(program: list[Op], seed: int) -> set[str]:
    """The kinds of errors that the checker reports."""
    run = _testing.DeviceCheck(seed)
    run.enter_rank(0)
    device = open_sim(0)
    cells, flags = device.allocate(8 * CELLS), device.allocate(4 * FLAGS)
    device.fill(cells, 0, bytes=8 * CELLS, stream=0)
    device.fill(flags, 0, bytes=4 * FLAGS, stream=0)
    device.synchronize_stream(0)
    streams = [device.create_stream() for _ in range(STREAMS)]
    events = [device.create_event() for _ in range(EVENTS)]
    try:
        for op in program:
            cell = cells + 8 * op.arg
            if op.stream < 0 and op.kind == "write":
                device.annotate_write(cell, 8)
            elif op.stream < 0 and op.kind == "read":
                device.annotate_read(cell, 8)
            elif op.kind == "sync_stream":
                device.synchronize_stream(streams[op.arg])
            elif op.kind == "sync_event":
                device.synchronize_event(events[op.arg])
            elif op.kind == "write":
                device.fill(cell, 1, bytes=8, stream=streams[op.stream])
            elif op.kind == "read":
                device.copy(device.allocate(8), cell, bytes=8, stream=streams[op.stream])
            elif op.kind == "record":
                device.record(events[op.arg], streams[op.stream])
            elif op.kind == "wait":
                device.wait(streams[op.stream], events[op.arg])
            elif op.kind == "signal":
                device.write_value(streams[op.stream], flags + 4 * op.arg, 1)
            else:
                device.wait_value(streams[op.stream], flags + 4 * op.arg, 1)
    except CommTimeout:
        pass  # the host waits for ever: the recording ends here
    run.leave_rank()
    run.finish()
    return {report.kind for report in run.reports()}


@settings(max_examples=600, deadline=None)
@given(_programs(), st.integers(0, 1000))
def test_against_all_orders(program: list[Op], seed: int) -> None:
    oracle = Oracle(program)
    kinds = _run(program, seed)
    assert kinds <= {"missing wait", "reused too early", "deadlock"}
    assert bool(kinds & {"missing wait", "reused too early"}) == oracle.race, (kinds, oracle.race)
    assert ("deadlock" in kinds) == oracle.deadlock, (kinds, oracle.deadlock)


@pytest.mark.parametrize(
    ("program", "race", "deadlock"),
    [
        ([Op("write", 0, 0), Op("read", 1, 0)], True, False),
        ([Op("write", 0, 0), Op("record", 0, 0), Op("wait", 1, 0), Op("read", 1, 0)], False, False),
        ([Op("write", 0, 0), Op("signal", 0, 1), Op("await", 1, 1), Op("read", 1, 0)], False, False),
        ([Op("await", 0, 0), Op("sync_stream", -1, 0), Op("signal", 1, 0)], False, True),
        ([Op("write", 0, 0), Op("sync_stream", -1, 0), Op("write", -1, 0), Op("read", 2, 0)], False, False),
    ],
)
def test_the_oracle_itself(program: list[Op], race: bool, deadlock: bool) -> None:
    oracle = Oracle(program)
    assert (oracle.race, oracle.deadlock) == (race, deadlock)
