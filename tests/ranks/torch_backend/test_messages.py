"""Point to point on the backend: order, deadlines, and what happens when ranks disagree."""

from __future__ import annotations

import datetime
import pickle
import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.torch_backend import BackendLost, BackendMismatch, BackendTimeout
from hdpcomm.torch_backend.work import BackendAborted
from tests.harness.fault_cases import LONG_S, interrupt_soon
from tests.harness.torch_groups import data, torch_ranks

REFUSED = "is out of step with rank . since: .*; destroy the process group on all ranks and make a new one"


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def across_groups() -> None:
    """Messages of a pair of ranks match in the order of the calls, whatever their group."""
    with torch_ranks() as (rank, size):
        group = dist.new_group([size - 1, 0], sort_ranks=False)
        last = size - 1
        if rank == 0:
            works = [dist.isend(torch.tensor([1.0]), last), dist.isend(torch.tensor([2.0]), last, group=group)]
            for work in works:
                work.wait()
        if rank == last:
            x = torch.empty(1)
            for value, of in ((1, None), (2, group)):
                assert dist.recv(x, 0, group=of) == 0
                assert x == value
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_across_groups(ranks: Any, size: int) -> None:
    ranks(size, across_groups)


def to_itself() -> None:
    """``isend`` and ``irecv`` of the own rank, in either order; ``send`` would wait for ever."""
    with torch_ranks(timeout=LONG_S) as (rank, _):
        works = [dist.isend(data(rank, 5, salt=number), rank) for number in range(3)]
        for number in range(3):
            x = torch.empty(5)
            assert dist.irecv(x, rank).wait()
            same(x, data(rank, 5, salt=number))
        for work in works:
            work.wait()
        large = torch.empty(300_000)
        posted = dist.irecv(large, rank)
        assert not posted.is_completed()
        dist.isend(data(rank, 300_000), rank).wait()
        posted.wait()
        same(large, data(rank, 300_000))
        dist.barrier()


def test_to_itself(ranks: Any) -> None:
    ranks(2, to_itself)


def beside_collectives() -> None:
    """Messages pass collectives in both directions, in the background."""
    with torch_ranks() as (rank, size):
        ring = data((rank - 1) % size, 1000)
        x = torch.empty(1000)
        posted = dist.irecv(x, (rank - 1) % size)
        if rank % 2:
            dist.barrier()  # the others send before it
        dist.send(data(rank, 1000), (rank + 1) % size)
        if rank % 2 == 0:
            dist.barrier()
        posted.wait()
        same(x, ring)
        # batch_isend_irecv, receives first and large
        x = torch.empty(300_000)
        mine = data(rank, 300_000)
        ops = [
            dist.P2POp(dist.irecv, x, (rank - 1) % size),
            dist.P2POp(dist.isend, mine, (rank + 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(x, data((rank - 1) % size, 300_000))
        future = dist.irecv(torch.empty(2), (rank - 1) % size).get_future()
        dist.isend(data(rank, 2), (rank + 1) % size).get_future().wait()
        same(future.wait()[0], data((rank - 1) % size, 2))


@pytest.mark.parametrize("size", [2, 4])
def test_beside_collectives(ranks: Any, size: int) -> None:
    ranks(size, beside_collectives)


def random_traffic(seed: int) -> int:
    """Every rank posts its part of the same random messages, its sends and receives in an order of its own."""
    with torch_ranks(timeout=40) as (rank, size):
        common = random.Random(seed)
        plan = []
        for number in range(120):
            src, dst = common.sample(range(size), 2)
            plan.append((number, src, dst, common.choice((0, 1, 17, 4096, 70_001))))
        own = random.Random(seed * 100 + rank)
        by_peer = [[each for each in plan if each[1 + way] == rank and each[2 - way] == peer]
                   for way in (0, 1) for peer in range(size)]  # fmt: skip
        works, received = [], []
        while by_peer := [each for each in by_peer if each]:
            number, src, dst, count = own.choice(by_peer).pop(0)
            x = torch.full((count,), number if src == rank else -1)
            works.append(dist.isend(x, dst) if src == rank else dist.irecv(x, src))
            if dst == rank:
                received.append((x, number))
        for work in works:
            work.wait()
        for x, number in received:
            assert (x == number).all()
        dist.barrier()
        return threading.active_count()


@pytest.mark.parametrize("size", [2, 4])
def test_random_traffic(ranks: Any, size: int) -> None:
    for seed in range(2):
        for threads in ranks(size, random_traffic, seed):
            assert threads <= size + 3


# --- errors


def deadlines() -> None:
    with torch_ranks(timeout=LONG_S) as (rank, _):
        x = torch.empty(3)
        if rank == 1:
            dist.barrier()
            with pytest.raises(dist.DistBackendError, match="rank 0 waited"):  # the first one hears why
                dist.send(x, 0)
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.send(x, 0)
            return
        work = dist.irecv(x, 1)
        with pytest.raises(BackendTimeout, match="waited") as caught:
            work.wait(datetime.timedelta(seconds=0.3))
        assert isinstance(caught.value, hdp.CommTimeout)
        assert isinstance(caught.value, dist.DistBackendError)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), BackendTimeout)
        assert work.exception() is caught.value
        assert work.is_completed()
        assert not work.is_success()
        dist.barrier()
        with pytest.raises(BackendAborted, match=REFUSED):
            dist.recv(x, 1)


def test_deadlines(ranks: Any) -> None:
    ranks(2, deadlines)


def given_up_between() -> None:
    """When a message is given up, all that are under way on its pair fail, and none is received for another."""
    with torch_ranks(timeout=LONG_S) as (rank, _):
        if rank == 1:
            first = dist.isend(torch.full((500_000,), 1.0), 0)
            second = dist.isend(torch.full((500_000,), 2.0), 0)
            with pytest.raises(BackendTimeout, match="waited"):
                second.wait(datetime.timedelta(seconds=0.2))
            third = dist.isend(torch.full((500_000,), 3.0), 0)
            dist.barrier()
            for work in (first, third):
                with pytest.raises(BackendAborted, match=REFUSED):
                    work.wait()
            return
        dist.barrier()
        with pytest.raises(dist.DistBackendError, match="rank 1 waited"):  # the first one hears why
            dist.recv(torch.empty(500_000), 1)
        with pytest.raises(BackendAborted, match=REFUSED):
            dist.recv(torch.empty(500_000), 1)
        x = torch.empty(3)
        own = dist.irecv(x, 0)  # messages to itself go on
        dist.isend(torch.ones(3), 0).wait()
        own.wait()
        assert x.tolist() == [1, 1, 1]


def test_given_up_between(ranks: Any) -> None:
    ranks(2, given_up_between)


def interrupted(call: str) -> None:
    """Ctrl-C puts the pair of ranks out of step, and the other rank hears why."""
    with torch_ranks(timeout=LONG_S) as (rank, _):
        x = torch.zeros(200_000)
        if rank == 0:
            interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                getattr(dist, call)(x, 1)
            dist.barrier()
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.send(x, 1)
        else:
            dist.barrier()
            with pytest.raises(BackendAborted, match=r"rank 0 was interrupted .*\(told by rank 0\)"):
                getattr(dist, "send" if call == "recv" else "recv")(x, 0)


@pytest.mark.parametrize("call", ["send", "recv"])
def test_interrupted(ranks: Any, call: str) -> None:
    ranks(2, interrupted, call)


def mismatches(kind: str) -> None:
    """Different sizes of a message, and of a collective. What was in step stays so."""
    with torch_ranks(timeout=20) as (rank, _):
        if kind == "size":
            with pytest.raises(BackendMismatch):
                dist.send(torch.zeros(3), 1) if rank == 0 else dist.recv(torch.zeros(4), 0)
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.send(torch.zeros(3), 1) if rank == 0 else dist.recv(torch.zeros(3), 0)
        else:
            with pytest.raises(BackendMismatch):
                dist.all_reduce(torch.zeros(3 + rank))
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.all_reduce(torch.zeros(3))
        x = torch.ones(2)
        if kind != "size":
            if rank == 0:
                dist.send(x + 1, 1)
            else:
                dist.recv(x, 0)
                assert x.tolist() == [2, 2]
        if kind != "collective":
            dist.all_reduce(x.fill_(1))
            assert x.tolist() == [2, 2]
    with torch_ranks(timeout=20) as (rank, _):  # a new group is healthy
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x[0] == 2


@pytest.mark.parametrize("kind", ["size", "collective"])
def test_mismatches(ranks: Any, kind: str) -> None:
    ranks(2, mismatches, kind)


def peers_that_leave() -> None:
    with torch_ranks(timeout=20) as (rank, size):
        if rank == 1:
            dist.isend(torch.ones(2), 0).wait()
            return
        x = torch.zeros(2)
        if rank == 0:
            first, second = dist.irecv(x, 1), dist.irecv(torch.empty(2), 1)
            first.wait()
            assert x[0] == 1
            with pytest.raises(BackendLost, match="rank 1 closed") as caught:
                second.wait()
            assert caught.value.peer == 1
            with pytest.raises(BackendLost):
                dist.recv(x, 1)
            with pytest.raises(BackendLost):
                dist.send(x, 1)
        if size > 2 and rank == 2:
            dist.send(x, 0)
        if size > 2 and rank == 0:
            dist.recv(x, 2)  # the others go on
        with pytest.raises(BackendLost):
            dist.all_reduce(x)


@pytest.mark.parametrize("size", [2, 4])
def test_peers_that_leave(ranks: Any, size: int) -> None:
    ranks(size, peers_that_leave)


def bad_arguments() -> None:
    with torch_ranks() as (rank, size):
        group = dist.group.WORLD
        x = torch.zeros(4)
        with pytest.raises(hdp.InvalidUsage, match=r"got rank 9; this group has ranks 0\.\."):
            group.recv([x], 9, 0)
        with pytest.raises(hdp.InvalidUsage, match=r"got 2 tensors; give a list of one"):
            group.allreduce([x, x])
        with pytest.raises(hdp.InvalidUsage, match="give one for each of the"):
            group.allgather([[x] * (size + 1)], [x])
        with pytest.raises(hdp.InvalidUsage, match="give all one type"):
            group.allgather([[x] * size], [x.int()])
        with pytest.raises(hdp.InvalidUsage, match="give equal sizes"):
            group.allgather([[torch.zeros(3)] * size], [x])
        with pytest.raises(hdp.InvalidUsage, match=r"one has \d times the elements"):
            group.all_gather_single(torch.zeros(3), x)
        with pytest.raises(hdp.InvalidUsage, match="give pairs"):
            group.all_gather_single_coalesced([x], [x, x])
        with pytest.raises(hdp.InvalidUsage, match="elements a rank and a tensor of 4"):
            group.scatter([x], [[torch.zeros(3)] * size], rank)
        with pytest.raises(hdp.InvalidUsage, match=r"got input splits .* sum up to the tensor's 4 rows"):
            group.all_to_all_single(x, x, [], [5] * size)
        with pytest.raises(hdp.InvalidUsage, match="divisible by the"):
            group.all_to_all_single(torch.zeros(5), torch.zeros(5), [], [])
        with pytest.raises(hdp.InvalidUsage, match="give one for each"):
            group.alltoall([x], [x] * size)
        with pytest.raises(NotImplementedError, match=r"all_reduce with ReduceOp\.BOR"):
            dist.all_reduce(x.int(), dist.ReduceOp.BOR)
        with pytest.raises(hdp.InvalidUsage, match="complex tensors can be added"):
            group.allreduce([x.cfloat()], dist.ReduceOp.MAX)
        with pytest.raises(hdp.InvalidUsage, match="cannot be reduced"):
            group.allreduce([x.to(torch.float8_e4m3fn)])
        with pytest.raises(hdp.InvalidUsage, match=r"on meta; this group moves CPU tensors, .*: pass x\.cpu"):
            group.allreduce([x.to("meta")])
        with pytest.raises(hdp.InvalidUsage, match="rank 9"):
            group.broadcast([x], 9)
        with pytest.raises(hdp.InvalidUsage, match="give a time above 0"):
            group.set_timeout(datetime.timedelta(0))
        with pytest.raises(NotImplementedError, match="leave the device out"):
            group._start_coalescing(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
            group._get_backend(torch.device("cuda"))
        for name, call in {
            "PREMUL_SUM": lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0)),
            "all_reduce of sparse tensors": lambda: dist.all_reduce(x.to_sparse()),
            "broadcast of sparse tensors": lambda: group.broadcast([x.to_sparse()], rank),
            "send.. with tag 3": lambda: group.send([x], 0, 3),
            "recv.. from any source": lambda: group.recv_anysource([x], 0),
            "split_group": lambda: group.split_group([0]),
            "merge_remote_group": lambda: group.merge_remote_group(None, 2, None),
            "monitored_barrier": lambda: group.monitored_barrier(),
            "_register_on_completion_hook": lambda: group._register_on_completion_hook(print),
            "source_rank of a work": lambda: dist.barrier(async_op=True)._source_rank(),
        }.items():
            with pytest.raises(NotImplementedError, match=f"hdpcomm backend: .*{name}"):
                call()
        dist.all_reduce(x)  # healthy
        group.allreduce(x, dist.ReduceOp.MAX).wait()
        group.barrier(datetime.timedelta(seconds=5)).wait()


def test_bad_arguments(ranks: Any) -> None:
    ranks(2, bad_arguments)


def aborts() -> None:
    with torch_ranks(timeout=20) as (rank, _):
        if rank == 0:
            work = dist.irecv(torch.empty(1), 1)
            dist.group.WORLD.abort()
            with pytest.raises(hdp.Aborted):
                work.wait()
            with pytest.raises(hdp.Error):
                dist.barrier()
        else:
            with pytest.raises((hdp.Aborted, hdp.PeerLost)):
                dist.barrier()


def test_abort(ranks: Any) -> None:
    ranks(2, aborts)
