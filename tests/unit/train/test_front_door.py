"""The names of ``import hdpcomm`` and the planner that measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.offload import rank_pool
from hdpcomm.parallel import tensor_parallel
from hdpcomm.plan import CostModel
from hdpcomm.run.model import spec_of
from hdpcomm.testing import run_threads

CONFIG = LlamaConfig(vocabulary=32, layers=1, hidden=16, heads=2, kv_heads=2, ffn=24)
DEEP = replace(CONFIG, layers=4)


def test_every_name_is_there() -> None:
    for name in hdp.__all__:
        assert getattr(hdp, name) is not None
    assert set(hdp._HOMES) <= set(hdp.__all__)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_measured_planner_is_that_of_its_mesh_and_equal_on_all_ranks(tensor: int) -> None:
    def main() -> tuple[CostModel, hdp.ClusterSpec, float]:
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm, tensor=tensor)
            model = tensor_parallel(Llama(CONFIG, seed=0), mesh)
            planner = hdp.Planner.measured(model, mesh, capacity=20, longest=16)
            trainer = hdp.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, mesh)
            loss = trainer.step([9, 30 // tensor], lambda i: torch.arange(9 if i == 0 else 30 // tensor)).loss
            return planner.cost_model, planner.cluster, loss

    first, *others = run_threads(main, 2, timeout=60.0)
    assert all(other == first for other in others)
    cost, cluster, loss = first
    assert (cluster.ranks, cluster.tensor, cluster.capacity) == (2 // tensor, tensor, 20)
    assert cost.seconds([16]) > 0
    assert 2 < loss < 5  # about log(32)


def test_a_measured_planner_refuses_pipelines() -> None:
    def main() -> str:
        with hdp.init() as comm, pytest.raises(InvalidUsage) as caught:
            hdp.Planner.measured(Llama(CONFIG), hdp.Mesh(comm, pipeline=2), capacity=20)
        return str(caught.value)

    assert all("pipelines of 2 stages" in told for told in run_threads(main, 2))


def test_a_measured_planner_offloads_and_slices() -> None:
    with hdp.init() as comm:
        model = Llama(DEEP, seed=0)
        pool = rank_pool(comm, 1 << 20)
        assert pool is not None
        offload = hdp.ActivationOffload(pool, model, min_bytes=1)
        planner = hdp.Planner.measured(
            model, comm, capacity=10, longest=8, slices=8, spec=spec_of(DEEP), offload=offload
        )
        assert (planner.slices, planner.memory.capacity) == (8, 10)
        assert 0 < planner.memory.offloadable < 1
        assert 0 < planner.memory.kept < 1
        assert planner.memory.copy_s > 0
        wider = planner.with_capacity(20)
        assert (wider.memory, wider.cluster) == (
            replace(planner.memory, capacity=20), replace(planner.cluster, capacity=20)
        )  # fmt: skip
        trainer = hdp.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm, offload=offload)
        assert 2 < trainer.step([30], lambda _: torch.arange(30)).loss < 5
        with pytest.raises(InvalidUsage, match="how much slices of this model keep"):
            hdp.Planner.measured(model, comm, capacity=10, longest=8, slices=2)


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"capacity": 2.5}, {"capacity": 8, "longest": 0}])
def test_a_measured_planner_says_what_it_wants(wrong: dict[str, object]) -> None:
    with hdp.init() as comm, pytest.raises(InvalidUsage, match="whole number"):
        hdp.Planner.measured(Llama(CONFIG), comm, **wrong)  # type: ignore[arg-type]
