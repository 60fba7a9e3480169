"""Thirty training steps of a mesh beside those of one process, and checkpoints that one takes from the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.models import LlamaConfig
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import tokens_of


def check_thirty_steps(make_trainer: Callable[[hdp.Communicator], Trainer], config: LlamaConfig) -> None:
    """AdamW and clipping in fp64 on 1 and 4 ranks; after 15 steps each trainer goes on with what the other has saved.

    make_trainer: by the communicator of all ranks; its optimizer is replaced.
    """
    batches = [tokens_of(lengths, config) for lengths in ((60, 1, 7, 33), (90, 3, 3), (1, 40, 2, 70))]

    def steps(trainer: Trainer, first: int, last: int) -> list[float]:
        rows = [batches[step % len(batches)] for step in range(first, last)]
        return [trainer.step([len(s) for s in row], lambda i, row=row: row[i]).loss for row in rows]

    def rank(state: dict[str, Any] | None = None) -> Any:
        """(the first 15 losses, the others, state between them, parameters); or the others from a state."""
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = make_trainer(comm)
            trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2, weight_decay=0.1)
            if state is not None:
                trainer.load_state_dict(state)
                return steps(trainer, 15, 30)
            first, between = steps(trainer, 0, 15), copy.deepcopy(trainer.state_dict())
            trainer.check_replicas()
            return first, steps(trainer, 15, 30), between, trainer.num_parameters()

    ((first, rest, state, parameters),) = run_threads(rank, 1)
    assert rest[-1] < first[0]
    cut = run_threads(rank, 4)
    for losses, others, saved, count in cut:
        assert losses == pytest.approx(first, rel=1e-9)
        assert others == pytest.approx(rest, rel=1e-9)
        assert count == parameters
        assert saved["optimizer"]["state"].keys() == state["optimizer"]["state"].keys()
        for name, tensor in state["model"].items():
            torch.testing.assert_close(saved["model"][name], tensor, rtol=1e-7, atol=1e-9)
    for losses in run_threads(rank, 4, state) + run_threads(rank, 1, cut[3][2]):
        assert losses == pytest.approx(rest, rel=1e-9)
