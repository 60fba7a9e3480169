"""Steps of pipelines beside those of one process."""

from __future__ import annotations

import functools

import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.models import Llama, LlamaConfig, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, Planner, SequenceFragment, SequenceInfo, StepPlan
from hdpcomm.train import Trainer
from tests.harness.plain_llama import batch_gradients

COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4, ring_step=1e-4)
CONFIG = LlamaConfig(vocabulary=61, layers=4, hidden=32, heads=4, kv_heads=2, ffn=48)
SEED = 3


class FixedPlanner(Planner):
    """Hands out a plan written by hand, and schedules it as any other; a micro-batch has sequences, or is a slice."""

    def __init__(self, ranks, stages, batches, *, ratio=0.0, chunks=1, tensor=1, split=False, seconds=None):
        cluster = ClusterSpec(ranks, 100_000, pipeline=stages, chunks=chunks, tensor=tensor, split_backward=split)
        super().__init__(None, cluster, cost_model=COST)
        self._batches, self._ratio = batches, ratio
        self._seconds = seconds or [1.0] * len(batches)

    def plan(self, lengths):
        slices = [what for _, what in self._batches if isinstance(what, SequenceFragment)]

        def held(what):
            if isinstance(what, SequenceFragment):
                return (SequenceInfo(len(lengths) + slices.index(what), what.stop - what.start),)
            return tuple(SequenceInfo(s, getattr(lengths[s], "num_tokens", lengths[s])) for s in what)

        made = tuple(
            MicroBatch(i, tuple(ranks), held(what), self._ratio, self._seconds[i])
            for i, (ranks, what) in enumerate(self._batches)
        )
        return StepPlan("by hand", self.cluster.ranks, made, 1.0, 1.0, 0.0, 0.0, fragments=tuple(slices))


def tokens_of(lengths, config):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(config.vocabulary, (length,), generator=generator) for length in lengths]


@functools.cache
def wanted(config, dtype, lengths):
    """Loss and gradients by another implementation, on one process."""
    return batch_gradients(Llama(config, seed=SEED, dtype=dtype), tokens_of(lengths, config))


def trainer_of(comm, planner, config, dtype, *, recompute="none", offload=False, lr=0.0, layers=None, **options):
    mesh = Mesh(comm, pipeline=planner.cluster.pipeline, tensor=planner.cluster.tensor)
    # Only the first HDP rank of a stage has the weights that count.
    model = Llama(config, seed=SEED + 10 * mesh.hdp_rank + 100 * mesh.tensor_rank, dtype=dtype)
    stages = split_model(model, mesh.pipeline * planner.cluster.chunks, layers=layers)[mesh.stage :: mesh.pipeline]
    for stage in stages:
        tensor_parallel(stage, mesh)
        set_recompute(stage, recompute)
    if offload:
        pool = PinnedPool(8 << 20, device="cpu")
        layers = [block for stage in stages for block in stage.blocks]
        options["offload"] = ActivationOffload(pool, layers, min_bytes=1, resident_layers=0)
    parameters = [p for stage in stages for p in stage.parameters()]
    return Trainer(stages, torch.optim.SGD(parameters, lr=lr), planner, mesh, **options)


def gradients_of(trainer):
    """By (name in the model, part of it); the tied weight of the last stage has a name of its own, ``head.weight``."""
    return {
        (stage.name_in_model(name), part_of(stage, name)): p.grad.clone()
        for stage in trainer.stages
        for name, p in stage.named_parameters()
    }


def part_of(module, name):
    """Which part of a parameter a tensor rank has; None: all of it."""
    return None if module.tensor is None else module.tensor.shards.get(name)


def check_gradients(gradients, metrics, config, dtype, lengths, limit):
    """``gradients``: by rank, all ranks together have every parameter."""
    loss_wanted, found_wanted = wanted(config, dtype, tuple(lengths))
    assert abs(metrics.loss - loss_wanted) <= limit * abs(loss_wanted)
    norm = torch.stack([g.double().norm() for g in found_wanted.values()]).norm()
    seen = {}
    for own in gradients:
        for (name, part), gradient in own.items():
            want = found_wanted["embedding.weight" if name not in found_wanted else name]
            want = want if part is None else part.take(want)
            error = (gradient - want).norm()  # a parameter's gradient may be 0: that of q where all sequences are short
            assert error <= limit * (want.norm() + 1e-6 * norm), f"{name}: {error:.2e}"
            assert torch.equal(seen.setdefault((name, part), gradient), gradient), f"{name} differs between ranks"
    for (name, part), gradient in seen.items():
        if name == "head.weight" and config.tied_embeddings:
            assert torch.equal(gradient, seen["embedding.weight", part])
    assert {name for name, _ in seen} >= found_wanted.keys()
    assert abs(metrics.grad_norm - norm) <= 10 * limit * norm


def one_step(planner, config, dtype, lengths, **options):
    """On each rank, a thread: (metrics, gradients, sequences that it read, the trainer's offload statistics)."""
    sequences = tokens_of(lengths, config)
    torch.set_num_threads(1)
    with hdp.init() as comm:
        trainer = trainer_of(comm, planner, config, dtype, max_grad_norm=None, **options)
        read = []
        metrics = trainer.step(lengths, lambda i: read.append(i) or sequences[i])
        moved = 0 if trainer.offload is None else trainer.offload.stats().stored_bytes
        return metrics, gradients_of(trainer), read, moved
