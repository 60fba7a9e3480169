"""Delta rules and Mamba-2 over ranks: output and gradients are those of the recurrence, token by token in float64."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.attention import AttentionCosts, as_pack, delta_rule, shard, ssd, unshard
from hdpcomm.attention.linear.exchange import choose_exchange
from hdpcomm.attention.linear.state_plan import state_plan
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import error

EXAMPLES = int(os.environ.get("HDPCOMM_TEST_PACKS", "25"))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
DELTA = ("q", "k", "v", "g", "beta")
SSD = ("x", "dt", "a", "b", "c", "d")
SHARED = ("a", "d")
"""Parameters: every rank has them whole, and gets its share of their gradients."""


def delta_inputs(lengths, heads, key_heads, dk, dv, *, channels=False, decay=1.0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def random(*shape):
        return torch.randn(total, *shape, dtype=torch.float64, generator=generator)

    k = torch.nn.functional.normalize(random(key_heads, dk), dim=-1)
    g = -decay * torch.nn.functional.softplus(random(heads, dk) if channels else random(heads))
    made = [random(key_heads, dk), k, random(heads, dv), g, random(heads).sigmoid() * 1.5, random(heads, dv)]
    return dict(zip((*DELTA, "dout"), (x.to(dtype) for x in made), strict=True))


def ssd_inputs(lengths, heads, groups, dk, dv, *, decay=1.0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    dt = torch.nn.functional.softplus(random(total, heads))
    a = -decay * torch.exp(random(heads))
    made = [random(total, heads, dv), dt, a, random(total, groups, dk), random(total, groups, dk), random(heads)]
    return dict(zip((*SSD, "dout"), (x.to(dtype) for x in (*made, random(total, heads, dv))), strict=True))


def by_token_delta(lengths, q, k, v, g, beta):
    """The definition: one state, one token after the other."""
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    rows = torch.eye(q.shape[2], dtype=q.dtype)
    outs = []
    for first, last in zip(np.cumsum([0, *lengths])[:-1], np.cumsum(lengths), strict=True):
        state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for t in range(first, last):
            decay = torch.exp(g[t]).reshape(v.shape[1], -1, 1)
            erase = rows - beta[t][:, None, None] * k[t][:, :, None] * k[t][:, None, :]
            state = erase @ (decay * state) + beta[t][:, None, None] * k[t][:, :, None] * v[t][:, None, :]
            outs.append((state * q[t][:, :, None]).sum(1))
    return torch.stack(outs)


def by_token_ssd(lengths, x, dt, a, b, c, d):
    group = x.shape[1] // b.shape[1]
    b, c = (y.repeat_interleave(group, 1) for y in (b, c))
    outs = []
    for first, last in zip(np.cumsum([0, *lengths])[:-1], np.cumsum(lengths), strict=True):
        state = x.new_zeros(x.shape[1], b.shape[2], x.shape[2])
        for t in range(first, last):
            state = torch.exp(a * dt[t])[:, None, None] * state
            state = state + dt[t][:, None, None] * b[t][:, :, None] * x[t][:, None, :]
            outs.append((state * c[t][:, :, None]).sum(1) + d[:, None] * x[t])
    return torch.stack(outs)


def wanted(recurrence, lengths, inputs, names):
    leaves = [inputs[name].double().clone().requires_grad_() for name in names]
    out = recurrence(lengths, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs["dout"].double())]


def call(inputs, comm, cu, **options):
    """The layer on leaves of one rank: (out, leaves)."""
    names = DELTA if "q" in inputs else SSD
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    if names is DELTA:
        out = delta_rule(*leaves.values(), comm=comm, cu_seqlens=cu, **with_options(**options))
    else:
        d = leaves.pop("d")
        out = ssd(*leaves.values(), comm=comm, cu_seqlens=cu, d=d, **with_options(**options))
        leaves["d"] = d
    return out, list(leaves.values())


def own(inputs, cu, rank, size):
    return {n: x if n in SHARED else shard(x, cu, rank=rank, size=size) for n, x in inputs.items()}


def on_ranks(size, lengths, inputs, names, **options):
    cu = np.cumsum([0, *lengths])

    def main():
        comm = hdp.init()
        mine = own(inputs, cu, comm.rank, size)
        out, leaves = call(mine, comm, cu, **options)
        out.backward(mine["dout"])
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    parts = zip(("out", *names), zip(*run_threads(main, size), strict=True), strict=True)
    return [sum(x.double() for x in part) if name in SHARED else unshard(part, cu) for name, part in parts]


def check(size, lengths, inputs, **options):
    names, recurrence = (DELTA, by_token_delta) if "q" in inputs else (SSD, by_token_ssd)
    dtype = inputs["dout"].dtype
    found = on_ranks(size, lengths, inputs, names, **options)
    for name, got, want in zip(("out", *names), found, wanted(recurrence, lengths, inputs, names), strict=True):
        assert error(got, want) <= TOLERANCE[dtype], (name, error(got, want), size, lengths, options)


@st.composite
def packs(draw):
    key_heads, dims = draw(st.sampled_from([1, 2])), st.sampled_from([1, 4, 7])
    return {
        "size": draw(st.integers(1, 4)),
        "lengths": draw(st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), min_size=1, max_size=4)),
        "shape": (key_heads * draw(st.sampled_from([1, 2])), key_heads, draw(dims), draw(dims)),
        "kind": draw(st.sampled_from(["gated", "kda", "ssd"])),
        "decay": draw(st.sampled_from([0.01, 1.0, 30.0])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "seed": draw(st.integers(0, 1000)),
        "exchange": draw(st.sampled_from(["auto", "gather", "scan", "pipeline"])),
    }  # fmt: skip


def inputs_of(kind, lengths, shape, **settings):
    if kind == "ssd":
        return ssd_inputs(lengths, *shape, **settings)
    return delta_inputs(lengths, *shape, channels=kind == "kda", **settings)


@given(packs())
@settings(max_examples=EXAMPLES, derandomize=True)
def test_any_pack_is_exact(pack):
    size, lengths, exchange = (pack.pop(name) for name in ("size", "lengths", "exchange"))
    check(size, lengths, inputs_of(lengths=lengths, **pack), exchange=exchange)


@pytest.mark.parametrize("exchange", ["gather", "scan", "pipeline"])
@pytest.mark.parametrize("kind", ["gated", "kda", "ssd"])
def test_every_kind_and_exchange(kind, exchange):
    lengths = [150, 1, 7, 70]
    check(4, lengths, inputs_of(kind, lengths, (4, 2, 8, 6)), exchange=exchange)


@pytest.mark.parametrize("lengths", [[1], [2, 1], [7]])
@pytest.mark.parametrize("kind", ["gated", "kda", "ssd"])
def test_ranks_without_a_token(kind, lengths):
    for exchange in ("gather", "scan", "pipeline"):
        check(4, lengths, inputs_of(kind, lengths, (2, 1, 5, 6)), exchange=exchange)


@pytest.mark.parametrize("kind", ["gated", "kda", "ssd"])
def test_bfloat16_is_as_exact_as_one_process(kind):
    lengths = [300, 31]
    inputs = inputs_of(kind, lengths, (4, 2, 16, 16), dtype=torch.bfloat16)
    inputs.update({name: inputs[name].float() for name in SHARED if name in inputs})  # shares are not rounded
    names, recurrence = (SSD, by_token_ssd) if kind == "ssd" else (DELTA, by_token_delta)
    want, alone = wanted(recurrence, lengths, inputs, names), on_ranks(1, lengths, inputs, names)
    for exchange in ("gather", "scan", "pipeline"):
        found = on_ranks(3, lengths, inputs, names, exchange=exchange)
        for name, got, one, exact in zip(("out", *names), found, alone, want, strict=True):
            assert error(got, exact) <= max(1.1 * error(one, exact), 1e-6), (name, exchange)


@pytest.mark.parametrize("kind", ["gated", "kda"])
def test_a_token_that_forgets_everything(kind):
    """Its neighbours' decays must not be rounded to the sum that holds its own."""
    lengths = [90]
    inputs = inputs_of(kind, lengths, (2, 1, 6, 5), decay=0.01, dtype=torch.float32)
    inputs["g"][40] = -1e5
    check(2, lengths, inputs)


def test_autocast_changes_nothing():
    inputs = delta_inputs([70, 9], 4, 2, 8, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = call(inputs, None, [0, 70, 79])
    assert torch.equal(out, call(inputs, None, [0, 70, 79])[0])


@pytest.mark.parametrize("size", [1, 3])
def test_a_pack_of_nothing(size):
    def main():
        comm = hdp.init()
        out, leaves = call(delta_inputs([], 4, 2, 8, 6), comm, [0], exchange="gather")
        out.sum().backward()
        return out.shape, leaves[0].grad.shape

    assert run_threads(main, size) == [((0, 4, 6), (0, 2, 8))] * size


def test_growing_states_are_exact_too():
    inputs = delta_inputs([64], 2, 1, 6, 5)
    inputs["g"] = -0.3 * inputs["g"]
    check(2, [64], inputs)


@pytest.mark.parametrize("exchange", ["gather", "scan", "pipeline"])
def test_runs_are_bitwise_the_same(exchange):
    inputs = delta_inputs([150, 7], 4, 2, 8, 6, dtype=torch.float32)
    first, second = (on_ranks(3, [150, 7], inputs, DELTA, exchange=exchange) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_several_uses_in_one_graph_checkpoints_and_another_thread():
    lengths, cu = [70, 9], [0, 70, 79]
    inputs = delta_inputs(lengths, 4, 2, 8, 6)

    def main(again):
        comm = hdp.init()
        mine = own(inputs, cu, comm.rank, 2)
        leaves = [mine[name].clone().requires_grad_() for name in DELTA]

        def layer(*x):
            return delta_rule(*x, comm=comm, cu_seqlens=cu)

        def once(*x):
            return torch.utils.checkpoint.checkpoint(layer, *x, use_reentrant=False) if again else layer(*x)

        loss = (once(*leaves) * once(*leaves)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [leaf.grad for leaf in leaves]

    for plain, repeated in zip(run_threads(main, 2, False), run_threads(main, 2, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, repeated, strict=True))


def sent(size, lengths, kind, shape, exchange):
    """Bytes that all ranks send, forward and backward."""
    inputs, cu = inputs_of(kind, lengths, shape, dtype=torch.float32), np.cumsum([0, *lengths])

    def main():
        comm = hdp.init()
        mine = own(inputs, cu, comm.rank, size)
        counts = [comm.stats()["bytes_sent"]]
        out, _ = call(mine, comm, cu, exchange=exchange, check=False)
        counts.append(comm.stats()["bytes_sent"])
        out.sum().backward()
        counts.append(comm.stats()["bytes_sent"])
        return counts[1] - counts[0], counts[2] - counts[1]

    return tuple(sum(part) for part in zip(*run_threads(main, size), strict=True))


@pytest.mark.parametrize("kind", ["gated", "kda", "ssd"])
def test_bytes_do_not_depend_on_the_length(kind):
    heads, dk, dv, size = 4, 8, 6, 4
    state = heads * dk * dv * 4
    transition = heads * (1 if kind == "ssd" else dk * dk) * 4
    for exchange in ("scan", "pipeline"):  # every state goes over every border once
        for lengths in ([50], [3000]):
            assert sent(size, lengths, kind, (heads, 2, dk, dv), exchange) == (2 * (size - 1) * state,) * 2
        assert sent(size, [50, 9, 700], kind, (heads, 2, dk, dv), exchange) == (6 * (size - 1) * state,) * 2
    gathered = 2 * size * (size - 1) * (state + transition)
    for lengths in ([50], [3000]):
        assert sent(size, lengths, kind, (heads, 2, dk, dv), "gather") == (gathered,) * 2


def test_the_exchange_is_chosen_by_cost():
    settings = {"shape": (32, 128, 128), "delta": True, "device": "cpu"}
    layouts = (as_pack([0, 16384]).layout(size) for size in (2, 8))
    two, eight = (state_plan(layout, layout) for layout in layouts)
    slow = AttentionCosts(flops_per_s=1e15, bytes_per_s=1e9, message_s=1e-6, call_s=0.0)
    distant = AttentionCosts(flops_per_s=1e15, bytes_per_s=1e12, message_s=1e-2, call_s=0.0)
    assert choose_exchange("auto", two, **settings, costs=None) == "pipeline"
    assert choose_exchange("auto", eight, **{**settings, "device": "cuda"}, costs=slow) == "scan"
    assert choose_exchange("auto", eight, **settings, costs=distant) == "gather"
    assert choose_exchange("scan", two, **settings, costs=None) == "scan"


BAD = {
    "dimensions": ({"q": torch.zeros(9, 2)}, r"expected q, k \[tokens, key_heads, dk\]"),
    "heads": ({"v": torch.zeros(9, 3, 5)}, "the heads of v must be a multiple"),
    "keys": ({"k": torch.zeros(9, 2, 3)}, "q and k must have one shape"),
    "decay": ({"g": torch.zeros(9, 4, 5)}, r"g must be \[tokens, 4\] or \[tokens, 4, 6\]"),
    "beta": ({"beta": torch.zeros(9, 2)}, r"and beta \[tokens, 4\]"),
    "types": ({"v": torch.zeros(9, 4, 5)}, "q, k and v must have one type"),
    "integers": ({"g": torch.zeros(9, 4, dtype=torch.int64)}, "g has type torch.int64"),
    "tokens": ({"cu_seqlens": [0, 12]}, r"q has \d+ tokens; under cu_seqlens, rank 1 of 3"),
    "empty": ({"cu_seqlens": [0, 20, 20, 49]}, "sequence 1 of cu_seqlens is empty"),
    "exchange": ({"exchange": "pigeon"}, "exchange='pigeon'; expected one of auto, gather, scan, pipeline"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_one_rank_are_an_error_on_all(name):
    changes, message = BAD[name]
    for rank, found in enumerate(errors(changes)):
        with pytest.raises(InvalidUsage, match=message):
            raise found
        assert (rank == 1) != ("refused its arguments" in str(found))


def test_ranks_that_disagree_all_hear_of_it():
    for found in errors({"exchange": "gather"}, exchange="scan"):
        with pytest.raises(Mismatch, match="called with different arguments"):
            raise found


@pytest.mark.parametrize("exchange", ["gather", "scan", "pipeline"])
def test_states_that_overflow_are_an_error_on_all_ranks(exchange):
    found = errors({"g": torch.full((17, 4), 300.0, dtype=torch.float64)}, exchange=exchange)
    assert all(isinstance(each, InvalidUsage) for each in found)
    assert any("the state overflows" in str(each) and "refused" not in str(each) for each in found)


def test_nan_is_found_on_all_ranks():
    for found in errors({"beta": torch.full((17, 4), torch.nan, dtype=torch.float64)}):
        with pytest.raises(InvalidUsage, match="beta holds NaN or infinity"):
            raise found


def errors(changes, **common):
    """The error of each of three ranks when rank 1 has other arguments; a good call follows."""
    lengths, cu = [40, 9], [0, 40, 49]
    inputs = delta_inputs(lengths, 4, 2, 6, 5)

    def main():
        comm = hdp.init()
        mine = own(inputs, cu, comm.rank, 3)
        tokens = mine["q"].shape[0]
        arguments = {**{name: mine[name] for name in DELTA}, "cu_seqlens": cu, **common}
        if comm.rank == 1:
            long = {n for n, x in changes.items() if isinstance(x, torch.Tensor) and len(x) > tokens}
            arguments.update({n: x[:tokens] if n in long else x for n, x in changes.items()})
        found, tensors = None, [arguments.pop(name) for name in DELTA]
        try:
            delta_rule(*tensors, comm=comm, **with_options(**arguments))
        except hdp.Error as raised:
            found = raised
        assert delta_rule(*(mine[name] for name in DELTA), comm=comm, cu_seqlens=cu).shape == mine["v"].shape
        return found

    return run_threads(main, 3, timeout=30)


SSD_BAD = {
    "dimensions": ({"b": torch.zeros(9, 2)}, r"expected x \[tokens, heads, head_dim\]"),
    "groups": ({"b": torch.zeros(9, 3, 6), "c": torch.zeros(9, 3, 6)}, "a multiple of the groups of b and c"),
    "a": ({"a": torch.zeros(3)}, "dt and a must have the heads of x"),
    "d": ({"d": torch.zeros(3)}, r"d must be \[heads\] = \(4,\)"),
    "types": ({"x": torch.zeros(9, 4, 5)}, "x, b and c must have one type"),
}


@pytest.mark.parametrize("name", SSD_BAD)
def test_bad_arguments_of_ssd(name):
    changes, message = SSD_BAD[name]
    arguments = {**{n: x for n, x in ssd_inputs([9], 4, 2, 6, 5).items() if n != "dout"}, **changes}
    d = arguments.pop("d")
    with pytest.raises(InvalidUsage, match=message):
        ssd(*arguments.values(), d=d, comm=None, cu_seqlens=[0, 9])
