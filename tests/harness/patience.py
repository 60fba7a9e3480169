"""How much longer than usual tests may wait where everything is slower: tools/sanitize.py sets ``TESTS_PATIENCE``."""

from __future__ import annotations

import os

from hdpcomm import testing
from hdpcomm.testing import device_check

__all__ = ["PATIENCE", "be_patient"]

PATIENCE = float(os.environ.get("TESTS_PATIENCE", "1"))
"""A factor for limits that no test is about: none that passes is faster or slower with it."""


def be_patient() -> None:
    """Gives ranks that a test starts without a ``timeout`` of its own so many times the usual one."""
    for start in (testing.spawn, testing.run_threads, device_check.check, device_check.planted_sites):
        assert start.__kwdefaults__ is not None
        start.__kwdefaults__["timeout"] *= PATIENCE
