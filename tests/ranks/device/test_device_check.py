"""The transport and the executor in check mode: no errors for any seed, and every line that orders work is needed.

A thousand seeds: ``python -m tests.ranks.device.test_device_check 1000``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import pytest
import torch

from hdpcomm.testing.device_check import PlantedSite, check, planted_sites
from tests.harness.ring_program import annotated, ring_attention
from tests.harness.stream_programs import PROGRAMS
from tests.harness.worlds import small_slots

ALL = {**PROGRAMS, "ring_attention": ring_attention}


def run(name: str, world_size: int, seeds: Iterable[int]) -> None:
    with small_slots(), annotated():
        check(ALL[name], world_size, seeds=seeds, transport="sim")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ALL)
def test_clean_in_any_order(name: str, world_size: int) -> None:
    run(name, world_size, range(50 if world_size == 2 else 10))


def test_every_line_that_orders_is_needed() -> None:
    found: dict[tuple[str, int, str], bool] = {}
    with small_slots(), annotated():
        for name, program in ALL.items():
            sites: list[PlantedSite] = planted_sites(program, 2, seeds=range(3), path="csrc", transport="sim")
            for site in sites:
                # The pacer bounds the host only. Flags keep kernels of small messages apart in any order; their lines
                # keep the messages in order, which tests/ranks/device/test_small_messages.py looks at.
                if any(name in site.file for name in ("/device/simulated/", "/pacer.cpp", "/small_messages.cpp")):
                    continue
                key = (site.file, site.line, site.call)
                found[key] = found.get(key, False) or bool(site.found)
            assert sites, name
    assert not [key for key, seen in found.items() if not seen]
    calls = [call for _, _, call in found]
    assert len(calls) >= 26
    assert {"record", "wait", "writeValue", "waitValue", "synchronize", "kernel signal"} <= set(calls)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in ALL:
        for size in (2, 3):
            started = time.monotonic()
            run(each, size, range(int(sys.argv[1])))
            print(f"{each} on {size} ranks: {sys.argv[1]} seeds clean, {time.monotonic() - started:.1f} s", flush=True)
