"""The longest sequence that a rank's memory allows, with and without recomputation, offload and the loss in chunks.

    python benchmarks/memory.py --memory 4 --ranks 8
    python benchmarks/memory.py --check 24 --models --json benchmarks/results/memory.json

The first table is computed by the memory model (hdpcomm.plan.memory) for a model of the size of GPT-2 with a vocabulary
of 32,000 on ranks of ``--memory`` GiB, with ZeRO-1 over all of them. ``--check MIB`` computes the same for a small
model and that many MiB, then runs a pass of just that many tokens in each setting and counts what it takes.
``--models`` profiles five small models by short passes, and compares what the profile says of a longer step, states
included, with what that step takes.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.measure.costs import forward_backward
from hdpcomm.measure.memory import profile_memory
from hdpcomm.models import Llama, LlamaConfig, from_pretrained, set_recompute
from hdpcomm.offload import ActivationOffload, MemoryMeter, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, ModelSpec, Planner
from hdpcomm.plan.memory import StepMemory
from hdpcomm.train import Trainer
from hdpcomm.train.step.runner import StepSettings

GPT2 = LlamaConfig(vocabulary=32000, layers=12, hidden=768, heads=12, kv_heads=4, ffn=2048)
SMALL = LlamaConfig(vocabulary=4000, layers=6, hidden=64, heads=4, kv_heads=2, ffn=176)
OWN = LlamaConfig(vocabulary=500, layers=4, hidden=64, heads=4, kv_heads=2, ffn=160)
WHOLE = 1 << 60
"""Tokens of a chunk of the loss that holds them all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting; ``measured_bytes`` of a pass of ``tokens`` tokens where it was run, states left out."""

    dtype: str
    recompute: int
    offload: bool
    chunks: bool
    tokens: int
    predicted_bytes: float
    measured_bytes: int | None = None


def memory_of(config: LlamaConfig, dtype: torch.dtype, ranks: int) -> StepMemory:
    """AdamW under ZeRO-1, with fp32 masters of narrower parameters."""
    size = dtype.itemsize
    spec = ModelSpec(
        config.layers, config.hidden, config.heads, config.kv_heads, config.ffn, config.vocabulary, dtype_bytes=size
    )
    masters = 12 if size < 4 else 8
    return StepMemory.of(spec, states=spec.params * (size + 4 + masters / ranks))


def rows_of(config: LlamaConfig, limit: float, ranks: int, *, states: bool = True) -> list[Row]:
    """All settings of both types."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        memory = memory_of(config, dtype, ranks)
        if not states:
            memory = replace(memory, states=0.0)
        for recompute in (0, config.layers // 2, config.layers):
            for offload in (False, True):
                for chunks in (False, True):
                    each = memory if chunks else replace(memory, chunk=WHOLE)
                    tokens = each.capacity(limit, recompute, float(offload))
                    predicted = each.peak_bytes(tokens, recompute, float(offload)) if tokens else 0.0
                    rows.append(Row(str(dtype).split(".")[1], recompute, offload, chunks, tokens, predicted))
    return rows


def measured(config: LlamaConfig, row: Row) -> Row:
    """The same with what a pass takes here, in sequences of 256 tokens."""
    model = Llama(config, dtype=getattr(torch, row.dtype))
    set_recompute(model, row.recompute)
    comm = hdp.init()
    forward_backward(model, comm, [8])  # makes the gradients
    model.chunk_tokens = None if row.chunks else WHOLE
    lengths = [min(256, row.tokens - start) for start in range(0, row.tokens, 256)]
    offload = ActivationOffload(PinnedPool(1 << 30, device="cpu"), model, min_bytes=1) if row.offload else None
    context = None if offload is None else offload.micro_batch(1.0, tokens=row.tokens)
    with MemoryMeter("cpu") as meter:
        forward_backward(model, comm, lengths, context=context)
    return replace(row, measured_bytes=meter.peak)


def models() -> dict[str, Callable[[], nn.Module]]:
    """Small ones: the Llama here, and four of transformers."""
    from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3Config

    size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "head_dim": 16}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "vocab_size": 1000}
    return {
        "Llama here": lambda: Llama(OWN),
        "Llama": lambda: from_pretrained(LlamaConfig(**size)),
        "Qwen3": lambda: from_pretrained(Qwen3Config(**size)),
        "Gemma 3": lambda: from_pretrained(Gemma3TextConfig(sliding_window=64, **size)),
        "Mixtral": lambda: from_pretrained(MixtralConfig(num_local_experts=4, **size)),
    }


def step_of(make: Callable[[], nn.Module], dtype: torch.dtype | None) -> list[tuple[int, int, float]]:
    """(recomputed layers, measured, predicted bytes) of a training step of 750 tokens, all that is kept included."""
    comm = hdp.init()
    lengths = [350, 250, 150]
    profile = profile_memory(
        make().to(dtype or torch.float32), comm, torch.optim.AdamW, tokens=256, settings=StepSettings(dtype=dtype)
    )
    found = []
    for recompute in (0, 2, 4):
        model = make()
        set_recompute(model, recompute)
        planner = Planner(None, ClusterSpec(comm.size, 1500), "static", CostModel(1e-9, 1e-6))
        trainer = Trainer(model, torch.optim.AdamW(model.parameters()), planner, comm, dtype=dtype)
        for _ in range(2):  # the first one makes the optimizer's state
            with MemoryMeter("cpu") as meter:
                trainer.step(lengths, lambda place: torch.arange(lengths[place]) % 100)
        gradients = trainer.runner.gradients
        kept = [*model.parameters(), *model.buffers(), gradients.sums.flat]
        kept += [] if trainer.runner.masters is None else [piece.master for piece in trainer.runner.masters.pieces]
        kept += [t for state in trainer.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        states = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        found.append((recompute, sum(states.values()) + meter.peak, profile.peak_bytes(sum(lengths), recompute)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=4.0, help="GiB of a rank")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--check", type=float, metavar="MIB", help="measure a small model in so many MiB beside states")
    parser.add_argument("--models", action="store_true", help="measure steps of five small models")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(GPT2, options.memory * 2**30, options.ranks)
    print(f"tokens of a rank and context of {options.ranks} ranks in {options.memory:g} GiB each")
    for row in rows:
        name = f"{row.dtype:9} recompute {row.recompute:2} offload {row.offload!s:5} chunks {row.chunks!s:5}"
        print(f"{name} {row.tokens:9,} {row.tokens * options.ranks:11,}")
    checked = []
    if options.check:
        print(f"measured against predicted, a small model in {options.check:g} MiB")
        for row in rows_of(SMALL, options.check * 2**20, 1, states=False):
            checked.append(measured(SMALL, row))
            ratio = checked[-1].measured_bytes / row.predicted_bytes
            name = f"{row.dtype:9} recompute {row.recompute:2} offload {row.offload!s:5} chunks {row.chunks!s:5}"
            print(f"{name} {row.tokens:7,} tokens {ratio:.3f}", flush=True)
    steps = []
    for name, make in models().items() if options.models else ():
        for dtype in (None, torch.bfloat16):
            rows_of_model = step_of(make, dtype)
            kind = "float32" if dtype is None else "bfloat16"
            told = "  ".join(f"{took / said:.3f}" for _, took, said in rows_of_model)
            print(f"{name:10} {kind:9} measured / predicted, 0, 2, 4 of 4 layers recomputed: {told}", flush=True)
            steps.append({"model": name, "dtype": kind, "rows": rows_of_model})
    if options.json:
        record = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": platform.machine()}
        record |= {"rows": [asdict(row) for row in rows], "checked": [asdict(row) for row in checked], "models": steps}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
