"""Ring attention with 2 and 4 ranks on one GPU: its error in bf16, and how much of a step waits for messages.

Exposed communication is 1 - (time without messages) / (time of the step). Without messages means the same attention
with exchanges that move nothing; in both cases all ranks run at the same time.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from common import CUDA, Row, Rows, main, processes_kind, row

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, ring_attention, shard
from hdpcomm.testing import spawn

TOKENS, HEADS, KV_HEADS, DIM = 16384, 32, 8, 128
TOLERANCE, EXPOSED, RANKS_S = 1e-2, 0.05, 45.0


class Silent:
    """A communicator whose exchanges move nothing; all other calls go to the real one."""

    def __init__(self, comm: hdp.Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def exchange(self, *_: Any, **__: Any) -> Silent:
        return self

    def wait(self, timeout: float | None = None) -> None:
        """Returns at once, as the Work of an exchange that moves nothing."""


def tensors(total: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(CUDA).manual_seed(5)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(total, n, DIM, device=CUDA, generator=generator).to(dtype) for n in heads]


def error(comm: hdp.Communicator, lengths: list[int]) -> float:
    """The largest relative error of out, dq, dk, dv on this rank against float64."""
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    whole = tensors(sum(lengths), torch.bfloat16)
    exact = [x.double().requires_grad_(i < 3) for i, x in enumerate(whole)]
    want = ring_attention(*exact[:3], comm=None, cu_seqlens=cu, backend="reference")
    want.backward(exact[3])
    q, k, v, dout = (shard(x, cu, rank=comm.rank, size=comm.size).requires_grad_(i < 3) for i, x in enumerate(whole))
    out = ring_attention(q, k, v, comm=comm, cu_seqlens=cu)
    out.backward(dout)
    pairs = zip((out.detach(), q.grad, k.grad, v.grad), (want.detach(), *(x.grad for x in exact[:3])), strict=True)
    parts = [(got.double(), shard(right, cu, rank=comm.rank, size=comm.size)) for got, right in pairs]
    return max(float((a - b).norm() / b.norm()) for a, b in parts)


def step_seconds(comm: Any, barrier: Any, steps: int = 5) -> float:
    """Median seconds of forward and backward at TOKENS tokens a rank."""
    total = TOKENS * comm.size
    cu = torch.tensor([0, total], dtype=torch.int32)
    q, k, v, dout = (shard(x, cu, rank=comm.rank, size=comm.size) for x in tensors(total, torch.bfloat16))
    for x in (q, k, v):
        x.requires_grad_()
    times = []
    for _ in range(steps + 1):
        torch.cuda.synchronize()
        barrier()
        started = time.perf_counter()
        ring_attention(q, k, v, comm=comm, cu_seqlens=cu, options=AttentionOptions(check=False)).backward(dout)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[steps // 2]


def on_a_rank() -> dict[str, float]:
    with hdp.init(transport="cuda") as comm:
        wrong = error(comm, [700, 1, 323, 1024])
        full = step_seconds(comm, comm.barrier)
        silent = step_seconds(Silent(comm), comm.barrier)
        return {"error": wrong, "step": full, "silent": silent}


def rows_of(size: int) -> list[Row]:
    kind, limits = processes_kind()
    found = spawn(on_a_rank, size, transport="cuda", timeout=RANKS_S)
    step, silent = (max(rank[name] for rank in found) for name in ("step", "silent"))
    limit = EXPOSED if limits else None
    return [
        row(f"ring, {size} {kind}: relative error", max(r["error"] for r in found), "", at_most=TOLERANCE),
        row(f"ring, {size} {kind}: step of 16K tokens a rank", step * 1e3, "ms"),
        row(f"ring, {size} {kind}: exposed communication", 1 - silent / step, "", at_most=limit),
    ]


GROUPS: dict[str, list[Rows]] = {"two": [lambda: rows_of(2)], "four": [lambda: rows_of(4)]}

if __name__ == "__main__":
    # One lane each way: nine streams of a rank with four. The clients of MPS share its queues, and with 32 of them each
    # a fourth one found no memory on an H100.
    os.environ["HDPCOMM_DEVICE_LANES"] = "1"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "16"
    main(__doc__.splitlines()[0], GROUPS)
