"""With ZeRO-2 and 3 on CPUs, memory of layers that come and go goes back to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, torch
from hdpcomm.train.units import return_large_blocks

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usm fsm used free top".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
if sys.argv[1] == "True":
    return_large_blocks()
torch.empty(8 << 20, dtype=torch.uint8)  # freed: glibc takes the next one of this size from the heap
before = mallinfo().hblkhd
block = torch.empty(8 << 20, dtype=torch.uint8)
print(mallinfo().hblkhd - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library than glibc 2.33")
@pytest.mark.parametrize(
    ("called", "threshold", "own"), [(True, None, True), (False, None, False), (True, str(64 << 20), False)]
)
def test_large_blocks_have_pages_of_their_own(called: bool, threshold: str | None, own: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    if threshold is not None:  # the user's own
        environment["MALLOC_MMAP_THRESHOLD_"] = threshold
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(called)], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) >= 8 << 20) == own
