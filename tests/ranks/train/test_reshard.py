"""Tensors between two layouts: bitwise, with the fewest bytes, each of which crosses hosts once."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads
from hdpcomm.train import Reshard
from hdpcomm.train.state import reshard
from hdpcomm.train.state.layout import TensorPart
from tests.harness.mesh_shapes import SHAPES, Shape, trainer_of

PAIRS = int(os.environ.get("HDPCOMM_RESHARD_PAIRS", "60"))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def values_of(name, shape):
    """Small whole numbers, which every type holds."""
    draw = torch.Generator().manual_seed(len(name) + sum(shape))
    return torch.randint(-100, 100, shape, generator=draw)


def layout(draw, ranks, shape):
    """For each rank a list of (offsets, sizes): along a dimension, by ranges of elements, or whole, on some ranks."""
    takers = draw.sample(range(ranks), draw.randint(1, ranks))
    kind = draw.choice(["whole", "cut", "ranges", "grid"])
    found = [[] for _ in range(ranks)]
    if kind == "whole" or not shape:
        for rank in takers:
            found[rank] = [((0,) * len(shape), shape)]
    elif kind == "cut":
        d = draw.randrange(len(shape))
        edges = sorted({0, shape[d], *(draw.randint(0, shape[d]) for _ in takers)})
        for number, (a, b) in enumerate(pairwise(edges)):
            for rank in {takers[number % len(takers)], draw.choice(takers)}:
                offsets, sizes = [0] * len(shape), list(shape)
                offsets[d], sizes[d] = a, b - a
                found[rank].append((tuple(offsets), tuple(sizes)))
    elif kind == "ranges":
        total = int(torch.tensor(shape).prod())
        edges = sorted({0, total, *(draw.randint(0, total) for _ in takers)})
        for number, (a, b) in enumerate(pairwise(edges)):
            part = TensorPart.of_range(shape, a, torch.empty(b - a))
            found[takers[number % len(takers)]] += [(tuple(o), tuple(x.shape)) for o, x in part.boxes]
    else:
        halves = [(0, n // 2, n) if n > 1 else (0, n) for n in shape]
        for index in range(2 ** len(shape)):
            box = [edges[min(index >> d & 1, len(edges) - 2) :][:2] for d, edges in enumerate(halves)]
            at = (tuple(a for a, _ in box), tuple(b - a for a, b in box))
            rank = takers[index % len(takers)]
            if at not in found[rank]:
                found[rank].append(at)
    return found


def problem(seed):
    draw = random.Random(seed)
    ranks = draw.randint(1, 4)
    hosts = sorted(draw.randint(0, 1) for _ in range(ranks)) if draw.random() < 0.5 else [0] * ranks
    tensors = {}
    for name in ("a", "bb", "ccc")[: draw.randint(1, 3)]:
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(0, 3)))
        kinds = draw.choice(DTYPES), draw.choice(DTYPES)
        tensors[name] = shape, kinds, layout(draw, ranks, shape), layout(draw, ranks, shape)
    return ranks, hosts, tensors, draw.choice([1, 16, 1 << 20])


def parts(tensors, side, rank, *, filled):
    found = {}
    for name, (shape, kinds, *sides) in tensors.items():
        boxes = sides[side][rank]
        if not boxes:
            continue
        whole = values_of(name, shape).to(kinds[side])
        made = []
        for offsets, sizes in boxes:
            here = whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].clone()
            made.append((offsets, here if filled else torch.full_like(here, 77)))
        found[name] = TensorPart(shape, made)
    return found


def check_equal(found, wanted):
    for name, part in found.items():
        for (at, mine), (_, theirs) in zip(part.boxes, wanted[name].boxes, strict=True):
            assert torch.equal(mine, theirs), (name, at)


def fill(side, value):
    for part in side.values():
        for _, tensor in part.boxes:
            tensor.fill_(value)


def fewest(ranks, hosts, tensors):
    """(bytes that all ranks receive, bytes between hosts), counted element by element."""
    total = between = 0
    for shape, kinds, has, wants in tensors.values():
        size = min(kind.itemsize for kind in kinds)

        def mask(boxes, shape=shape):
            found = torch.zeros(shape, dtype=torch.bool)
            for offsets, sizes in boxes:
                found[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] = True
            return found

        owned, wanted = [mask(each) for each in has], [mask(each) for each in wants]
        total += size * sum(int((want & ~own).sum()) for own, want in zip(owned, wanted, strict=True))
        for host in set(hosts):
            here = [rank for rank in range(ranks) if hosts[rank] == host]
            want = torch.stack([wanted[rank] for rank in here]).any(0)
            between += size * int((want & ~torch.stack([owned[rank] for rank in here]).any(0)).sum())
    return total, between


@pytest.mark.parametrize("first", range(0, PAIRS, 20))
def test_random_pairs_of_layouts(first):
    for seed in range(first, first + 20):
        ranks, hosts, tensors, message_bytes = problem(seed)

        def main(tensors=tensors):
            with hdp.init() as comm:
                source = parts(tensors, 0, comm.rank, filled=True)
                target = parts(tensors, 1, comm.rank, filled=False)
                moving = Reshard(source, target, comm)
                before = comm.stats()["bytes_sent"]
                moving.run()
                sent = comm.stats()["bytes_sent"] - before
                wanted = parts(tensors, 1, comm.rank, filled=True)
                check_equal(target, wanted)
                fill(target, 77)
                moving.start()
                fill(source, 55)  # what goes is what it was
                check_equal(target, parts(tensors, 1, comm.rank, filled=False))
                comm.all_reduce(torch.ones(3))  # others' operations between
                moving.finish()
                check_equal(target, wanted)
                assert moving.version == 2
                assert comm.stats()["bytes_sent"] - before >= 2 * sent
                return sent, moving.bytes_sent, moving.bytes_between_hosts

        with patch.multiple(reshard, nodes_of=lambda _, hosts=hosts: hosts, _MESSAGE_BYTES=message_bytes):
            results = run_threads(main, ranks)
        total, between = fewest(ranks, hosts, tensors)
        assert all(sent == planned for sent, planned, _ in results), seed
        assert sum(sent for sent, *_ in results) == total, seed
        assert {crossing for *_, crossing in results} == {between}, seed


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_from_a_trainers_mesh_to_ranks_that_want_all_of_it(zero):
    """Four ranks train in a pipeline; a fifth one gets the whole model in bfloat16, a sixth a half of each matrix."""

    def main():
        torch.set_num_threads(1)
        with hdp.init() as world:
            trains = world.subset([1, 2, 3, 4])
            source = {}
            if trains is not None:
                trainer = trainer_of(trains, SHAPES["hdp 2 pp 2"], zero=zero)
                source = trainer.checkpoint_state()["model"]
            plain = trainer_of(world.subset([world.rank]), Shape(1)).state_dict()["model"]
            target = {}
            if world.rank == 0:
                target = {name: torch.empty_like(x, dtype=torch.bfloat16) for name, x in plain.items()}
            if world.rank == 5:
                target = {
                    name: TensorPart(x.shape, [((x.shape[0] // 2, *[0] * (x.dim() - 1)), x[x.shape[0] // 2 :].clone())])
                    for name, x in plain.items()
                    if x.dim() == 2
                }
                for part in target.values():
                    part.boxes[0][1].zero_()
            moving = Reshard(source, target, world)
            moving.run()
            for name, part in target.items():
                if world.rank == 0:
                    assert torch.equal(part, plain[name].bfloat16()), name
                else:
                    assert torch.equal(part.boxes[0][1], plain[name][plain[name].shape[0] // 2 :]), name
            return moving.bytes_sent, sum(x.numel() for x in plain.values())

    sent = run_threads(main, 6)
    elements = sent[0][1]
    assert sum(each for each, _ in sent[1:5]) >= 2 * elements
    assert sent[0][0] == sent[5][0] == 0
    assert all(each > 0 for each, _ in sent[1:5]), "the replicas share the work"


def test_what_nobody_has_or_other_shapes():
    def missing():
        with hdp.init() as comm:
            Reshard({"w": TensorPart((4,), [((0,), torch.ones(2))])}, {"w": torch.empty(4)}, comm)

    def other():
        with hdp.init() as comm:
            Reshard({"w": torch.ones(4 + comm.rank)}, {}, comm)

    def types():
        with hdp.init() as comm:
            Reshard({"w": torch.ones(4, dtype=DTYPES[comm.rank])}, {}, comm)

    with pytest.raises(InvalidUsage, match="give sources of one type"):
        run_threads(types, 2)
    with pytest.raises(InvalidUsage, match=r"wants elements \[2\] to \[4\] of w, which no rank has"):
        run_threads(missing, 2)
    with pytest.raises(InvalidUsage, match="has the shape"):
        run_threads(other, 2)


def test_what_is_started_comes_while_ranks_do_something_else():
    """The receiver asks until it is there; the sender is in no call; a second run waits for the first."""

    def main():
        with hdp.init() as comm:
            values = torch.arange(1 << 20, dtype=torch.float32)
            source, target = ({"w": values.clone()}, {}) if comm.rank == 0 else ({}, {"w": torch.zeros(1 << 20)})
            moving = Reshard(source, target, comm)
            assert not moving.ready()
            with pytest.raises(InvalidUsage, match=r"finish\(\) without start\(\)"):
                moving.finish()
            for version in range(1, 4):
                moving.start()
                for tensor in source.values():
                    tensor += 1
                for call in (moving.start, moving.run):
                    with pytest.raises(InvalidUsage, match=r"call finish\(\) first"):
                        call()
                until = time.monotonic() + 60
                while not moving.ready() and time.monotonic() < until:
                    time.sleep(0.001)
                moving.finish()
                assert moving.version == version
                for tensor in target.values():
                    assert torch.equal(tensor, values + version - 1)

    run_threads(main, 2)
