"""Linear layers on prefix trees: output and gradients are those of the recurrence on every trajectory by itself.

HDPCOMM_TEST_TREES: how many random trees of each kind of layer (default 6).
"""

import itertools
import os
import random

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import Tree, shard, short_conv, unshard
from hdpcomm.attention.linear.state_plan import state_plan
from hdpcomm.attention.tree_layout import tree_layout
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import error
from tests.harness.tree_oracle import random_tree, trajectories
from tests.ranks.attention.test_linear import (
    DELTA,
    SHARED,
    SSD,
    TOLERANCE,
    by_token_delta,
    by_token_ssd,
    call,
    inputs_of,
    own,
)

TREES = int(os.environ.get("HDPCOMM_TEST_TREES", "6"))
KINDS = ["gated", "kda", "ssd"]
EXCHANGES = ["gather", "scan", "pipeline"]
BRANCHED = Tree([-1, 0, 0, 2, 2, 0, -1, -1, 7], [40, 17, 9, 1, 23, 30, 5, 3, 11])
CONV = ("x", "weight", "bias")


def conv_inputs(total, channels, width, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total, channels), (channels, width), (channels,), (total, channels)]
    made = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return dict(zip((*CONV, "dout"), made, strict=True))


def by_token_conv(lengths, x, weight, bias):
    """Token by token, from the definition."""
    (total,), width = lengths, weight.shape[1]
    rows = [sum(weight[:, width - 1 - i] * x[t - i] for i in range(min(width, t + 1))) for t in range(total)]
    return torch.stack(rows) + bias


def layer_of(inputs):
    """(names, those of parameters, the definition on one sequence)"""
    if "weight" in inputs:
        return CONV, ("weight", "bias"), by_token_conv
    return (DELTA, (), by_token_delta) if "q" in inputs else (SSD, SHARED, by_token_ssd)


def wanted(tree, inputs):
    """Each trajectory from its first token on, in float64; a shared token's output is that of any."""
    names, parameters, recurrence = layer_of(inputs)
    leaves = {name: inputs[name].double().clone().requires_grad_() for name in names}
    out = [None] * tree.num_tokens
    for places in trajectories(tree.parents.tolist(), tree.lengths.tolist()):
        own = [x if name in parameters else x[places] for name, x in leaves.items()]
        for place, row in zip(places, recurrence([len(places)], *own), strict=True):
            out[place] = row
    whole = torch.stack(out)
    return [whole.detach(), *torch.autograd.grad(whole, list(leaves.values()), inputs["dout"].double())]


def apply(mine, comm, tree, **options):
    """The layer on leaves of one rank: (out, leaves)."""
    if "weight" not in mine:
        return call(mine, comm, tree, **options)
    leaves = [mine[name].clone().requires_grad_() for name in CONV]
    return short_conv(*leaves[:2], bias=leaves[2], comm=comm, cu_seqlens=tree, **with_options(**options)), leaves


def share(inputs, tree, comm):
    if "weight" not in inputs:
        return own(inputs, tree, comm.rank, comm.size)
    parts = {n: shard(inputs[n], tree, rank=comm.rank, size=comm.size) for n in ("x", "dout")}
    return inputs | parts


def on_ranks(size, tree, inputs, **options):
    names, parameters, _ = layer_of(inputs)

    def main():
        comm = hdp.init()
        mine = share(inputs, tree, comm)
        out, leaves = apply(mine, comm, tree, **options)
        out.backward(mine["dout"])
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    parts = zip(("out", *names), zip(*run_threads(main, size), strict=True), strict=True)
    return [sum(x.double() for x in part) if name in parameters else unshard(part, tree) for name, part in parts]


def check(size, tree, inputs, **options):
    names, parameters, _ = layer_of(inputs)
    found, want = on_ranks(size, tree, inputs, **options), wanted(tree, inputs)
    for name, got, exact in zip(("out", *names), found, want, strict=True):
        # gradients of parameters are sums over tokens, which may cancel: compared with the norm of what is added
        norm, sums = float(exact.norm()), tree.num_tokens**0.5 if name in parameters else 0.0
        wrong = error(got, exact) * (norm / sums if norm < sums else 1.0)
        assert wrong <= TOLERANCE[inputs["dout"].dtype], (name, wrong, size, tree, options)


@pytest.mark.parametrize("seed", range(TREES))
@pytest.mark.parametrize("kind", [*KINDS, "conv"])
def test_random_trees(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    segments, longest = rng.choice([(rng.randint(1, 12), 40), (rng.randint(1, 3), 300)])
    tree = Tree(*random_tree(rng, segments=segments, longest=longest))
    dtype, size = rng.choice([torch.float64, torch.float32]), 1 + seed % 4
    if kind == "conv":
        inputs = conv_inputs(tree.num_tokens, rng.randint(1, 5), rng.randint(1, 6), dtype, seed)
        check(size, tree, inputs)
        return
    key_heads = rng.choice([1, 2])
    shape = (key_heads * rng.choice([1, 2]), key_heads, rng.choice([1, 4, 7]), rng.choice([1, 4, 7]))
    inputs = inputs_of(kind, [tree.num_tokens], shape, decay=rng.choice([0.01, 1.0, 30.0]), dtype=dtype, seed=seed)
    check(size, tree, inputs, exchange=rng.choice(["auto", *EXCHANGES]))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_exchange(kind, exchange):
    check(4, BRANCHED, inputs_of(kind, [BRANCHED.num_tokens], (4, 2, 8, 6)), exchange=exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    "tree",
    [Tree([-1], [1]), Tree([-1, 0], [1, 1]), Tree([-1, 0, 0, 0], [1] * 4), Tree([-1, 0, 1, 2, 3], [3, 1, 20, 1, 2])],
    ids=["a token", "two tokens", "three answers of a token", "a chain"],
)
def test_small_trees_and_ranks_without_a_token(tree, exchange):
    for kind in KINDS:
        check(4, tree, inputs_of(kind, [tree.num_tokens], (2, 1, 5, 6)), exchange=exchange)
    check(4, tree, conv_inputs(tree.num_tokens, 3, 4))


def test_the_past_of_a_convolution_spans_several_segments():
    tree = Tree([-1, 0, 1, 1, 3, 0], [2, 1, 1, 1, 5, 9])
    for size in (1, 3):
        check(size, tree, conv_inputs(tree.num_tokens, 3, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_exact_as_one_process(kind):
    inputs = inputs_of(kind, [BRANCHED.num_tokens], (4, 2, 16, 16), dtype=torch.bfloat16)
    inputs.update({name: inputs[name].float() for name in SHARED if name in inputs})  # shares are not rounded
    want, alone = wanted(BRANCHED, inputs), on_ranks(1, BRANCHED, inputs)
    for exchange in EXCHANGES:
        found = on_ranks(3, BRANCHED, inputs, exchange=exchange)
        for got, one, exact in zip(found, alone, want, strict=True):
            assert error(got, exact) <= max(1.1 * error(one, exact), 1e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_runs_are_bitwise_the_same(exchange):
    inputs = inputs_of("gated", [BRANCHED.num_tokens], (4, 2, 8, 6), dtype=torch.float32)
    first, second = (on_ranks(3, BRANCHED, inputs, exchange=exchange) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def least_states(size, tree):
    """Tokens whose state another rank's next token needs, once for each such rank; by the trajectories."""
    holder = torch.empty(tree.num_tokens, dtype=torch.int64)
    for rank in range(size):
        holder[shard(torch.arange(tree.num_tokens), tree, rank=rank, size=size)] = rank
    ways = trajectories(tree.parents.tolist(), tree.lengths.tolist())
    steps = {(at, int(holder[after])) for way in ways for at, after in itertools.pairwise(way)}
    return sum(int(holder[at]) != rank for at, rank in steps)


def sent(size, tree, inputs, **options):
    """(forward, backward) bytes that all ranks send."""

    def main():
        comm = hdp.init()
        mine = share(inputs, tree, comm)
        counts = [comm.stats()["bytes_sent"]]
        out, _ = apply(mine, comm, tree, check=False, **options)
        counts.append(comm.stats()["bytes_sent"])
        out.sum().backward()
        counts.append(comm.stats()["bytes_sent"])
        return counts[1] - counts[0], counts[2] - counts[1]

    return tuple(sum(part) for part in zip(*run_threads(main, size), strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_states_go_only_where_a_child_is(size):
    """Each state once to each rank that has a run after it; the bytes do not depend on the tokens."""
    short, long = ([-1, 0, 0, 0, 0], [40, 20, 20, 20, 20]), ([-1, 0, 0, 0, 0], [1600, 800, 800, 800, 800])
    found = set()
    for parents, lengths in (short, long, random_tree(random.Random(size), segments=10, longest=60)):
        tree = Tree(parents, lengths)
        for kind, exchange in (("gated", "scan"), ("ssd", "pipeline")):
            inputs = inputs_of(kind, [tree.num_tokens], (2, 1, 4, 3), dtype=torch.float32)
            least = least_states(size, tree) * 2 * 4 * 3 * 4
            assert sent(size, tree, inputs, exchange=exchange) == (least, least)
            found.add((tuple(parents), kind, least))
    assert len(found) == 4  # as many bytes for the long tree as for the short one


def test_subtrees_that_stay_on_their_ranks_send_nothing():
    tree = Tree([-1, 0, 0, -1, 3, 3], [20, 7, 7, 20, 7, 7])
    inputs = inputs_of("kda", [tree.num_tokens], (2, 1, 4, 3))
    for exchange in EXCHANGES:
        assert sent(2, tree, inputs, exchange=exchange) == (0, 0)
    check(2, tree, inputs, exchange="gather")


def test_gathered_bytes_are_the_same_for_any_length():
    for lengths in ([40, 20, 20], [4000, 2000, 2000]):
        tree = Tree([-1, 0, 0], lengths)
        inputs = inputs_of("gated", [tree.num_tokens], (2, 1, 4, 3), dtype=torch.float32)
        layout = tree_layout(tree, 2)
        carriers = state_plan(layout, layout).carriers
        assert carriers == 2
        assert sent(2, tree, inputs, exchange="gather") == (2 * carriers * 2 * (4 * 3 + 4 * 4) * 4,) * 2


def test_several_uses_in_one_graph_and_checkpoints():
    inputs = inputs_of("gated", [BRANCHED.num_tokens], (4, 2, 8, 6))

    def main(again):
        comm = hdp.init()
        mine = share(inputs, BRANCHED, comm)
        leaves = [mine[name].clone().requires_grad_() for name in DELTA]

        def layer(*x):
            return hdp.attention.delta_rule(*x, comm=comm, cu_seqlens=BRANCHED)

        def once(*x):
            return torch.utils.checkpoint.checkpoint(layer, *x, use_reentrant=False) if again else layer(*x)

        (once(*leaves) * once(*leaves)).sum().backward()
        return [leaf.grad for leaf in leaves]

    for plain, repeated in zip(run_threads(main, 3, False), run_threads(main, 3, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, repeated, strict=True))


def errors(change, **settings):
    """The error of each of three ranks when the arguments of rank 1 are ``change``d; a good call follows."""
    tree = Tree([-1, 0, 0], [20, 12, 8])
    inputs = inputs_of("gated", [40], (2, 1, 4, 3))

    def main():
        comm = hdp.init()
        good = {**{n: x for n, x in share(inputs, tree, comm).items() if n != "dout"}, "cu_seqlens": tree}
        arguments, found = {**good, **settings}, None
        if comm.rank == 1:
            arguments |= change(good)
        try:
            hdp.attention.delta_rule(comm=comm, **with_options(**arguments))
        except hdp.Error as raised:
            found = raised
        assert hdp.attention.delta_rule(comm=comm, **good).shape == good["v"].shape
        return found

    return run_threads(main, 3, timeout=30)


def test_bad_calls_are_an_error_on_all_ranks():
    other = Tree([-1, 0, 1], [20, 12, 8])
    x = shard(torch.arange(40), other, rank=1, size=3)

    def another_tree(good):
        return {n: t[:1].expand(len(x), *t.shape[1:]) for n, t in good.items() if n in DELTA} | {"cu_seqlens": other}

    for found in errors(another_tree, exchange="scan"):
        with pytest.raises(Mismatch, match="a tree of 3 segments with 40 tokens"):
            raise found
    for found in errors(lambda _: {"cu_seqlens": Tree([-1, 0], [20, 30])}):
        with pytest.raises(InvalidUsage, match=r"q has 1\d tokens; under cu_seqlens, rank 1 of 3 holds 1\d"):
            raise found


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_states_that_overflow_are_an_error_on_all_ranks(exchange):
    found = errors(lambda good: {"g": torch.full_like(good["g"], 300.0)}, exchange=exchange)
    assert all(isinstance(each, InvalidUsage) for each in found)
    assert any("the state overflows" in str(each) for each in found)
