"""Reductions and the kernels over several buffers, compared with numpy in float64 and in wider integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm import kernels
from hdpcomm._core import kernels as core
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import transfers
from tests.harness import buffer_kernels

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
OPS = ("sum", "prod", "min", "max")
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([1023, 1024, 1025, 4099]))
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 1e-7, -3e-8, 1e-40)


def values(generator, count, dtype, offset=0):
    """Random elements of a type, ``offset`` elements into their memory; floats with special values among them."""
    if dtype.is_floating_point:
        x = torch.from_numpy(generator.normal(0, 3, count))
        places = generator.integers(0, max(count, 1), count // 4)
        x[places] = torch.from_numpy(generator.choice(SPECIAL, len(places)))
    elif dtype == torch.bool:
        x = torch.from_numpy(generator.integers(0, 2, count))
    else:
        x = torch.from_numpy(generator.integers(-(2**62), 2**62, count))
    place = torch.empty(count + offset, dtype=dtype)[offset:]
    return place.copy_(x.to(dtype))


def exact(op, tensors):
    """The fold with higher precision: in float64, or with Python integers."""
    name = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}[op]
    if tensors[0].dtype.is_floating_point:
        arrays = [x.double().numpy() for x in tensors]
    else:
        arrays = [np.array([int(v) for v in x.tolist()], dtype=object) for x in tensors]
    result = arrays[0]
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            result = getattr(np, name)(result, array)
    return result


def back(result, dtype):
    """The exact result as ``dtype``: rounded, or wrapped."""
    if dtype.is_floating_point:
        # Sums and products of two 16-bit floats are exact in fp32 up to one rounding; so is this.
        return torch.from_numpy(np.asarray(result, dtype=np.float64)).to(dtype)
    bits = 8 * torch.empty(0, dtype=dtype).element_size()
    wrapped = [int(v) % 2**bits for v in result]
    unsigned = np.array(wrapped, dtype=f"uint{bits}")
    return torch.from_numpy(unsigned).view(dtype)


def same_bits(a, b):
    """Asserts equal bits, except for NaN payloads."""
    if a.dtype.is_floating_point:
        nan = a.isnan()
        assert torch.equal(nan, b.isnan())
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if a.numel():
        assert torch.equal(a.clone().view(torch.uint8), b.clone().view(torch.uint8))


@given(
    st.integers(0, 2**32), SIZES, st.sampled_from(FLOATS + INTS), st.sampled_from(OPS),
    st.tuples(*[st.integers(0, 17)] * 3), st.sampled_from(["new", "a", "b"]),
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_reduce_is_exact_arithmetic_rounded_once(seed, count, dtype, op, offsets, into):
    generator = np.random.default_rng(seed)
    a, b, out = (values(generator, count, dtype, offset) for offset in offsets)
    # The oracle rounds float64 to 16 bits in two steps (as torch does), like fp32 maths that is rounded once.
    want = exact(op, (a.float(), b.float()) if dtype in (torch.float16, torch.bfloat16) else (a, b))
    want = back(want, torch.float32).to(dtype) if dtype in (torch.float16, torch.bfloat16) else back(want, dtype)
    target = {"new": out, "a": a, "b": b}[into]
    kernels.reduce(target, a, b, op=op)
    if dtype.is_floating_point and op in ("min", "max"):
        want, target = want + 0.0, target + 0.0  # min and max may return either zero
    same_bits(target, want)


@pytest.mark.parametrize("op", OPS)
def test_bools_are_or_and_and(op):
    a, b = torch.tensor([0, 0, 1, 1], dtype=torch.bool), torch.tensor([0, 1, 0, 1], dtype=torch.bool)
    out = torch.empty(4, dtype=torch.bool)
    kernels.reduce(out, a, b, op=op)
    assert torch.equal(out, (a | b) if op in ("sum", "max") else (a & b))


@given(st.integers(0, 2**32), SIZES, st.sampled_from(FLOATS), st.integers(0, 9), st.sampled_from([1, 2, 3, 7, 64]))
@settings(max_examples=80, deadline=None)
def test_divide(seed, count, dtype, offset, divisor):
    x = values(np.random.default_rng(seed), count, dtype, offset)
    wide = x.double() if dtype == torch.float64 else x.float()
    want = (wide / divisor).to(dtype)
    buffer_kernels.divide(x, divisor)
    same_bits(x, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
def test_all_16_bit_values_go_to_float_and_back(dtype, divisor):
    """Halves of subnormal values lie in the middle between two others: ties to even."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = every.clone()
    buffer_kernels.divide(out, divisor)
    same_bits(out, (every.float() / divisor).to(dtype))


@given(
    st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 3), SIZES, st.sampled_from(FLOATS + INTS),
    st.sampled_from((*OPS, "avg")), st.lists(st.integers(0, 9), min_size=12, max_size=12), st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_fold_goes_from_left_to_right_and_rounds_once(
    seed, num_inputs, num_outputs, count, dtype, op, offsets, in_place
):
    if op == "avg" and not dtype.is_floating_point:
        op = "sum"
    generator = np.random.default_rng(seed)
    inputs = [values(generator, count, dtype, offset) for offset in offsets[:num_inputs]]
    outputs = [torch.empty(count + offset, dtype=dtype)[offset:] for offset in offsets[9 : 9 + num_outputs]]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    acc = inputs[0].to(wide)
    for x in inputs[1:]:  # one rounding to `wide` a step, from the exact value
        acc = back(exact("sum" if op == "avg" else op, (acc, x.to(wide))), wide)
    want = (acc / num_inputs if op == "avg" else acc).to(dtype)
    if in_place:
        outputs[0] = inputs[-1]
    buffer_kernels.fold(outputs, inputs, op=op)
    for got in outputs:
        if dtype.is_floating_point and op in ("min", "max"):
            same_bits(got + 0.0, want + 0.0)
        else:
            same_bits(got, want)


@given(st.integers(0, 2**32), st.integers(1, 8), SIZES, st.integers(0, 20), st.integers(0, 7), st.integers(0, 33))
@settings(max_examples=60, deadline=None)
def test_collect_lays_the_inputs_side_by_side(seed, num_inputs, count, offset, first, room):
    generator = np.random.default_rng(seed)
    inputs = [values(generator, count, torch.uint8, int(generator.integers(0, 20))) for _ in range(num_inputs)]
    memory = torch.full((num_inputs * (count + room) + offset,), 9, dtype=torch.uint8)
    out = memory[offset:].view(num_inputs, count + room)[:, :count]
    out[0] = inputs[0]
    want = torch.stack(inputs)
    inputs[0] = out[0]  # already in its place
    buffer_kernels.collect(out, inputs, first=first % num_inputs)
    assert torch.equal(out, want)
    assert (memory[offset:].view(num_inputs, count + room)[:, count:] == 9).all()


@given(SIZES, st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_put_copies_and_signals(count, to, start):
    src = torch.randint(0, 255, (count + start,), dtype=torch.uint8)[start:]
    dst, flag = torch.zeros(count + to + 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    buffer_kernels.put(dst[to : to + count], src, flag, 7)
    assert torch.equal(dst[to : to + count], src)
    assert dst[-1] == 0
    assert flag.item() == 7


def test_bad_arguments_say_what_is_wrong():
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(InvalidUsage, match="no reduction 'mean'; expected sum, prod"):
        kernels.reduce(x, x, x, op="mean")
    with pytest.raises(InvalidUsage, match="tensors of a reduction differ"):
        kernels.reduce(x, x, y)
    with pytest.raises(InvalidUsage, match="not contiguous"):
        kernels.reduce(x[::2], x[::2], x[::2])
    with pytest.raises(InvalidUsage, match="'avg' needs a floating type, not int32"):
        kernels.reduce(y, y, y, op="avg")
    with pytest.raises(InvalidUsage, match="'avg' needs a floating type, not int32"):
        buffer_kernels.divide(y, 2.0)
    with pytest.raises(InvalidUsage, match="65 inputs of a fold; expected 1 to 64"):
        buffer_kernels.fold([x], [x] * 65)
    with pytest.raises(InvalidUsage, match="4 bytes apart; expected at least the 16 bytes"):
        buffer_kernels.collect(torch.zeros(5).as_strided((2, 4), (1, 1)), [x, x])
    with pytest.raises(InvalidUsage, match="first is 2; expected 0 to 1"):
        buffer_kernels.collect(torch.zeros(2, 4), [x, x], first=2)
    buffer_kernels.divide(torch.zeros(4, device="meta"), 2.0)  # sizes are all that counts there
    with pytest.raises(InvalidUsage, match="complex64 was given; expected"):
        buffer_kernels.divide(torch.zeros(4, dtype=torch.complex64), 2.0)
    kernels.reduce(x, x, x)  # and the next one works


def test_the_core_refuses_what_python_cannot_pass():
    with pytest.raises(InvalidUsage, match="must not be negative; got -1"):
        core.reduce(0, 0, 0, -1, 7, 0, False, 0)
    with pytest.raises(InvalidUsage, match="begins 2 bytes after a multiple of 4, where no float32 can lie"):
        core.reduce(2, 0, 0, 0, 7, 0, False, 0)
    with pytest.raises(InvalidUsage, match="no reduction"):
        core.reduce(0, 0, 0, 0, 7, 255, False, 0)
    with pytest.raises(InvalidUsage, match="flag of a put"):
        core.put(0, 0, 0, 2, 1, False, 0)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_sums_take_addends_of_other_types_in_pieces(monkeypatch, narrow):
    monkeypatch.setattr(transfers, "_PIECE_ELEMENTS", 7)
    generator = np.random.default_rng(0)
    sums, addend = (torch.from_numpy(generator.normal(0, 3, (5, 9))) for _ in range(2))
    sums, addend = sums.float(), addend.to(narrow)
    wanted = (sums.numpy().astype(np.float64) + addend.double().numpy()).astype(np.float32)
    transfers.accumulate(sums, addend)
    assert np.array_equal(sums.numpy(), wanted)  # one rounding of the exact sum
