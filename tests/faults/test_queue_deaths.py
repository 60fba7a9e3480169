"""Ranks that die while a step's queue is taken: the others are told, shrink, and take from a queue again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.plan.step import pool_rows
from hdpcomm.testing import spawn
from hdpcomm.train import Trainer
from tests.harness.fault_cases import LONG_S

CONFIG = LlamaConfig(vocabulary=31, layers=1, hidden=16, heads=2, kv_heads=1, ffn=24)
LENGTHS = (90, 1, 7, 33, 2, 18, 40, 5, 24, 3, 12, 29)
COST = CostModel(attention=1e-4, linear=1e-2, fixed=1e-3, ring_step=1e-2)


def trainer_on(comm: hdp.Communicator, model: Llama) -> Trainer:
    planner = Planner(None, ClusterSpec(comm.size, 50), cost_model=COST, queue=True)
    assert planner.plan(LENGTHS).queued > 0
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm)


def training(folder: str, dies: int) -> None:
    """Three ranks, one of which dies with what it has taken from the queue."""
    torch.set_num_threads(1)
    comm = hdp.init(timeout=LONG_S)
    me, model = comm.rank, Llama(CONFIG, seed=3)
    trainer = trainer_on(comm, model)
    losses = [trainer.step(LENGTHS, fetch).loss]

    plan = trainer.planner.plan(LENGTHS)
    waiting = {each.id for row in pool_rows(plan, 0) for each in plan.micro_batch(row).sequences}

    def last_one(i: int) -> torch.Tensor:
        if me == dies and i in waiting:
            os.kill(os.getpid(), signal.SIGKILL)
        return fetch(i)

    with pytest.raises(hdp.PeerLost) as caught:
        trainer.step(LENGTHS, last_one)
    assert comm.lost() == [dies]
    comm = comm.shrink(timeout=20.0)
    assert comm.lost() == []
    trainer = trainer_on(comm, model)
    losses += [trainer.step(LENGTHS, fetch).loss for _ in range(3)]
    (Path(folder) / f"rank{me}").write_text(json.dumps([caught.value.peer, losses]))


def fetch(i: int) -> torch.Tensor:
    return torch.arange(LENGTHS[i]) * (i + 3) % 31


@pytest.mark.parametrize("dies", [0, 1], ids=["the owner of the counter", "another rank"])
def test_the_others_go_on_with_a_queue_of_their_own(dies: int, tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match=f"rank {dies}"):
        spawn(training, 3, str(tmp_path), dies, timeout=100.0)
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(3) if rank != dies]
    assert found[0] == found[1]
    peer, losses = found[0]
    assert peer == dies
    assert losses == sorted(losses, reverse=True)  # the step that failed has changed nothing
