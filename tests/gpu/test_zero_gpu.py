"""ZeRO-2 and 3 on a GPU: parts in device memory that processes import, pulled and added on streams of their own."""

from __future__ import annotations

import pytest
import torch

from hdpcomm.testing import spawn
from tests.ranks.device.test_device_training import ZERO, check_zero, zero_training
from tests.ranks.device.test_host_copies import check_stays, training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("zero", "dtype"), ZERO)
def test_training(zero: int, dtype: torch.dtype | None) -> None:
    check_zero(spawn(zero_training, 2, zero, dtype, transport="cuda"), zero, dtype)


@pytest.mark.parametrize(("zero", "dtype"), [(1, None), *ZERO])
def test_host_memory_between_steps(zero: int, dtype: torch.dtype | None) -> None:
    options = {"zero": zero, "dtype": dtype}
    runs = [spawn(training, 2, stores, options, transport="cuda") for stores in (True, False)]
    check_stays(*runs, rtol=1e-5 if dtype is None else 2e-2)
