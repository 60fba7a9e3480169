"""Operations over links and by NCCL in check mode: clean for every seed, and every line that orders is needed.

A thousand seeds: ``python -m tests.ranks.nccl.test_paths_check 1000``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import pytest
import torch

from tests.harness.fakes import check, planted_sites
from tests.harness.ring_program import annotated, ring_attention
from tests.harness.stream_programs import PROGRAMS, joined
from tests.harness.worlds import small_slots

HOSTS = {"cuda+nccl": (0, 0, 1), "nccl": ()}


def collectives() -> None:
    """The rest of the operations whose schedules cross, in the foreground and in the background."""
    with joined() as rank:
        n, count = rank.comm.size, 1500
        for background in (False, True):
            for op, algorithm in (
                ("all_gather", "hierarchical"),
                ("all_gather", "ring"),
                ("reduce_scatter", "hierarchical"),
                ("reduce_scatter", "direct"),
                ("all_reduce", "hierarchical"),
                ("all_reduce", "auto"),  # NCCL's own
            ):
                sizes = {"all_gather": (n, 1), "reduce_scatter": (1, n), "all_reduce": (1, 1)}[op]
                out, x = (torch.empty(k * count) for k in sizes)
                rank.made(x)
                work = rank.collective(op, out, x, count, algorithm, background=background)
                if background:
                    work.wait_on(rank.stream)
                rank.used(out)


# Peers' reads need links between all, and messages by NCCL are no program that sends first and then receives.
ALL = {name: program for name, program in PROGRAMS.items() if name not in ("peer_reads", "through_the_api")}
ALL |= {"more collectives": collectives, "ring_attention": ring_attention}


def run(name: str, transport: str, seeds: Iterable[int]) -> None:
    with small_slots(), annotated():
        check(ALL[name], 3, seeds=seeds, transport=transport, hosts=HOSTS[transport])


@pytest.mark.parametrize("transport", HOSTS)
@pytest.mark.parametrize("name", ALL)
def test_clean_in_any_order(name: str, transport: str) -> None:
    run(name, transport, range(9 if transport == "nccl" else 15))


def test_every_line_that_orders_is_needed() -> None:
    """All lines of the core but those of the fake, which stand for NCCL, the pacer (it bounds the host only), and those
    that keep messages in order, not memory (tests/ranks/device/test_small_messages.py, test_device_check.py)."""
    found: dict[tuple[str, int, str], bool] = {}
    with small_slots(), annotated():
        for name, program in ALL.items():
            options = {"transport": "cuda+nccl", "hosts": HOSTS["cuda+nccl"]}
            sites = planted_sites(program, 3, seeds=range(6), path="csrc", **options)
            for site in sites:
                if any(
                    name in site.file for name in ("/csrc/testing/", "/pacer.cpp", "/small_messages.cpp", "/mark.hpp")
                ):
                    continue
                key = (site.file, site.line, site.call)
                found[key] = found.get(key, False) or bool(site.found)
            assert sites, name
    assert not [key for key, seen in found.items() if not seen]
    rooms = {room: sum(room in file for file, _, _ in found) for room in ("comm/stream", "links", "nccl")}
    assert rooms["comm/stream"] >= 7, rooms
    assert rooms["links"] >= 18, rooms
    assert rooms["nccl"] >= 2, rooms


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind in HOSTS:
        for each in ALL:
            started = time.monotonic()
            run(each, kind, range(int(sys.argv[1])))
            print(f"{each} by {kind}: {sys.argv[1]} seeds clean, {time.monotonic() - started:.1f} s", flush=True)
