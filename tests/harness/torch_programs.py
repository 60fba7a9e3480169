"""Random programs of point-to-point calls that end under gloo's rules, how a rank runs one, and what it must receive.

A program is made as one order of events of all ranks, of which each rank gets its own. What blocks stands where its
partner has been posted before in that order (or is the very next event), so no program can deadlock, whatever the
timing. Messages of a pair of ranks have one size and one group; the n-th send of a pair meets its n-th receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Program", "check", "make_program", "members_of", "run_program"]

SIZES = (0, 1, 5, 1000, 70_001)
Event = tuple[Any, ...]


def members_of(size: int) -> list[list[int]]:
    """The ranks of the groups of a program: the world, all in another order, and one of two ranks."""
    everyone = list(range(size))
    return [everyone, everyone[::-1], [size - 1, 0]]


@dataclass
class Pair:
    """The messages from one rank to another, both ranks of the world."""

    source: int
    receiver: int
    group: int
    count: int
    sends: list[int] = field(default_factory=list)  # keys, in the order posted
    receives: list[int] = field(default_factory=list)


@dataclass
class Program:
    """``events[rank]``: what the rank calls. The other fields are for :func:`check`."""

    events: list[list[Event]]
    pairs: list[Pair]


class _Maker:
    def __init__(self, random: Random, size: int, plain: bool) -> None:
        self.random = random
        self.plain = plain
        self.size = size
        self.groups = members_of(size)
        self.events: list[list[Event]] = [[] for _ in range(size)]
        self.pairs: dict[tuple[int, int], Pair] = {}
        self.pending: dict[int, tuple[int, Pair, bool, int]] = {}  # key: rank, pair, is a send, place in the pair
        self.next_key = 0

    def pair(self) -> Pair:
        group = self.random.randrange(len(self.groups))
        source, receiver = self.random.sample(self.groups[group], 2)
        if (source, receiver) not in self.pairs:
            count = self.random.choice(SIZES[1:] if self.plain else SIZES)
            self.pairs[source, receiver] = Pair(source, receiver, group, count)
        return self.pairs[source, receiver]

    def post(self, one: Pair, *, send: bool, blocking: bool) -> tuple[int, Event]:
        """The event of a call, and its rank."""
        members = self.groups[one.group]
        key, self.next_key = self.next_key, self.next_key + 1
        rank, other, keys = (one.source, one.receiver, one.sends) if send else (one.receiver, one.source, one.receives)
        peer, place = members.index(other), len(keys)
        keys.append(key)
        if not blocking:
            self.pending[key] = (rank, one, send, place)
        name = ("" if blocking else "i") + ("send" if send else "recv")
        strided = not self.plain and self.random.random() < 0.1
        return rank, (name, one.group, peer, one.count, key, strided)

    def add(self, one: Pair, *, send: bool, blocking: bool) -> None:
        rank, event = self.post(one, send=send, blocking=blocking)
        self.events[rank].append(event)

    def message(self) -> None:
        one = self.pair()
        ahead = len(one.sends) - len(one.receives)
        if ahead == 0 and self.random.random() < 0.3:  # both block, and meet
            self.add(one, send=True, blocking=True)
            self.add(one, send=False, blocking=True)
            return
        send = self.random.random() < 0.5
        can_block = ahead < 0 if send else ahead > 0
        self.add(one, send=send, blocking=can_block and self.random.random() < 0.5)

    def batch(self) -> None:
        first = self.pair()
        rank, event = self.post(first, send=self.random.random() < 0.5, blocking=False)
        events = [event]
        for _ in range(self.random.randrange(4)):
            one = self.pair()
            if one.group == first.group and rank in (one.source, one.receiver):
                events.append(self.post(one, send=rank == one.source, blocking=False)[1])
        self.events[rank].append(("batch", events))

    def wait(self, *, certainly: bool = False) -> None:
        for key, (rank, one, send, place) in list(self.pending.items()):
            if place >= len(one.receives if send else one.sends):
                continue
            if certainly or self.random.random() < 0.3:
                if send and not self.plain and self.random.random() < 0.2:
                    self.events[rank].append(("drop", key))
                else:
                    self.events[rank].append(("wait", key))
                del self.pending[key]
        if self.pending and not self.plain and self.random.random() < 0.3:
            key = self.random.choice(list(self.pending))
            self.events[self.pending[key][0]].append(("test", key))

    def barrier(self) -> None:
        group = self.random.randrange(len(self.groups))
        for rank in self.groups[group]:
            self.events[rank].append(("barrier", group))

    def end(self) -> None:
        for one in self.pairs.values():
            while len(one.sends) < len(one.receives):
                self.add(one, send=True, blocking=self.random.random() < 0.3)
            while len(one.receives) < len(one.sends):
                self.add(one, send=False, blocking=self.random.random() < 0.3)
        self.wait(certainly=True)


def make_program(random: Random, size: int, length: int, *, plain: bool = False) -> Program:
    """``length`` steps on ``size`` ranks, and what it takes to end them.

    ``plain``: only what gloo does as well, also where cores are busy: no empty or strided tensors, no works that
    are polled or dropped.
    """
    maker = _Maker(random, size, plain)
    for _ in range(length):
        step = random.random()
        if step < 0.65:
            maker.message()
        elif step < 0.75:
            maker.batch()
        elif step < 0.97:
            maker.wait()
        else:
            maker.barrier()
    maker.end()
    return Program(maker.events, list(maker.pairs.values()))


class _Runner:
    """One rank's run; ``got``: by the receive's key, the number that came."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.works: dict[int, Any] = {}
        self.buffers: dict[int, torch.Tensor] = {}  # of receives
        self.got: dict[int, int | None] = {}

    def tensor(self, event: Event) -> torch.Tensor:
        name, _, _, count, key, strided = event
        x = torch.full((count, 2), -1)[:, 0] if strided else torch.full((count,), -1)
        return x.fill_(key) if "send" in name else x

    def run(self, event: Event) -> None:
        name = event[0]
        if name == "wait":
            self.works[event[1]].wait()
            self.note(event[1])
        elif name == "drop":
            del self.works[event[1]]
        elif name == "test":
            self.works[event[1]].is_completed()
        elif name == "barrier":
            dist.barrier(self.groups[event[1]])
        elif name == "batch":
            self.batch(event[1])
        else:
            self.call(event)

    def call(self, event: Event) -> None:
        name, group, peer, _, key, _ = event
        x = self.tensor(event)
        if "recv" in name:
            self.buffers[key] = x
        side = {"group_dst" if "send" in name else "group_src": peer}
        result = getattr(dist, name)(x, group=self.groups[group], **side)
        if name == "recv":
            self.note(key)
        elif name != "send":
            self.works[key] = result

    def batch(self, events: list[Event]) -> None:
        ops = []
        for event in events:
            name, group, peer, _, key, _ = event
            x = self.tensor(event)
            if name == "irecv":
                self.buffers[key] = x
            ops.append((key, dist.P2POp(getattr(dist, name), x, group=self.groups[group], group_peer=peer)))
        works = dist.batch_isend_irecv([op for _, op in ops])
        self.works.update(zip((key for key, _ in ops), works, strict=True))

    def note(self, key: int) -> None:
        if key not in self.buffers:
            return  # a send
        values = set(self.buffers[key].tolist())
        assert len(values) <= 1, f"message {key} is torn: {values}"
        self.got[key] = values.pop() if values else None


def run_program(events: Sequence[Event], groups: Sequence[dist.ProcessGroup]) -> dict[int, int | None]:
    """Runs a rank's events. Returns the key of the send that each receive got, by the key of the receive."""
    runner = _Runner(groups)
    for event in events:
        runner.run(event)
    return runner.got


def check(program: Program, got: Sequence[dict[int, int | None]]) -> None:
    """That every receive got the message that the rules of matching give it. ``got``: of all ranks."""
    for one in program.pairs:
        received = [got[one.receiver][key] for key in one.receives]
        assert received == [key if one.count else None for key in one.sends], one
