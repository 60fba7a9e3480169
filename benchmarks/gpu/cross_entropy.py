"""Cross-entropy, forward and backward, against torch unfused, torch.compile and, where it is installed, Liger.

At 8K tokens x 128K columns of bf16, and at 16K x 128K of fp32, the shape of Liger's own benchmark. Its public figures
there (Liger 0.5.2, H100 NVL; linkedin/Liger-Kernel, benchmark/data/h100_all_benchmark_data.csv, commit 3534d44, lines
"cross_entropy,...,full,speed", V=131072): Liger 12.34 ms, torch unfused 32.55 ms, torch.compile 21.24 ms. So fused is
2.64 times as fast as unfused, and our kernel must reach that ratio in this run.

The logits are random, and made anew before each call, outside the measured time, since ours and Liger's overwrite them
with gradients. Memory is the peak that a call allocates beside the logits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from common import CUDA, Row, Rows, main, row
from torch import Tensor
from torch.nn import functional

from hdpcomm.kernels import cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]
TOKENS, COLUMNS, ROUNDS, LIGER = 8192, 131072, 7, 2.64


class Source(torch.autograd.Function):
    """Puts ``holder[0]`` into an autograd graph without a cost, in place of a projection before the loss."""

    @staticmethod
    def forward(ctx, anchor, holder):  # noqa: ARG004
        return holder[0]

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return torch.zeros(1, device=CUDA), None


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels).sum()


def unfused(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def liger() -> Loss | None:
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy
    except ImportError:
        return None
    return lambda logits, labels: liger_cross_entropy(logits, labels, reduction="sum")


def time_and_memory(loss_of: Loss, base: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """(median seconds, peak bytes beside the logits as a share of theirs, loss)."""
    anchor, holder, times = torch.zeros(1, device=CUDA, requires_grad=True), [torch.empty_like(base)], []
    loss, peak = torch.zeros(()), 0
    for i in range(ROUNDS + 2):
        holder[0] = holder[0].detach().copy_(base)
        logits = Source.apply(anchor, holder)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = loss_of(logits, labels)
        loss.backward()
        end.record()
        end.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        if i >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times), peak / (base.numel() * base.element_size()), loss.item()


def case(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    base = torch.randn(tokens, COLUMNS, device=CUDA, dtype=dtype)
    labels = torch.randint(0, COLUMNS, (tokens,), device=CUDA)
    labels[::97] = -100
    return base, labels


def against_unfused() -> list[Row]:
    base, labels = case(TOKENS, torch.bfloat16)
    mine = time_and_memory(ours, base, labels)
    theirs = time_and_memory(unfused, base, labels)
    rows = [
        row("cross-entropy 8K x 128K bf16", mine[0] * 1e3, "ms"),
        row("cross-entropy: bytes moved per second", 6 * base.numel() / mine[0] / 1e9, "GB/s"),
        row("cross-entropy, torch unfused", theirs[0] * 1e3, "ms"),
        row("cross-entropy: faster than torch unfused", theirs[0] / mine[0], "x", at_least=3.0),
        row("cross-entropy: memory beside the logits", mine[1], "logits", at_most=0.05),
        row("cross-entropy: loss, relative to torch's", abs(mine[2] / theirs[2] - 1), "", at_most=1e-4),
    ]
    if (other := liger()) is not None:
        fused = time_and_memory(other, base, labels)
        rows.append(row("cross-entropy, Liger", fused[0] * 1e3, "ms"))
        rows.append(row("cross-entropy: faster than Liger", fused[0] / mine[0], "x", at_least=1.0))
    return rows


def against_public_liger() -> list[Row]:
    base, labels = case(2 * TOKENS, torch.float32)
    mine = time_and_memory(ours, base, labels)[0]
    theirs = time_and_memory(unfused, base, labels)[0]
    return [
        row("cross-entropy 16K x 128K fp32", mine * 1e3, "ms"),
        row("cross-entropy fp32, torch unfused", theirs * 1e3, "ms"),
        row("cross-entropy fp32: over unfused; Liger's public is 2.64", theirs / mine, "x", at_least=LIGER),
    ]


def against_compiled() -> list[Row]:
    base, labels = case(TOKENS, torch.bfloat16)
    mine = time_and_memory(ours, base, labels)[0]
    compiled = time_and_memory(torch.compile(unfused), base, labels)[0]
    return [
        row("cross-entropy, torch.compile", compiled * 1e3, "ms"),
        row("cross-entropy: faster than torch.compile", compiled / mine, "x", at_least=1.0),
    ]


GROUPS: list[Rows] = [against_unfused, against_public_liger, against_compiled]

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)
