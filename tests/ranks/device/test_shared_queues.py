"""Streams that share hardware queues: whatever a queue holds first runs first, and no exchange waits for itself.

A GPU has fewer queues than programs have streams, and fewer still where processes share it. With one queue for all of a
rank's streams, its operations run in the order in which they were enqueued; any other number only orders fewer of them.

One thing needs queues of its own: more sends in the background than there are slots, of which the receives are
operations that come later (``through_the_api`` does it). docs/stream-transport.md says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import testing
from tests.harness.attention_oracle import GRADS, Case
from tests.harness.fakes import FakeMachine
from tests.harness.native import _testing
from tests.harness.stream_programs import PROGRAMS
from tests.harness.worlds import small_slots
from tests.ranks.device.test_device_collectives import messages
from tests.ranks.device.test_device_queues import long_messages
from tests.ranks.device.test_device_training import attention, training

QUEUES = [1, 2, 3]
ORDERED = [name for name in PROGRAMS if name != "through_the_api"]


def sharing(queues: int) -> Callable[[int, list[int]], _testing.TestDevice]:
    def opened(ordinal: int, out_of_reach: list[int]) -> _testing.TestDevice:
        device = _testing.TestDevice(ordinal, out_of_reach)
        device.share_queues(queues)
        return device

    return opened


def run(queues: int, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    machine = FakeMachine(world_size, opens=sharing(queues))
    with small_slots():
        return testing.run_threads(machine.ranks(fn), world_size, *args, transport="sim", timeout=40)


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("name", ORDERED)
def test_programs(name: str, queues: int) -> None:
    run(queues, PROGRAMS[name], 3)


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_operations(world_size: int, queues: int) -> None:
    run(queues, messages, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_many_pieces(world_size: int) -> None:
    run(1, long_messages, world_size, 60_000)


def several_landings() -> None:
    """Some messages of one exchange to the same peer have landing places, each with work behind it."""
    with hdp.init() as comm:
        zone = comm.landing_zone(torch.empty(0))
        assert zone is not None
        peer, count = 1 - comm.rank, 5000
        places = [zone.memory[at : at + 4 * count].view(torch.float32) for at in (0, 32768, 65536)]
        for turn in range(3):
            x = [torch.arange(count, dtype=torch.float32) * (k + 1) + comm.rank + turn for k in range(4)]
            between = torch.zeros(count)
            comm.exchange(
                [(x[0], peer, 0), (x[1], peer, 32768), (x[2], peer), (x[3], peer, 65536)],
                [(places[0], peer, 0), (places[1], peer, 32768), (between, peer), (places[2], peer, 65536)],
            )
            for k, got in enumerate((places[0], places[1], between, places[2])):
                assert torch.equal(got, torch.arange(count, dtype=torch.float32) * (k + 1) + peer + turn)


@pytest.mark.parametrize("queues", QUEUES)
def test_several_landing_places(queues: int) -> None:
    run(queues, several_landings, 2)


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("queues", QUEUES)
def test_attention(queues: int, variant: str) -> None:
    case = Case(4, [150, 7, 1, 61], heads=4, kv_heads=4, dtype=torch.float32, options={"variant": variant})
    for (got, _), (want, _) in zip(
        run(queues, attention, 4, case), testing.run_threads(attention, 4, case), strict=True
    ):
        for name in GRADS:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("queues", QUEUES)
def test_training(queues: int) -> None:
    for losses, weights in run(queues, training, 3):
        assert losses[-1] < losses[0]
        assert weights.isfinite().all()


def background() -> None:
    """Exchanges and collectives in the background, all posted before the first is waited for."""
    with hdp.init() as comm:
        n, r = comm.size, comm.rank
        x = torch.arange(3000, dtype=torch.float32) + r
        got, total = torch.zeros(3000), torch.zeros(3000)
        works = [
            comm.exchange([(x, (r + 1) % n)], [(got, (r - 1) % n)], async_op=True),
            comm.all_reduce(x, out=total, algorithm="ring", async_op=True),
            comm.exchange([(x, (r - 1) % n)], [(torch.zeros(3000), (r + 1) % n)], async_op=True),
        ]
        for work in reversed(works):
            work.wait()
        assert torch.equal(got, torch.arange(3000, dtype=torch.float32) + (r - 1) % n)
        assert torch.equal(total, n * torch.arange(3000, dtype=torch.float32) + n * (n - 1) / 2)


@pytest.mark.parametrize("queues", QUEUES)
def test_works_in_the_background(queues: int) -> None:
    run(queues, background, 3)
