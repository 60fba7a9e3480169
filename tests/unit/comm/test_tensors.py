"""What crosses to the core of a tensor: the quick way through torch's C interface says what the tensor itself says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hdpcomm import _core
from hdpcomm.comm.tensors import describe, plain_tensors
from hdpcomm.errors import InvalidUsage

DTYPES = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
    "uint16",
    "uint32",
    "uint64",
]  # all that the core knows


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_is_described_by_address_count_and_type(name: str) -> None:
    x = torch.zeros(5, 3, dtype=getattr(torch, name))[1:]
    address, count, code = describe(x, "x")
    assert (address, count, code) == (x.data_ptr(), 12, _core.DTYPES[str(x.dtype).removeprefix("torch.")])


@pytest.mark.parametrize(
    ("x", "count"),
    [
        (torch.zeros(()), 1),
        (torch.zeros(0, 4), 0),
        (torch.zeros(3, requires_grad=True), 3),
        (torch.nn.Parameter(torch.zeros(2, 2)), 4),
        (torch.zeros(4, 1, 3).transpose(0, 1), 12),
        (torch.nn.Buffer(torch.zeros(7)), 7),
    ],
)
def test_unusual_tensors(x: torch.Tensor, count: int) -> None:
    address, elements, code = describe(x, "x")
    assert elements == count
    assert code == _core.DTYPES["float32"]
    assert count == 0 or address == x.data_ptr()


def test_tensors_that_wrap_others_are_refused() -> None:
    """They have no memory of their own: the core would read from address 0."""
    from torch.testing._internal.two_tensor import TwoTensor

    wrapping = TwoTensor(torch.ones(4), torch.zeros(4))
    with pytest.raises(InvalidUsage, match=r"x is a TwoTensor, whose values lie in the tensors .*'a', 'b'"):
        describe(wrapping, "x")
    assert [each.tolist() for each in plain_tensors(wrapping)] == [[1.0] * 4, [0.0] * 4]


class Wrapped(torch.Tensor):
    pass


def test_subclasses_and_arrays_take_the_long_way() -> None:
    x = torch.arange(6.0)
    assert describe(x.as_subclass(Wrapped), "x") == describe(x, "x") == describe(x.numpy(), "x")
    assert describe(np.zeros(3, np.int16), "x")[1] == 3


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 4).t(), "x is not contiguous"),
        (torch.zeros(2).expand(2, 2), "x is not contiguous"),
        (torch.tensor([1 + 2j]).conj().imag, r"x is a lazily negated view.*resolve_neg\(\)"),
        (torch.zeros(2, dtype=torch.complex64), "x has dtype torch.complex64"),
        (torch.zeros(2, device="meta"), "x is on meta"),
        ([1.0, 2.0], "x is a list"),
    ],
)
def test_what_cannot_cross_is_named(x: Any, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        describe(x, "x")
