"""The memory of steps on meshes: as measured against what short passes say, and layers recomputed so that it fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.offload import MemoryMeter
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.plan.memory import Line, StepMemory, most_in_flight
from hdpcomm.run import RunConfig
from hdpcomm.run.first_weights import FirstWeights
from hdpcomm.run.memory import measure_memory
from hdpcomm.run.pipelines import device_recompute, new_trainer, recompute_by_device, stage_recompute
from hdpcomm.testing import run_threads
from hdpcomm.train import MatrixOwners
from tests.ranks.parallel.test_pipeline_runs import MODEL, data, losses, plain, plain_folder, run_of  # noqa: F401

OWN = LlamaConfig(vocabulary=500, layers=4, hidden=64, heads=4, kv_heads=2, ffn=160)
TOKENS = 300


def masters_of(trainer):
    return [] if trainer.runner.masters is None else [piece.master for piece in trainer.runner.masters.pieces]


def kept_bytes(trainer):
    """Bytes of all that a trainer keeps between steps; shared storages count once."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers(), trainer.runner.gradients.sums.flat]
    tensors += masters_of(trainer)
    if isinstance(trainer.optimizer, MatrixOwners):
        tensors += [p for part in trainer.optimizer.parts for group in part.param_groups for p in group["params"]]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measured_and_predicted(config):
    """On each rank: its stage, bytes of a step with four micro-batches of ``TOKENS`` tokens, and as predicted."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        memory = measure_memory(comm, replace(config, recompute="none"))
        ranks = comm.size // config.pipeline // config.tensor
        cluster = ClusterSpec(
            ranks, TOKENS, pipeline=config.pipeline, chunks=config.chunks, tensor=config.tensor, expert=config.expert,
            split_backward=config.split_backward,
        )  # fmt: skip
        planner = Planner(None, cluster, "static", CostModel(1e-9, 1e-6), context_ranks=ranks)
        trainer = new_trainer(comm, config, planner, None, FirstWeights(comm, config))
        lengths = [TOKENS * ranks] * 4
        for _ in range(2):
            with MemoryMeter("cpu") as meter:
                done = trainer.step(lengths, lambda i: torch.arange(lengths[i]) * 7 % 499)
        assert done.micro_batches == 4
        stage = trainer.mesh.stage
        predicted = memory[stage].peak_bytes(TOKENS, recompute_by_device(config)[stage])
        return stage, kept_bytes(trainer) + meter.peak, predicted


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pipeline": 2, "chunks": 2}),
        (2, {"pipeline": 2, "split_backward": True, "recompute": (1, 1)}),
        (4, {"pipeline": 2, "tensor": 2, "recompute": (1, 2)}),
        (4, {"pipeline": 2, "zero": 1, "dtype": "bf16"}),
        (2, {"expert": 2, "zero": 1, "model": replace(OWN, experts=4, top_k=2)}),
        (2, {"optimizer": "Muon"}),
        (4, {"optimizer": "Muon", "pipeline": 2, "tensor": 2, "recompute": "full"}),
    ],
)
def test_a_step_takes_what_the_model_says(ranks, options):
    config = RunConfig(**{"model": OWN, "capacity": TOKENS, "tokens_per_step": 4 * TOKENS} | options)
    rows = run_threads(lambda: measured_and_predicted(config), ranks, timeout=100.0)
    for stage in range(config.pipeline):
        measured = max(row[1] for row in rows if row[0] == stage)
        (predicted,) = {row[2] for row in rows if row[0] == stage}
        assert predicted == pytest.approx(measured, rel=0.05)


def limits_of(config, ranks):
    """The memory of each device."""

    def main():
        with hdp.init() as comm:
            return measure_memory(comm, config)

    found = run_threads(main, ranks)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize(
    ("ranks", "options", "layers"),
    [
        (4, {"pipeline": 2, "tensor": 2}, 1),
        (2, {"pipeline": 2, "chunks": 2}, 2),
        (2, {"pipeline": 2, "split_backward": True}, 1),
    ],
)
def test_each_stage_recomputes_what_it_has_to(data, plain, tmp_path, ranks, options, layers):  # noqa: F811
    memory = limits_of(RunConfig(model=MODEL, capacity=300, **options), ranks)
    limit = int(max(memory[0].peak_bytes(300, layers), memory[-1].peak_bytes(300, memory[-1].layers))) + 1
    fewest = [next(n for n in range(5) if each.peak_bytes(300, n) <= limit) for each in memory]
    assert fewest[0] > 0
    wanted = tuple(fewest)
    if "chunks" in options:
        wanted = tuple(min(1, each) for each in fewest) + tuple(max(0, each - 1) for each in fewest)
    auto = {"recompute": "auto", "memory": limit, **options}
    results = run_of(data, ranks, **auto, out=str(tmp_path))
    assert {result.recompute for result in results} == {wanted}
    assert {result.step_memory for result in results} == {memory}
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    if "tensor" not in options:
        return
    # Also when the run goes on, whose checkpoint says nothing of it.
    again = run_of(data, ranks, **auto, out=str(tmp_path / "again"), resume=str(tmp_path / "step-2"))
    assert {result.recompute for result in again} == {wanted}
    assert losses(again) == pytest.approx(losses(plain)[2:], rel=1e-4)


def test_a_limit_that_nothing_fits_is_refused_on_all_ranks(data):  # noqa: F811
    with pytest.raises(InvalidUsage, match=r"300 tokens a rank take .* with all 2 layers recomputed"):
        run_of(data, 2, recompute="auto", memory=1000, pipeline=2)


def test_recomputed_layers_of_stages_by_hand():
    config = RunConfig(model=MODEL, pipeline=2, chunks=2, recompute=(1, 0, 1, 1))
    assert stage_recompute(config) == [1, 0, 1, 1]
    assert recompute_by_device(config) == [2, 1]
    assert device_recompute(config) == 2
    assert recompute_by_device(RunConfig(model=MODEL, pipeline=2, recompute="full")) == [2, 2]
    assert recompute_by_device(RunConfig(model=MODEL, recompute=3)) == [3]
    for wrong in ((1, 0, 1), (2, 0, 0, 0), (0, 0, 0, -1)):
        with pytest.raises(InvalidUsage, match="for stages of 1, 1, 1, 1 layers"):
            RunConfig(model=MODEL, pipeline=2, chunks=2, recompute=wrong)
    with pytest.raises(InvalidUsage, match="where there is more than one stage"):
        RunConfig(model=MODEL, recompute=(1,))


def test_each_device_holds_slices_as_the_first_one_does():
    for slices, held in ((1, [2, 1]), (4, [2, 2])):
        memory = limits_of(RunConfig(model=MODEL, capacity=300, pipeline=2, slices=slices), 2)
        assert [each.in_flight for each in memory] == held


def test_micro_batches_in_flight():
    """1F1B: as many as devices from here to the end. Interleaved: of the warm-up, each of a share of layers."""
    assert [most_in_flight(4, 1, device) for device in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(2, 2, device) for device in range(2)] == [2.5, 1.5]
    step = StepMemory(4, 1000.0, 10.0, 2.0, Line(0, 42), Line(0, 50), Line(0, 30))
    first = replace(step, in_flight=3.0, messages=2.0)
    assert first.peak_bytes(10) == step.peak_bytes(10) + 2 * 40 * 10 + 2 * 10
    assert first.peak_bytes(10, 4) == step.peak_bytes(10, 4) + 2 * (40 - 4 * 8) * 10 + 2 * 10
    # Gradients are owed by micro-batches beside those in flight, and by these where they owe more than they held.
    full = replace(first, owed=9.0, owing=1.0)
    split = replace(full, in_flight=1.0)
    assert full.peak_bytes(10, 4) == first.peak_bytes(10, 4)  # recomputed layers owe none
    assert split.peak_bytes(10) == step.peak_bytes(10) + 4 * 9 * 10 + 2 * 10
    assert replace(split, in_flight=2.0, owed=11.0).peak_bytes(10) == step.peak_bytes(10) + (44 + 44) * 10 + 2 * 10
    assert split.peak_bytes(10, 3) == 1000 + max(42 - 24, 50 - 24, 30 + 9 - 2) * 10 + 9 * 10 + 2 * 10
    alone = replace(step, resident=0, owed=9.0)  # offload takes 40 of the activations, 36 of which wait for gradients
    assert alone.peak_bytes(10, 0, 1.0) == 1000 + (50 - 40 + 36) * 10
    assert alone.peak_bytes(10, 0, 0.5) == 1000 + (50 - 20 + 20) * 10
