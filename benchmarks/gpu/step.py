"""A training step of 7B-sized layers on lengths of all sizes, beside the same step by FSDP2 and by context parallelism.

All ways train the same layers in bf16 with master weights in fp32, AdamW, clipping and the loss of hdpcomm.kernels,
and begin with the same weights; the losses of their first steps are compared. On one rank all pack alike. Two ranks
share the GPU: what they take from each other is the same for all, and what is left is the cost of communication.
torch's FSDP2 and context parallelism then run over ``backend="hdpcomm"``, since NCCL refuses two ranks on one GPU.
The share of the matrix peak counts the model's FLOPs (forward 1, backward 2, causal attention half of the square)
over what a large matrix product reaches.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import Row, Rows, main, processes_kind, row, seconds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.models import causal_lm as llama_module
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, PlannedStep, Planner
from hdpcomm.testing import spawn
from hdpcomm.torch_backend import communicator
from hdpcomm.train import Trainer
from hdpcomm.train.step.data_parallel import WholeSequencePlanner

sys.path.append(str(Path(__file__).resolve().parents[1]))  # at the end: this folder has no train.py
from train import LockstepLoop

DEVICE = "cuda"
K = 1024
LAYER: dict[str, Any] = {
    "vocabulary": 32000, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "tied_embeddings": False
}  # fmt: skip
MIXED = [48 * K, 20000, 15 * K, 9001, 8 * K, 5555, 4 * K, 4095]
MIXED += [*(2 * K + 7 * i for i in range(4)), *(300 + i for i in range(12))]
LONG = [64 * K]
LAYERS, DEEP, POOL_BYTES, RANKS_S = 2, 4, 16 << 30, 45.0
STEPS, MEASURED = 3, 8 * K  # timed steps; tokens of the longest sequence that the cost model is measured with


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(layers=layers, **LAYER)


def model_flops(lengths: Sequence[int], layers: int) -> float:
    """Three times those of a forward pass: nothing is computed again."""
    one = config(layers)
    kv = one.kv_heads * one.head_dim
    weights = layers * one.hidden * (2 * one.hidden + 2 * kv + 3 * one.ffn) + one.hidden * one.vocabulary
    attention = layers * 2.0 * one.hidden * sum(n * n for n in lengths)  # QK^T and PV of the lower triangle
    return 3.0 * (2.0 * weights * sum(lengths) + attention)


@functools.cache
def matrix_peak() -> float:
    """FLOP/s of a bf16 matrix product of two random matrices, by a process that ends before any other begins."""
    return float(spawn(product_flops, 1)[0])


def product_flops() -> float:
    if DEVICE != "cuda":
        return 1e11
    size = 8192
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    return 2.0 * size**3 / seconds(lambda _: a @ b)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def new_model(layers: int, dtype: torch.dtype) -> Llama:
    """The same weights in every way and on every rank, drawn on the device."""
    model = Llama(config(layers), dtype=dtype, device="meta").to_empty(device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, device=DEVICE, generator=generator) * 0.02
            parameter.copy_(drawn if parameter.dim() > 1 else torch.ones_like(drawn))
    return model


def tokens_of(lengths: Sequence[int]) -> Callable[[int], Tensor]:
    def fetch(place: int) -> Tensor:
        generator = torch.Generator().manual_seed(place)
        return torch.randint(LAYER["vocabulary"], (lengths[place],), generator=generator)

    return fetch


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")


def timed(comm: hdp.Communicator, step: Callable[[], float]) -> dict[str, float]:
    """Median seconds of a step, the first one's loss, and the most memory that this process held."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for _ in range(STEPS + 1):
        synchronize()
        comm.barrier()
        started = time.perf_counter()
        losses.append(step())
        synchronize()
        times.append(time.perf_counter() - started)
    memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"seconds": sorted(times[1:])[STEPS // 2], "loss": losses[0], "memory": float(memory)}


def clean() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def hybrid(
    comm: hdp.Communicator, lengths: Sequence[int], capacity: int, layers: int = LAYERS, offload: bool = False
) -> dict[str, float]:
    """This library's trainer, planned with measured costs."""
    clean()
    model = new_model(layers, torch.bfloat16)
    mover = ActivationOffload(PinnedPool(POOL_BYTES, device=DEVICE), model) if offload else None
    planner = Planner.measured(model, comm, capacity=capacity, longest=min(MEASURED, capacity), offload=mover)
    trainer = Trainer(model, adamw(model), planner, comm, dtype=torch.bfloat16, offload=mover, zero=int(comm.size > 1))
    fetch, ratio = tokens_of(lengths), 0.0
    found = timed(comm, lambda: trainer.step(lengths, fetch).loss)
    plan = planner.plan(lengths)
    ratio = max(each.offload_ratio for each in plan.micro_batches)
    most = max(len(each.ranks) for each in plan.micro_batches)
    return found | {"ratio": ratio, "ranks": most, "predicted": plan.makespan_s}


def fsdp2(comm: hdp.Communicator, lengths: Sequence[int], capacity: int) -> dict[str, float]:
    """FSDP2 with its mixed precision; whole sequences, packed as the one rank of :func:`hybrid` packs them."""
    clean()
    model = sharded(new_model(LAYERS, torch.float32))
    costs = hdp.plan.CostModel(1e-9, 1e-6)
    planner = WholeSequencePlanner(ClusterSpec(ranks=comm.size, capacity=capacity), costs)
    loop = LockstepLoop(model, adamw(model), planner, comm)
    fetch = tokens_of(lengths)
    return timed(comm, lambda: loop.step(PlannedStep(tuple(lengths), planner.plan(lengths), 0.0), fetch).loss)


def sharded(model: Llama) -> Llama:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Causal attention of one whole sequence by torch, which its context parallelism replaces."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def context_parallel_step(comm: hdp.Communicator, lengths: Sequence[int], _: int) -> dict[str, float]:
    """torch's context parallelism over all ranks, with FSDP2; one sequence."""
    from torch.distributed.tensor.experimental import context_parallel

    clean()
    (length,) = lengths
    model = sharded(new_model(LAYERS, torch.float32))
    optimizer, mesh = adamw(model), init_device_mesh(DEVICE, (dist.get_world_size(),))
    whole = tokens_of(lengths)(0).to(DEVICE)
    alone = comm.subset([comm.rank])
    assert alone is not None

    def step() -> float:
        labels = torch.cat((whole[1:], whole.new_tensor([-100])))
        buffers = [whole.clone(), labels, torch.arange(length, device=DEVICE)]
        with (
            mock.patch.object(llama_module, "ring_attention", plain_attention),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0, 0, 0], no_restore_buffers=set(buffers)),
        ):
            tokens, labels, positions = buffers
            cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32)
            loss = model(tokens, positions=positions, cu_seqlens=cu_seqlens, comm=alone, labels=labels)
            (loss * (dist.get_world_size() / (length - 1))).backward()  # FSDP2 takes the mean of the ranks
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / (length - 1)

    return timed(comm, step)


def on_hdpcomm(way: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """A way of this library, on a rank of two."""
    with hdp.init() as comm:
        return way(comm, *arguments)


def on_torch(way: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """A way of torch over this library's backend, on a rank of two."""
    dist.init_process_group("hdpcomm")
    try:
        return way(communicator(), *arguments)
    finally:
        dist.destroy_process_group()


def share(found: dict[str, float], lengths: Sequence[int], layers: int, peak: float) -> float:
    return model_flops(lengths, layers) / found["seconds"] / peak


def figures(label: str, found: dict[str, float], lengths: Sequence[int], layers: int, peak: float) -> list[Row]:
    return [
        row(f"{label}: tokens", sum(lengths) / found["seconds"], "/s"),
        row(f"{label}: share of the matrix peak", share(found, lengths, layers, peak), ""),
        row(f"{label}: most memory of a rank", found["memory"] / 1e9, "GB"),
    ]


def compared(label: str, ours: dict[str, float], theirs: dict[str, float]) -> list[Row]:
    return [
        row(f"{label}: as fast as", theirs["seconds"] / ours["seconds"], "x", at_least=1.0),
        row(f"{label}: loss differs by", abs(ours["loss"] / theirs["loss"] - 1), "", at_most=1e-3),
    ]


def one_rank() -> list[Row]:
    peak = matrix_peak()
    rows = [row("matrix product 8192^3, bf16", peak / 1e12, "TFLOP/s")]
    capacity = max(MIXED)
    with hdp.init() as comm:
        ours = hybrid(comm, MIXED, capacity)
        rows += figures("1 rank, mixed", ours, MIXED, LAYERS, peak)
        rows.append(row("1 rank, mixed: step against the plan", ours["seconds"] / ours["predicted"], "x"))
        keep(rows)
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            theirs = fsdp2(comm, MIXED, capacity)
        finally:
            dist.destroy_process_group()
        rows += figures("1 rank, mixed, FSDP2", theirs, MIXED, LAYERS, peak)
        return rows + compared("1 rank, mixed against FSDP2", ours, theirs)


def with_offload() -> list[Row]:
    """A sequence twice as long as the rank's capacity, half of it in host memory."""
    peak, rows = matrix_peak(), []
    with hdp.init() as comm:
        plain = hybrid(comm, LONG, LONG[0], DEEP)
        rows += figures(f"1 rank, 64K, {DEEP} layers", plain, LONG, DEEP, peak)
        moved = hybrid(comm, LONG, LONG[0] * 11 // 16, DEEP, True)
        rows += figures(f"1 rank, 64K, {DEEP} layers, offload", moved, LONG, DEEP, peak)
        rows.append(row("1 rank, 64K, offload: ratio", moved["ratio"], ""))
        rows.append(row("1 rank, 64K, offload: slower by", moved["seconds"] / plain["seconds"] - 1, "", at_most=0.03))
        rows.append(
            row("1 rank, 64K, offload: loss differs by", abs(moved["loss"] / plain["loss"] - 1), "", at_most=1e-4)
        )
    return rows


def worst(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in found) for name in found[0]}


def two_ranks(name: str, lengths: Sequence[int], rival: str, way: Callable[..., dict[str, float]]) -> list[Row]:
    kind, _ = processes_kind()
    peak, label = matrix_peak(), f"2 {kind}, {name}"
    ours = worst(spawn(on_hdpcomm, 2, hybrid, lengths, max(lengths) // 2, transport=TRANSPORT, timeout=RANKS_S))
    rows = figures(label, ours, lengths, LAYERS, peak)
    rows.append(row(f"{label}: ranks of the longest sequence", ours["ranks"], "", at_least=2))
    keep(rows)
    theirs = worst(spawn(on_torch, 2, way, lengths, max(lengths), transport=TRANSPORT, timeout=RANKS_S))
    rows += figures(f"{label}, {rival}", theirs, lengths, LAYERS, peak)
    return rows + compared(f"{label} against {rival}", ours, theirs)


TRANSPORT = "cuda"


def keep(rows: list[Row]) -> None:
    """Prints what a group has so far, in case the rest of it fails."""
    for line in rows:
        print(f"so far: {line['name']}: {line['value']:.4g} {line['unit']}", flush=True)


GROUPS: dict[str, list[Rows]] = {
    "one": [one_rank],
    "offload": [with_offload],
    "mixed": [lambda: two_ranks("mixed", MIXED, "FSDP2", fsdp2)],
    "long": [lambda: two_ranks("64K", LONG, "torch CP", context_parallel_step)],
}

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)
