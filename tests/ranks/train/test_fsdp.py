"""FSDP2 models: the losses of the unsharded model for any numbers of micro-batches, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.train import Trainer
from hdpcomm.train.data_parallel import gloo_group

CONFIG = LlamaConfig(vocabulary=31, layers=3, hidden=16, heads=2, kv_heads=1, ffn=24)
COST = CostModel(1e-6, 1e-5)
NOISY = CostModel(1e-4, 1e-2, 1e-3, ring_step=1e-2)  # whose plans have a queue


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trainer_of(model, comm, policy="balanced", **options):
    queue = policy == "queue"
    policy, cost = ("balanced", NOISY) if queue else (policy, COST)
    planner = Planner(None, ClusterSpec(comm.size, capacity=32), policy, cost, queue=queue)
    return Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), planner, comm, max_grad_norm=0.5, **options)


def losses(trainer, lengths):
    return [trainer.step(lengths, lambda i: torch.arange(lengths[i]) * (i + 3) % 31) for _ in range(4)]


def both(lengths, policy, recompute):
    torch.set_num_threads(1)
    comm = hdp.init()
    plain = losses(trainer_of(Llama(CONFIG), comm, policy), lengths)
    with gloo_group(comm):
        model = sharded(adapt(Llama(CONFIG), recompute=recompute), init_device_mesh("cpu", (comm.size,)))
        trainer = trainer_of(model, comm, policy)
        found = losses(trainer, lengths)
        kept = sum(p.to_local().numel() for p in model.parameters())
        state = trainer.state_dict()
        assert all(isinstance(value, DTensor) for value in state["model"].values())
        trainer.load_state_dict(state)
    counts = [len(trainer.planner.plan(lengths).for_rank(rank)) for rank in range(comm.size)]
    return plain, found, kept, counts


@pytest.mark.parametrize(
    ("size", "lengths", "policy", "recompute"),
    [
        (2, [40, 3, 20, 30, 7, 1], "balanced", "none"),
        (3, [30, 31, 30, 32, 3], "naive", 2),
        (2, [9], "naive", "none"),
        (2, [60, 20], "static", "full"),
        (3, [60, *range(1, 24)], "queue", "none"),
    ],
)
def test_the_losses_of_the_unsharded_model(ranks, size, lengths, policy, recompute):
    for plain, found, kept, counts in ranks(size, both, lengths, policy, recompute):
        assert [step.loss for step in found] == pytest.approx([step.loss for step in plain], rel=1e-5)
        assert [step.grad_norm for step in found] == pytest.approx([step.grad_norm for step in plain], rel=1e-4)
        assert found[-1].loss < found[0].loss
        assert kept < 0.75 * Llama(CONFIG).num_parameters()
        if policy == "naive":
            assert len(set(counts)) == 2  # different numbers of micro-batches
        assert (found[-1].queued > 0) == (policy == "queue")


def refused(case):
    comm = hdp.init()
    with gloo_group(comm):
        mesh = init_device_mesh("cpu", (comm.size,))
        model = Llama(CONFIG)
        if case == "no root":
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
        elif case == "another mesh":
            sharded(model, init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicate", "shard")))
        else:
            sharded(model, mesh)
        options = {"zero": 1} if case == "zero" else {}
        try:
            trainer_of(model, comm, **options)
        except InvalidUsage as error:
            return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no root", "call fully_shard(model) after its layers"),
        ("another mesh", "shard all of them on one mesh of the 2 ranks"),
        ("zero", "sharded by fully_shard already"),
    ],
)
def test_what_is_refused(ranks, case, text):
    for told in ranks(2, refused, case):
        assert text in told
