"""Loss curves of every way to train, against the single process that runs each sequence by itself.

    python benchmarks/curves.py                            50 steps of a tiny model, about 3 minutes on two cores
    python benchmarks/curves.py --steps 16 --json curves.json

Ends with an error if a curve leaves its limit at the last step: 1e-4 relative in fp32, 1e-9 in fp64; bf16 with masters
within 2% of fp32 after 200 steps, where bf16 alone is not. The suite has a small form of it
(tests/ranks/train/test_sharded.py).
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from functools import cache, partial
from pathlib import Path

import torch

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig, adapt
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer, summed_loss

CONFIG = LlamaConfig(vocabulary=31, layers=3, hidden=16, heads=2, kv_heads=1, ffn=24)
COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4)
LENGTHS = (30, 4, 9, 1, 12, 3)
LIMITS = {"fp32": 1e-4, "fp64": 1e-9}


def fetch(step: int, place: int) -> torch.Tensor:
    return (torch.arange(LENGTHS[place]) * (place + 3 + step % 5)) % 31


def curve(
    ranks: int, steps: int, *, policy: str = "balanced", start: torch.dtype = torch.float32,
    recompute: str | int = "none", offload: bool = False, chunks: bool = True, lr: float = 1e-2, scale: float = 1.0,
    **options: object,
) -> list[float]:  # fmt: skip
    """Losses of all steps. ``scale``: of the first weights, so that small steps are lost in bf16."""

    def main() -> list[float]:
        torch.set_num_threads(1)
        comm = hdp.init()
        model = adapt(Llama(CONFIG, dtype=start), recompute=recompute)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= scale if parameter.dim() > 1 else 1.0
        pool = PinnedPool(1 << 20, device="cpu")
        moved = ActivationOffload(pool, model, ratio=1.0, min_bytes=1) if offload else None
        planner = Planner(None, ClusterSpec(comm.size, 64 // comm.size), policy, COST)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        loss = None if chunks else summed_loss
        trainer = Trainer(model, optimizer, planner, comm, offload=moved, loss=loss, **options)
        return [trainer.step(LENGTHS, partial(fetch, step)).loss for step in range(steps)]

    return run_threads(main, ranks, timeout=600.0)[0]


def single_process(steps: int, dtype: torch.dtype) -> list[float]:
    """Each sequence by itself, torch's own loss and clipping."""
    torch.set_num_threads(1)
    model = Llama(CONFIG, dtype=dtype)
    comm = hdp.init()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        count = sum(length - 1 for length in LENGTHS)
        total = 0.0
        for place, length in enumerate(LENGTHS):
            if length < 2:
                continue
            tokens = fetch(step, place)
            bounds = torch.tensor([0, length], dtype=torch.int32)
            logits = model(tokens, positions=torch.arange(length), cu_seqlens=bounds, comm=comm)
            loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for parameter in model.parameters():  # clip_grad_norm_ adds 1e-6 to the norm
            parameter.grad /= max(1.0, float(norm))
        optimizer.step()
        losses.append(total)
    return losses


def settings() -> list[tuple[str, int, dict[str, object]]]:
    """(name, ranks, options) of every curve in fp32 and fp64."""
    found: list[tuple[str, int, dict[str, object]]] = []
    for policy in ("balanced", "naive", "static"):
        for ranks in (1, 2, 3, 4):
            found.append((policy, ranks, {"policy": policy}))
    for ranks in (2, 3, 4):
        found.append(("ZeRO-1", ranks, {"zero": 1}))
    found += [
        ("recompute all", 2, {"recompute": "full"}),
        ("recompute 1 layer", 3, {"recompute": 1}),
        ("offload", 2, {"offload": True}),
        ("whole logits", 2, {"chunks": False}),
        (
            "ZeRO-1, offload, recompute 1, whole logits",
            4,
            {"zero": 1, "offload": True, "recompute": 1, "chunks": False},
        ),
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bf16-steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = cache(partial(single_process, options.steps))
    rows, failed = [], False
    for name, ranks, given in settings():
        for text, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
            losses = curve(ranks, options.steps, start=dtype, **given)
            error = abs(losses[-1] / wanted(dtype)[-1] - 1)
            failed |= not (error <= LIMITS[text] and losses[-1] < losses[0])
            rows.append({"name": name, "ranks": ranks, "dtype": text, "error": error, "last": losses[-1]})
            print(f"{name:45} {ranks} ranks {text} {losses[-1]:.4f} {error:.1e}", flush=True)
    run = {"lr": 3e-4, "scale": 16.0}
    full = curve(1, options.bf16_steps, **run)[-1]
    masters = curve(2, options.bf16_steps, zero=1, dtype=torch.bfloat16, **run)[-1] / full - 1
    alone = curve(1, options.bf16_steps, start=torch.bfloat16, **run)[-1] / full - 1
    print(f"bf16 after {options.bf16_steps} steps: with masters {masters:+.1%} of fp32's loss, alone {alone:+.1%}")
    failed |= not abs(masters) <= 0.02 < abs(alone)
    if options.json:
        record = {"date": date.today().isoformat(), "torch": torch.__version__, "steps": options.steps, "rows": rows}
        record["bf16"] = {"steps": options.bf16_steps, "masters": masters, "alone": alone}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
