"""A rank dies whose memory others use: all are told its name, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import spawn
from hdpcomm.train import Trainer
from tests.harness.fault_cases import LONG_S

CONFIG = LlamaConfig(vocabulary=31, layers=3, hidden=16, heads=2, kv_heads=1, ffn=24)
LENGTHS = (90, 1, 7, 33, 2, 18, 40, 5, 24, 3, 12, 29)
COST = CostModel(attention=1e-4, linear=1e-2, fixed=1e-3, ring_step=1e-2)


def fetch(i: int) -> torch.Tensor:
    return torch.arange(LENGTHS[i]) * (i + 3) % 31


def trainer_on(comm: hdp.Communicator, zero: int) -> Trainer:
    planner, model = Planner(None, ClusterSpec(comm.size, 50), cost_model=COST), Llama(CONFIG, seed=3)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm, zero=zero)


def training(folder: str, zero: int, dies: int, where: str) -> None:
    torch.set_num_threads(1)
    comm = hdp.init(timeout=LONG_S)
    me = comm.rank
    trainer = trainer_on(comm, zero)
    losses = [trainer.step(LENGTHS, fetch).loss]
    if me == dies:

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "forward":
            trainer.model.blocks[1].register_forward_hook(die)
        elif where == "backward":
            trainer.model.blocks[1].register_full_backward_hook(die)
        else:
            trainer.optimizer.register_step_pre_hook(die)

    def steps() -> None:
        for _ in range(2):  # a rank that was done with its passes, or had its update, is told by what comes next
            trainer.step(LENGTHS, fetch)

    with pytest.raises(hdp.PeerLost) as caught:
        steps()
    assert caught.value.peer == dies
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("hdpcomm-grad")]
    assert left == []
    comm = comm.shrink(timeout=20.0)
    trainer = trainer_on(comm, zero)
    losses += [trainer.step(LENGTHS, fetch).loss for _ in range(3)]
    (Path(folder) / f"rank{me}").write_text(json.dumps(losses))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("dies", "where"), [(0, "forward"), (1, "backward"), (2, "update")])
def test_all_are_told_and_go_on(dies: int, where: str, zero: int, tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match=f"rank {dies}"):
        spawn(training, 3, str(tmp_path), zero, dies, where, timeout=100.0)
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(3) if rank != dies]
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-6)  # a new model, of two ranks
    assert found[0][1:] == sorted(found[0][1:], reverse=True)


def failing(folder: str, zero: int) -> None:
    """A rank whose data cannot be read: it raises, the others hear of it, and its threads end."""
    torch.set_num_threads(1)
    comm = hdp.init(timeout=LONG_S)
    trainer = trainer_on(comm, zero)

    def bad(i: int) -> torch.Tensor:
        if comm.rank == 1:
            raise RuntimeError("no such sequence")
        return fetch(i)

    with pytest.raises((RuntimeError, hdp.Error)) as caught, comm:
        trainer.step(LENGTHS, bad)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("hdpcomm-")] == []
    (Path(folder) / f"rank{comm.rank}").write_text(f"{type(caught.value).__name__}: {caught.value}")


@pytest.mark.parametrize("zero", [2, 3])
def test_data_that_cannot_be_read(zero: int, tmp_path: Path) -> None:
    spawn(failing, 3, str(tmp_path), zero, timeout=100.0)
    told = [(tmp_path / f"rank{rank}").read_text() for rank in range(3)]
    assert told[1] == "RuntimeError: no such sequence"
    for text in (told[0], told[2]):
        assert text.startswith("PeerLost"), told
        assert "rank 1" in text
