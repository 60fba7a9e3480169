"""Attention on trees by the definition: every trajectory by itself, dense and in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.attention import Tree, ring_attention, shard, unshard
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import error

RESULTS = ("out", "dq", "dk", "dv")


def random_tree(rng: random.Random, *, segments: int, longest: int) -> tuple[list[int], list[int]]:
    """(parents, lengths) in depth-first order; lengths from 1 to ``longest``, most of them short."""
    parents: list[int] = []
    lengths: list[int] = []
    path: list[int] = []
    while len(parents) < segments:
        path = path[: rng.randint(0, len(path)) if rng.random() < 0.8 else 0]
        parents.append(path[-1] if path else -1)
        lengths.append(rng.randint(1, rng.choice([1, 3, 20, longest])))
        path.append(len(parents) - 1)
    return parents, lengths


@dataclass
class TreeCase:
    """One attention on a tree over ``size`` ranks."""

    size: int
    parents: list[int]
    lengths: list[int]
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float64
    window: int | None = None
    sinks: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tree(self) -> Tree:
        return Tree(self.parents, self.lengths)

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "dout": self.heads}
        x = {
            name: torch.randn(sum(self.lengths), heads, self.dim, dtype=torch.float64, generator=generator)
            for name, heads in shapes.items()
        }
        x["sinks"] = torch.randn(self.heads, dtype=torch.float64, generator=generator)
        return {name: value.to(self.dtype) for name, value in x.items()}


def trajectories(parents: list[int], lengths: list[int]) -> list[list[int]]:
    """For each leaf, the places in the pack of all tokens from its root to its end."""
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    found = []
    for leaf in set(range(len(parents))) - set(parents):
        segments = [leaf]
        while parents[segments[0]] >= 0:
            segments.insert(0, parents[segments[0]])
        found.append([first[s] + i for s in segments for i in range(lengths[s])])
    return found


def expected(case: TreeCase) -> dict[str, torch.Tensor]:
    """Output and gradients: dense attention on each trajectory, in float64; a shared token's output is that of any."""
    x = {name: value.double() for name, value in case.tensors().items()}
    leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks")]
    q, k, v, sinks = leaves
    out: list[torch.Tensor | None] = [None] * len(q)
    for places in trajectories(case.parents, case.lengths):
        queries, keys, values = (t[places].transpose(0, 1) for t in (q, k, v))
        group = case.heads // case.kv_heads
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        gap = torch.arange(len(places))[:, None] - torch.arange(len(places))[None, :]
        seen = (gap >= 0) & (gap < (case.window or len(places)))
        weights = torch.exp(queries @ keys.transpose(1, 2) / case.dim**0.5) * seen
        total = weights.sum(-1, keepdim=True)
        if case.sinks:
            total = total + torch.exp(sinks)[:, None, None]
        rows = (weights / total @ values).transpose(0, 1)
        for place, row in zip(places, rows, strict=True):
            out[place] = row
    whole = torch.stack([row for row in out if row is not None])
    grads = torch.autograd.grad(whole, leaves, x["dout"], allow_unused=True)
    found = dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=True))
    return {"out": whole.detach(), **found}


def on_rank(case: TreeCase, comm: hdp.Communicator) -> dict[str, torch.Tensor]:
    x, place = case.tensors(), {"rank": comm.rank, "size": comm.size}
    mine = {name: shard(x[name], case.tree, **place) for name in ("q", "k", "v", "dout")}
    leaves = [mine[name].requires_grad_() for name in ("q", "k", "v")]
    sinks = x["sinks"].requires_grad_() if case.sinks else None
    options = with_options(sinks=sinks, **case.options)
    out = ring_attention(*leaves, comm=comm, cu_seqlens=case.tree, window=case.window, **options)
    out.backward(mine["dout"])
    found = {"out": out.detach(), **dict(zip(RESULTS[1:], (leaf.grad for leaf in leaves), strict=True))}
    return found | ({} if sinks is None else {"dsinks": sinks.grad})


def check(case: TreeCase, tolerance: float) -> None:
    parts = run_threads(lambda: on_rank(case, hdp.init()), case.size)
    want = expected(case)
    for name in RESULTS:
        got = unshard([part[name] for part in parts], case.tree)
        assert got.dtype == case.dtype
        assert error(got, want[name]) <= tolerance, (name, error(got, want[name]), case)
    if case.sinks:
        assert error(sum(part["dsinks"] for part in parts), want["dsinks"]) <= tolerance
