"""Split backward passes: gradients of one process, whatever else there is, and weight gradients that come later."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from hdpcomm.testing import run_threads
from tests.harness.pipelines import CONFIG, FixedPlanner, check_gradients, one_step
from tests.harness.programs import check_programs, pipeline_programs
from tests.ranks.parallel.test_pipeline import LENGTHS, LIMIT, SMALL, UNEVEN, random_plan

PLANS = int(os.environ.get("HDPCOMM_TEST_PIPELINE_PLANS", "12"))


def check_step(planner, config, dtype, lengths, *, transport="shm", **options):
    cluster = planner.cluster
    ranks = cluster.ranks * cluster.pipeline * cluster.tensor
    plan = planner.plan(lengths)
    schedule = planner.schedule(plan)
    assert (schedule.alone >= 0).any()
    check_programs(pipeline_programs(schedule, plan), plan, stages=schedule.stages, split=True)
    results = run_threads(lambda: one_step(planner, config, dtype, lengths, **options), ranks, transport=transport)
    check_gradients([r[1] for r in results], results[0][0], config, dtype, lengths, LIMIT[dtype])
    assert all(r[0] == results[0][0] for r in results)
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("how", ["plain", "recompute", "offload", "some recomputed and offload"])
def test_gradients_are_those_of_one_process(how, dtype):
    offload = "offload" in how
    planner = FixedPlanner(2, 2, UNEVEN, ratio=0.6 if offload else 0.0, split=True)
    recompute = {"recompute": "full", "some recomputed and offload": 1}.get(how, "none")
    results = check_step(planner, CONFIG, dtype, LENGTHS, offload=offload, recompute=recompute)
    assert all((r[3] > 0) == offload for r in results)


@pytest.mark.parametrize(("ranks", "tensor", "chunks"), [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2)])
def test_tensor_ranks_and_interleaved_stages(ranks, tensor, chunks):
    batches = UNEVEN if ranks == 2 else [((0,), sequences) for _, sequences in UNEVEN]
    planner = FixedPlanner(ranks, 2, batches, chunks=chunks, tensor=tensor, split=True)
    check_step(planner, dataclasses.replace(CONFIG, vocabulary=62), torch.float64, LENGTHS)


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans(seed):
    """A dozen by default; HDPCOMM_TEST_PIPELINE_PLANS gives another number. Half of them on simulated devices."""
    hdp_ranks, devices, chunks, batches, lengths = random_plan(seed)
    if devices == 1:
        devices, hdp_ranks, batches = 4, 1, [((0,), sequences) for _, sequences in batches]
    stages = devices * chunks
    layers = [4 // stages + (stage < 4 % stages) for stage in range(stages)]
    planner = FixedPlanner(hdp_ranks, devices, batches, chunks=chunks, split=True)
    check_step(planner, SMALL, torch.float64, lengths, layers=layers, transport=("shm", "sim")[seed % 2])
