"""A sequence or a tree in slices gives the output and gradients of the whole, computed densely in float64.

HDPCOMM_TEST_SLICES: how many random cases of each (default 40).
"""

import gc
import os
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hdpcomm as hdp
from hdpcomm.attention import SlicedSequence, Tree, carry_pack, mla_attention, positions, ring_attention, shard, unshard
from hdpcomm.attention.tiles import Band
from hdpcomm.attention.tree_layout import seen_keys, slice_layouts
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.offload import ActivationOffload, MemoryMeter, PinnedPool
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import Case, error
from tests.harness.attention_oracle import plain as plain_attention
from tests.harness.tree_oracle import RESULTS, TreeCase, expected, random_tree, trajectories
from tests.ranks.attention.test_mla import dense, tensors
from tests.ranks.attention.test_tree_mla import wanted as mla_on_tree

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
WAYS = ["kept", "again", "checkpoint"]
CASES = int(os.environ.get("HDPCOMM_TEST_SLICES", "40"))
BRANCHED = [-1, 0, 0, 2, 2, 0, -1, -1, 7], [40, 17, 9, 1, 23, 30, 5, 3, 11]
SHORT = [-1, 0, 0, 2, 2, -1], [2, 3, 1, 1, 1, 1]


def cuts(rng, length, slices):
    return [0, *sorted(rng.sample(range(1, length), slices - 1)), length]


def host_memory():
    return ActivationOffload(PinnedPool(4 << 20, device="cpu"), [torch.nn.Identity()], min_bytes=1)


def on_slices(run, bounds, inputs, comm, way, tree=None, ratio=0.0):
    """(outputs, gradients of ``inputs``) of each slice on this rank. ``run(part, leaves)``: its forward pass; ``way``:
    all graphs are kept, or slices run again, or are checkpoints; ``ratio``: share of the keys in host memory."""
    offload = host_memory() if ratio else None
    sliced = SlicedSequence(bounds, tree, offload=offload, ratio=ratio)
    place = {"rank": comm.rank, "size": comm.size}
    outs, leaves, douts = [], [], []
    for n in range(len(sliced)):
        part = sliced.slice(n)
        mine = {name: shard(x[part.start : part.stop], part, **place) for name, x in inputs.items()}
        douts.append(mine.pop("dout"))
        leaves.append([x.clone().requires_grad_() for x in mine.values()])
        with torch.set_grad_enabled(way != "again" or n == len(sliced) - 1):
            if way == "checkpoint":
                outs.append(checkpoint(run, part, leaves[-1], use_reentrant=False, context_fn=carry_pack))
            else:
                outs.append(run(part, leaves[-1]))
    for n in reversed(range(len(sliced))):
        if not outs[n].requires_grad:
            again = run(sliced.slice(n), leaves[n])
            assert torch.equal(again, outs[n])
            outs[n] = again
        outs[n].backward(douts[n])
    if offload is not None:
        stats = offload.stats()
        assert (stats.held, stats.pool.in_use) == (0, 0)
        assert stats.loads >= stats.stores
        assert (stats.stores > 0) == any(len(q) for q, *_ in leaves)
    return [[out.detach(), *(x.grad for x in mine)] for out, mine in zip(outs, leaves, strict=True)]


def whole(parts, bounds, tree=None):
    """From the results of all ranks, by slice, to those of the sequence or tree."""
    sliced = SlicedSequence(bounds, tree)
    made = [
        [unshard([rank[n][i] for rank in parts], sliced.slice(n)) for n in range(len(sliced))]
        for i in range(len(parts[0][0]))
    ]
    return [torch.cat(each) for each in made]


def check(case, bounds, way, sinks=False, want=None, ratio=0.0):
    given = case.tensors()
    inputs = {name: given[name] for name in ("q", "k", "v", "dout")}
    case.sinks, tree = sinks, case.tree if len(case.parents) > 1 else None
    shares = []

    def main():
        comm = hdp.init()
        own_sinks = given["sinks"].clone().requires_grad_() if sinks else None
        options = with_options(sinks=own_sinks, **case.options)
        run = lambda part, leaves: ring_attention(*leaves, comm=comm, cu_seqlens=part, window=case.window, **options)
        found = on_slices(run, bounds, inputs, comm, way, tree, ratio)
        shares.append(own_sinks)
        return found

    found = whole(run_threads(main, case.size), bounds, tree)
    want = expected(case) if want is None else want
    for name, got in zip(RESULTS, found, strict=True):
        assert got.dtype == case.dtype
        assert error(got, want[name]) <= TOLERANCE[case.dtype], (name, error(got, want[name]), case, bounds)
    if sinks:
        assert error(sum(each.grad for each in shares), want["dsinks"]) <= TOLERANCE[case.dtype]


def random_case(rng, size, parents, lengths, seed):
    kv_heads, group = rng.choice([(1, 1), (1, 2), (2, 2), (2, 1), (1, 4)])
    heads = kv_heads * group
    variants = ["auto", "ring", "gather"]
    if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        variants.append("ulysses")
    return TreeCase(
        size, parents, lengths, heads, kv_heads, rng.choice([4, 8, 16]), rng.choice([torch.float64, torch.float32]),
        rng.choice([None, None, 1, 7, 50, 400]), seed=seed, options={"variant": rng.choice(variants)},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(CASES))
def test_random_slices(seed):
    rng = random.Random(seed)
    length = rng.choice([9, 40, 97, 300])
    case = random_case(rng, 1 + seed % 4, [-1], [length], seed)
    bounds = cuts(rng, length, rng.randint(1, min(9, length)))
    way, sinks = rng.choice(WAYS), rng.random() < 0.2
    check(case, bounds, way, sinks, ratio=rng.choice([0.0, 0.0, 0.3, 1.0]))


@pytest.mark.parametrize("seed", range(CASES))
def test_random_slices_of_trees(seed):
    """Cuts anywhere, or where segments begin."""
    rng = random.Random(1000 + seed)
    parents, lengths = random_tree(rng, segments=rng.choice([2, 5, 14]), longest=rng.choice([5, 60]))
    case, total = random_case(rng, 1 + seed % 4, parents, lengths, seed), sum(lengths)
    bounds = cuts(rng, total, rng.randint(1, min(9, total)))
    if rng.random() < 0.3:
        rows = [sum(lengths[:i]) for i in range(1, len(lengths))]
        bounds = [0, *sorted(rng.sample(rows, rng.randint(1, len(rows)))), total]
    way, sinks = rng.choice(WAYS), rng.random() < 0.2
    check(case, bounds, way, sinks, ratio=rng.choice([0.0, 0.0, 0.3, 1.0]))


@pytest.mark.parametrize("seed", range(24))
def test_chunks(seed):
    """Chunks that begin and end where slices do, inside of them, and over several."""
    rng = random.Random(seed)
    length, chunk = rng.choice([9, 40, 97, 150]), rng.choice([1, 7, 20, 64, 500])
    size = 1 + seed % 4
    options = {"variant": rng.choice(["ring", "gather", "ulysses" if size != 3 else "ring"]), "chunk": chunk}
    window = rng.choice([None, None, 9])
    case = TreeCase(size, [-1], [length], heads=4, kv_heads=4, window=window, seed=seed, options=options)
    plain = Case(1, [length], heads=4, kv_heads=4, window=window, options={"chunk": chunk})
    given = case.tensors()
    leaves = [given[name].double().requires_grad_() for name in ("q", "k", "v", "sinks")]
    plain.dim = leaves[0].shape[2]
    out = plain_attention(plain, *leaves)
    grads = torch.autograd.grad(out, leaves[:3], given["dout"].double())
    want = dict(zip(RESULTS, (out.detach(), *grads), strict=True))
    bounds = cuts(rng, length, rng.randint(1, min(9, length)))
    if rng.random() < 0.3:
        bounds = [*range(0, length, chunk), length]
    check(case, bounds, rng.choice(WAYS), want=want)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("bounds", [range(8), [0, 1, 50], [0, 49, 50], [0, 50]])
def test_slices_of_one_token(bounds, size):
    check(TreeCase(size, [-1], [bounds[-1]]), bounds, "kept")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_token_of_a_tree_is_a_slice(size):
    check(TreeCase(size, *SHORT), range(10), "kept")


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "hybrid"])
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("tree", [([-1], [90]), BRANCHED], ids=["a sequence", "a tree"])
def test_every_variant(variant, window, tree):
    case = TreeCase(4, *tree, heads=4, kv_heads=2, window=window, options={"variant": variant})
    check(case, [0, 31, 60, sum(tree[1])], "again")


@pytest.mark.parametrize("tree", [([-1], [100]), BRANCHED], ids=["a sequence", "a tree"])
def test_one_slice_is_the_whole_bit_for_bit(tree):
    case = TreeCase(3, *tree, dtype=torch.float32)
    pack = [0, 100] if len(tree[0]) == 1 else case.tree
    inputs = {name: x for name, x in case.tensors().items() if name != "sinks"}

    def main():
        comm = hdp.init()
        run = lambda part, leaves: ring_attention(*leaves, comm=comm, cu_seqlens=part)
        sliced = on_slices(run, [0, case.tree.num_tokens], inputs, comm, "kept", case.tree)[0]
        mine = {name: shard(x, pack, rank=comm.rank, size=comm.size) for name, x in inputs.items()}
        leaves = [mine[name].clone().requires_grad_() for name in ("q", "k", "v")]
        out = ring_attention(*leaves, comm=comm, cu_seqlens=pack)
        out.backward(mine["dout"])
        return all(torch.equal(a, b) for a, b in zip(sliced, [out, *(x.grad for x in leaves)], strict=True))

    assert run_threads(main, 3) == [True] * 3


@pytest.mark.parametrize("send", ["latent", "kv", "auto"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tree", [None, Tree(*BRANCHED)], ids=["a sequence", "a tree"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_latents_are_kept(send, size, way, tree, ratio):
    bounds, dims = [0, 20, 21, 77, 139], (4, 8, 4, 6, 10)
    inputs = tensors([139], dims, torch.float64)
    weights = []

    def main():
        comm = hdp.init()
        weight = inputs["w_kv"].clone().requires_grad_()
        rows = {name: x for name, x in inputs.items() if name != "w_kv"}
        run = lambda part, leaves: mla_attention(*leaves, weight, comm=comm, cu_seqlens=part, **with_options(send=send))
        found = on_slices(run, bounds, rows, comm, way, tree, ratio)
        weights.append(weight.grad)
        return found

    found = whole(run_threads(main, size), bounds, tree)
    wanted = dense([139], dims, inputs) if tree is None else mla_on_tree(tree, dims, inputs)
    out, dq, dc, drope, dweight = wanted
    for got, want in zip([*found, sum(weights)], (out, dq, dc, drope, dweight), strict=True):
        assert error(got, want) <= 1e-10


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_several_layers_and_two_uses_in_one_graph(size, way, ratio):
    """Each call of a pass keeps its own keys; checkpoints inside of checkpoints find them again."""
    case = TreeCase(size, [-1], [60])
    inputs = {name: x for name, x in case.tensors().items() if name != "sinks"}
    bounds = [0, 17, 40, 60]

    def layers(attend, q, k, v, recompute):
        def twice(x):
            return attend(x, k, v) + attend(x * 0.5, v, k)

        x = q
        for _ in range(3):
            x = x + (checkpoint(twice, x, use_reentrant=False, context_fn=carry_pack) if recompute else twice(x))
        return x

    def main():
        comm = hdp.init()

        def run(part, leaves):
            attend = lambda q, k, v: ring_attention(q, k, v, comm=comm, cu_seqlens=part)
            return layers(attend, *leaves, way == "checkpoint")

        sliced = on_slices(run, bounds, inputs, comm, way, ratio=ratio)
        mine = {name: shard(x, [0, 60], rank=comm.rank, size=comm.size) for name, x in inputs.items()}
        leaves = [mine[name].clone().requires_grad_() for name in ("q", "k", "v")]
        out = layers(lambda q, k, v: ring_attention(q, k, v, comm=comm, cu_seqlens=[0, 60]), *leaves, False)
        out.backward(mine["dout"])
        return sliced, [out.detach(), *(x.grad for x in leaves)]

    parts = run_threads(main, size)
    found = whole([sliced for sliced, _ in parts], bounds)
    for i, got in enumerate(found):
        want = unshard([plain[i] for _, plain in parts], [0, 60])
        assert error(got, want) <= 1e-10


def test_positions_count_from_the_sequence():
    part = SlicedSequence([0, 7, 20]).slice(1)
    found = torch.cat([positions(part, rank=rank, size=3) for rank in range(3)])
    assert sorted(found.tolist()) == list(range(7, 20))


def test_positions_count_from_the_root():
    part = SlicedSequence([0, 3, 10], Tree([-1, 0, 0, -1], [4, 2, 3, 1])).slice(1)
    assert unshard([positions(part, rank=rank, size=3) for rank in range(3)], part).tolist() == [3, 4, 5, 4, 5, 6, 0]
    assert part.longest == 7


@pytest.mark.parametrize("seed", range(CASES))
def test_ranks_have_equal_work_in_each_slice_of_a_tree(seed):
    """As many tokens, to one; and about as many pairs, where there are enough of them."""
    rng, size = random.Random(seed), 2 + seed % 3
    tree = Tree(*random_tree(rng, segments=rng.choice([2, 9, 30]), longest=300))
    bounds = cuts(rng, tree.num_tokens, rng.randint(1, min(9, tree.num_tokens)))
    sliced = SlicedSequence(bounds, tree)
    for number in range(len(sliced)):
        parts = [positions(sliced.slice(number), rank=rank, size=size) for rank in range(size)]
        tokens, pairs = [len(each) for each in parts], [int((each + 1).sum()) for each in parts]
        assert max(tokens) - min(tokens) <= 1
        assert max(pairs) <= 1.04 * sum(pairs) / size + tree.depth


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("tree", [([-1], [90]), BRANCHED], ids=["a sequence", "a tree"])
def test_each_rank_is_sent_each_key_that_it_needs_once(size, window, tree):
    """By an independent count over all pairs of tokens; keys that no later slice sees go nowhere."""
    bounds, band = (0, 30, 31, sum(tree[1])), Band(None if window is None else 1 - window, 0)
    ways = {way[i]: way[: i + 1] for way in trajectories(*tree) for i in range(len(way))}
    for number in range(3):
        queries, keys = slice_layouts(Tree(*tree), bounds, number, size)
        owner = {}
        for piece in range(len(keys.owner)):
            for at in range(int(keys.count[piece])):
                owner[int(keys.source[piece]) + at] = int(keys.owner[piece])
        needed = set()
        for q in range(bounds[number], bounds[number + 1]):
            needed |= {(k, owner[q]) for k in ways[q][-window if window else None :]}
        seen = seen_keys(keys)
        runs = zip(seen.source.tolist(), seen.count.tolist(), seen.owner.tolist(), strict=True)
        held = {k: rank for first, count, rank in runs for k in range(first, first + count)}
        assert held == {k: owner[k] for q in range(bounds[number], bounds[number + 1]) for k in ways[q]}
        wanted = sum(owner[k] != rank for k, rank in needed)
        atoms = queries.atoms(seen, band)
        assert int((atoms.rows * atoms.needed.sum(axis=1)).sum()) == wanted
        assert [queries.rows(rank) for rank in range(size)] == [
            sum(owner[q] == rank for q in range(bounds[number], bounds[number + 1])) for rank in range(size)
        ]


def test_errors():
    for bounds in ([], [0], [1, 5], [0, 5, 5], [0, 5, 3]):
        with pytest.raises(InvalidUsage, match="expected rising numbers of tokens"):
            SlicedSequence(bounds)
    with pytest.raises(InvalidUsage, match=r"tree of 9 tokens is cut at \[0, 5, 10\]; expected its tokens"):
        SlicedSequence([0, 5, 10], Tree([-1, 0], [4, 5]))
    with pytest.raises(InvalidUsage, match="SlicedSequence: tree is 10, expected Tree"):
        SlicedSequence([0, 5, 10], 10)
    part = SlicedSequence([0, 5, 9], Tree([-1, 0], [4, 5])).slice(0)
    q = torch.randn(5, 1, 4)
    for given in ({"causal": False}, {"options": hdp.attention.AttentionOptions(chunk=3)}):
        with pytest.raises(InvalidUsage, match=r"causal=False was given with a slice|chunk=3 was given with a tree"):
            ring_attention(q, q, q, comm=None, cu_seqlens=part, **given)
    sliced = SlicedSequence([0, 5, 9])
    with pytest.raises(InvalidUsage, match="slice 2 asked of a sequence of 2 slices"):
        sliced.slice(2)
    q = torch.randn(5, 1, 4, requires_grad=True)
    with pytest.raises(InvalidUsage, match="causal=False was given with a slice"):
        ring_attention(q, q, q, comm=None, cu_seqlens=sliced.slice(0), causal=False)
    with pytest.raises(InvalidUsage, match="rank 0 of 1 holds 4"):
        ring_attention(q, q, q, comm=None, cu_seqlens=sliced.slice(1))
    with pytest.raises(InvalidUsage, match="call 0 of a layer is not of the kind that it was"):
        hdp.attention.short_conv(q[:, 0], torch.randn(4, 3), comm=None, cu_seqlens=sliced.slice(0))


def test_backward_passes_out_of_order_are_refused():
    sliced = SlicedSequence([0, 5, 9])
    first, second = torch.randn(5, 1, 4, requires_grad=True), torch.randn(4, 1, 4, requires_grad=True)
    out = ring_attention(first, first, first, comm=None, cu_seqlens=sliced.slice(0))
    ring_attention(second, second, second, comm=None, cu_seqlens=sliced.slice(1))
    with pytest.raises(InvalidUsage, match="from the last slice to the first"):
        out.sum().backward()


@pytest.mark.parametrize("trees", [(None, None), (Tree([-1, 0, 0], [4, 4, 4]),) * 2])
def test_ranks_that_mean_other_slices_are_told(trees):
    def main():
        comm = hdp.init()
        sliced = SlicedSequence([0, 4 + 4 * comm.rank, 12], trees[comm.rank])
        part = sliced.slice(0)
        q = torch.randn(len(positions(part, rank=comm.rank, size=2)), 1, 4)
        with pytest.raises(Mismatch, match="cut at"):
            ring_attention(q, q, q, comm=comm, cu_seqlens=part)

    run_threads(main, 2)


@pytest.mark.parametrize("kind", ["ring", "ulysses", "latent", "tree"])
def test_graphs_of_all_slices_hold_keys_once(kind):
    """Not once for each slice that sees them."""
    tree = Tree([-1, 0, 0], [700, 500, 400]) if kind == "tree" else None
    size = 2 if kind == "ulysses" else 1

    def held(slices):
        def main():
            comm = hdp.init()
            sliced = SlicedSequence([1600 * k // slices for k in range(slices + 1)], tree)
            weight, outs = torch.randn(4 * 14, 32), []
            with MemoryMeter("cpu") as meter:
                for number in range(slices):
                    part = sliced.slice(number)
                    rows = len(positions(part, rank=comm.rank, size=comm.size))
                    if kind == "latent":
                        given = [torch.randn(rows, *shape, requires_grad=True) for shape in ((4, 12), (32,), (4,))]
                        outs.append(mla_attention(*given, weight, comm=comm, cu_seqlens=part))
                    else:
                        given = [torch.randn(rows, heads, 16, requires_grad=True) for heads in (2, 2, 2)]
                        options = with_options(variant="ulysses" if kind == "ulysses" else "ring")
                        outs.append(ring_attention(*given, comm=comm, cu_seqlens=part, **options))
                return meter.in_use

        return run_threads(main, size)[0]

    few, many = held(2), held(16)
    assert many <= 1.03 * few


def three_slices(offload, ratio=1.0):
    sliced = SlicedSequence([0, 100, 200, 300], offload=offload, ratio=ratio)
    for number in range(3):
        yield lambda number=number: ring_attention(
            *(torch.randn(100, 2, 8, requires_grad=True) for _ in range(3)), comm=None, cu_seqlens=sliced.slice(number)
        )


@pytest.mark.parametrize("graphs", [True, False])
def test_a_pool_without_room_for_keys(graphs):
    """Two slices fit and the keys of the third; nothing stays behind."""
    offload = ActivationOffload(PinnedPool(30 << 10, device="cpu"), [torch.nn.Identity()], min_bytes=1)
    first, second, third = three_slices(offload)
    with torch.set_grad_enabled(graphs):
        outs = [first(), second()]
        with pytest.raises(InvalidUsage, match=r"pool is full: 6.4 kB are needed for kept rows of shape \(100, 2, 8\)"):
            third()
    del outs, first, second, third
    gc.collect()
    assert offload.stats().held == 0

    offload = ActivationOffload(
        PinnedPool(30 << 10, device="cpu"), [torch.nn.Identity()], min_bytes=1, when_full="keep"
    )
    outs = [run() for run in three_slices(offload)]
    for out in reversed(outs):
        out.sum().backward()
    stats = offload.stats()
    assert stats.refused_bytes > 0
    assert stats.held == 0


def test_offload_of_slices_is_checked():
    offload = host_memory()
    for given, told in (
        ({"offload": 3}, "offload"),
        ({"offload": offload, "ratio": 1.5}, "ratio, the share of the rows"),
    ):
        with pytest.raises(InvalidUsage, match=told):
            SlicedSequence([0, 5, 10], **given)
    assert SlicedSequence([0, 5, 10], offload=offload).store.ratio == offload.ratio == 1.0
    q = torch.randn(5, 1, 4)
    part = SlicedSequence([0, 5, 10]).slice(1)
    with pytest.raises(InvalidUsage, match="runs in slice 1 before slice 0: run the forward passes from slice 0 on"):
        ring_attention(q, q, q, comm=None, cu_seqlens=part)


def test_host_memory_is_free_after_forward_passes_alone():
    """At once: no object of a sequence holds itself."""
    offload = host_memory()
    gc.disable()
    try:
        sliced = SlicedSequence([0, 100, 200, 300], offload=offload)
        with torch.no_grad():
            for number in range(3):
                x, part = torch.randn(100, 2, 8), sliced.slice(number)
                for _ in range(3):
                    x = x + ring_attention(x, x.sin(), x.cos(), comm=None, cu_seqlens=part)
        assert offload.stats().held == 18
        del sliced, part
        assert offload.stats().held == 0
    finally:
        gc.enable()
