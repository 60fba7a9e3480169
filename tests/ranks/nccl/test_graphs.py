"""Operations captured into graphs of simulated devices and replayed: over links, by a fake NCCL, and by both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.device.communicator import DeviceCommunicator
from tests.faults.test_comm_errors import caught
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import until
from tests.harness.native import _testing
from tests.harness.stream_programs import Caller
from tests.harness.worlds import small_slots

WORLDS = {
    "links": ("sim", ()),
    "nccl": ("nccl", ()),
    "nccl on hosts": ("nccl", (0, 1, 1)),
    "both": ("cuda+nccl", (0, 0, 1)),
    "both, three hosts": ("cuda+nccl", (0, 0, 1, 2, 2)),
}


def on_all(fn: Callable[[], None], world: str, *, fake_nccl: _testing.FakeNccl | None = None) -> None:
    transport, hosts = WORLDS[world]
    with small_slots():
        run_threads(
            fn, len(hosts) or 3, transport=transport, hosts=hosts, fake_nccl=fake_nccl, opens=_testing.TestDevice
        )


@contextmanager
def caller() -> Iterator[Caller]:
    with hdp.init(timeout=20) as comm:
        assert isinstance(comm, DeviceCommunicator)
        rank = Caller(comm, comm.streams.device.create_stream())
        yield rank
        settle(rank)  # a rank that closes while others still capture would be missed by them
        rank.device.destroy_stream(rank.stream)


def settle(rank: Caller) -> None:
    rank.comm.synchronize()
    rank.device.synchronize_stream(rank.stream)
    rank.comm.barrier()
    rank.comm.synchronize()


def graph_of(rank: Caller, step: Callable[[], None]) -> _testing.Graph:
    """As a user does it: once as it is, then captured."""
    step()
    settle(rank)
    rank.device.begin_capture(rank.stream)
    step()
    return rank.device.end_capture(rank.stream)


class Step:
    """A step with every kind of operation, on memory of its own."""

    def __init__(self, rank: Caller) -> None:
        self.rank, n = rank, rank.comm.size
        self.x = torch.zeros(2048)
        self.y, self.late, self.total, self.spread, self.twice = (torch.zeros(2048) for _ in range(5))
        self.all = torch.zeros(2048 * n)

    def __call__(self) -> None:
        rank, n, r = self.rank, self.rank.comm.size, self.rank.comm.rank
        to, back = (r + 1) % n, (r - 1) % n
        rank.exchange([(self.x, to, None)], [(self.y, back, None)])
        later = rank.exchange([(self.x, back, None)], [(self.late, to, None)], background=True)
        rank.collective("all_reduce", self.total, self.x, 2048, "ring")
        work = rank.collective("all_reduce", self.spread, self.x, 2048, "hierarchical", background=True)
        rank.collective("all_gather", self.all, self.x, 2048, "auto")
        work.wait_on(rank.stream)
        later.wait_on(rank.stream)
        rank.collective("all_reduce", self.twice, self.total, 2048, "auto")

    def check(self, turn: int) -> None:
        n, r = self.rank.comm.size, self.rank.comm.rank
        values = [float(turn * (peer + 1)) for peer in range(n)]
        assert (self.y == values[(r - 1) % n]).all(), turn
        assert (self.late == values[(r + 1) % n]).all(), turn
        assert (self.total == sum(values)).all(), turn
        assert (self.spread == sum(values)).all(), turn
        assert (self.twice == n * sum(values)).all(), turn
        assert torch.equal(self.all, torch.tensor(values).repeat_interleave(2048))


@pytest.mark.parametrize("world", WORLDS)
def test_a_step_that_is_captured_once_and_replayed(world: str) -> None:
    def run() -> None:
        with caller() as rank:
            step = Step(rank)
            graph = graph_of(rank, step)
            for turn in range(1, 6):
                step.x.fill_(turn * (rank.comm.rank + 1))
                if turn == 3:  # operations outside follow and precede a replay on its stream
                    step()
                graph.launch(rank.stream)
                rank.device.synchronize_stream(rank.stream, 10.0)
                step.check(turn)

    on_all(run, world)


@pytest.mark.parametrize("world", WORLDS)
def test_graphs_of_overlapping_subsets_in_one_order(world: str) -> None:
    """Three subsets, a graph each, replayed without a host in between."""

    def run() -> None:
        with caller() as rank:
            graphs, results = [], []
            for ranks in ([0, 1, 2], [2, 0], [1, 2]):
                comm = rank.comm.subset(ranks)
                if comm is None:
                    settle(rank)
                    continue
                member = Caller(comm, rank.stream)
                x, out = torch.full((300,), float(rank.comm.rank + 1)), torch.zeros(300)

                def step(member: Caller = member, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
                    member.collective("all_reduce", out, x, 300, "direct")

                step()
                settle(rank)
                rank.device.begin_capture(rank.stream)
                step()
                graphs.append(rank.device.end_capture(rank.stream))
                results.append((x, out, float(sum(r + 1 for r in ranks))))  # the graph holds neither
            for _ in range(4):
                for graph in graphs:
                    graph.launch(rank.stream)
            rank.device.synchronize_stream(rank.stream, 10.0)
            for _, out, total in results:
                assert (out == total).all()

    on_all(run, world)


@pytest.mark.parametrize("world", ["nccl", "both, three hosts"])
def test_peers_that_nccl_has_not_met(world: str) -> None:
    """Connecting is no work for a capture: refused before anybody is told, and nothing is broken."""

    def run() -> None:
        with caller() as rank:
            n, r = rank.comm.size, rank.comm.rank
            x, y = torch.full((4,), float(r)), torch.zeros(4)
            far = next(peer for peer in (2, 3, 4, 0) if peer < n and not rank.comm.lands(peer) and peer != r)
            rank.device.begin_capture(rank.stream)
            with pytest.raises(hdp.InvalidUsage, match=rf"a message with rank {far}, .* run the same operation once"):
                rank.exchange([], [(y, far, None)])
            with pytest.raises(hdp.InvalidUsage, match=r"all_reduce by NCCL itself cannot be captured"):
                rank.collective("all_reduce", y, x, 4, "auto")
            with pytest.raises(hdp.InvalidUsage, match="run the same"):
                rank.collective("all_reduce", y, x, 4, "direct")
            rank.device.end_capture(rank.stream)
            step = Step(rank)
            graph = graph_of(rank, step)
            step.x.fill_(7.0 * (r + 1))
            graph.launch(rank.stream)
            rank.device.synchronize_stream(rank.stream, 10.0)
            step.check(7)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HDPCOMM_NCCL_CONNECT", "0")
        on_all(run, world)


@pytest.mark.parametrize("late", [None, 0, 1, 2])
@pytest.mark.parametrize("world", ["nccl", "nccl on hosts", "both"])
def test_one_side_captures_and_the_other_does_not(world: str, late: int | None) -> None:
    """NCCL wants it alike on all ranks of an operation; all hear what the others did, whoever comes last."""

    def run() -> None:
        comm = hdp.init(timeout=20)
        assert isinstance(comm, DeviceCommunicator)
        rank = Caller(comm, comm.streams.device.create_stream())
        x = torch.zeros(50)
        rank.collective("all_reduce", x, x, 50, "ring")
        settle(rank)
        if comm.rank == late:
            time.sleep(0.02)
        if comm.rank == 2:
            rank.device.begin_capture(rank.stream)
            error = caught(lambda: (rank.collective("all_reduce", x, x, 50, "ring"), wait_for(comm.synchronize)))
        else:
            error = caught(lambda: rank.collective("all_reduce", x, x, 50, "ring").wait(10.0))
        assert "(captured into a graph)" in str(error)
        comm.close()

    def wait_for(call: Callable[[], None]) -> None:
        limit = time.monotonic() + 10.0
        while time.monotonic() < limit:
            call()
        raise AssertionError("10 s after the others this rank has heard of nothing")

    on_all(run, world)


def test_what_a_capture_cannot_hold() -> None:
    def run() -> None:
        with caller() as rank:
            x = torch.zeros(50)
            rank.collective("all_reduce", x, x, 50, "ring")
            settle(rank)
            rank.device.begin_capture(rank.stream)
            work = rank.collective("all_reduce", x, x, 50, "ring")
            with pytest.raises(hdp.InvalidUsage, match="captured into a graph cannot be waited for on the host"):
                work.wait()
            rank.device.end_capture(rank.stream)

    on_all(run, "both")


def test_collectives_of_one_graph_that_did_not_run_before() -> None:
    """Each has scratch memory of its own, which is allocated in the capture."""

    def run() -> None:
        with caller() as rank:
            n, r = rank.comm.size, rank.comm.rank
            x, y, total = torch.zeros(n * 4096), torch.zeros(n * 4096), torch.zeros(50)
            rank.collective("all_reduce", total, total, 50, "ring")  # makes streams and connections
            rank.all_to_all(y, x, "bruck")
            settle(rank)
            before = _testing.scratch_bytes(rank.engine)
            rank.device.begin_capture(rank.stream)
            for _ in range(3):
                rank.all_to_all(y, x, "bruck")
                rank.all_to_all(x, y, "bruck")
            graph = rank.device.end_capture(rank.stream)
            assert _testing.scratch_bytes(rank.engine) > before
            for turn in range(2):
                x.copy_(torch.arange(n * 4096) + 100_000 * r + turn)
                graph.launch(rank.stream)
                rank.device.synchronize_stream(rank.stream)
                assert torch.equal(x, torch.arange(n * 4096.0) + 100_000 * r + turn)

    on_all(run, "both")


def test_an_error_ends_a_replay() -> None:
    """A replay has no deadline, but an engine that fails lets its streams go, the graphs' as well."""
    fake = _testing.FakeNccl(3)

    def run() -> None:
        comm = hdp.init(timeout=20)
        assert isinstance(comm, DeviceCommunicator)
        rank = Caller(comm, comm.streams.device.create_stream())
        step = Step(rank)
        graph = graph_of(rank, step)
        settle(rank)
        if comm.rank == 2:
            fake.set_async_error(2, 1)
        else:
            graph.launch(rank.stream)  # rank 2 never does
        error = caught(lambda: rank.collective("all_reduce", step.x, step.x, 2048, "ring").wait(10.0))
        assert "failed on rank 2: unhandled cuda error" in str(error)
        rank.device.synchronize_stream(rank.stream, 5.0)
        comm.close()

    on_all(run, "both", fake_nccl=fake)
    assert fake.complaints() == []


def test_a_communicator_that_graphs_keep_does_not_hold_up_its_end() -> None:
    """NCCL destroys it when the last graph has gone, which the program may keep for ever."""
    fake = _testing.FakeNccl(3)

    def run() -> None:
        with caller() as rank:
            graph = graph_of(rank, Step(rank))
            fake.hold_destroy()
            del graph

    on_all(run, "nccl", fake_nccl=fake)
    assert fake.num_in_destroy() == 3
    fake.let_destroy()
    assert until(lambda: fake.num_in_destroy() == 0)
    assert fake.complaints() == []
