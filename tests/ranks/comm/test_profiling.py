"""torch.profiler shows communication: an event for each operation, for each wait and for each ring step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from tests.harness.torch_groups import torch_ranks

Event = tuple[str, dict[str, Any]]


def events_of(run: Callable[[], None], *, shapes: bool = True) -> list[Event]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as found:
        run()
    ours = [event for event in found.events() if event.name.startswith("hdpcomm::")]
    ours.sort(key=lambda event: event.time_range.start)
    return [(event.name.removeprefix("hdpcomm::"), dict(event.kwinputs)) for event in ours]


def collectives() -> list[Event]:
    with hdp.init() as comm:
        peer = comm.size - 1 - comm.rank
        x, out = torch.ones(4), torch.empty(4 * comm.size)

        def run() -> None:
            comm.all_reduce(x)
            comm.all_gather(out, x, async_op=True).wait()
            comm.subset([comm.rank]).broadcast(x, 0)
            comm.exchange([(x, peer), (out, peer)], [(x.new_empty(4), peer), (torch.empty_like(out), peer)])
            comm.exchange(async_op=True).wait()
            if comm.rank < peer:
                comm.send(x, peer)
            elif comm.rank > peer:
                comm.recv(x, peer)
            comm.barrier()

        run()  # without a profiler
        return events_of(run)


def test_each_operation_and_wait_has_an_event(ranks: Any) -> None:
    both = {"ranks": "0,1"}
    for rank, found in enumerate(ranks(2, collectives)):
        assert found == [
            ("all_reduce", {"bytes": 16, **both}),
            ("all_gather", {"bytes": 32, **both}),
            ("wait all_gather", {"bytes": 32, **both}),
            ("broadcast", {"bytes": 16, "ranks": str(rank)}),
            ("exchange", {"sent": 48, "received": 48, **both}),
            ("exchange", {"sent": 0, "received": 0, **both}),
            ("wait exchange", {"sent": 0, "received": 0, **both}),
            ("send" if rank == 0 else "recv", {"bytes": 16, "ranks": "0,1" if rank == 0 else "1,0"}),
            ("barrier", {"bytes": 0, **both}),
        ]


def backend() -> list[Event]:
    with torch_ranks() as (rank, size):
        x = torch.ones(8, dtype=torch.float64)

        def run() -> None:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            dist.isend(x, rank).wait() if size == 1 else (dist.send if rank == 0 else dist.recv)(x, 1 - rank)

        return events_of(run)


def test_operations_of_torch_distributed_have_them(ranks: Any) -> None:
    told = {"bytes": 64, "ranks": "0,1"}
    for rank, found in enumerate(ranks(2, backend)):
        call, message = "send" if rank == 0 else "recv", {"bytes": 64, "ranks": "0,1" if rank == 0 else "1,0"}
        assert found == [
            ("all_reduce", told),
            ("all_reduce", told),
            ("wait all_reduce", told),
            (call, message),
            (f"wait {call}", message),
        ]


def ring() -> tuple[list[Event], list[Event]]:
    from hdpcomm.attention import packed_attention, packing

    with hdp.init() as comm:
        q, k, v = (torch.randn(8, 2, 8, requires_grad=True) for _ in range(3))

        def run() -> None:
            with packing(comm, torch.tensor([0, 8 * comm.size])):
                packed_attention(q, k, v).sum().backward()

        named = events_of(run)
        return named, events_of(run, shapes=False)


def test_ring_steps_hold_the_events_of_their_exchange(ranks: Any) -> None:
    kv = 8 * 2 * 2 * 8 * 4  # bytes of a rank's keys and values
    # Rank 0 has the first and the last quarter: rank 1 needs the first of them, rank 0 both of rank 1's. Keys and
    # values go in both passes, their gradients back in one.
    expected = [2 * kv // 2 + kv, 2 * kv + kv // 2]
    for rank, (found, without_values) in enumerate(ranks(2, ring)):
        steps = [(name, told["step"]) for name, told in found if name.startswith("ring")]
        assert steps == [("ring forward", 0), ("ring forward", 1)] + [("ring backward", t) for t in range(3)]
        sent = sum(told["sent"] for name, told in found if name == "exchange")
        assert sent == expected[rank]
        assert [name for name, _ in without_values] == [name for name, _ in found]
        assert not any(told for _, told in without_values)


def errors() -> list[str]:
    with hdp.init() as comm:
        wrong: list[Callable[[], Any]] = [
            lambda: comm.send(torch.ones(1), 7),
            lambda: comm.recv(torch.ones(1), "next"),  # type: ignore[arg-type]
            lambda: comm.exchange([torch.ones(1)]),  # type: ignore[list-item]
            lambda: comm.exchange(3),  # type: ignore[arg-type]
            lambda: comm.all_reduce([1.0]),
            lambda: comm.all_reduce(torch.ones(1), "most"),
        ]
        told = []
        for call in wrong:
            with pytest.raises(InvalidUsage) as plain:
                call()
            with profile(activities=[ProfilerActivity.CPU]), pytest.raises(InvalidUsage) as profiled:
                call()
            assert str(plain.value) == str(profiled.value)
            told.append(str(plain.value))
        comm.barrier()
        return told


def test_errors_are_the_same_with_a_profiler(ranks: Any) -> None:
    for told in ranks(2, errors):
        assert len(told) == 6
