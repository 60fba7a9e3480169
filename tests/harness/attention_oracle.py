"""Plain softmax attention in float64, sequence by sequence, and functions that compare ranks with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import hdpcomm as hdp
from hdpcomm.attention import ring_attention, shard, unshard
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options

GRADS = ("out", "dq", "dk", "dv")


@dataclass
class Case:
    """The parameters of one attention on ``size`` ranks."""

    size: int
    lengths: list[int]
    keys: list[int] | None = None  # lengths of the keys, where they differ
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    v_dim: int | None = None  # the head_dim of v, where it differs
    dtype: torch.dtype = torch.float64
    causal: bool = True
    window: Any = None
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # variant, backend, check, chunk

    @property
    def cu(self) -> list[int]:
        return [0, *np.cumsum(self.lengths, dtype=int).tolist()]

    @property
    def cu_k(self) -> list[int]:
        return self.cu if self.keys is None else [0, *np.cumsum(self.keys, dtype=int).tolist()]

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(self.dtype)

        v_dim = self.dim if self.v_dim is None else self.v_dim
        q, dout = random(self.cu[-1], self.heads, self.dim), random(self.cu[-1], self.heads, v_dim)
        k, v = (random(self.cu_k[-1], self.kv_heads, dim) for dim in (self.dim, v_dim))
        return {"q": q, "k": k, "v": v, "dout": dout, "sinks": random(self.heads)}


def visible(n: int, m: int, causal: bool, window: Any) -> torch.Tensor:
    """[n, m]: which keys each query sees; the ends are aligned."""
    query, key = torch.arange(n)[:, None] + m - n, torch.arange(m)[None, :]
    seen = torch.ones(n, m, dtype=torch.bool)
    if causal:
        seen &= key <= query
    if window is not None:
        left, right = (window - 1, window - 1) if isinstance(window, int) else window
        if left >= 0:
            seen &= key >= query - left
        if right >= 0:
            seen &= key <= query + right
    return seen


def plain(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The output by the definition: exp of scores over their sum."""
    outs = [v.new_empty(0, case.heads, v.shape[2])]
    for (a, b), (c, d) in zip(
        zip(case.cu, case.cu[1:], strict=False), zip(case.cu_k, case.cu_k[1:], strict=False), strict=True
    ):
        group = case.heads // case.kv_heads
        keys, values = (x[c:d].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = q[a:b].transpose(0, 1) @ keys.transpose(1, 2) * (case.dim**-0.5 if case.scale is None else case.scale)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        weights = torch.exp(scores) * visible(b - a, d - c, case.causal, case.window)
        if chunk := case.options.get("chunk"):
            chunks = torch.arange(b - a) // chunk
            weights = weights * (chunks[:, None] == chunks)
        total = weights.sum(-1, keepdim=True)
        if case.sinks:
            total = total + torch.exp(sinks)[:, None, None]
        outs.append(((weights @ values) / torch.where(total == 0, 1.0, total)).transpose(0, 1))
    return torch.cat(outs)


def expected(case: Case) -> dict[str, torch.Tensor]:
    """Output and gradients of the plain attention, in float64."""
    inputs = {name: x.double().clone() for name, x in case.tensors().items()}
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "sinks")]
    out = plain(case, *leaves)
    grads = torch.autograd.grad(out, leaves, inputs["dout"], allow_unused=True)
    parts = [g if g is not None else torch.zeros_like(x) for g, x in zip(grads, leaves, strict=True)]
    return {"out": out.detach(), "dq": parts[0], "dk": parts[1], "dv": parts[2], "dsinks": parts[3]}


def on_rank(case: Case, comm: hdp.Communicator) -> dict[str, torch.Tensor]:
    """The result of one rank for ``case``."""
    x = case.tensors()
    place = {"rank": comm.rank, "size": comm.size}
    cuts = {"q": case.cu, "dout": case.cu, "k": case.cu_k, "v": case.cu_k}
    mine = {name: shard(x[name], cu, **place) for name, cu in cuts.items()}
    leaves = [mine[name].requires_grad_() for name in ("q", "k", "v")]
    sinks = x["sinks"].requires_grad_() if case.sinks else None
    out, lse = ring_attention(
        *leaves, comm=comm, cu_seqlens=torch.tensor(case.cu, dtype=torch.int32), causal=case.causal,
        window=case.window, scale=case.scale, return_lse=True,
        **with_options(
            cu_seqlens_k=None if case.keys is None else case.cu_k, softcap=case.softcap, sinks=sinks, **case.options
        ),
    )  # fmt: skip
    out.backward(mine["dout"])
    dq, dk, dv = (leaf.grad for leaf in leaves)
    result = {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if sinks is not None:
        result["dsinks"] = sinks.grad
    return result


def on_ranks(case: Case) -> dict[str, torch.Tensor]:
    """The results of all ranks in the order of the pack, with the sum of the gradients of sinks."""
    parts = run_threads(lambda: on_rank(case, hdp.init()), case.size)
    cuts = {"out": case.cu, "lse": case.cu, "dq": case.cu, "dk": case.cu_k, "dv": case.cu_k}
    whole = {name: unshard([part[name] for part in parts], cu) for name, cu in cuts.items()}
    if case.sinks:
        whole["dsinks"] = sum(part["dsinks"] for part in parts)
    return whole


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the result; or over the norm of the inputs, which are of order 1, if the
    result is 0 except for rounding (the gradient of q where each query sees one key).
    """
    norm, inputs = float(want.double().norm()), want.numel() ** 0.5
    return float((got.double() - want.double()).norm()) / (norm if norm > 1e-4 * inputs else max(inputs, 1.0))


def check(case: Case, tolerance: float) -> None:
    want, got = expected(case), on_ranks(case)
    for name in (*GRADS, "dsinks") if case.sinks else GRADS:
        assert got[name].dtype == case.dtype
        assert error(got[name], want[name]) <= tolerance, (name, error(got[name], want[name]), case)
