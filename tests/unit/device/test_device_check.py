"""SimDevice's check mode: correct programs have no errors, and each line that orders work is missed if left out."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import hdpcomm
from hdpcomm._core.device import Device, open_sim
from hdpcomm.errors import CommTimeout, DeviceError, InvalidUsage
from hdpcomm.testing.device_check import OrderingError, OrderingReport, check, current_rank, planted_sites
from tests.harness.device_contract import PROGRAMS, words
from tests.harness.native import _testing

SOURCE = Path(__file__).read_text().splitlines()


def line(mark: str) -> int:
    """Number of the line that ends with the comment ``# <mark>``."""
    (number,) = (i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}"))
    return number


def find(program: Callable[..., object], world_size: int = 1, *, seed: int = 0) -> tuple[OrderingReport, ...]:
    with pytest.raises(OrderingError) as caught:
        check(program, world_size, seeds=[seed])
    assert caught.value.seed == seed
    assert f"seeds=[{seed}]" in str(caught.value)
    return caught.value.reports


def new(count: int, value: int = 0) -> tuple[Device, int]:
    """A device, and memory of it that has been written."""
    device = open_sim(current_rank())
    memory = device.allocate(4 * count)
    device.fill(memory, value, bytes=4 * count, stream=0)
    device.synchronize_stream(0)
    return device, memory


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_contract(program: Callable[[Device], None]) -> None:
    check(lambda: program(open_sim(current_rank())), 1, seeds=range(9))


class PingPong:
    """Rank 0 fills a buffer and copies it to rank 1, which sums it up: events inside a rank, flags between them."""

    def __init__(self, world_size: int = 2, count: int = 256, turns: int = 3) -> None:
        self.count, self.turns = count, turns
        self.handles: dict[int, list[bytes]] = {}
        self.barrier = threading.Barrier(world_size)

    def meet(self, device: Device, key: int) -> None:
        device.annotate_release(key)
        self.barrier.wait(30)
        device.annotate_acquire(key)

    def __call__(self) -> list[int]:
        device, slot = new(self.count)
        flags, size = device.allocate(64), 4 * self.count
        device.fill(flags, 0, bytes=64, stream=0)
        device.synchronize_stream(0)  # before-export
        self.handles[current_rank()] = [device.export_memory(slot), device.export_memory(flags)]
        self.barrier.wait(30)
        work, copies = device.create_stream(), device.create_stream()
        event, total = device.create_event(), device.allocate_pinned(size)
        device.fill(total, 0, bytes=size, stream=work)
        if current_rank() == 0:
            there, full = (device.import_memory(handle) for handle in self.handles[1])
            for turn in range(1, self.turns + 1):
                device.fill(slot, turn, bytes=size, stream=work)  # make
                device.record(event, work)  # made
                device.wait(copies, event)  # wait-made
                device.wait_value(copies, full + 4, turn - 1)  # wait-empty
                device.copy(there, slot, bytes=size, stream=copies)  # put
                device.write_value(copies, full, turn)  # signal-full
                device.record(event, copies)  # copied
                device.wait(work, event)  # wait-copied
        else:
            for turn in range(1, self.turns + 1):
                device.wait_value(work, flags, turn)  # wait-full
                _testing.accumulate(device, total, slot, count=self.count, stream=work)  # take
                device.write_value(work, flags + 4, turn)  # signal-empty
        device.synchronize_stream(work)  # end
        device.annotate_read(total, size)  # look
        result: list[int] = words(total, self.count).tolist()
        self.meet(device, 1)
        device.free(slot)
        device.free(flags)
        device.free_pinned(total)  # free
        return result


def test_a_correct_exchange_is_clean_and_right_whatever_the_order() -> None:
    for _, total in check(PingPong(), 2, seeds=range(60)):
        assert total == [6 * 0x01010101] * 256


# What must be found when a line is left out: the two operations of a race, or those that wait for ever.
PLANTED = {
    "made": ("make", "put"),
    "wait-made": ("make", "put"),
    "wait-empty": ("take", "put"),
    "signal-full": ("wait-full", None),
    "copied": ("put", "make"),
    "wait-copied": ("put", "make"),
    "wait-full": ("take", "put"),
    "signal-empty": ("wait-empty", None),
    "end": ("take", "look"),
}


def test_each_line_that_orders_is_missed() -> None:
    sites = {site.line: site for site in planted_sites(PingPong(), 2, seeds=(0, 1, 2), path="test_device_check")}
    for mark, (first, second) in PLANTED.items():
        site = sites.pop(line(mark))
        assert site.uses == 3 * (2 if mark == "end" else 3)
        assert site.found, f"{site} was not missed"
        if second is None:
            assert any(each.kind == "deadlock" and each.first[1] == line(first) for each in site.found), site
        else:
            pairs = {frozenset((each.first[1], each.second[1])) for each in site.found}
            assert frozenset((line(first), line(second))) in pairs, site
    assert sites.pop(line("before-export")).found
    assert len(sites) == 1  # the synchronize of new(): nothing depends on it before the next one
    assert not next(iter(sites.values())).found


def test_a_kernel_s_own_flags() -> None:
    count = 64

    def program() -> None:
        device, memory = new(count)
        source, flags = device.allocate(4 * count), device.allocate(64)
        first, second = device.create_stream(), device.create_stream()
        device.fill(flags, 0, bytes=64, stream=0)
        device.fill(source, 1, bytes=4 * count, stream=0)
        device.synchronize_stream(0)
        add = partial(_testing.accumulate_with_flags, device, memory, source, count=count)
        add(stream=first, waits=[], signals=[(flags, 1)])  # signals
        add(stream=second, waits=[(flags, 1)], signals=[(flags + 4, 1)])  # waits
        device.wait_value(first, flags + 4, 1)
        device.synchronize_stream(first)
        device.annotate_read(memory, 4 * count)
        assert (words(memory, count) == 2 * 0x01010101).all()

    check(program, 1, seeds=range(12))
    found = {(site.line, site.call): site.found for site in planted_sites(program, 1)}
    assert {each.kind for each in found[line("signals"), "kernel signal"]} == {"deadlock"}
    assert {each.kind for each in found[line("waits"), "kernel wait"]} <= {"missing wait", "reused too early"}
    assert found[line("waits"), "kernel wait"]
    assert [each.kind for each in found[line("waits"), "kernel signal"]] == ["deadlock"]


def test_missing_wait() -> None:
    def program() -> list[int]:
        device, memory = new(1000)
        other = device.create_stream()
        target = device.allocate_pinned(4000)
        device.fill(memory, 1, bytes=4000, stream=0)  # mw-write
        device.copy(target, memory, bytes=4000, stream=other)  # mw-read
        device.synchronize_stream(other)
        device.synchronize_stream(0)
        return np.unique(words(target, 1000)).tolist()

    for seed in range(6):  # found in every order
        (report,) = find(program, seed=seed)
        assert report.kind == "missing wait"
        assert (report.first[1], report.second[1]) == (line("mw-write"), line("mw-read"))
        assert report.first[0].endswith("test_device_check.py")
        assert "bytes 0 to 4000 of the block that was allocated at test_device_check.py" in report.text
        assert "stream 0 of device 0" in report.text
        assert "stream 1 of device 0" in report.text


def test_the_order_differs_between_seeds() -> None:
    seen = set()

    def program() -> None:
        device, memory = new(1)
        other = device.create_stream()
        target = device.allocate_pinned(4)
        device.fill(memory, 1, bytes=4, stream=0)
        device.copy(target, memory, bytes=4, stream=other)
        device.synchronize_stream(other)
        seen.add(int(words(target, 1)[0]))

    for seed in range(30):
        find(program, seed=seed)
    assert seen >= {0, 0x01010101}  # before, after, and torn


def test_reused_too_early() -> None:
    def program() -> None:
        device, memory = new(1000)
        other = device.create_stream()
        target = device.allocate(4000)
        device.copy(target, memory, bytes=4000, stream=other)  # re-read
        device.fill(memory + 100, 1, bytes=4, stream=0)  # re-write

    (report,) = find(program)
    assert report.kind == "reused too early"
    assert (report.first[1], report.second[1]) == (line("re-read"), line("re-write"))
    assert "bytes 100 to 104" in report.text


def test_the_host_is_ordered_by_synchronize_and_query_only() -> None:
    def program(wait: str) -> None:
        device, memory = new(10)
        event, stream = device.create_event(), device.create_stream()
        device.fill(memory, 1, bytes=40, stream=stream)  # host-write
        device.record(event, stream)
        if wait == "synchronize":
            device.synchronize_event(event)
        while wait == "query" and not device.query(event):
            pass
        device.annotate_read(memory, 40)  # host-read
        device.annotate_write(memory, 40)
        device.fill(memory, 2, bytes=40, stream=0)  # ordered after the host by its submission

    check(program, 1, "synchronize", seeds=range(6))
    check(program, 1, "query", seeds=range(6))
    reports = find(lambda: program("nothing"))
    assert ("missing wait", line("host-write"), line("host-read")) in {
        (each.kind, each.first[1], each.second[1]) for each in reports
    }


def test_use_after_free() -> None:
    def program(early: bool) -> None:
        device, memory = new(10)
        stream = device.create_stream()
        if early:
            device.fill(memory, 1, bytes=40, stream=stream)  # free-use
            device.free(memory)  # free-early
        else:
            device.free(memory)  # free-before
            device.fill(memory, 1, bytes=40, stream=stream)  # free-after
        device.synchronize_stream(stream)

    (report,) = find(lambda: program(True))
    assert (report.kind, report.first[1], report.second[1]) == ("use after free", line("free-use"), line("free-early"))
    (report,) = find(lambda: program(False))
    assert (report.kind, report.first[1], report.second[1]) == (
        "use after free",
        line("free-before"),
        line("free-after"),
    )


def test_memory_of_another_allocator_has_several_lives() -> None:
    array = np.zeros(64, np.uint32)

    def program(wait: bool) -> None:
        device = open_sim(current_rank())
        first, second = device.create_stream(), device.create_stream()
        device.fill(array.ctypes.data, 1, bytes=256, stream=first)  # life-one
        if wait:
            device.synchronize_stream(first)
        device.annotate_free(array.ctypes.data, 256)  # life-end
        device.fill(array.ctypes.data, 2, bytes=256, stream=second)
        device.synchronize_stream(second)
        device.synchronize_stream(first)

    check(program, 1, True, seeds=range(6))
    reports = find(lambda: program(False))
    assert ("use after free", line("life-one"), line("life-end")) in {
        (each.kind, each.first[1], each.second[1]) for each in reports
    }


def test_never_written() -> None:
    def program(wait: bool) -> None:
        device, total = new(16)
        memory = device.allocate(64)  # nw-made
        device.fill(memory, 1, bytes=32, stream=0)
        if wait:
            device.wait_value(0, memory + 60, 0)  # nw-flag
        else:
            _testing.accumulate(device, total, memory, count=16, stream=0)  # nw-read
        device.write_value(0, memory + 60, 0)
        device.synchronize_stream(0)

    (report,) = find(lambda: program(False))
    assert (report.kind, report.first[1], report.second[1]) == ("never written", line("nw-made"), line("nw-read"))
    assert "bytes 32 to 64" in report.text
    (report,) = find(lambda: program(True))
    assert (report.kind, report.second[1]) == ("never written", line("nw-flag"))


def test_deadlock_of_two_ranks_ends_at_once() -> None:
    handles: dict[int, bytes] = {}
    barrier = threading.Barrier(2)

    def program() -> None:
        device, memory = new(16)
        handles[current_rank()] = device.export_memory(memory)
        barrier.wait(30)
        other = device.import_memory(handles[1 - current_rank()])
        device.wait_value(0, memory, 1)  # dl-wait
        device.write_value(0, other, 1)  # after the wait: the other one waits for it as well
        device.synchronize_stream(0, 1000.0)

    with pytest.raises(OrderingError) as caught:
        check(program, 2, seeds=[5])
    assert isinstance(caught.value.__cause__, CommTimeout)
    assert "all ranks wait and nothing can run" in str(caught.value.__cause__)
    (report,) = caught.value.reports
    assert (report.kind, report.first[1]) == ("deadlock", line("dl-wait"))
    assert "holds 0" in report.text


def test_a_rank_that_waits_outside_of_its_device_does_not_hide_a_deadlock() -> None:
    ended = threading.Event()

    def program() -> None:
        device, memory = new(16)
        if current_rank() == 1:
            ended.wait(30)  # for the other rank, in a way that the device does not see
            return
        device.wait_value(0, memory, 1)
        try:
            device.synchronize_stream(0, 1000.0)
        finally:
            ended.set()

    assert [each.kind for each in find(program, 2)] == ["deadlock"]


def test_host_threads_are_ordered_by_annotations() -> None:
    shared: dict[str, int] = {}
    written = threading.Event()

    def program(annotate: bool) -> None:
        device = open_sim(current_rank())
        if current_rank() == 0:
            shared["memory"] = device.allocate(64)
            device.export_memory(shared["memory"])
            device.fill(shared["memory"], 1, bytes=64, stream=0)  # ann-write
            device.synchronize_stream(0)
            if annotate:
                device.annotate_release(7)
            written.set()
        else:
            written.wait(30)
            if annotate:
                device.annotate_acquire(7)
            device.copy(device.allocate(64), shared["memory"], bytes=64, stream=0)  # ann-read

    written.clear()
    check(program, 2, True, seeds=[0])
    written.clear()
    (report,) = (each for each in find(lambda: program(False), 2) if each.kind != "never written")
    assert {report.first[1], report.second[1]} == {line("ann-write"), line("ann-read")}


def test_a_flag_that_is_passed_late_orders_only_what_the_earliest_write_did() -> None:
    def program() -> None:
        device, memory = new(16)
        flag, stream = device.allocate(4), device.create_stream()
        device.fill(flag, 0, bytes=4, stream=0)
        device.synchronize_stream(0)
        device.write_value(0, flag, 1)  # lets the wait pass
        device.fill(memory, 1, bytes=64, stream=0)  # late-write
        device.write_value(0, flag, 2)
        device.wait_value(stream, flag, 1)
        device.copy(device.allocate(64), memory, bytes=64, stream=stream)  # late-read

    for seed in range(12):
        (report,) = find(program, seed=seed)
        assert (report.first[1], report.second[1]) == (line("late-write"), line("late-read"))


def test_a_kernel_that_fails() -> None:
    def program() -> None:
        device = open_sim(current_rank())
        _testing.launch_failing(device, 0)
        device.synchronize_stream(0)

    with pytest.raises(DeviceError, match="kernel failing failed: as the test wants"):
        check(program, 1, seeds=[0])
    check(lambda: new(4), 1, seeds=[0])  # and the next check works


def test_errors_of_the_program_pass_through() -> None:
    def program() -> None:
        new(4)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        check(program, 1, seeds=[0])
    with pytest.raises(ValueError, match="mine"):
        planted_sites(program, 1)

    def one_fails() -> None:
        device, memory = new(4)
        if current_rank() == 1:
            raise ValueError("only I")
        device.wait_value(0, memory, 1)
        device.synchronize_stream(0)

    with pytest.raises(ValueError, match="only I"):
        check(one_fails, 2, seeds=[0])
    assert check(current_rank, 3, seeds=[1, 2]) == [[0, 1, 2], [0, 1, 2]]


def test_use_of_checks() -> None:
    with pytest.raises(InvalidUsage, match=r"outside of check\(\)"):
        current_rank()
    run = _testing.DeviceCheck(3)
    with pytest.raises(InvalidUsage, match="a check runs already"):
        _testing.DeviceCheck(4)
    device = open_sim(0)
    assert device.name == "sim, checked"
    for early in (run.reports, run.ordering_sites, run.num_operations):
        with pytest.raises(InvalidUsage, match=r"call finish\(\)"):
            early()
    memory = device.allocate(64)
    run.finish()
    assert run.num_operations() == 1
    assert run.reports() == []
    with pytest.raises(InvalidUsage, match="has ended"):
        device.fill(memory, 0, bytes=64, stream=0)
    device.free(memory)
    with pytest.raises(OrderingError) as caught:
        check(
            lambda: (_testing.accumulate(new(4)[0], *[open_sim(0).allocate(4)] * 2, count=1, stream=0), None),
            1,
            seeds=[0],
        )
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.seed, copy.reports, str(copy)) == (0, caught.value.reports, str(caught.value))


def test_a_seed_gives_the_same_report_again() -> None:
    sites = [planted_sites(PingPong(), 2, seeds=(seed,)) for seed in (7, 7)]
    assert sites[0] == sites[1]


def test_build_without_check_says_which_build_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdpcomm.testing._native", None)
    monkeypatch.delattr(hdpcomm.testing, "_native")
    monkeypatch.delitem(sys.modules, "hdpcomm.testing.device_check")
    with pytest.raises(ImportError, match="no wheel contains: build from source with CMAKE_ARGS=-DHDPCOMM_TESTING=ON"):
        importlib.import_module("hdpcomm.testing.device_check")
