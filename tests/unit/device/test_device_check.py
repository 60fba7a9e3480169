"""SimDevice's check mode: correct programs are clean, and each line that orders is missed when it is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hdpcomm._core.device import Device, open_sim
from hdpcomm.testing.sim_check import check, current_rank
from tests.unit.device.contract import PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_contract(program: Callable[[Device], None]) -> None:
    check(lambda: program(open_sim(current_rank())), 1, seeds=range(9))
