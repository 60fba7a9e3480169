"""The CUDA kernels compared with the CPU kernels, which tests/unit/kernels compares with oracles. Needs a GPU.

Tests have the names of those for the CPU. Results must be bitwise equal, except for NaN payloads and for sums in
another order.
"""

import numpy as np
import pytest
import torch

from hdpcomm import kernels
from hdpcomm.attention import positions, shard
from hdpcomm.attention.rows import merge
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import lean
from tests.harness import buffer_kernels
from tests.unit.kernels.test_kernels_buffers import FLOATS, INTS, OPS, same_bits, values
from tests.unit.kernels.test_kernels_cross_entropy import DTYPES, ROUNDING, problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = torch.device("cuda")
SIZES = (0, 1, 7, 1023, 4099, 300_001)


def on_gpu(x, offset=0):
    """A copy on the GPU that begins ``offset`` elements after a boundary of 256 bytes."""
    place = torch.empty(x.numel() + offset, dtype=x.dtype, device=CUDA)[offset:]
    return place.view(x.shape).copy_(x)


def mixed(seed, dtype, number=2, offset=0):
    generator = np.random.default_rng(seed)
    return [[values(generator, count, dtype, offset) for _ in range(number)] for count in SIZES]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool])
def test_reduce_is_exact_arithmetic_rounded_once(dtype, op):
    for a, b in mixed(1, dtype):
        for offsets in ((0, 0, 0), (1, 1, 1), (0, 1, 3), (5, 0, 2)):
            want = torch.empty_like(a)
            kernels.reduce(want, a, b, op=op)
            out, left, right = (on_gpu(x, offset) for x, offset in zip((want, a, b), offsets, strict=True))
            out.zero_()
            kernels.reduce(out, left, right, op=op)
            same_bits(out.cpu(), want)
            kernels.reduce(left, left, right, op=op)
            same_bits(left.cpu(), want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_divide(dtype):
    for (x,) in mixed(2, dtype, 1):
        for offset in (0, 1):
            got = on_gpu(x, offset)
            want = x.clone()
            buffer_kernels.divide(got, 7.0)
            buffer_kernels.divide(want, 7.0)
            same_bits(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
def test_all_16_bit_values_go_to_float_and_back(dtype, divisor):
    """Halves of subnormal values lie in the middle between two others: ties to even."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = every.clone().to(CUDA)
    buffer_kernels.divide(out, divisor)
    same_bits(out.cpu(), (every.float() / divisor).to(dtype))


@pytest.mark.parametrize("op", [*OPS, "avg"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64])
def test_fold_goes_from_left_to_right_and_rounds_once(dtype, op):
    if op == "avg" and not dtype.is_floating_point:
        with pytest.raises(InvalidUsage, match="floating type"):
            buffer_kernels.fold(
                [torch.zeros(1, dtype=dtype, device=CUDA)], [torch.zeros(1, dtype=dtype, device=CUDA)], op=op
            )
        return
    for inputs in mixed(4, dtype, 9):
        for offsets in (0, 1):
            want = torch.empty_like(inputs[0])
            buffer_kernels.fold([want], inputs, op=op)
            outputs = [on_gpu(torch.zeros_like(want), i * offsets) for i in range(3)]
            buffer_kernels.fold(outputs, [on_gpu(x, i * offsets) for i, x in enumerate(inputs)], op=op)
            for out in outputs:
                same_bits(out.cpu(), want)


def test_collect_lays_the_inputs_side_by_side():
    for inputs in mixed(5, torch.uint8, 5):
        for offset in (0, 3):
            out = on_gpu(torch.zeros(5, inputs[0].numel(), dtype=torch.uint8), offset)
            buffer_kernels.collect(out, [on_gpu(x, i * offset) for i, x in enumerate(inputs)], first=2)
            assert torch.equal(out.cpu(), torch.stack(inputs))


def test_put_copies_and_signals():
    for (x,) in mixed(6, torch.uint8, 1):
        flag = torch.zeros(1, dtype=torch.int32, device=CUDA)
        dst = on_gpu(torch.zeros_like(x), 1)
        buffer_kernels.put(dst, on_gpu(x, 2), flag, 7)
        assert torch.equal(dst.cpu(), x)
        assert flag.item() == 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 37, 2048, 2049, 50257])
def test_loss_and_gradient_are_the_oracles(dtype, columns):
    logits, labels, weights, upstream = problem(columns, 17, columns, dtype)
    results = []
    for device in ("cpu", CUDA):
        anchor = torch.zeros(1, dtype=dtype, device=device, requires_grad=True)
        inner = logits.to(device) + 0 * anchor
        loss = kernels.cross_entropy(inner, labels.to(device), weights=weights.to(device))
        (grad,) = torch.autograd.grad(loss, inner, upstream.to(device))
        assert grad.data_ptr() == inner.data_ptr()
        results.append((loss.detach().cpu(), grad.float().cpu()))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=3e-6)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-5, rtol=4 * ROUNDING[dtype])


def test_a_label_outside_the_vocabulary_makes_the_loss_nan():
    """A bad label makes the loss NaN; only the CPU raises, since reading labels back would stop the stream."""
    loss = kernels.cross_entropy(torch.zeros(3, 4, device=CUDA), torch.tensor([0, 4, -1], device=CUDA))
    assert loss.isnan().tolist() == [False, True, True]


def test_no_memory_of_the_logits_size_is_taken():
    logits = torch.randn(512, 32768, device=CUDA, dtype=torch.bfloat16, requires_grad=True) * 1
    labels = torch.randint(0, 32768, (512,), device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(kernels.cross_entropy(logits, labels).sum(), logits)
    assert torch.cuda.max_memory_allocated() - before < logits.numel() // 10


def test_an_empty_result_may_hold_anything():
    out, lse = torch.full((65, 3, 64), torch.nan, device=CUDA), torch.full((65, 3), -torch.inf, device=CUDA)
    part, part_lse = torch.randn(65, 3, 64, device=CUDA), torch.randn(65, 3, device=CUDA)
    merge(out, lse, part, part_lse)
    assert torch.equal(out, part)
    assert torch.equal(lse, part_lse)


@pytest.mark.parametrize("width", [0, 1, 3, 256, 20000])
def test_positions_and_rows(width):
    cu = [0, 700, 701, 1024]
    x = torch.randn(1024, width)
    for rank in range(3):
        assert torch.equal(shard(x.to(CUDA), cu, rank=rank, size=3).cpu(), shard(x, cu, rank=rank, size=3))
        places = positions(cu, rank=rank, size=3)
        assert torch.equal(positions(cu, rank=rank, size=3, device=CUDA).cpu(), places)


def test_kernels_run_on_the_current_stream():
    side = torch.cuda.Stream()
    a = torch.randn(1 << 22, device=CUDA)
    out = torch.zeros_like(a)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        kernels.reduce(out, a, a)
        assert not side.query()
    side.synchronize()
    assert torch.equal(out, 2 * a)


def _needs_memory(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


def test_sizes_beyond_32_bits():
    _needs_memory(8)
    count = 2**31 + 1001
    a = torch.randint(-100, 100, (count,), dtype=torch.int8, device=CUDA)
    out = torch.zeros_like(a)
    kernels.reduce(out, a, a)
    for part in (slice(0, 5000), slice(2**31 - 5000, 2**31 + 900), slice(count - 5000, count)):
        assert torch.equal(out[part], a[part] + a[part])


def test_logits_beyond_32_bits():
    _needs_memory(8)
    tokens, columns = 2**14 + 3, 2**17
    logits = torch.zeros(1, device=CUDA, dtype=torch.bfloat16, requires_grad=True).expand(tokens, columns) * 1
    logits.data[-1] = torch.randn(columns, device=CUDA)
    labels = torch.randint(0, columns, (tokens,), device=CUDA)
    last = logits[-1:].detach().clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(last.float(), labels[-1:], reduction="sum")
    want.backward()
    loss = kernels.cross_entropy(logits, labels)
    torch.testing.assert_close(loss[-1], want.detach(), atol=1e-5, rtol=3e-6)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(grad[-1], last.grad[0], atol=1e-5, rtol=2**-7)


def test_kernels_are_captured_and_replayed():
    out, part = torch.randn(65, 3, 64, device=CUDA), torch.randn(65, 3, 64, device=CUDA)
    lse, part_lse = torch.randn(65, 3, device=CUDA), torch.randn(65, 3, device=CUDA)
    summed = torch.zeros_like(part)
    want_out, want_lse = out.clone(), lse.clone()
    for _ in range(2):
        merge(want_out, want_lse, part, part_lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge(out, lse, part, part_lse)
        kernels.reduce(summed, part, part)
        buffer_kernels.divide(summed, 2.0)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    assert torch.equal(summed, part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", lean.ACTIVATIONS)
def test_norms_activations_and_rotations(activation, dtype):
    """hdpcomm.models.lean on this device against float64 on the CPU."""
    x, up, weight = (torch.randn(shape).to(dtype) for shape in ((33, 4, 64), (33, 4, 64), (64,)))
    angles = torch.randn(33, 1, 32)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def results(place, wide):
        a, b, w = (t.to(place, wide).requires_grad_() for t in (x, up, weight))
        cos, sin = (t.to(place, wide) for t in tables)
        mixed = lean.gated(lean.rms_norm(a, w, 1e-5), lean.rms_norm(b, w, 1e-5, offset=1.0), activation)
        gates = torch.cat((mixed, a), dim=-1)
        mixed = lean.gate_halves(gates, activation) + lean.gate_clamped(gates, 1.7, 1.5)
        out = lean.rotate(mixed, cos, sin)
        out.backward(torch.ones_like(out))
        return [t.detach().double().cpu() for t in (out, a.grad, b.grad, w.grad)]

    for got, want in zip(results(CUDA, dtype), results("cpu", torch.float64), strict=True):
        assert float((got - want).norm() / want.norm()) <= (2e-2 if dtype == torch.bfloat16 else 1e-5)
