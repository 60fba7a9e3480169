"""Checkpoints of meshes: each rank writes what it has; the same mesh goes on with its bits, any other goes on, too."""

from __future__ import annotations

import copy

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.run import CheckpointFolder, open_checkpoint
from hdpcomm.testing import run_threads
from hdpcomm.train.state.layout import TensorPart
from tests.harness.mesh_shapes import SHAPES, trainer_of
from tests.ranks.parallel.test_sharded_mesh import ONE, check_state, steps_of


def tensors_of(state):
    """(name, entry) of all that a checkpoint holds."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in tensors_of(value))
        else:
            yield name, value


def own_bytes(trainer):
    """What this rank holds: its parameters, master weights and optimizer state."""
    kept = {p.data_ptr(): p.nbytes for p in trainer.model.parameters()}
    for group in trainer.optimizer.param_groups:
        kept |= {p.data_ptr(): p.nbytes for p in group["params"]}
    states = (
        each for own in trainer.optimizer.state.values() for each in own.values() if isinstance(each, torch.Tensor)
    )
    return sum(kept.values()) + sum(each.nbytes for each in states)


def folder_of(comm, path):
    """The first rank makes it before the others, since it sweeps what it finds."""
    if comm.rank:
        comm.barrier()
    folder = CheckpointFolder(path, keep=1, rank=comm.rank, writers=comm.size, session="s")
    if not comm.rank:
        comm.barrier()
    return folder


def saved(path, shape, **options):
    """On each rank: (what it has then, bytes sent, bytes that it holds, losses of the two steps that follow)."""

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, shape, **options)
            steps_of(trainer, shape.config, (0, 1))
            folder = folder_of(comm, path)
            sent = comm.stats()["bytes_sent"]
            state = trainer.checkpoint_state()
            sent = comm.stats()["bytes_sent"] - sent
            folder.save(2, {"trainer": state}, {})
            folder.wait()
            told = (copy.deepcopy(trainer.state_dict()), sent, own_bytes(trainer))
            return *told, steps_of(trainer, shape.config, (2, 3))

    return run_threads(rank, shape.ranks)


def resumed(path, shape, **options):
    """On each rank: (what it has then, losses of two steps)."""

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, shape, **options)
            state = {"trainer": trainer.checkpoint_state()}
            open_checkpoint(path / "step-2").load_into(state)
            trainer.load_state_dict(state["trainer"])
            return copy.deepcopy(trainer.state_dict()), steps_of(trainer, shape.config, (2, 3))

    return run_threads(rank, shape.ranks)


NARROW = {"wide": torch.float32, "dtype": torch.bfloat16}
OPTIONS = {
    "plain": {"zero": 0},
    "zero-1": {"zero": 1, "bucket_bytes": 2000},
    "bf16": {**NARROW, "zero": 0},
    "bf16 zero-1": {**NARROW, "zero": 1},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hdp 2 pp 2", "plain"),
        ("hdp 2 tp 2", "zero-1"),
        ("tp 4, two ranks a KV head", "plain"),
        ("pp 2 x 2 stages", "bf16 zero-1"),
        ("hdp 4 ep 2", "zero-1"),
        ("hdp 2 ep 2", "bf16"),
        ("hdp 2 pp 2 tp 2 ep 2", "plain"),
        ("hdp 2 pp 2 tp 2 ep 2", "bf16 zero-1"),
    ],
)
def test_the_same_mesh_goes_on_with_its_bits(name, kind, tmp_path):
    shape, options = SHAPES[name], OPTIONS[kind]
    before = saved(tmp_path, shape, **options)
    whole = before[0][0]
    size = sum(each.nbytes for _, each in tensors_of(whole) if isinstance(each, torch.Tensor))
    files = [file.stat().st_size for file in (tmp_path / "step-2").glob("*.distcp")]
    entries = sum(1 for _ in tensors_of(whole))
    assert size <= sum(files) <= size + 4096 * entries * shape.ranks  # each element once
    for _, sent, held, _ in before:
        assert sent < 64 * 1024  # names
        assert max(files) <= held + 4096 * entries
    for (state, losses), (wanted, *_, then) in zip(resumed(tmp_path, shape, **options), before, strict=True):
        assert losses == then
        check_state(state, wanted, 0.0)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("hdp 2 pp 2 tp 2", "hdp 2 tp 2"),
        ("tp 4, two ranks a KV head", "pp 2 x 2 stages"),
        ("hdp 2 pp 2 tp 2 ep 2", "hdp 4 ep 2"),
        ("hdp 4 ep 2", "one process"),
        ("hdp 2 pp 2", "one process"),
    ],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_another_mesh_has_the_same_state(first, then, zero, tmp_path):
    shape = SHAPES[first]
    after = SHAPES.get(then, ONE[shape.config])
    before = saved(tmp_path, shape, zero=zero)
    for state, losses in resumed(tmp_path, after, zero=1 - zero):
        check_state(state, before[0][0], 0.0)
        for pair, want in zip(losses, before[0][-1], strict=True):
            assert pair == pytest.approx(want, rel=1e-8)


def test_each_element_is_written_by_one_rank_and_read_where_it_is_needed():
    """Covers replicated norms of tensor ranks, the tied head, and experts on several HDP ranks."""
    shape = SHAPES["hdp 2 pp 2 tp 2 ep 2"]

    def rank():
        with hdp.init() as comm:
            return dict(tensors_of(trainer_of(comm, shape, zero=1).checkpoint_state()))

    written = {}
    for state in run_threads(rank, shape.ranks):
        for name, each in state.items():
            if isinstance(each, TensorPart) and each.written:
                count, size = written.get(name, (0, each.size()))
                boxes = each.__create_chunk_list__()
                written[name] = count + sum(torch.Size(box.sizes).numel() for box in boxes), size
    assert written
    assert {name: size.numel() for name, (_, size) in written.items()} == {name: n for name, (n, _) in written.items()}


def test_an_optimizer_whose_state_is_no_tensor(tmp_path):
    """Its numbers are in the checkpoint, those of all stages."""
    shape = SHAPES["hdp 2 pp 2"]

    def rank():
        with hdp.init() as comm:
            trainer = trainer_of(comm, shape)
            steps_of(trainer, shape.config, (0,))
            for own in trainer.optimizer.state.values():
                own["seen"] = 5 + comm.rank // 2  # of a stage
            folder = folder_of(comm, tmp_path)
            folder.save(1, trainer.checkpoint_state(), {})
            folder.wait()
            comm.barrier()  # the first rank has joined the parts
            for own in trainer.optimizer.state.values():
                own["seen"] = 0
            state = trainer.checkpoint_state()
            open_checkpoint(tmp_path / "step-1").load_into(state)
            trainer.load_state_dict(state)
            return {own["seen"] for own in trainer.optimizer.state.values()}

    assert run_threads(rank, shape.ranks) == [
        {5},
        {5},
        {5, 6},
        {5, 6},
    ]  # the last stage has a copy of the first's weight
