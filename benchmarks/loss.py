"""The last layer and its loss: memory and time in chunks of tokens against whole logits.

    python benchmarks/loss.py --tokens 4096 16384 --vocabulary 32000 128000 --json loss.json
    python benchmarks/loss.py --device cuda --dtype bfloat16 --width 4096

A step is forward and backward of one linear layer and cross-entropy. Memory is the most that was alive above inputs and
weight, their gradients included; time is the median of the repeats. "torch" is F.linear and F.cross_entropy, "fused"
F.linear and hdpcomm.kernels.cross_entropy, "chunks" hdpcomm.kernels.linear_cross_entropy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hdpcomm.kernels import cross_entropy, linear_cross_entropy
from hdpcomm.offload import MemoryMeter

METHODS = {
    "torch": lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum"),
    "fused": lambda hidden, weight, labels: cross_entropy(F.linear(hidden, weight), labels).sum(),
    "chunks": linear_cross_entropy,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one size."""

    method: str
    tokens: int
    vocabulary: int
    width: int
    seconds: float
    memory_bytes: int


def _step(method: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    hidden.grad = weight.grad = None
    started = time.perf_counter()
    METHODS[method](hidden, weight, labels).backward()
    if hidden.device.type == "cuda":
        torch.cuda.synchronize(hidden.device)
    return time.perf_counter() - started


def measure(options: argparse.Namespace, tokens: int, vocabulary: int) -> list[Row]:
    """All methods on one size, in turns."""
    kind = {"dtype": getattr(torch, options.dtype), "device": options.device}
    hidden = torch.randn(tokens, options.width, **kind).requires_grad_()
    weight = (torch.randn(vocabulary, options.width, **kind) * 0.02).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=options.device)
    memory: dict[str, int] = {}
    for method in METHODS:
        with MemoryMeter(options.device) as meter:
            _step(method, hidden, weight, labels)
        memory[method] = meter.peak
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(options.repeat):
        for method, found in seconds.items():
            found.append(_step(method, hidden, weight, labels))
    return [
        Row(method, tokens, vocabulary, options.width, statistics.median(found), memory[method])
        for method, found in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8000, 32000])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for v in options.vocabulary for t in options.tokens for row in measure(options, t, v)]
    print(f"{'tokens':>8} {'vocabulary':>10} {'method':>8} {'seconds':>9} {'memory MiB':>11}")
    for row in rows:
        print(f"{row.tokens:8} {row.vocabulary:10} {row.method:>8} {row.seconds:9.3f} {row.memory_bytes / 2**20:11.1f}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
