"""ZeRO-2 and 3 on a GPU: parts in device memory that processes import, pulled and added on streams of their own."""

from __future__ import annotations

import pytest
import torch

from hdpcomm.testing import spawn
from tests.ranks.device.test_device_training import ZERO, check_zero, zero_training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("zero", "dtype"), ZERO)
def test_training(zero: int, dtype: torch.dtype | None) -> None:
    check_zero(spawn(zero_training, 2, zero, dtype, transport="cuda"), zero, dtype)
