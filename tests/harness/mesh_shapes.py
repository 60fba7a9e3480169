"""Small models on meshes of every shape, with a trainer on each rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hdpcomm.comm import Mesh
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner
from tests.harness.pipelines import COST, SEED
from tests.harness.small_buckets import make_trainer

__all__ = ["DENSE", "SHAPES", "SPARSE", "Shape", "adamw", "trainer_of"]

DENSE = LlamaConfig(vocabulary=64, layers=4, hidden=16, heads=4, kv_heads=2, ffn=24)  # tied embeddings
SPARSE = LlamaConfig(
    vocabulary=64, layers=2, hidden=16, heads=2, kv_heads=2, ffn=12, experts=4, top_k=2,
    router_aux_loss=0.05, router_z_loss=0.02,
)  # fmt: skip


class Shape(NamedTuple):
    hdp: int
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    chunks: int = 1
    config: LlamaConfig = DENSE
    split: bool = False

    @property
    def ranks(self):
        return self.hdp * self.pipeline * self.tensor


SHAPES = {
    "hdp 2 pp 2": Shape(2, pipeline=2),
    "hdp 2 tp 2": Shape(2, tensor=2),
    "tp 4, two ranks a KV head": Shape(1, tensor=4),
    "hdp 2 pp 2 tp 2": Shape(2, pipeline=2, tensor=2),
    "pp 2 x 2 stages": Shape(2, pipeline=2, chunks=2),
    "hdp 2 pp 2, split backward": Shape(2, pipeline=2, split=True),
    "hdp 4 ep 2": Shape(4, expert=2, config=SPARSE),
    "hdp 2 ep 2": Shape(2, expert=2, config=SPARSE),
    "hdp 2 pp 2 tp 2 ep 2": Shape(2, pipeline=2, tensor=2, expert=2, config=SPARSE),
    "hdp 2 pp 2 tp 2 ep 2, split backward": Shape(2, pipeline=2, tensor=2, expert=2, config=SPARSE, split=True),
}


def adamw(module):
    """No decay for vectors: two groups."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def trainer_of(comm, shape, *, wide=torch.float64, norm=0.5, optimizer=adamw, capacity=64, **options):
    """Only the first ranks have the weights that count. ``capacity``: tokens of all HDP ranks together."""
    mesh = Mesh(comm, pipeline=shape.pipeline, tensor=shape.tensor, expert=shape.expert)
    cluster = ClusterSpec(
        shape.hdp, capacity // shape.hdp, pipeline=shape.pipeline, tensor=shape.tensor, chunks=shape.chunks,
        split_backward=shape.split,
    )  # fmt: skip
    planner = Planner(None, cluster, cost_model=COST)
    seed = SEED if comm.rank == 0 or shape.pipeline > 1 else SEED + comm.rank
    model = Llama(shape.config, seed=seed, dtype=wide)
    if shape.ranks == 1:
        return make_trainer(model, optimizer(model), planner, comm, max_grad_norm=norm, **options)
    if shape.pipeline == 1:
        expert_parallel(model, mesh)
        tensor_parallel(model, mesh)
        return make_trainer(model, optimizer(model), planner, mesh, max_grad_norm=norm, **options)
    stages = split_model(model, shape.pipeline * shape.chunks)[mesh.stage :: shape.pipeline]
    for stage in stages:
        expert_parallel(stage, mesh)
        tensor_parallel(stage, mesh)
    return make_trainer(stages, optimizer(torch.nn.ModuleList(stages)), planner, mesh, max_grad_norm=norm, **options)
