"""One-shot and two-shot collectives, whose kernels read peers, compared with a sum in torch and with shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.costs import load_costs
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.testing import run_threads, spawn
from tests.harness.native import _testing
from tests.harness.worlds import small_slots

WAYS = [
    ("all_gather", "one_shot"),
    ("reduce_scatter", "one_shot"),
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
]
COUNTS = (0, 1, 31, 2048, 2049, 5001)  # of a block; the window of these tests holds 2048 floats


def drawn(count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def folded(operands: list[torch.Tensor], op: str) -> torch.Tensor:
    """The sum in the documented order: from rank 0 on, in float32 (float64 for float64), rounded once."""
    wide = torch.promote_types(operands[0].dtype, torch.float32) if operands[0].is_floating_point() else torch.int64
    total = operands[0].to(wide).numpy().copy()
    for x in operands[1:]:
        total = np.maximum(total, x.to(wide).numpy()) if op == "max" else total + x.to(wide).numpy()
    if op == "avg":
        total = total / total.dtype.type(len(operands))
    return torch.from_numpy(total).to(operands[0].dtype)


def run(comm: hdp.Communicator, way: tuple[str, str], x: torch.Tensor, op: str, *, in_place: bool) -> torch.Tensor:
    """The result of an operation on ``x``, which is a block, or one for each rank in a reduce_scatter."""
    name, algorithm = way
    count = x.numel() // (comm.size if name == "reduce_scatter" else 1)
    block = slice(comm.rank * count, (comm.rank + 1) * count)
    if name == "all_gather":
        out = x.new_full((comm.size * count,), 77)
        if in_place:
            x = out[block].copy_(x)
        comm.all_gather(out, x, algorithm=algorithm)
    elif name == "reduce_scatter":
        out = x[block] if in_place else x.new_full((count,), 77)
        comm.reduce_scatter(out, x, op, algorithm=algorithm)
    else:
        out = x if in_place else x.new_full((count,), 77)
        comm.all_reduce(x, op, out=None if in_place else out, algorithm=algorithm)
    return out


def expected(comm: hdp.Communicator, name: str, count: int, op: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    blocks = comm.size if name == "reduce_scatter" else 1
    operands = [drawn(blocks * count, seed + rank, dtype) for rank in comm.ranks]
    if name == "all_gather":
        return torch.cat(operands)
    if name == "reduce_scatter":
        operands = [x[comm.rank * count : (comm.rank + 1) * count] for x in operands]
    return folded(operands, op)


def check(comm: hdp.Communicator, way: tuple[str, str], count: int, op: str, dtype: torch.dtype, seed: int = 0) -> None:
    want = expected(comm, way[0], count, op, seed, dtype)
    blocks = comm.size if way[0] == "reduce_scatter" else 1
    zone = comm.landing_zone(want)
    assert zone is not None
    for in_place in (False, True):
        x = drawn(blocks * count, seed + comm.global_rank, dtype)
        landed = zone.memory[512 : 512 + x.numel() * x.element_size()].view(dtype).copy_(x)
        for operand in (x, landed):
            got = run(comm, way, operand, op, in_place=in_place)
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=f"{way} {count} {op} {dtype} {in_place=}")
            comm.barrier()  # the zone is written again


def everything(ranks: tuple[int, ...]) -> None:
    with hdp.init() as world:
        comm = world.subset(ranks)
        if comm is None:
            return
        for way in WAYS:
            for count in COUNTS:
                check(comm, way, count, "sum", torch.float32)
            for dtype, op in (
                (torch.bfloat16, "avg"),
                (torch.float64, "sum"),
                (torch.int16, "max"),
                (torch.int64, "sum"),
            ):
                check(comm, way, 4099, op, dtype)


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (2, 0, 1), (3, 1), (0, 1, 2, 3)])
def test_all_sizes_in_place_and_landed(ranks: tuple[int, ...]) -> None:
    with small_slots():
        run_threads(everything, max(ranks) + 1, ranks, transport="sim")


def random_mix(operations: list[Any]) -> None:
    with hdp.init() as world:
        works = []
        for seed, (ranks, way, count, background) in enumerate(operations):
            comm = world.subset(ranks)
            if comm is None:
                continue
            blocks = comm.size if way[0] == "reduce_scatter" else 1
            x = drawn(blocks * count, 10 * seed + world.rank, torch.float32)
            out = torch.zeros(count * (comm.size if way[0] == "all_gather" else 1))
            call: Callable[..., hdp.Work] = getattr(comm, way[0])
            inputs = (x,) if way[0] == "all_reduce" else (out, x)
            more = {"out": out} if way[0] == "all_reduce" else {}
            work = call(*inputs, algorithm=way[1], async_op=background, **more)
            works.append((work, out, expected(comm, way[0], count, "sum", 10 * seed, torch.float32)))
        for work, out, want in works:
            work.wait()
            assert torch.equal(out, want)


OPERATION = st.tuples(
    st.permutations(range(3)).flatmap(lambda order: st.integers(1, 3).map(lambda n: tuple(order[:n]))),
    st.sampled_from([*WAYS, ("all_gather", "ring"), ("reduce_scatter", "direct")]),
    st.integers(0, 3000),
    st.booleans(),
)


@given(st.lists(OPERATION, min_size=1, max_size=12))
@settings(max_examples=12, deadline=None)
def test_random_mixes_of_overlapping_subsets(operations: list[Any]) -> None:
    exact = [each for each in operations if each[1] != ("reduce_scatter", "direct") or len(each[0]) < 3]
    with small_slots():
        run_threads(random_mix, 3, exact, transport="sim")


def bits(count: int, algorithms: bool) -> dict[tuple[str, str], bytes]:
    """Results of float sums of two ranks, where every order gives the same bits, and of integers; "": shm's choice."""
    with hdp.init() as comm:
        results = {}
        for way in WAYS:
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                blocks = comm.size if way[0] == "reduce_scatter" else 1
                x = drawn(blocks * count, comm.rank, dtype)
                got = run(comm, way if algorithms else (way[0], "auto"), x, "sum", in_place=False)
                results[way[0] + way[1], str(dtype)] = got.view(torch.uint8).numpy().tobytes()
        return results


def test_the_same_bits_as_shared_memory() -> None:
    want = run_threads(bits, 2, 70_001, False, transport="shm")
    assert run_threads(bits, 2, 70_001, True, transport="sim") == want
    assert spawn(bits, 2, 70_001, True, transport="sim") == want


def counts_of() -> None:
    with hdp.init() as comm:
        before = comm.stats()
        comm.all_gather(torch.zeros(300), torch.zeros(100), algorithm="one_shot")
        after = comm.stats()
        assert after["bytes_sent"] - before["bytes_sent"] == 800
        assert after["bytes_received"] - before["bytes_received"] == 800
        assert after["messages_sent"] - before["messages_sent"] == 2
        assert after["peers"] == 2
        comm.all_reduce(torch.zeros(96), algorithm="two_shot")
        assert comm.stats()["bytes_sent"] - after["bytes_sent"] == 2 * 2 * 128  # a part read, a part written
        assert isinstance(comm, DeviceCommunicator)
        assert _testing.scratch_bytes(comm.streams) == 0


def test_traffic_is_counted() -> None:
    run_threads(counts_of, 3, transport="sim")


def by_name(transport: str) -> None:
    with hdp.init() as comm:
        x, out = torch.ones(4), torch.zeros(8)
        if transport == "shm":
            assert "one_shot" not in comm.algorithms("all_reduce")
            with pytest.raises(
                hdp.InvalidUsage, match=r"no algorithm 'one_shot' of messages .*cuda and sim.*it has: ring"
            ):
                comm.all_reduce(x, algorithm="one_shot")
        else:
            assert comm.algorithms("all_reduce")[-2:] == ("one_shot", "two_shot")
            assert comm.algorithms("all_gather")[-1] == "one_shot"
            assert comm.algorithms("broadcast") == hdp.Communicator.algorithms("broadcast")
        with pytest.raises(hdp.InvalidUsage, match="all_gather has no algorithm 'two_shot'"):
            comm.all_gather(out, x, algorithm="two_shot")
        with pytest.raises(hdp.InvalidUsage, match="broadcast has no algorithm 'one_shot'"):
            comm.broadcast(x, 0, algorithm="one_shot")
        with pytest.raises(hdp.InvalidUsage, match="'avg' needs a floating type"):
            comm.all_reduce(
                torch.ones(4, dtype=torch.int32), "avg", algorithm="two_shot" if transport == "sim" else "ring"
            )
        comm.all_reduce(x)
        assert x.tolist() == [2.0] * 4


@pytest.mark.parametrize("transport", ["shm", "sim"])
def test_names_where_they_apply(transport: str) -> None:
    run_threads(by_name, 2, transport, transport=transport)


def chosen() -> None:
    """The algorithm that the given costs make far cheaper is chosen."""
    with hdp.init() as comm:
        before = comm.stats()["messages_sent"]
        comm.all_reduce(torch.ones(1 << 16))
        assert comm.stats()["messages_sent"] - before == 1  # one_shot: direct sends two


@pytest.mark.parametrize("name", ["round_s", "signal_s", "read_s_per_byte"])
def test_costs_decide(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_COSTS", str(tmp_path / "costs.json"))
    free = {"round_s": 1e-9, "signal_s": 1e-9, "read_s_per_byte": 1e-14, "gamma_s_per_byte": 1e-14, "alpha_s": 1.0}
    (tmp_path / "costs.json").write_text(str({"sim": free}).replace("'", '"'))
    run_threads(chosen, 2, transport="sim")
    dear = {"one_shot", "two_shot"}
    costs = _core.collective.DeviceTransportCosts(**load_costs("sim") | {name: 1e3})
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        assert _testing.choose_on_devices(costs, _core.comm.OPS[op], 4, 1 << 20, 4) not in dear


COSTS = st.floats(1e-13, 1e-3)


@given(st.lists(COSTS, min_size=7, max_size=7), st.integers(1, 64), st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_the_choice_is_the_cheapest(values: list[float], size: int, count: int) -> None:
    costs = _core.collective.DeviceTransportCosts(**dict(zip(_core.collective.DEVICE_COSTS, values, strict=True)))
    for op, code in _core.comm.OPS.items():
        if op == "send/recv":
            continue
        names = [*_core.comm.algorithms_of(code), *_core.comm.peer_readers_of(code)]
        seconds = {
            name: _testing.estimate_on_devices_s(costs, code, _core.comm.ALGORITHMS[name], size, count, 2)
            for name in names
        }
        assert seconds[_testing.choose_on_devices(costs, code, size, count, 2)] == min(seconds.values())


def test_no_group_is_too_large_to_choose_for() -> None:
    costs = _core.collective.DeviceTransportCosts(**_core.collective.DEVICE_COSTS | {"alpha_s": 1.0})
    assert _testing.choose_on_devices(costs, _core.comm.OPS["all_reduce"], 64, 8, 4) == "one_shot"
    assert _testing.choose_on_devices(costs, _core.comm.OPS["all_reduce"], 65, 8, 4) not in ("one_shot", "two_shot")


def bad_window() -> None:
    with pytest.raises(
        hdp.InvalidUsage, match="a window of 4096 bytes was asked for; give a multiple of 4096 from 8192"
    ):
        hdp.init(transport="sim")


def test_windows_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_DEVICE_WINDOW_BYTES", "4096")
    run_threads(bad_window, 1)
