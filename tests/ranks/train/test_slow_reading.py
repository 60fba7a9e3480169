"""A rank that reads its data for longer than operations may take does not end the training."""

from __future__ import annotations

import time

import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads
from tests.ranks.train.test_trainer import LENGTHS, fetch, trainer_of

TIMEOUT_S = 1.5


class SlowReader:
    """Reads whole sequences or parts; at one call of one rank, it waits."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.waited = False

    def _wait(self) -> None:
        if not self.waited:
            self.waited = True
            time.sleep(self.wait_s)

    def __call__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._wait()
        tokens = fetch(place)
        return tokens, torch.cat([tokens[1:], torch.tensor([hdp.train.IGNORE])])

    def part(self, place: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = self(place)
        return tokens[start:stop], labels[start:stop]


def losses(wait_s: float) -> list[list[float]]:
    def rank() -> list[float]:
        with hdp.init("shm", timeout=TIMEOUT_S) as comm:
            trainer = trainer_of(comm)
            found = [trainer.step(LENGTHS, SlowReader(0)).loss]
            found += [trainer.step(LENGTHS, SlowReader(wait_s if comm.rank == 1 else 0)).loss for _ in range(2)]
            return found

    return run_threads(rank, 3, timeout=60.0)


def test_a_rank_that_reads_for_several_timeouts_does_not_end_the_run() -> None:
    assert losses(2.5 * TIMEOUT_S) == losses(0)
