"""Backends: what they refuse, how tiles become kernel calls, that CUDA calls fit torch's operators. No GPU needed."""

import itertools
import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm.attention.backends as backends_module
from hdpcomm.attention import Problem, as_pack, available_backends
from hdpcomm.attention.backends import choose
from hdpcomm.attention.backends import cuda as cuda_module
from hdpcomm.attention.backends.base import Accumulator, GradSum, Score
from hdpcomm.attention.backends.cuda import (
    CudnnBackend,
    EfficientBackend,
    FlashAttn2Backend,
    FlashBackend,
    VarlenBackend,
    batches_of,
)
from hdpcomm.attention.backends.dense import (
    CpuBackend,
    DividedBackend,
    ReferenceBackend,
    cut,
    divided,
    equal_runs,
    lower,
    plan_size,
)
from hdpcomm.attention.ring import ring_plan
from hdpcomm.attention.tiles import Band, Span, Tile, band_tile, tiles_of
from hdpcomm.errors import InvalidUsage

SCORE = Score(0.3)


def _visible(tile):
    """All (query row, key row) pairs of a tile."""
    return {
        (tile.q_start + a, tile.k_start + b)
        for a in range(tile.num_q) for b in range(tile.num_k)
        if (tile.low is None or b - a >= tile.low) and (tile.high is None or b - a <= tile.high)
    }  # fmt: skip


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(-9, 9),
    st.none() | st.integers(0, 12),
    st.none() | st.integers(0, 12),
)
@settings(max_examples=200, deadline=None)
def test_lowering_keeps_every_pair_once(n, m, shift, left, right):
    band = Band(None if left is None else -left, right)
    for tile in tiles_of([Span(0, n, 3)], [Span(0, m, 7)], shift, band):
        parts = [_visible(part) for part in lower(tile)]
        assert set().union(*parts) == _visible(tile)
        assert sum(map(len, parts)) == len(_visible(tile))
        assert all(part.full or part.low is not None or part.high == 0 for part in lower(tile))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(-9, 9), st.none() | st.integers(0, 12), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_cutting_keeps_every_pair_once(n, m, shift, right, block):
    for tile in tiles_of([Span(0, n, 3)], [Span(0, m, 7)], shift, Band(None, right)):
        parts = [part for whole in lower(tile) for part in cut(whole, block)]
        seen = [_visible(part) for part in parts]
        assert set().union(*seen) == _visible(tile)
        assert sum(map(len, seen)) == len(_visible(tile))
        assert all(0 < part.num_q <= block and 0 < part.num_k <= block for part in parts)
        assert all(part.full or part.high == 0 for part in parts)


def test_long_bands_become_small_masks():
    parts = list(lower(Tile(0, 5000, 0, 5063, 0, 63)))
    assert sum(part.num_q for part in parts) == 5000
    assert max(part.num_k for part in parts) <= 256 + 63


class WrittenOut(VarlenBackend):
    """A varlen kernel that follows the definition: aligned at the ends, with windows left and right of the diagonal."""

    name = "written out"

    def refuses(self, problem):  # noqa: ARG002
        return None

    def _pieces(self, batch):
        for q, k in zip(itertools.pairwise(batch.cu_q.tolist()), itertools.pairwise(batch.cu_k.tolist()), strict=True):
            n, m = q[1] - q[0], k[1] - k[0]
            gap = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
            seen = torch.ones(n, m, dtype=torch.bool)
            if batch.left >= 0:
                seen &= gap >= -batch.left
            if batch.right >= 0:
                seen &= gap <= batch.right
            yield slice(*q), slice(*k), seen

    def call_forward(self, q, k, v, batch, score):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for rows, keys, seen in self._pieces(batch):
            scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * score.scale
            scores = scores.masked_fill(~seen, -torch.inf)
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys])
        return out, lse

    def call_backward(self, dout, qkv, out, lse, batch, score):
        q, k, v = qkv
        grads = [torch.zeros_like(x) for x in qkv]
        for rows, keys, seen in self._pieces(batch):
            scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * score.scale
            weights = torch.exp(scores - lse[:, rows, None]) * seen
            delta = (dout[rows] * out[rows]).sum(-1).T[..., None]
            slope = weights * (torch.einsum("qhd,khd->hqk", dout[rows], v[keys]) - delta) * score.scale
            grads[0][rows] = torch.einsum("hqk,khd->qhd", slope, k[keys])
            grads[1][keys] = torch.einsum("hqk,qhd->khd", slope, q[rows])
            grads[2][keys] = torch.einsum("hqk,qhd->khd", weights, dout[rows])
        return tuple(grads)


def _run(backend, tiles, tensors):
    q, k, v, dout = tensors
    result = Accumulator(q.shape, q)
    backend.forward((q, k, v), tiles, SCORE, result)
    grads = tuple(GradSum(x.shape, x, x.dtype) for x in (q, k, v))
    backend.backward(dout, (q, k, v), result.out, result.lse, tiles, SCORE, grads)
    return result.out, result.lse, *(grad.total() for grad in grads)


@pytest.mark.parametrize("band", [Band(None, 0), Band(None, None), Band(-7, 0), Band(-3, 4), Band(None, 5)])
@pytest.mark.parametrize("backend", [
    CpuBackend(),
    WrittenOut(),
    DividedBackend(CpuBackend(), WrittenOut(), least=4, generations=(9, 10)),
])  # fmt: skip
def test_backends_agree_on_every_step_of_a_ring(band, backend):
    layout = as_pack([0, 41, 42, 70]).layout(3)
    keys = as_pack([0, 48, 50, 66]).layout(3)
    for rank, kv_layout in itertools.product(range(3), (layout, keys)):
        for step in ring_plan(layout, kv_layout, band, rank=rank).steps:
            rows = (int(layout.local_cu(rank)[-1]), step.kv_rows, step.kv_rows, int(layout.local_cu(rank)[-1]))
            tensors = [torch.randn(n, 2, 4, dtype=torch.float64) for n in rows]
            want = _run(ReferenceBackend(), step.tiles, tensors)
            for a, b in zip(_run(backend, step.tiles, tensors), want, strict=True):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def _causal(rows, first=0, keys=0):
    return Tile(first, first + rows, keys, keys + rows, None, 0)


@pytest.mark.parametrize(("tiles", "runs"), [
    ([], []),
    ([_causal(4, 4 * i, 4 * i) for i in range(5)], [5]),
    ([_causal(4), _causal(4, 4, 4), _causal(5, 8, 8), _causal(5, 13, 13), _causal(4, 18, 18)], [2, 2, 1]),
    ([_causal(4), _causal(4, 5, 4), _causal(4, 9, 9), _causal(4, 9, 13)], [1, 1, 1, 1]),  # gaps, and rows again
    ([Tile(0, 4, 0, 6), Tile(4, 8, 6, 12), _causal(4, 8, 12), Tile(12, 16, 16, 20)], [2, 1, 1]),
    ([Tile(0, 4, 0, 4, -1, 0), Tile(4, 8, 4, 8, -1, 0), Tile(8, 12, 8, 12, -2, 0)], [2, 1]),
])  # fmt: skip
def test_equal_tiles_that_follow_each_other_are_one_call(tiles, runs):
    found = list(equal_runs(iter(tiles)))
    assert [count for _, count in found] == runs
    assert [tile for tile, _ in found] == [tiles[sum(runs[:i])] for i in range(len(runs))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, -3])
def test_sequences_of_one_length_have_the_bits_of_each_alone(dtype, window, monkeypatch):
    """q, k and v are columns of one tensor, as layers that project them together give them."""
    tiles = [Tile(i * 20, i * 20 + 20, i * 20, i * 20 + 20, window, 0) for i in range(6)]
    q, k, v = torch.randn(120, 8, 16, dtype=dtype).split((4, 2, 2), dim=1)
    dout = torch.randn(120, 4, 16, dtype=dtype)
    calls = []
    kernel = CpuBackend.call_forward
    monkeypatch.setattr(CpuBackend, "call_forward", lambda *a: calls.append(a[1][0].shape) or kernel(*a))
    together = _run(CpuBackend(), tiles, (q, k, v, dout))
    assert calls == [(6, 4, 20, 16)]
    for tile in tiles:
        rows = slice(tile.q_start, tile.q_stop)
        alone = _run(CpuBackend(), [tile._replace(q_start=0, q_stop=20, k_start=0, k_stop=20)], [
            x[rows] for x in (q, k, v, dout)
        ])  # fmt: skip
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[rows], b)


def test_tiles_of_many_sequences_share_a_call():
    layout = as_pack([0, *range(64, 64 * 21, 64)]).layout(4)
    plan = ring_plan(layout, layout, Band(None, 0), rank=1)
    calls = [len(batches_of(step.tiles, torch.device("cpu"))) for step in plan.steps]
    assert [len(step.tiles) for step in plan.steps] == [20, 20, 20, 20, 0]
    assert calls == [1, 1, 1, 1, 0]
    own = batches_of(plan.steps[0].tiles, torch.device("cpu"))[0]
    assert (own.left, own.right, own.max_q, own.max_k) == (-1, 0, 16, 16)
    assert own.q_rows == slice(0, 320)


def _problem(**changes):
    fields = {"device": "cpu", "dtype": torch.float32, "heads": 4, "kv_heads": 2, "head_dim": 64}
    return Problem(**(fields | changes))


def test_auto_takes_the_first_that_can():
    assert choose("auto", _problem()).name == "cpu"
    assert choose("auto", _problem(softcap=30.0)).name == "reference"
    assert available_backends(_problem())["cpu"] is None
    assert available_backends(_problem())["reference"] is None


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("cpu", {"device": "cuda"}, "computes on the CPU"),
    ("cpu", {"softcap": 1.0}, "no softcap"),
    ("flash", {}, "computes on CUDA devices"),
    ("efficient", {}, "computes on CUDA devices"),
    ("efficient", {"windowed": True}, "no sliding window"),
    ("cudnn", {"windowed": True}, "no sliding window"),
    ("flash-attn", {}, "not installed"),
])  # fmt: skip
def test_refusals_name_the_reason_and_the_alternatives(name, changes, reason):
    problem = _problem(**changes)
    with pytest.raises(InvalidUsage, match=r"use .*reference"):
        choose(name, problem)
    assert reason in available_backends(problem)[name] or "sliding window" in reason


def device(monkeypatch, capability, flash_attn=None):
    """A CUDA device of a compute capability, with a version of flash-attn, as torch would report them."""
    backends_module._choose.cache_clear()
    monkeypatch.setattr(cuda_module, "_version", lambda: flash_attn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("capability", "flash_attn", "deterministic", "plain", "softcap"),
    [
        ((8, 0), None, False, "flash", "reference"),
        ((8, 0), (2, 8), False, "flash", "flash-attn"),
        ((9, 0), None, False, "flash+cudnn", "reference"),
        ((9, 0), (2, 8), False, "flash+cudnn", "flash-attn"),
        ((9, 0), (2, 8), True, "flash", "flash-attn"),
        ((10, 0), (2, 8), False, "flash+cudnn", "flash-attn"),
        ((12, 0), (2, 8), False, "flash", "flash-attn"),
    ],
)
def test_the_fastest_backend_is_chosen(monkeypatch, capability, flash_attn, deterministic, plain, softcap):
    device(monkeypatch, capability, flash_attn)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        half = {"device": "cuda", "dtype": torch.bfloat16}
        assert choose("auto", _problem(**half)).name == plain
        assert choose("auto", _problem(**half, softcap=5.0)).name == softcap
    finally:
        torch.use_deterministic_algorithms(before)
    backends_module._choose.cache_clear()


def test_the_right_cuda_device_is_asked(monkeypatch):
    """Types, sizes and compute capability, as a device would report them."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    device(monkeypatch, (9, 0))
    assert choose("auto", _problem(**half)).name == "flash+cudnn"
    assert choose("auto", _problem(**(half | {"head_dim": 256}))).name == "flash"
    assert choose("auto", _problem(**half, windowed=True)).name == "flash"
    assert choose("auto", _problem(device="cuda")).name == "efficient"
    assert choose("auto", _problem(device="cuda", dtype=torch.float64)).name == "reference"
    assert choose("auto", _problem(**half, softcap=5.0)).name == "reference"
    reasons = available_backends(_problem(**(half | {"head_dim": 12})))
    assert "multiple of 8" in reasons["flash"]
    assert "at most 128" in available_backends(_problem(**(half | {"head_dim": 256})))["cudnn"]
    device(monkeypatch, (8, 0))
    assert choose("auto", _problem(**half)).name == "flash"
    device(monkeypatch, (7, 5))
    assert "compute capability 8.0" in available_backends(_problem(**half))["flash"]
    backends_module._choose.cache_clear()


TILES = [Tile(0, 40, 0, 40, None, 0), Tile(40, 64, 40, 70), Tile(0, 64, 70, 80)]
EQUAL = [_causal(20), _causal(20, 20, 20), *TILES[1:]]


@pytest.mark.parametrize(("backend", "dtype", "tiles"), [
    (FlashBackend(), torch.bfloat16, [*TILES, Tile(0, 32, 0, 36, -3, 4)]),
    (EfficientBackend(), torch.float32, EQUAL),
    (CudnnBackend(), torch.float16, EQUAL),
])  # fmt: skip
def test_cuda_calls_fit_torchs_operators(backend, dtype, tiles, monkeypatch):
    """Tensors without storage run torch's own shape functions: arguments and shapes of all calls are checked."""
    merged = []
    monkeypatch.setattr(Accumulator, "merge", lambda _, out, lse, rows: merged.append((out.shape, lse.shape, rows)))
    with torch.device("meta"):
        q, dout, out = (torch.empty(64, 4, 64, dtype=dtype) for _ in range(3))
        k, v = (torch.empty(80, 2, 64, dtype=dtype) for _ in range(2))
        lse = torch.empty(64, 4)
        grads = tuple(GradSum(x.shape, x, torch.float32) for x in (q, k, v))
    backend.forward((q, k, v), tiles, SCORE, Accumulator(q.shape, q))
    backend.backward(dout, (q, k, v), out, lse, tiles, SCORE, grads)
    for out_shape, lse_shape, _ in merged:
        assert out_shape[1:] == (4, 64)
        assert lse_shape == out_shape[:2]
    assert sum(shape[0] for shape, _, _ in merged) == sum(tile.num_q for tile in tiles)


def _pairs(tiles):
    """How often each pair of a query and a key is in the tiles."""
    seen = torch.zeros(100, 100, dtype=torch.int64)
    for tile in tiles:
        gap = torch.arange(tile.num_k)[None] - torch.arange(tile.num_q)[:, None]
        inside = torch.ones_like(gap, dtype=torch.bool)
        if tile.low is not None:
            inside &= gap >= tile.low
        if tile.high is not None:
            inside &= gap <= tile.high
        seen[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += inside
    return seen


@given(
    q=st.tuples(st.integers(0, 20), st.integers(1, 80)),
    k=st.tuples(st.integers(0, 20), st.integers(1, 80)),
    offset=st.integers(-10, 80),
    causal=st.booleans(),
    least=st.integers(1, 40),
)
def test_long_tiles_have_few_sizes_and_all_have_the_same_pairs(q, k, offset, causal, least):
    tile = band_tile(Span(offset, offset + q[1], q[0]), Span(0, k[1], k[0]), 0, Band(None, 0 if causal else None))
    if tile is None:
        return
    long, others = divided((tile,), least)
    assert torch.equal(_pairs([*long, *others]), _pairs([tile]))
    for each in long:
        assert each.low is None
        assert each.high in (None, 0)
        assert min(each.num_q, each.num_k) >= least
        assert each.num_q == plan_size(each.num_q)
        assert each.num_k == plan_size(each.num_k)


def test_eight_sizes_an_octave():
    assert len({plan_size(n) for n in range(2048, 4096)}) == 8
    assert len({plan_size(n) for n in range(2048, 1 << 17)}) == 6 * 8
    assert all(n * 8 / 9 <= plan_size(n) <= n for n in range(1, 10000))


def test_gradients_of_rows_that_come_once_keep_their_type():
    like = torch.zeros(6, 2, 4, dtype=torch.bfloat16)
    part = torch.randn(6, 2, 4).bfloat16()
    once = GradSum(like.shape, like, torch.float32)
    once.add(part[:2], slice(0, 2))
    once.add(part[3:], slice(3, 6))
    assert once.total().dtype == torch.bfloat16
    assert torch.equal(once.total()[[0, 1, 3, 4, 5]], part[[0, 1, 3, 4, 5]])
    assert not once.total()[2].any()
    once.add(part[1:3], slice(1, 3))
    assert once.total().dtype == torch.float32
    assert torch.equal(once.total()[1], 2 * part[1].float())
    assert torch.equal(once.total()[2], part[2].float())
    whole = GradSum(like.shape, like, torch.float32)
    whole.add(part, slice(0, 6))
    assert torch.equal(whole.total(), part)
    whole.add(part, torch.arange(6))
    assert torch.equal(whole.total(), 2 * part.float())


def test_results_of_rows_that_come_once_keep_their_type():
    out, lse = torch.randn(6, 2, 4).bfloat16(), torch.randn(6, 2)
    once = Accumulator(out.shape, out)
    once.merge(out[:2].clone(), lse[:2], slice(0, 2))
    once.merge(out[3:].clone(), lse[3:], slice(3, 6))
    assert once.out.dtype == torch.bfloat16
    assert once.lse.dtype == torch.float32
    assert torch.equal(once.out[[0, 1, 3, 4, 5]], out[[0, 1, 3, 4, 5]])
    assert not once.out[2].any()
    assert once.lse[2].isneginf().all()
    once.merge(out[1:3].clone(), lse[1:3], slice(1, 3))
    assert once.out.dtype == torch.float32
    torch.testing.assert_close(once.out[1], out[1].float())  # the same block twice is twice its weight
    torch.testing.assert_close(once.lse[1], lse[1] + math.log(2))
    assert torch.equal(once.out[2], out[2].float())


class StandIn:
    """Fakes of the functions of flash-attn 2.7.4, with their signatures and a plain implementation."""

    def __init__(self):
        self.kernel = WrittenOut()
        self.calls = []

    def _batch(self, cu_q, cu_k, left, right, *noted):
        self.calls.append(noted)
        return types.SimpleNamespace(cu_q=cu_q, cu_k=cu_k, left=left, right=right)

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        noted = (max_seqlen_q, max_seqlen_k, dropout_p, causal, softcap, alibi_slopes, return_softmax)
        batch = self._batch(cu_seqlens_q, cu_seqlens_k, window_size_left, window_size_right, *noted)
        return *self.kernel.call_forward(q, k, v, batch, Score(softmax_scale)), None, None

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        noted = (max_seqlen_q, max_seqlen_k, dropout_p, causal, softcap, alibi_slopes, deterministic)
        batch = self._batch(cu_seqlens_q, cu_seqlens_k, window_size_left, window_size_right, *noted)
        parts = self.kernel.call_backward(dout, (q, k, v), out, softmax_lse, batch, Score(softmax_scale))
        for grad, part in zip((dq, dk, dv), parts, strict=True):
            grad.copy_(part)


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn_is_called_as_it_wants(monkeypatch, deterministic):
    stand_in = StandIn()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(cuda_module.importlib, "import_module", lambda _: stand_in)
    tensors = [torch.randn(n, 2, 4, dtype=torch.float64) for n in (64, 80, 80, 64)]
    tiles = [*TILES, Tile(0, 32, 0, 36, -3, 4)]
    want = _run(ReferenceBackend(), tiles, tensors)
    for a, b in zip(_run(FlashAttn2Backend(), tiles, tensors), want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert stand_in.calls[0] == (40, 40, 0.0, True, 0.0, None, False)
    assert {call[3] for call in stand_in.calls} == {True, False}
    assert stand_in.calls[-1][-1] is deterministic


@pytest.mark.parametrize(("version", "reason"), [
    (None, "not installed"), ((2, 3), "2.3 is installed; expected 2.7"), ((3, 0), "expected 2.7"), ((2, 8), None),
])  # fmt: skip
def test_versions_of_flash_attn(version, reason, monkeypatch):
    monkeypatch.setattr(cuda_module, "_version", lambda: version)
    refusal = FlashAttn2Backend().refuses(_problem(device="cuda", dtype=torch.float16, softcap=5.0))
    assert refusal is None if reason is None else reason in refusal
    monkeypatch.setattr(cuda_module, "_version", lambda: (2, 8))
    assert "has no torch.float32" in FlashAttn2Backend().refuses(_problem(device="cuda"))
    assert "multiple of 8" in FlashAttn2Backend().refuses(_problem(device="cuda", dtype=torch.float16, head_dim=9))
