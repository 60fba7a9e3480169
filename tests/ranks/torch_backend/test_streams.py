"""Device tensors on the backend: order in check mode, hosts that go on, and the tests of host tensors by streams."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.comm.device.communicator import DeviceWork
from hdpcomm.testing import run_threads
from hdpcomm.testing.device_check import OrderingError, check, planted_sites
from hdpcomm.torch_backend import BackendTimeout, communicator
from hdpcomm.torch_backend.work import BackendAborted, Operation, StreamWork
from tests.harness.stream_groups import joined, tensors_with_streams
from tests.harness.torch_groups import data, torch_ranks
from tests.harness.worlds import small_slots
from tests.ranks.torch_backend import test_collectives as collectives
from tests.ranks.torch_backend import test_training as training

# --- the order of streams


def options(kind: Any, *, background: bool) -> Any:
    made = kind()
    made.asyncOp = background
    return made


def reductions() -> None:
    """In the foreground, in the background, waited for by another stream or by a future, on reused memory."""
    with joined() as rank:
        n = rank.group.size()
        total = n * (n + 1) // 2
        for count in (1, 5000):
            x = rank.made(count)
            rank.group.allreduce([x], options(dist.AllreduceOptions, background=False)).wait()
            assert (rank.read(x) == total).all()
            x = rank.made(count)
            work = rank.group.allreduce([x], options(dist.AllreduceOptions, background=True))
            assert isinstance(work, StreamWork)
            for stream in rank.streams:
                with rank.on(stream):
                    work.wait()
                    assert (rank.read(x) == total).all()
            assert work.is_completed()
            assert work.is_success()
            x = rank.made(count)
            (result,) = rank.group.allreduce([x]).get_future().wait()
            assert (rank.read(result) == total).all()


def moves() -> None:
    """Gathers, scatters and messages."""
    with joined() as rank:
        n, r = rank.group.size(), rank.group.rank()
        x, out = rank.made(3000), torch.empty(3000 * n, dtype=torch.uint8)
        rank.group.all_gather_single(out, x).wait()
        assert rank.read(out).view(n, -1)[:, 0].tolist() == list(range(1, n + 1))
        parts = [torch.empty(3000, dtype=torch.uint8) for _ in range(2)]
        rank.group.reduce_scatter_single_coalesced(parts, [out, out]).wait()
        assert all((rank.read(part) == n * (r + 1)).all() for part in parts)
        arrived = torch.empty(3000, dtype=torch.uint8)
        works = [rank.group.recv([arrived], (r - 1) % n), rank.group.send([x], (r + 1) % n)]
        for work in works:
            work.wait()
        assert (rank.read(arrived) == (r - 1) % n + 1).all()


def marks() -> None:
    """A point of one stream, waited for by another: what orders the copies into outputs that are not contiguous."""
    with joined() as rank:
        work = rank.group.communicator.all_reduce(rank.made(10), async_op=True)
        assert isinstance(work, DeviceWork)
        work.follow()
        x = rank.made(100, 7)
        mark = work.mark()
        for stream in rank.streams[::-1]:
            with rank.on(stream):
                mark.wait()
                assert (rank.read(x) == 7).all()
        mark.wait(5.0)
        assert mark.done()
        work.wait()


PROGRAMS: dict[str, Callable[[], None]] = {each.__name__: each for each in (reductions, moves, marks)}


def run(name: str, world_size: int, seeds: Iterable[int]) -> None:
    with small_slots(), tensors_with_streams():
        check(PROGRAMS[name], world_size, seeds=seeds, transport="sim")


@pytest.mark.parametrize(("world_size", "seeds"), [(2, 9), (3, 3)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_clean_in_any_order(name: str, world_size: int, seeds: int) -> None:
    run(name, world_size, range(seeds))


def nobody_waits() -> None:
    with joined() as rank:
        x = rank.made(5000)
        work = rank.group.allreduce([x])
        rank.read(x)
        work.wait()


def test_without_the_wait_the_order_is_wrong() -> None:
    with small_slots(), tensors_with_streams(), pytest.raises(OrderingError, match=r"missing wait|reused too early"):
        check(nobody_waits, 2, seeds=range(3), transport="sim")


def test_the_lines_of_a_mark_are_needed() -> None:
    with small_slots(), tensors_with_streams():
        sites = planted_sites(marks, 2, seeds=range(3), path="paths.py", transport="sim")
    needed = {site.call: bool(site.found) for site in sites if site.call in ("record", "wait")}
    assert needed == {"record": True, "wait": True}


# --- the host


def test_the_host_goes_on() -> None:
    """All works are there before rank 1 has called anything; with a timeout the host waits."""
    started = threading.Event()

    def program() -> list[Any]:
        with joined() as rank:
            if rank.group.rank() == 1:
                assert started.wait(30)
            x, y = rank.made(5000), torch.empty(5000, dtype=torch.uint8)
            z = rank.made(9)
            works = [rank.group.allreduce([x]), rank.group.broadcast([z], 0)]
            sent = rank.made(5000, 9)
            works.append(rank.group.send([sent], 1) if rank.group.rank() == 0 else rank.group.recv([y], 0))
            assert all(isinstance(work, StreamWork) for work in works)
            futures = [work.get_future() for work in works]
            if rank.group.rank() == 0:
                assert all(future.done() for future in futures)
                assert not works[0].is_completed()
                for work in works:
                    work.wait()
                started.set()
            for work in works:
                assert work.wait(datetime.timedelta(seconds=30))
                assert work.is_completed()
            received = sent if rank.group.rank() == 0 else y
            return [rank.read(each)[-1].item() for each in (x, z, received)]

    with tensors_with_streams():
        assert run_threads(program, 2, transport="sim") == [[3, 1, 9]] * 2


def test_lists_are_copied_by_a_stream() -> None:
    """The parts of a gather go to their tensors behind it, and who waits for the work waits for the copies, too."""
    finish = Operation.finish

    def as_streams_would(operation: Operation) -> None:
        local.rank.device.synchronize_stream(local.rank.current)
        finish(operation)

    local = threading.local()

    def program() -> None:
        with joined() as local.rank:
            group, x = local.rank.group, local.rank.made(3000)
            outs = [torch.zeros(3000, dtype=torch.uint8) for _ in range(group.size())]
            work = group.allgather([outs], [x])
            assert isinstance(work, StreamWork)
            for stream in local.rank.streams:
                with local.rank.on(stream):
                    work.wait()
                    assert [int(local.rank.read(out)[-1]) for out in outs] == [1, 2]
            work.wait(datetime.timedelta(seconds=30))
            assert work.is_success()

    with tensors_with_streams(), mock.patch.object(Operation, "finish", as_streams_would):
        run_threads(program, 2, transport="sim")


def test_a_receive_into_a_strided_tensor_holds_no_send_up() -> None:
    """Both ranks receive first: were it copied by the current stream, that would wait, and the sends behind it."""
    local = threading.local()
    on: list[bool] = []

    def program() -> None:
        with joined() as local.rank:
            rank = local.rank
            peer = 1 - rank.group.rank()
            works = [
                rank.group.recv([torch.zeros(70_001, 2, dtype=torch.uint8)[:, 0]], peer),
                rank.group.send([rank.made(70_001)], peer),
            ]
            for work in works:
                work.wait(datetime.timedelta(seconds=30))

    def noted(_operation: Operation) -> None:
        on.append(local.rank.current in local.rank.streams)

    with tensors_with_streams(), mock.patch.object(Operation, "finish", noted):
        run_threads(program, 2, transport="sim", timeout=60)
    assert on == [False, False]


def test_deadline_of_a_wait() -> None:
    late = threading.Event()

    def program() -> None:
        with joined() as rank:
            if rank.group.rank() == 1:
                assert late.wait(30)
                return
            work = rank.group.allreduce([rank.made(9)])
            try:
                with pytest.raises(BackendTimeout, match="all_reduce"):
                    work.wait(datetime.timedelta(seconds=0.3))
                assert isinstance(work.exception(), BackendTimeout)
                assert not work.is_success()
                with pytest.raises(dist.DistBackendError):
                    work.get_future().wait()
                with pytest.raises(BackendAborted, match="all_reduce"):  # the streams of this world are over
                    rank.group.allreduce([rank.made(9)])
            finally:
                late.set()

    with tensors_with_streams():
        run_threads(program, 2, transport="sim")


def test_what_device_messages_do_not_have() -> None:
    def program() -> None:
        with joined() as rank:
            x = torch.zeros(3)
            for call in (rank.group.send, rank.group.recv):
                with pytest.raises(NotImplementedError, match=r"with tag 4; messages of a pair .* leave the tag out"):
                    call([x], 0, 4)
                with pytest.raises(hdp.InvalidUsage, match=r"got rank 7; this group has ranks 0\.\.0"):
                    call([x], 7)
            with pytest.raises(NotImplementedError, match=r"any source; .* name the source"):
                rank.group.recv_anysource([x])
            assert [each.type for each in rank.group._device_types] == ["cpu", "cuda"]
            assert rank.group._get_backend(torch.device("cuda", 0)) is rank.group
            with pytest.raises(RuntimeError, match="device type xpu: this group moves tensors on cpu, cuda"):
                rank.group._get_backend(torch.device("xpu"))

    with tensors_with_streams():
        run_threads(program, 1, transport="sim")


# --- the groups of torch.distributed, by the streams of a simulated device


def simulated(fn: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.dict(os.environ, HDPCOMM_TRANSPORT="sim"):
        return fn(*args)


@pytest.mark.parametrize(
    "fn",
    [
        collectives.reduce_everything,
        collectives.move_everything,
        collectives.ragged,
        collectives.strided,
        collectives.asynchronous,
        collectives.functional_collectives,
        collectives.again,
    ],
    ids=lambda fn: fn.__name__,
)
def test_collectives(ranks: Any, fn: Any) -> None:
    ranks(2, simulated, fn)


def ring() -> None:
    """Messages round a ring, batched and one by one, in a group and its reverse."""
    with torch_ranks("cuda:hdpcomm") as (rank, size):
        assert communicator().transport == "sim"
        for group in (None, dist.new_group(range(size)[::-1], sort_ranks=False)):
            place = dist.get_rank(group)
            to, back = (place + 1) % size, (place - 1) % size
            to, back = (each if group is None else dist.get_global_rank(group, each) for each in (to, back))
            for count in (0, 1, 7, 70_001):
                x, y = torch.empty(count), torch.empty(2, count)[:, ::2]
                ops = [dist.P2POp(dist.irecv, x, back, group), dist.P2POp(dist.isend, data(rank, count), to, group)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                collectives.equal(x, data(back, count))
                mine = data(rank, *y.shape)
                posted = dist.irecv(y, back, group)
                dist.send(mine, to, group)
                posted.wait()
                collectives.equal(y, data(back, *y.shape))


@pytest.mark.parametrize("size", [2, 3])
def test_messages(ranks: Any, size: int) -> None:
    ranks(size, simulated, ring)


@pytest.mark.parametrize("run", [training.with_ddp, training.with_fsdp2], ids=lambda run: run.__name__)
def test_training_as_with_host_tensors(ranks: Any, run: Any) -> None:
    streams = ranks(2, simulated, training.losses, run, "cpu:hdpcomm,cuda:hdpcomm", uuid.uuid4().hex)
    host = ranks(2, training.losses, run, "hdpcomm", uuid.uuid4().hex)
    assert [losses for losses, _ in streams] == [losses for losses, _ in host]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in PROGRAMS:
        for size in (2, 3):
            run(each, size, range(int(sys.argv[1])))
            print(f"{each} on {size} ranks: {sys.argv[1]} seeds clean", flush=True)
