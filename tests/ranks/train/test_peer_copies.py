"""Copies in other ranks' memory: any one rank may go, nothing wrong is ever given back, and no byte goes in vain."""

from __future__ import annotations

import os
import random
from unittest.mock import patch

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads
from hdpcomm.train.state import peer_copies
from hdpcomm.train.state.layout import TensorPart
from hdpcomm.train.state.peer_copies import PeerCopies
from tests.ranks.train.test_reshard import DTYPES, layout

CASES = int(os.environ.get("HDPCOMM_TEST_PEER_COPIES", "40"))


def on_hosts(hosts):
    """Context in which the ranks are on these hosts, by rank."""
    return patch.object(peer_copies, "nodes_of", lambda _: hosts)


def values_of(name, shape, step):
    draw = torch.Generator().manual_seed(len(name) + 1000 * step)
    return torch.randint(-100, 100, shape, generator=draw)


def problem(seed):
    draw = random.Random(seed)
    ranks = draw.randint(2, 5)
    hosts = sorted(draw.randint(0, 1) for _ in range(ranks)) if draw.random() < 0.5 else [0] * ranks
    tensors = {}
    for name in ("a", "bb", "ccc")[: draw.randint(1, 3)]:
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 3)))
        tensors[name] = shape, draw.choice(DTYPES), layout(draw, ranks, shape), layout(draw, ranks, shape)
    return draw, ranks, hosts, tensors


def parts(tensors, side, rank, step):
    found = {}
    for name, (shape, dtype, *sides) in tensors.items():
        whole = values_of(name, shape, step).to(dtype)
        boxes = [
            (at, whole[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))].clone())
            for at, sizes in sides[side][rank]
        ]
        if boxes:
            found[name] = TensorPart(shape, boxes)
    return found


def check_loaded(kept, tensors, living, rank):
    """What a survivor of any layout gets is the state of that step."""
    target = parts(tensors, 1, rank, 99)
    kept.load_into(target, living)
    for name, part in parts(tensors, 1, rank, kept.step).items():
        for (_, mine), (_, theirs) in zip(target[name].boxes, part.boxes, strict=True):
            assert torch.equal(mine, theirs)


def loses_one(seed):
    draw, ranks, hosts, tensors = problem(seed)
    lost, steps = draw.randrange(ranks), draw.randint(1, 4)

    def body():
        with hdp.init() as comm:
            copies = PeerCopies(parts(tensors, 0, comm.rank, 0), comm)
            for step in range(1, steps + 1):
                live = parts(tensors, 0, comm.rank, step)
                copies.take(step, live, {"of": comm.rank, "step": step})
                for part in live.values():  # the next step changes them at once
                    for _, tensor in part.boxes:
                        tensor.fill_(33)
            copies.finish()
            living = comm.subset([rank for rank in range(ranks) if rank != lost])
            if living is not None:
                kept = PeerCopies.newest(copies, living)
                assert kept is not None
                assert kept.step == steps
                assert [each["of"] for each in kept.notes] == list(living.ranks)
                check_loaded(kept, tensors, living, comm.rank)
                assert PeerCopies.newest(copies, living).step == steps  # once more
            comm.barrier()
            return copies.nbytes, copies.bytes_sent, [cell.nbytes for s in copies._slots[:1] for cell in cells_of(s)]

    with on_hosts(hosts):
        told = run_threads(body, ranks)
    size = sum(torch.zeros(shape, dtype=dtype).numel() * dtype.itemsize for shape, dtype, *_ in tensors.values())
    assert sum(sum(cells) for *_, cells in told) == 2 * size  # each element twice
    shared = size - sum(alone_bytes(tensors, ranks).values())
    sent = sum(each for _, each, _ in told)
    assert sent >= size - shared
    if len(set(hosts)) == 1:  # who holds the same elements is asked to keep them
        assert sent <= (size - shared) + 8 * 200


def cells_of(slot):
    return [cell for each in (slot.local, *slot.got.values(), *slot.sent.values()) for cell in each.cells]


def alone_bytes(tensors, ranks):
    """Bytes that only one rank holds, by name, counted element by element."""
    found = {}
    for name, (shape, dtype, has, _) in tensors.items():
        holders = torch.zeros(shape, dtype=torch.int64)
        for rank in range(ranks):
            mask = torch.zeros(shape, dtype=torch.bool)
            for at, sizes in has[rank]:
                mask[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))] = True
            holders += mask
        found[name] = int((holders == 1).sum()) * dtype.itemsize
    return found


@pytest.mark.parametrize("seed", range(CASES))
def test_any_rank_may_go(seed):
    loses_one(seed)


def damaged(seed):
    draw, ranks, hosts, tensors = problem(seed)
    lost, place = draw.randrange(ranks), draw.random()

    def body():
        with hdp.init() as comm:
            copies = PeerCopies(parts(tensors, 0, comm.rank, 0), comm)
            for step in (1, 2):
                copies.take(step, parts(tensors, 0, comm.rank, step), {})
            copies.finish()
            newest = copies._slots[1].step
            segments = [each for each in segments_of(copies._slots[1]) if each.bytes]
            if segments and comm.rank == (lost + 1) % ranks:  # one bit of a survivor's copy is another one
                memory = segments[int(place * len(segments))].memory
                memory[int(place * (memory.numel() - 16))] ^= 1 << int(place * 8)
            comm.barrier()
            living = comm.subset([rank for rank in range(ranks) if rank != lost])
            kept = None
            if living is not None:
                kept = PeerCopies.newest(copies, living)
                if kept is not None:
                    check_loaded(kept, tensors, living, comm.rank)
            comm.barrier()
            return newest, kept and kept.step

    with on_hosts(hosts):
        told = run_threads(body, ranks)
    for newest, step in told:
        assert newest == 2
        assert step in (None, 1, 2)  # the older one, or the other copy of the elements


def segments_of(slot):
    return [slot.local, *slot.sent.values(), *slot.got.values()]


@pytest.mark.parametrize("seed", range(CASES // 2))
def test_a_damaged_copy_is_never_given_back(seed):
    damaged(seed)


def test_a_message_that_has_not_come_costs_a_step():
    """The owner of what nobody else holds dies before its copy has left: the state before is whole."""

    def body():
        with hdp.init() as comm:
            shape = (2, 3)
            live = [
                {"w": TensorPart(shape, [((comm.rank, 0), torch.full((1, 3), 10.0 * step + comm.rank))])}
                for step in range(3)
            ]
            copies = PeerCopies(live[0], comm)
            copies.take(1, live[1], {})
            if comm.rank == 0:
                copies.finish()
                comm.barrier()  # in the place of that of take(), which rank 1 begins and does not end
                living = comm.subset([0])
                kept = PeerCopies.newest(copies, living)
                target = {"w": torch.zeros(shape)}
                kept.load_into(target, living)
                assert kept.step == 1
                return target["w"].tolist()
            copies.finish()
            comm.barrier()
            copies._comm = _Silent(comm)
            copies.take(2, live[2], {})
            comm.subset([1])
            return None

    with on_hosts([0, 1]):
        told = run_threads(body, 2)
    assert told[0] == [[10.0] * 3, [11.0] * 3]


class _Silent:
    """A communicator that sends nothing."""

    def __init__(self, comm):
        self.rank, self.size = comm.rank, comm.size

    def barrier(self):
        pass

    def exchange(self, *_, **__):
        return _Done()


class _Done:
    def wait(self):
        pass


def test_replicas_send_nothing_and_hosts_keep_for_each_other():
    def body():
        with hdp.init() as comm:
            same = PeerCopies({"w": torch.zeros(100)}, comm)
            mine = {f"{comm.rank}": torch.zeros(100)}
            hosts = PeerCopies(mine, comm)
            keepers = {(cell.owner, cell.keeper) for cell in cells_of(hosts._slots[0])}
            return same.bytes_sent, keepers

    with on_hosts([0, 0, 1, 1]):
        told = run_threads(body, 4)
    for sent, pairs in told:
        assert sent == 0
        assert all(owner // 2 != keeper // 2 for owner, keeper in pairs)


def test_a_world_of_one_keeps_its_own():
    with hdp.init() as comm:
        copies = PeerCopies({"w": torch.zeros(3)}, comm)
        copies.take(4, {"w": torch.arange(3.0)}, "note")
        kept = PeerCopies.newest(copies, comm)
        target = {"w": torch.zeros(3)}
        kept.load_into(target, comm)
        assert (kept.step, kept.notes, target["w"].tolist()) == (4, ["note"], [0.0, 1.0, 2.0])
        assert PeerCopies.newest(None, comm) is None
