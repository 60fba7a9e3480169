"""A rank that generates answers dies at any moment of examples/grpo.py: the others sample its prompts and train on."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import threading
from pathlib import Path

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import RankPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
STEPS, PROMPTS, RANKS, DIES = 12, 6, 4, 3
KILLS = int(os.environ.get("HDPCOMM_LOOP_KILLS", "3"))


def loop(after_s, victims):
    torch.set_num_threads(1)
    program = runpy.run_path(str(EXAMPLE), run_name="example")
    options = argparse.Namespace(
        steps=STEPS, generators=2, prompts=PROMPTS, answers=4, longest=3, kill=-1, report=None, ranks=0
    )
    with hdp.init(timeout=60.0) as world:
        run = program["Loop"](world, options)
        world.barrier()
        if world.rank in victims:
            threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        run.run()
        weights = [] if run.trainer is None else [p.detach().clone() for p in run.trainer.model.parameters()]
        return run.rank, [*run.world.ranks], run.told, int(run.updates["trained"]), weights


@pytest.mark.parametrize("number", range(KILLS))
def test_a_rank_that_generates_dies(number):
    with RankPool(RANKS) as pool:
        ended = pool.run(loop, 0.005 + 1.2 * number / KILLS, [DIES], timeout=100.0, survivors=True)
    assert [rank for rank, *_ in ended[:3]] == [0, 1, 2]
    for rank, ranks, told, updates, weights in ended[:2]:
        assert ranks == [0, 1, 2] or len(ended) == RANKS, "it ended before it was to die"
        assert len(told) == updates == STEPS - 1, rank
        assert all(sum(each["by_rank"]) == PROMPTS for each in told)
        assert all(0 <= each["behind"] <= 2 for each in told[1:])
        assert all(torch.equal(own, other) for own, other in zip(weights, ended[0][4], strict=True))


def test_all_that_generate_die():
    with pytest.raises(SystemExit, match="no rank is left that generates"), RankPool(RANKS) as pool:
        pool.run(loop, 0.2, [2, 3], timeout=100.0, survivors=True)


def test_a_rank_that_trains_dies():
    with pytest.raises((hdp.PeerLost, hdp.Aborted), match="rank 1 died"), RankPool(RANKS) as pool:
        pool.run(loop, 0.2, [1], timeout=100.0, survivors=True)
