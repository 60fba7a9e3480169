# ruff: noqa: ARG005  (fetch() is a function of the sequence)
"""Bad arguments of what needs no other rank, each with what its error has to say of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm import attention, data, models, offload, plan, sim, train
from hdpcomm.kernels import linear_cross_entropy
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, ModelSpec, Planner, StepPlan, Tree
from hdpcomm.testing import run_threads, spawn
from tests.harness.attention_options import with_options
from tests.harness.bad_calls import HUGE, NAN, Case

MODEL = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256)
CLUSTER = ClusterSpec(ranks=4, capacity=100)
COSTS = CostModel(1e-9, 1e-6)
INF = math.inf


def planner(**changed: Any) -> Planner:
    return Planner(None, ClusterSpec(**{"ranks": 4, "capacity": 100} | changed), cost_model=COSTS)


PLAN: StepPlan = planner().plan([300, 20, 50])
PLANNER = planner()


def qkv(tokens: int = 6, heads: int = 4, kv_heads: int = 2, dim: int = 8, **kind: Any) -> list[torch.Tensor]:
    return [torch.zeros(tokens, n, dim, **kind) for n in (heads, kv_heads, kv_heads)]


def attend(tensors: list[Any] | None = None, cu: Any = (0, 2, 6), **options: Any) -> Any:
    return attention.ring_attention(*(tensors or qkv()), comm=None, cu_seqlens=cu, **with_options(**options))


def with_one(place: int, value: Any) -> list[Any]:
    tensors: list[Any] = qkv()
    tensors[place] = value
    return tensors


def nan_at(place: int) -> list[Any]:
    tensors = qkv()
    tensors[place][0, 0, 0] = NAN
    return tensors


TINY = Llama(LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=16))


def trainer(comm: Any = None, **changed: Any) -> train.Trainer:
    here = hdp.init() if comm is None else comm
    return train.Trainer(
        changed.pop("model", TINY),
        changed.pop("optimizer", torch.optim.SGD(TINY.parameters(), lr=0.1)),
        changed.pop("planner", planner(ranks=1)),
        here,
        **changed,
    )


def one_step(lengths: Any, fetch: Any) -> Any:
    with hdp.init() as comm:
        return trainer(comm).step(lengths, fetch)


ATTENTION: list[Case] = [
    (lambda: attend(qkv(tokens=5)), "5 tokens"),
    (lambda: attend([torch.zeros(6, 4)] * 3), "(6, 4)"),
    (lambda: attend(qkv(heads=3)), "(6, 3, 8)"),
    (lambda: attend(qkv(kv_heads=0)), "(6, 0, 8)"),
    (lambda: attend(qkv(dim=0)), "(6, 4, 0)"),
    (lambda: attend(with_one(1, torch.zeros(6, 2, 4))), "(6, 2, 4)"),
    (lambda: attend(with_one(2, torch.zeros(5, 2, 8))), "(5, 2, 8)"),
    (lambda: attend(with_one(1, torch.zeros(6, 2, 8, dtype=torch.float64))), "float64"),
    (lambda: attend(qkv(dtype=torch.int32)), "int32"),
    (lambda: attend(qkv(dtype=torch.complex64)), "complex64"),
    (lambda: attend(with_one(0, torch.zeros(4, 6, 8).transpose(0, 1))), "not contiguous"),
    (lambda: attend(with_one(0, np.zeros((6, 4, 8), dtype=np.float32))), "ndarray"),
    (lambda: attend(with_one(2, None)), "None"),
    (lambda: attend(with_one(1, "k")), "'k'"),
    (lambda: attend(nan_at(0)), "q holds NaN"),
    (lambda: attend(nan_at(2)), "v holds NaN"),
    (lambda: attend(cu=[0, 2, 2, 6]), "sequence 1"),
    (lambda: attend(cu=[0, 4, 2, 6]), "[0, 4, 2, 6]"),
    (lambda: attend(cu=[1, 6]), "[1, 6]"),
    (lambda: attend(cu=[-1, 6]), "[-1, 6]"),
    (lambda: attend(cu=[]), "[]"),
    (lambda: attend(cu=[[0, 6]]), "[[0, 6]]"),
    (lambda: attend(cu=[0.0, 6.0]), "float64"),
    (lambda: attend(cu=[0, NAN]), "float64"),
    (lambda: attend(cu=torch.tensor([0.0, 6.0])), "float32"),
    (lambda: attend(cu=torch.tensor([False, True])), "bool"),
    (lambda: attend(cu=[False, True]), "bool"),
    (lambda: attend(cu="06"), "<U2"),
    (lambda: attend(cu=None), "None"),
    (lambda: attend(cu=6), "6"),
    (lambda: attend(cu=[0, HUGE]), str(HUGE)),
    (lambda: attend(cu=[[0], [1, 2]]), "[[0], [1, 2]]"),
    (lambda: attend(cu=["0", "6"]), "<U1"),
    (lambda: attend(cu=torch.tensor([0, 6], device="meta")), "meta"),
    (lambda: attend(cu_seqlens_k=[0, 6]), "cu_seqlens_k 1"),
    (lambda: attend(cu_seqlens_k=[0, 3, 7]), "6 tokens"),
    (lambda: attend(window=-3), "-3"),
    (lambda: attend(window=0), "0"),
    (lambda: attend(window=1.5), "1.5"),
    (lambda: attend(window=(1, 2, 3)), "(1, 2, 3)"),
    (lambda: attend(window=(-2, 0)), "-2"),
    (lambda: attend(window="4"), "'4'"),
    (lambda: attend(window=True), "True"),
    (lambda: attend(scale=NAN), "nan"),
    (lambda: attend(scale=INF), "inf"),
    (lambda: attend(scale="1"), "'1'"),
    (lambda: attend(softcap=-1.0), "-1.0"),
    (lambda: attend(softcap=NAN), "nan"),
    (lambda: attend(softcap=None), "None"),
    (lambda: attend(send="kv"), "send='kv'"),
    (lambda: attend(exchange="scan"), "exchange='scan'"),
    (lambda: attend(options={"variant": "ring"}), "{'variant': 'ring'}"),
    (lambda: attend(variant="star"), "'star'"),
    (lambda: attend(variant=None), "None"),
    (lambda: attend(backend="magic"), "'magic'"),
    (lambda: attend(backend=3), "3"),
    (lambda: attend(sinks=torch.zeros(3)), "(3,)"),
    (lambda: attend(sinks=torch.zeros(4, dtype=torch.int64)), "int64"),
    (lambda: attend(sinks=[0.0] * 4), "[0.0, 0.0, 0.0, 0.0]"),
    (lambda: attend(costs="cheap"), "'cheap'"),
    (lambda: attention.shard(torch.zeros(5), [0, 6], rank=0, size=1), "(5,)"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=2, size=2), "rank 2"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=-1, size=2), "rank -1"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=0, size=0), "size is 0"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=0, size=-2), "size is -2"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=0, size=2.0), "2.0"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=0.5, size=2), "0.5"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=0, size=True), "True"),
    (lambda: attention.shard(torch.zeros(6), [0, 6], rank=0, size=2, dim=1), "(6,)"),
    (lambda: attention.shard([0] * 6, [0, 6], rank=0, size=2), "[0, 0, 0, 0, 0, 0]"),
    (lambda: attention.unshard([torch.zeros(2), torch.zeros(2)], [0, 6]), "(2,)"),
    (lambda: attention.unshard([], [0, 6]), "0"),
    (lambda: attention.positions([0, 6], rank=3, size=2), "rank 3"),
    (lambda: attention.local_cu_seqlens([0, 6], rank=0, size=0), "0"),
    (lambda: attention.AttentionCosts(0, 1, 1, 1), "flops_per_s is 0"),
    (lambda: attention.AttentionCosts(NAN, 1, 1, 1), "nan"),
    (lambda: attention.AttentionCosts("1", 1, 1, 1), "'1'"),
    (lambda: attention.packed_attention(*qkv()), "packing"),
]  # fmt: skip

PLANS: list[Case] = [
    (lambda: ModelSpec(layers=0, hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8), "layers is 0"),
    (lambda: ModelSpec(layers=-2, hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8), "layers is -2"),
    (lambda: ModelSpec(layers=2, hidden=64, heads=4, kv_heads=3, ffn=8, vocab=8), "kv_heads 3"),
    (lambda: ModelSpec(layers="2", hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8), "'2'"),
    (lambda: ModelSpec(layers=True, hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8), "True"),
    (lambda: ModelSpec(layers=NAN, hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8), "nan"),
    (lambda: ModelSpec(layers=2.5, hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8), "2.5"),
    (lambda: ModelSpec(layers=None, hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8), "None"),
    (lambda: ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=8, vocab=8, top_k=2), "top_k is 2"),
    (lambda: ClusterSpec(ranks=0), "ranks is 0"),
    (lambda: ClusterSpec(ranks=-1), "ranks is -1"),
    (lambda: ClusterSpec(ranks=1.5), "1.5"),
    (lambda: ClusterSpec(ranks=INF), "inf"),
    (lambda: ClusterSpec(ranks=True), "True"),
    (lambda: ClusterSpec(ranks="4"), "'4'"),
    (lambda: ClusterSpec(ranks=None), "None"),
    (lambda: ClusterSpec(ranks=HUGE), str(HUGE)),
    (lambda: ClusterSpec(ranks=4, capacity=0), "capacity is 0"),
    (lambda: ClusterSpec(ranks=4, capacity=NAN), "nan"),
    (lambda: ClusterSpec(ranks=4, capacity=HUGE), str(HUGE)),
    (lambda: ClusterSpec(ranks=4, ranks_per_node=0), "ranks_per_node is 0"),
    (lambda: ClusterSpec(ranks=4, tensor=0), "tensor is 0"),
    (lambda: ClusterSpec(ranks=4, chunks=2), "chunks is 2"),
    (lambda: ClusterSpec(ranks=2, speeds=(1.0,)), "1 speeds for 2"),
    (lambda: ClusterSpec(ranks=2, speeds=(1.0, 2.0)), "2.0"),
    (lambda: ClusterSpec(ranks=2, speeds=(1.0, NAN)), "nan"),
    (lambda: ClusterSpec(ranks=2, speeds=("1", 1.0)), "'1'"),
    (lambda: ClusterSpec(ranks=2, speeds=0.5), "0.5"),
    (lambda: ClusterSpec(ranks=2, device="abacus").hardware, "'abacus'"),
    (lambda: Planner(None, CLUSTER), "neither"),
    (lambda: Planner(None, CLUSTER, "best", COSTS), "'best'"),
    (lambda: Planner(None, CLUSTER, None, COSTS), "None"),
    (lambda: Planner(None, CLUSTER, ["balanced"], COSTS), "['balanced']"),
    (lambda: Planner(None, ClusterSpec(ranks=4), cost_model=COSTS), "capacity"),
    (lambda: Planner(None, 4, cost_model=COSTS), "4"),
    (lambda: Planner("llama-7b", CLUSTER), "'llama-7b'"),
    (lambda: Planner(None, CLUSTER, cost_model={"attention": 1}), "{'attention': 1}"),
    (lambda: Planner(None, CLUSTER, cost_model=COSTS, context=-1), "-1"),
    (lambda: Planner(None, CLUSTER, cost_model=COSTS, context=1.5), "1.5"),
    (lambda: Planner(None, CLUSTER, cost_model=COSTS, context="8k"), "'8k'"),
    (lambda: Planner(None, CLUSTER, cost_model=COSTS, memory=100), "100"),
    (lambda: PLANNER.plan([0]), "0"),
    (lambda: PLANNER.plan([5, -3]), "-3"),
    (lambda: PLANNER.plan([1.5]), "1.5"),
    (lambda: PLANNER.plan([NAN]), "nan"),
    (lambda: PLANNER.plan(["12"]), "'12'"),
    (lambda: PLANNER.plan([None]), "None"),
    (lambda: PLANNER.plan([True]), "True"),
    (lambda: PLANNER.plan([[1, 2]]), "[1, 2]"),
    (lambda: PLANNER.plan([HUGE]), str(HUGE)),
    (lambda: PLANNER.plan([401]), "401"),
    (lambda: PLANNER.plan("12"), "'12'"),
    (lambda: PLANNER.plan(12), "12"),
    (lambda: PLANNER.plan(None), "None"),
    (lambda: PLANNER.plan({3: 4}), "{3: 4}"),
    (lambda: PLANNER.plan(np.array([1.5])), "1.5"),
    (lambda: PLANNER.plan(torch.tensor([2.5])), "2.5"),
    (lambda: PLANNER.lower_bound([-4]), "-4"),
    (lambda: PLAN.for_rank(4), "rank 4"),
    (lambda: PLAN.for_rank(-1), "rank -1"),
    (lambda: PLAN.for_rank("0"), "'0'"),
    (lambda: PLAN.for_rank(0.5), "0.5"),
    (lambda: PLANNER.validate(PLAN, [1, 2]), "2"),
    (lambda: PLANNER.validate(None), "None"),
    (lambda: planner(ranks=2).validate(PLAN), "4 ranks"),
    (lambda: StepPlan.from_json("{"), "{"),
    (lambda: StepPlan.from_json("[]"), "[]"),
    (lambda: StepPlan.from_json(5), "5"),
    (lambda: CostModel(-1.0, 0.0), "-1.0"),
    (lambda: CostModel(NAN, 0.0), "nan"),
    (lambda: CostModel(0.0, INF), "inf"),
    (lambda: CostModel("1", 0.0), "'1'"),
    (lambda: CostModel(True, 0.0), "True"),
    (lambda: CostModel(None, 0.0), "None"),
    (lambda: CostModel(0.0, 0.0, forward=1.5), "1.5"),
    (lambda: CostModel.fit([]), "0 samples"),
    (lambda: CostModel.fit([(1, (5,), 1.0)] * 2), "2 samples"),
    (lambda: CostModel.fit([(1, (5,), NAN)] * 3), "nan"),
    (lambda: CostModel.fit([(0, (5,), 1.0)] * 3), "ranks=0"),
    (lambda: CostModel.fit([(1, (), 1.0)] * 3), "lengths=()"),
    (lambda: CostModel.fit([(1, (5,))] * 3), "(1, (5,))"),
    (lambda: CostModel.fit(["abc"] * 3), "'abc'"),
    (lambda: CostModel.fit([(1, ("5",), 1.0)] * 3), "'5'"),
    (lambda: CostModel.fit(5), "5"),
    (lambda: CostModel.from_json("nonsense"), "expected a JSON object"),
    (lambda: CostModel.from_json(None), "None"),
    (lambda: COSTS.seconds([5], 0), "0"),
    (lambda: COSTS.seconds([5], -2), "-2"),
    (lambda: COSTS.seconds(["5"], 1), "'5'"),
    (lambda: MemoryModel(0), "0"),
    (lambda: MemoryModel(-5), "-5"),
    (lambda: MemoryModel("100"), "'100'"),
    (lambda: MemoryModel(100, offloadable=1.5), "1.5"),
    (lambda: MemoryModel(100, copy_s=NAN), "nan"),
    (lambda: MemoryModel(100, host_tokens=-1.0), "-1.0"),
    (lambda: MemoryModel.of(None, ClusterSpec(ranks=2)), "capacity"),
    (lambda: Tree([-1], [0]), "0"),
    (lambda: Tree([-1, 1], [2, 2]), "1"),
    (lambda: Tree([-2], [2]), "-2"),
    (lambda: Tree([-1], [2, 3]), "2 lengths"),
    (lambda: Tree([-1.0], [2]), "float64"),
    (lambda: Tree("ab", [1, 2]), "<U"),
    (lambda: Tree(None, [1]), "None"),
    (lambda: sim.simulate_step(PLANNER, [-5]), "-5"),
    (lambda: sim.simulate_step(planner(ranks=2), PLAN), "4 ranks"),
    (lambda: sim.simulate_step(None, [5]), "None"),
    (lambda: plan.PlanAhead(PLANNER, None), "None"),
]  # fmt: skip

OTHERS: list[Case] = [
    (lambda: trainer(max_grad_norm=0), "0"),
    (lambda: trainer(max_grad_norm=-1.0), "-1.0"),
    (lambda: trainer(max_grad_norm=NAN), "nan"),
    (lambda: trainer(max_grad_norm="1"), "'1'"),
    (lambda: trainer(max_grad_norm=True), "True"),
    (lambda: trainer(planner=planner(ranks=3)), "3"),
    (lambda: trainer(planner=None), "None"),
    (lambda: trainer(model=nn.ReLU()), "nothing to train"),
    (lambda: trainer(model="llama"), "'llama'"),
    (lambda: trainer(optimizer=None), "None"),
    (lambda: trainer(zero=4), "4"),
    (lambda: trainer(zero=True), "True"),
    (lambda: trainer(dtype=torch.int8), "int8"),
    (lambda: trainer(dtype="bf16"), "'bf16'"),
    (lambda: trainer(optimizer_offload="cpu"), "'cpu'"),
    (lambda: trainer(loss="ce"), "'ce'"),
    (lambda: trainer(offload=5), "5"),
    (lambda: trainer(comm="world"), "'world'"),
    (lambda: one_step([5], lambda i: torch.zeros(4, dtype=torch.int64)), "(4,)"),
    (lambda: one_step([5], lambda i: torch.zeros(5)), "float32"),
    (lambda: one_step([5], lambda i: [1, 2, 3, 4, 5]), "[1, 2, 3, 4, 5]"),
    (lambda: one_step([5], lambda i: None), "None"),
    (lambda: one_step([5], None), "None"),
    (lambda: one_step([101], lambda i: torch.zeros(101, dtype=torch.int64)), "101"),
    (lambda: one_step([], lambda i: None), "0"),
    (lambda: one_step([-1], lambda i: None), "-1"),
    (lambda: one_step("5", lambda i: None), "'5'"),
    (lambda: LlamaConfig(layers=0), "layers is 0"),
    (lambda: LlamaConfig(layers="2"), "'2'"),
    (lambda: LlamaConfig(layers=1.5), "1.5"),
    (lambda: LlamaConfig(layers=True), "True"),
    (lambda: LlamaConfig(hidden=15), "15"),
    (lambda: LlamaConfig(rope_theta=NAN), "nan"),
    (lambda: LlamaConfig(norm_eps=-1.0), "-1.0"),
    (lambda: models.adapt(None), "None"),
    (lambda: models.adapt("gpt2"), "'gpt2'"),
    (lambda: models.adapt(TINY, recompute="some"), "'some'"),
    (lambda: models.adapt(TINY, recompute=-1), "-1"),
    (lambda: models.adapt(TINY, recompute=1.5), "1.5"),
    (lambda: models.adapt(nn.Linear(2, 2), chunk_tokens=8), "Linear"),
    (lambda: linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)), "2"),
    (lambda: linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 3), torch.zeros(3, dtype=torch.int64)), "(5, 3)"),
    (lambda: linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3)), "float32"),
    (lambda: linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.full((3,), 7)), "7"),
    (lambda: offload.PinnedPool(0, device="cpu"), "size is 0"),
    (lambda: offload.PinnedPool(-1, device="cpu"), "size is -1"),
    (lambda: offload.PinnedPool(1 << 60, device="cpu"), "a pinned pool of 1152921.5 TB"),
    (lambda: offload.PinnedPool(HUGE, device="cpu"), str(HUGE)),
    (lambda: offload.PinnedPool(1.5, device="cpu"), "1.5"),
    (lambda: offload.PinnedPool("1G", device="cpu"), "'1G'"),
    (lambda: offload.PinnedPool(True, device="cpu"), "True"),
    (lambda: offload.PinnedPool(4096, device="tpu"), "tpu"),
    (lambda: offload.PinnedPool(4096, device=None), "None"),
    (lambda: offload.PinnedPool(4096, device="cpu", sharers=0), "sharers is 0"),
    (lambda: offload.measure_copies(offload.PinnedPool(4096, device="cpu"), 0), "size is 0"),
    (lambda: offload.measure_copies(offload.PinnedPool(4096, device="cpu"), 4096), "4096"),
    (lambda: offload.ActivationOffload(offload.PinnedPool(4096, device="cpu"), TINY, ratio=1.5), "1.5"),
    (lambda: offload.ActivationOffload(offload.PinnedPool(4096, device="cpu"), TINY, ratio=NAN), "nan"),
    (lambda: offload.ActivationOffload(offload.PinnedPool(4096, device="cpu"), TINY, ratio="1"), "'1'"),
    (lambda: offload.ActivationOffload(offload.PinnedPool(4096, device="cpu"), TINY, resident_layers=-1), "-1"),
    (lambda: offload.ActivationOffload(offload.PinnedPool(4096, device="cpu"), TINY, when_full="wait"), "'wait'"),
    (lambda: offload.ActivationOffload(offload.PinnedPool(4096, device="cpu"), TINY, timeout=0), "0"),
    (lambda: offload.ActivationOffload(offload.PinnedPool(4096, device="cpu"), nn.ReLU()), "ReLU"),
    (lambda: offload.ActivationOffload(None, TINY), "None"),
    (lambda: data.BatchSampler([], tokens=5), "(0,)"),
    (lambda: data.BatchSampler([[1, 2]], tokens=5), "(1, 2)"),
    (lambda: data.BatchSampler([0], tokens=5), "0"),
    (lambda: data.BatchSampler([1.5], tokens=5), "1.5"),
    (lambda: data.BatchSampler([NAN], tokens=5), "nan"),
    (lambda: data.BatchSampler(["a"], tokens=5), "'a'"),
    (lambda: data.BatchSampler(None, tokens=5), "None"),
    (lambda: data.BatchSampler([HUGE], tokens=5), str(HUGE)),
    (lambda: data.BatchSampler([6], tokens=5), "5"),
    (lambda: data.BatchSampler([6], tokens=-1), "-1"),
    (lambda: data.BatchSampler([6], tokens=NAN), "nan"),
    (lambda: data.BatchSampler([6], tokens="8"), "'8'"),
    (lambda: data.BatchSampler([6], tokens=8, seed=-1), "-1"),
    (lambda: data.BatchSampler([6], tokens=8, seed=0.5), "0.5"),
    (lambda: data.BatchSampler([6], tokens=8, seed=HUGE), str(HUGE)),
    (lambda: data.BatchSampler([6], tokens=8).batch(-1), "-1"),
    (lambda: data.BatchSampler([6], tokens=8).batch(0.5), "0.5"),
    (lambda: data.open_corpus([], context=8), "no path"),
    (lambda: data.open_corpus(["/nowhere/text"], context=8), "/nowhere/text"),
    (lambda: data.open_corpus([Path(__file__)], context=0), "0"),
    (lambda: data.open_corpus([Path(__file__)], context=2.5), "2.5"),
    (lambda: data.open_corpus([Path(__file__)], context="4k"), "'4k'"),
    (lambda: data.open_corpus(5, context=8), "5"),
    (lambda: data.open_corpus("text.txt", context=8), "text.txt"),
    (lambda: data.open_corpus([None], context=8), "None"),
    (lambda: data.open_store(Path("/nowhere/store")), "/nowhere/store"),
    (lambda: data.encoder_of("/nowhere/tokenizer"), "/nowhere/tokenizer"),
    (lambda: data.fold([[]]), "0"),
    (lambda: data.fold([[1.5]]), "1.5"),
    (lambda: data.fold(["ab"]), "'ab'"),
    (lambda: data.fold([[1]], [[NAN]]), "nan"),
    (lambda: data.fold([[1]], [[1.0, 2.0]]), "2"),
    (lambda: spawn(print, 0), "0"),
    (lambda: spawn(print, -2), "-2"),
    (lambda: spawn(print, 1.5), "1.5"),
    (lambda: spawn(print, 2, transport="pigeon"), "'pigeon'"),
    (lambda: run_threads(print, 0), "0"),
    (lambda: run_threads(print, "2"), "'2'"),
]  # fmt: skip
