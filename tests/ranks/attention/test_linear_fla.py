"""The backend of flash-linear-attention, on stand-ins with its signatures: the results of the recurrence, any ranks."""

import sys
import types

import pytest
import torch

import hdpcomm.attention.linear.fla as fla_backend
from hdpcomm.attention import Tree, delta_rule
from hdpcomm.attention.linear.fla import choose_backend
from hdpcomm.errors import InvalidUsage
from tests.ranks.attention.test_linear import check, delta_inputs, errors, inputs_of
from tests.ranks.attention.test_tree_linear import check as check_tree


def _recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens):
    """As fla: [1, tokens, heads, ...] and states [runs, heads, dk, dv]."""
    outs, finals = [], []
    for run, (first, last) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        assert last > first  # empty runs are never passed
        state = initial_state[run]
        for t in range(first, last):
            state = torch.exp(g[0, t]).reshape(len(state), -1, 1) * state
            kt, vt = k[0, t][:, :, None], v[0, t][:, None, :]
            if beta is None:
                state = state + kt * vt
            else:
                state = state + beta[0, t][:, None, None] * kt * (vt - (state * kt).sum(1, keepdim=True))
            outs.append(scale * (state * q[0, t][:, :, None]).sum(1))
        finals.append(state)
    return torch.stack(outs)[None], torch.stack(finals)


def chunk_delta(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state
    assert scale == 1.0
    return _recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens)


def chunk_simple_gla(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state
    return _recurrence(q, k, v, g, None, scale, initial_state, cu_seqlens)


@pytest.fixture
def fla(monkeypatch):
    functions = {
        "gated_delta_rule": ("chunk_gated_delta_rule", chunk_delta),
        "kda": ("chunk_kda", chunk_delta),
        "simple_gla": ("chunk_simple_gla", chunk_simple_gla),
    }
    for module, (name, function) in functions.items():
        made = types.ModuleType(f"fla.ops.{module}")
        setattr(made, name, function)
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", made)
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", types.ModuleType("fla.ops"))
    monkeypatch.setattr(fla_backend, "_refuses", lambda *_: None)


@pytest.mark.parametrize("exchange", ["gather", "scan", "pipeline"])
@pytest.mark.parametrize("kind", ["gated", "kda", "ssd"])
@pytest.mark.usefixtures("fla")
def test_any_ranks(kind, exchange):
    for size, lengths in ((1, [20]), (2, [30, 1, 7]), (3, [40, 2])):
        check(size, lengths, inputs_of(kind, lengths, (2, 1, 4, 3)), exchange=exchange, backend="fla")


@pytest.mark.parametrize("exchange", ["gather", "scan", "pipeline"])
@pytest.mark.parametrize("kind", ["gated", "kda", "ssd"])
@pytest.mark.usefixtures("fla")
def test_trees(kind, exchange):
    tree = Tree([-1, 0, 0, 2, 2, -1], [14, 7, 1, 5, 3, 9])
    for size in (1, 3):
        inputs = inputs_of(kind, [tree.num_tokens], (2, 1, 4, 3))
        check_tree(size, tree, inputs, exchange=exchange, backend="fla")


def test_it_is_refused_where_it_cannot_compute(monkeypatch):
    monkeypatch.setattr(fla_backend, "_installed", lambda: False)
    assert choose_backend("auto", "cuda", torch.bfloat16) == "torch"
    with pytest.raises(InvalidUsage, match="flash-linear-attention is not installed; use torch"):
        choose_backend("fla", "cuda", torch.bfloat16)
    monkeypatch.setattr(fla_backend, "_installed", lambda: True)
    assert choose_backend("auto", "cuda", torch.bfloat16) == "fla"
    assert choose_backend("auto", "cuda", torch.float32) == "torch"
    assert choose_backend("torch", "cuda", torch.bfloat16) == "torch"
    with pytest.raises(InvalidUsage, match="it takes float16 and bfloat16"):
        choose_backend("fla", "cuda", torch.float32)
    inputs = delta_inputs([9], 4, 2, 6, 5)
    with pytest.raises(InvalidUsage, match="the backend 'fla' cannot do this: it computes on CUDA devices"):
        delta_rule(*list(inputs.values())[:5], comm=None, cu_seqlens=[0, 9], backend="fla")
    for found in errors({"backend": "magic"}):
        with pytest.raises(InvalidUsage, match="backend='magic'; expected one of auto, torch, fla"):
            raise found
