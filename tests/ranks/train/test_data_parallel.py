"""The DDP baseline: the losses of the hybrid trainer on the same batches, and plans of whole sequences."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.train import Trainer
from hdpcomm.train.step.data_parallel import DataParallelTrainer, WholeSequencePlanner, torch_group

CONFIG = LlamaConfig(vocabulary=31, layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)
COST = CostModel(1e-6, 1e-5)


def losses_of_both(lengths):
    torch.set_num_threads(1)
    comm = hdp.init()
    cluster = ClusterSpec(comm.size, capacity=40)

    def losses(make):
        model = Llama(CONFIG)
        trainer = make(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        steps = [trainer.step(lengths, lambda i: torch.arange(lengths[i]) * (i + 3) % 31) for _ in range(4)]
        return [step.loss for step in steps], steps[-1]

    ours = losses(lambda model, optimizer: Trainer(model, optimizer, Planner(None, cluster, "naive", COST), comm))
    with torch_group(comm):
        planner = WholeSequencePlanner(cluster, COST)
        ddp = losses(lambda model, optimizer: DataParallelTrainer(model, optimizer, planner, comm))
    return ours, ddp


@pytest.mark.parametrize(
    ("size", "lengths"),
    [(2, (30, 3, 20, 7, 1)), (3, (9, 5)), (2, (60, 4))],
    ids=["several micro-batches", "a rank without a sequence", "one above the capacity"],
)
def test_the_losses_of_the_hybrid_trainer(ranks, size, lengths):
    for (ours, _), (ddp, last) in ranks(size, losses_of_both, lengths):
        assert ddp == pytest.approx(ours, rel=1e-5)
        assert ddp[-1] < ddp[0]
        assert last.sequences_on_ranks == {1: len(lengths)}
        assert last.bytes_sent > 2 * (size - 1) * 4 * Llama(CONFIG).num_parameters()


def idle_of_one_that_waits(lengths):
    comm = hdp.init()
    model = Llama(CONFIG)
    if comm.rank == 0:
        model.register_forward_hook(lambda *_: time.sleep(0.3))
    planner = WholeSequencePlanner(ClusterSpec(comm.size, capacity=40), COST)
    with torch_group(comm):
        trainer = DataParallelTrainer(model, torch.optim.SGD(model.parameters()), planner, comm)
        for _ in range(2):
            trainer.step(lengths, lambda i: torch.arange(lengths[i]))
    spans = trainer.timeline.spans
    return sum(span.idle_s for span in spans), sum(span.busy_s for span in spans)


def test_waiting_for_the_gradients_of_others_is_idle(ranks):
    (_, worked), (waited, _) = ranks(2, idle_of_one_that_waits, (9, 8))
    assert worked > 0.3
    assert waited > 0.2


def refusal_of_a_sharded_model():
    comm = hdp.init()
    with torch_group(comm):
        model = fully_shard(Llama(CONFIG), mesh=init_device_mesh("cpu", (comm.size,)))
        planner = Planner(None, ClusterSpec(comm.size, capacity=40), cost_model=COST)
        with pytest.raises(InvalidUsage, match=r"sharded already .* zero=3"):
            Trainer(model, torch.optim.SGD(model.parameters()), planner, comm)


def test_models_that_fsdp2_has_sharded_are_refused(ranks):
    ranks(2, refusal_of_a_sharded_model)


def test_plans_of_whole_sequences():
    planner = WholeSequencePlanner(ClusterSpec(2, capacity=10), COST)
    plan = planner.plan([4, 25, 3, 9, 6, 2])
    plan.validate([4, 25, 3, 9, 6, 2])
    packs = [[[s.length for s in each.sequences] for each in plan.for_rank(rank)] for rank in range(2)]
    assert packs == [[[25]], [[9], [6, 4], [3, 2]]]
    assert plan.makespan_s == pytest.approx(COST.seconds([25]))
    assert planner.plan([5]).for_rank(1) == ()
