"""The tests of attention kernels and backends on a GPU; skipped without one."""

import pytest
import torch

from hdpcomm.attention import AttentionOptions, Problem, available_backends, ring_attention
from hdpcomm.attention.backends import choose
from hdpcomm.attention.backends.base import Accumulator, GradSum, Score
from hdpcomm.attention.backends.dense import ReferenceBackend
from hdpcomm.attention.rows import Rows, add_rows, copy_rows, merge
from hdpcomm.attention.tiles import Tile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = torch.device("cuda")
TILES = [Tile(0, 300, 0, 300, None, 0), Tile(300, 512, 300, 400), Tile(100, 512, 400, 640)]
BANDED = [*TILES, Tile(0, 60, 200, 240, -20, 12)]  # as band_tile() cuts it: every query and every key in the band


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(0, 2, 8), (1, 1, 1), (3, 2, 5), (65, 3, 129), (4096, 8, 128)])
@pytest.mark.parametrize("block", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_merge_is_the_one_of_the_cpu(tokens, heads, dim, block):
    acc = torch.float64 if block == torch.float64 else torch.float32
    out, part = torch.randn(tokens, heads, dim, dtype=acc), torch.randn(tokens, heads, dim).to(block)
    lse, part_lse = (torch.randn(heads, tokens, dtype=acc).t() for _ in range(2))
    lse = lse.contiguous()
    part_lse[tokens // 2 :] = -torch.inf
    rows = torch.randperm(tokens)
    for index in (None, rows):
        want_out, want_lse = out.clone(), lse.clone()
        merge(want_out, want_lse, part, part_lse, index)
        got_out, got_lse = out.to(CUDA), lse.to(CUDA)
        part_lse_cuda = part_lse.t().to(CUDA).t()
        merge(got_out, got_lse, part.to(CUDA), part_lse_cuda, None if index is None else index.to(CUDA))
        torch.testing.assert_close(got_out.cpu(), want_out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(got_lse.cpu(), want_lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 33, 64])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_copy_is_indexing(width, dtype):
    source = torch.randint(0, 100, (1000, 2, width)).to(dtype)
    rows = Rows([(0, 500, 300), (300, 7, 100), (400, 999, 1)])
    index = [*range(500, 800), *range(7, 107), 999]
    for src in (source, torch.cat((source, source), 1)[:, :2]):
        dst = torch.zeros(rows.total, 2, width, dtype=dtype, device=CUDA)
        copy_rows(dst, src.to(CUDA) if src.is_contiguous() else torch.cat((source, source), 1).to(CUDA)[:, :2], rows)
        assert torch.equal(dst.cpu(), source[index])


@pytest.mark.parametrize("width", [1, 3, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_add_is_indexed_addition(width, dtype):
    rows = Rows([(500, 0, 300), (7, 300, 100)])
    dst, src = torch.randn(1000, width, dtype=dtype), torch.randn(400, width, dtype=dtype)
    want, got = dst.clone(), dst.to(CUDA)
    add_rows(want, src, rows)
    add_rows(got, src.to(CUDA), rows)
    assert torch.equal(got.cpu(), want)


def _run(backend, tiles, tensors):
    q, k, v, dout = (x.to(backend.compute_dtype(x.dtype)) for x in tensors)
    result = Accumulator(q.shape, tensors[0])
    score = Score(q.shape[-1] ** -0.5)
    backend.forward((q, k, v), tiles, score, result)
    grads = tuple(GradSum(x.shape, x, result.dtype) for x in (q, k, v))
    backend.backward(dout, (q, k, v), result.out.to(q.dtype), result.lse, tiles, score, grads)
    return result.out, result.lse, *(grad.total() for grad in grads)


@pytest.mark.parametrize("name", ["flash-attn", "flash", "cudnn", "efficient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("banded", [False, True])
def test_backends_agree_with_the_reference(name, dtype, banded):
    problem = Problem("cuda", dtype, heads=4, kv_heads=2, head_dim=64, windowed=banded)
    if (reason := available_backends(problem)[name]) is not None:
        pytest.skip(reason)
    tensors = [torch.randn(n, h, 64, device=CUDA).to(dtype) for n, h in ((512, 4), (640, 2), (640, 2), (512, 4))]
    tiles = BANDED if banded else TILES
    got, want = _run(choose(name, problem), tiles, tensors), _run(ReferenceBackend(), tiles, tensors)
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm() / b.norm()) <= (1e-2 if dtype == torch.bfloat16 else 5e-6)


@pytest.mark.parametrize("ends", [(700, 701, 1024), (4500, 4800, 7100)])
@pytest.mark.parametrize("window", [None, 50])
def test_one_rank_equals_torchs_attention(window, ends):
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    q, k, v = (torch.randn(ends[-1], h, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    out = ring_attention(q, k, v, comm=None, cu_seqlens=cu, window=window, options=AttentionOptions(check=True))
    out.sum().backward()
    grads = [x.grad for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = ring_attention(*exact, comm=None, cu_seqlens=cu, window=window, backend="reference")
    want.sum().backward()
    for a, b in zip((out, *grads), (want, *(x.grad for x in exact)), strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= 1e-2
