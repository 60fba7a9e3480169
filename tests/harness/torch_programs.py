"""Random programs of point-to-point calls that end under gloo's rules, how a rank runs one, and what it must receive.

A program is made as one order of events of all ranks, of which each rank gets its own. What blocks stands where its
partner has been posted before in that order (or is the very next event), so no program can deadlock, whatever the
timing. Messages of a class (source, receiver, group, tag) have one size; the n-th send of a class meets its n-th
receive. Receives from any source have classes of their own, without a source; a send to one is waited for at the end
only, since what another rank sends later may come first and take its receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ANY", "Program", "check", "make_program", "members_of", "run_program"]

ANY = -1
SIZES = (0, 1, 5, 1000, 70_001)
Event = tuple[Any, ...]


def members_of(size: int) -> list[list[int]]:
    """The ranks of the groups of a program: the world, all in another order, and one of two ranks."""
    everyone = list(range(size))
    return [everyone, everyone[::-1], [size - 1, 0]]


@dataclass
class Class:
    """Messages that match each other; ``source`` and ``receiver`` are ranks of the world."""

    source: int
    receiver: int
    group: int
    tag: int
    count: int
    sends: list[tuple[int, int]] = field(default_factory=list)  # (source, number), in the order posted
    receives: list[int] = field(default_factory=list)  # keys


@dataclass
class Program:
    """``events[rank]``: what the rank calls. The other fields are for :func:`check`."""

    events: list[list[Event]]
    classes: list[Class]


class _Maker:
    def __init__(self, random: Random, size: int, plain: bool) -> None:
        self.random = random
        self.plain = plain
        self.size = size
        self.groups = members_of(size)
        self.events: list[list[Event]] = [[] for _ in range(size)]
        self.classes: dict[tuple[int, int, int, int], Class] = {}
        self.pending: dict[int, tuple[int, Class, bool, int]] = {}  # key: rank, class, is a send, place in the class
        self.next_key = 0

    def class_of(self) -> Class:
        group = self.random.randrange(len(self.groups))
        receiver = self.random.choice(self.groups[group])
        others = [rank for rank in self.groups[group] if rank != receiver]
        # tags 0 and 1 name a source, 2 takes any
        tag = self.random.randrange(2 if self.plain else 3)
        source = ANY if tag == 2 else self.random.choice(others)
        place = (source, receiver, group, tag)
        if place not in self.classes:
            self.classes[place] = Class(*place, self.random.choice(SIZES[1:] if self.plain else SIZES))
        return self.classes[place]

    def post(self, one: Class, *, send: bool, blocking: bool) -> tuple[int, Event]:
        """The event of a call, and its rank."""
        members = self.groups[one.group]
        key, self.next_key = self.next_key, self.next_key + 1
        if send:
            others = [rank for rank in members if rank != one.receiver]
            rank = self.random.choice(others) if one.source == ANY else one.source
            peer, place = members.index(one.receiver), len(one.sends)
            one.sends.append((rank, key))
        else:
            rank = one.receiver
            peer, place = ANY if one.source == ANY else members.index(one.source), len(one.receives)
            one.receives.append(key)
        if not blocking:
            self.pending[key] = (rank, one, send, place)
        name = ("" if blocking else "i") + ("send" if send else "recv")
        strided = not self.plain and self.random.random() < 0.1
        return rank, (name, one.group, peer, one.tag, one.count, key, strided)

    def add(self, one: Class, *, send: bool, blocking: bool) -> None:
        rank, event = self.post(one, send=send, blocking=blocking)
        self.events[rank].append(event)

    def message(self) -> None:
        one = self.class_of()
        ahead = len(one.sends) - len(one.receives)
        if ahead == 0 and one.source != ANY and self.random.random() < 0.3:  # both block, and meet
            self.add(one, send=True, blocking=True)
            self.add(one, send=False, blocking=True)
            return
        send = self.random.random() < 0.5
        can_block = (ahead < 0 and one.source != ANY) if send else ahead > 0
        self.add(one, send=send, blocking=can_block and self.random.random() < 0.5)

    def batch(self) -> None:
        first = self.class_of()
        rank, event = self.post(first, send=self.random.random() < 0.5, blocking=False)
        events = [event]
        for _ in range(self.random.randrange(4)):
            one = self.class_of()
            send = rank != one.receiver
            if one.group != first.group or (send and one.source != rank) or (not send and one.source == ANY):
                continue
            events.append(self.post(one, send=send, blocking=False)[1])
        self.events[rank].append(("batch", events))

    def wait(self, *, certainly: bool = False) -> None:
        for key, (rank, one, send, place) in list(self.pending.items()):
            if place >= len(one.receives if send else one.sends):
                continue
            if send and one.source == ANY and not certainly:
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
        for one in self.classes.values():
            while len(one.sends) < len(one.receives):
                self.add(one, send=True, blocking=self.random.random() < 0.3)
            while len(one.receives) < len(one.sends):
                self.add(one, send=False, blocking=self.random.random() < 0.3)
        self.wait(certainly=True)


def make_program(random: Random, size: int, length: int, *, plain: bool = False) -> Program:
    """``length`` steps on ``size`` ranks, and what it takes to end them.

    ``plain``: only what gloo does as well, also where cores are busy: no receives from any source, empty or strided
    tensors, or works that are polled or dropped.
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
    return Program(maker.events, list(maker.classes.values()))


class _Runner:
    """One rank's run; ``got``: by key, the number that came and the rank of the world that sent it."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], members: list[list[int]]) -> None:
        self.groups = groups
        self.members = members
        self.works: dict[int, Any] = {}
        self.buffers: dict[int, tuple[torch.Tensor, int, int]] = {}  # of receives: tensor, group, peer
        self.got: dict[int, tuple[int | None, int | None]] = {}

    def tensor(self, event: Event) -> torch.Tensor:
        name, _, _, _, count, key, strided = event
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
        name, group, peer, tag, _, key, _ = event
        x = self.tensor(event)
        side = {} if peer == ANY else {"group_dst" if "send" in name else "group_src": peer}
        if "recv" in name:
            self.buffers[key] = x, group, peer
        result = getattr(dist, name)(x, group=self.groups[group], tag=tag, **side)
        if name == "recv":
            self.note(key, result)
        elif name != "send":
            self.works[key] = result

    def batch(self, events: list[Event]) -> None:
        ops = []
        for event in events:
            name, group, peer, tag, _, key, _ = event
            x = self.tensor(event)
            if name == "irecv":
                self.buffers[key] = x, group, peer
            if peer == ANY:
                self.works[key] = dist.irecv(x, group=self.groups[group], tag=tag)
            else:
                ops.append(
                    (key, dist.P2POp(getattr(dist, name), x, group=self.groups[group], tag=tag, group_peer=peer))
                )
        if ops:
            works = dist.batch_isend_irecv([op for _, op in ops])
            self.works.update(zip((key for key, _ in ops), works, strict=True))

    def note(self, key: int, source: int | None = None) -> None:
        if key not in self.buffers:
            return  # a send
        x, group, peer = self.buffers[key]
        if source is None and peer == ANY:
            source = self.members[group][self.works[key]._source_rank()]
        values = set(x.tolist())
        assert len(values) <= 1, f"message {key} is torn: {values}"
        self.got[key] = (values.pop() if values else None), source


def run_program(
    events: Sequence[Event], groups: Sequence[dist.ProcessGroup], members: list[list[int]]
) -> dict[int, tuple[int | None, int | None]]:
    """What a rank received: by the receive's key the send's, and the source where it was asked for."""
    runner = _Runner(groups, members)
    for event in events:
        runner.run(event)
    return runner.got


def check(program: Program, got: Sequence[dict[int, tuple[int | None, int | None]]]) -> None:
    """That every receive got the message that the rules of matching give it. ``got``: of all ranks."""
    for one in program.classes:
        received = [got[one.receiver][key] for key in one.receives]
        if one.source != ANY:
            expected = [key if one.count else None for _, key in one.sends]
            assert [number for number, _ in received] == expected, one
            assert {source for _, source in received} <= {None, one.source}, one
            continue
        by_source = defaultdict(list)
        for number, source in received:
            by_source[source].append(number)
        sent = defaultdict(list)
        for source, key in one.sends:
            sent[source].append(key if one.count else None)
        assert by_source == sent, one
