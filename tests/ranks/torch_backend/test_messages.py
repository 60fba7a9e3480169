"""Point to point on the backend: tags, any source, order, deadlines, and what happens when ranks disagree."""

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
from hdpcomm.torch_backend.errors import BackendAborted
from tests.harness.fault_cases import LONG_S, interrupt_soon
from tests.harness.torch_groups import data, torch_ranks

REFUSED = "is out of step with rank . since: .*; destroy the process group on all ranks and make a new one"


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def tags_out_of_order() -> None:
    with torch_ranks() as (rank, _):
        other = rank ^ 1
        works = [dist.isend(data(rank, tag + 1, salt=tag), other, tag=tag) for tag in range(6)]
        for tag in (5, 0, 3, 1, 4, 2):
            x = torch.empty(tag + 1)
            assert dist.recv(x, other, tag=tag) == other
            same(x, data(other, tag + 1, salt=tag))
        for work in works:
            work.wait()
        # equal tags keep their order, also where some wait among the unexpected
        works = [dist.isend(torch.full((3,), float(i)), other, tag=i % 2) for i in range(8)]
        for i in (1, 0, 2, 3, 5, 7, 4, 6):
            x = torch.empty(3)
            dist.recv(x, other, tag=i % 2)
            assert x[0] == i
        for work in works:
            work.wait()


@pytest.mark.parametrize("size", [2, 4])
def test_tags_out_of_order(ranks: Any, size: int) -> None:
    ranks(size, tags_out_of_order)


def any_source() -> None:
    with torch_ranks() as (rank, size):
        if rank > 0:
            dist.send(data(rank, 5), 0, tag=7)
            dist.send(torch.tensor([rank]), 0, tag=8)
            dist.barrier()
            return
        seen = set()
        for _ in range(size - 1):
            x = torch.empty(5)
            source = dist.recv(x, tag=7)
            same(x, data(source, 5))
            seen.add(source)
        assert seen == set(range(1, size))
        number = torch.empty(1, dtype=torch.int64)
        for _ in range(size - 1):
            work = dist.irecv(number, tag=8)
            work.wait()
            assert work._source_rank() == number.item()
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_any_source(ranks: Any, size: int) -> None:
    ranks(size, any_source)


def groups_apart() -> None:
    """The same ranks and tag in two groups: messages do not mix; source ranks are translated."""
    with torch_ranks() as (rank, size):
        group = dist.new_group([size - 1, 0], sort_ranks=False)
        last = size - 1
        if rank == 0:
            works = [dist.isend(torch.tensor([1.0]), last), dist.isend(torch.tensor([2.0]), last, group=group)]
            for work in works:
                work.wait()
        if rank == last:
            x = torch.empty(1)
            assert dist.recv(x, group=group) == 0
            assert x == 2
            assert dist.recv(x) == 0
            assert x == 1
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_groups_apart(ranks: Any, size: int) -> None:
    ranks(size, groups_apart)


def to_itself() -> None:
    """``isend`` and ``irecv`` of the own rank, in either order, by tag and group; ``send`` would wait for ever."""
    with torch_ranks(timeout=LONG_S) as (rank, size):
        other = dist.new_group(list(range(size)))
        works = [dist.isend(data(rank, 5, salt=tag), rank, tag=tag) for tag in range(3)]
        for tag in (2, 0, 1):
            x = torch.empty(5)
            assert dist.irecv(x, rank, tag=tag).wait()
            same(x, data(rank, 5, salt=tag))
        for work in works:
            work.wait()
        large = torch.empty(300_000)
        posted = dist.irecv(large, rank, group=other)
        assert not posted.is_completed()
        dist.isend(data(rank, 300_000), rank, group=other).wait()
        assert posted.is_completed()
        assert posted._source_rank() == rank
        same(large, data(rank, 300_000))
        # sizes that differ fail on both sides, in either order
        for first in (dist.isend, dist.irecv):
            second = dist.irecv if first is dist.isend else dist.isend
            works = [first(torch.zeros(3), rank), second(torch.zeros(4), rank)]
            for work in works:
                with pytest.raises(BackendMismatch, match="give both the same size and type"):
                    work.wait()
        # one that is given up is not received later
        late = dist.isend(torch.zeros(3), rank)
        with pytest.raises(BackendTimeout, match=f"to send tag 0 to rank {rank}; look for the receive"):
            late.wait(datetime.timedelta(seconds=0.2))
        posted = dist.irecv(torch.empty(3), rank)
        with pytest.raises(BackendTimeout, match="no receive wanted: none"):
            posted.wait(datetime.timedelta(seconds=0.2))
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
            dist.P2POp(dist.irecv, x, (rank - 1) % size, tag=1),
            dist.P2POp(dist.isend, mine, (rank + 1) % size, tag=1),
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
    """Every rank posts the same random messages in an order of its own; some receives take any source."""
    with torch_ranks(timeout=40) as (rank, size):
        common = random.Random(seed)
        plan = []
        for number in range(120):
            src, dst = common.sample(range(size), 2)
            plan.append((number, src, dst, common.randrange(4), common.choice((0, 1, 17, 4096, 70_001))))
        own = random.Random(seed * 100 + rank)
        sends = [each for each in plan if each[1] == rank]
        works = [
            dist.isend(torch.full((size_,), number), dst, tag=tag * 10 + size_) for number, _, dst, tag, size_ in sends
        ]
        wanted = [each for each in plan if each[2] == rank]
        own.shuffle(wanted)
        got = []
        for _, src, _, tag, size_ in wanted:
            x = torch.empty(size_, dtype=torch.int64)
            got.append((src, tag * 10 + size_, x, dist.irecv(x, src, tag=tag * 10 + size_)))
        for _, _, _, work in got:
            work.wait()
        for work in works:
            work.wait()
        # messages of a pair with equal tags come in the order sent, to receives in the order posted
        for src in range(size):
            for tag in {each[1] for each in got if each[0] == src}:
                expected = [n for n, s, d, t, k in plan if (s, d, t * 10 + k) == (src, rank, tag) and k > 0]
                numbers = [int(x[0]) for s, t, x, _ in got if (s, t) == (src, tag) and len(x) > 0]
                assert numbers == expected
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
            dist.send(torch.full((3,), 4.0), 0, tag=9)
            dist.barrier()
            # a send that nobody receives is given up on both ranks; later messages of the pair are refused
            with pytest.raises(BackendTimeout, match="waited"):
                dist.isend(torch.full((500_000,), 5.0), 0, tag=3).wait(datetime.timedelta(seconds=0.3))
            dist.barrier()
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.send(x, 0, tag=3)
            return
        work = dist.irecv(x, 1, tag=5)
        with pytest.raises(BackendTimeout, match=r"to receive tag 5 from rank 1.*no receive wanted: none") as caught:
            work.wait(datetime.timedelta(seconds=0.3))
        assert isinstance(caught.value, hdp.CommTimeout)
        assert isinstance(caught.value, dist.DistBackendError)
        assert caught.value.peer == 1
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), BackendTimeout)
        assert work.exception() is caught.value
        assert work.is_completed()
        assert not work.is_success()
        # a later one shows what has come meanwhile, and it is still there
        dist.barrier()
        work = dist.irecv(x, tag=6)
        with pytest.raises(BackendTimeout, match=r"no receive wanted: \(rank 1, tag 9\)"):
            work.wait(datetime.timedelta(seconds=1.0))
        dist.recv(x, 1, tag=9)
        assert x[0] == 4
        dist.barrier()
        dist.barrier()
        for tag in (3, 4):
            with pytest.raises(BackendAborted, match=r"rank 1 waited .* \(told by rank 1\).*make a new one"):
                dist.recv(x, 1, tag=tag)


def test_deadlines(ranks: Any) -> None:
    ranks(2, deadlines)


def given_up_between() -> None:
    """When a message is given up, all that are under way on its pair fail, and none is received for another."""
    with torch_ranks(timeout=LONG_S) as (rank, _):
        if rank == 1:
            first = dist.isend(torch.full((500_000,), 1.0), 0, tag=1)
            second = dist.isend(torch.full((500_000,), 2.0), 0, tag=2)
            with pytest.raises(BackendTimeout, match="to send tag 2 to rank 0; look for the receive") as caught:
                second.wait(datetime.timedelta(seconds=0.2))
            assert caught.value.peer == 0
            third = dist.isend(torch.full((500_000,), 3.0), 0, tag=2)
            dist.barrier()
            for work in (first, third):
                with pytest.raises(BackendAborted, match=REFUSED):
                    work.wait()
            return
        dist.barrier()
        for tag in (2, 1):
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.recv(torch.empty(500_000), 1, tag=tag)
        x = torch.empty(3)
        own = dist.irecv(x, 0, tag=7)  # messages to itself go on
        dist.isend(torch.ones(3), 0, tag=7).wait()
        own.wait()
        assert x.tolist() == [1, 1, 1]


def test_given_up_between(ranks: Any) -> None:
    ranks(2, given_up_between)


def interrupted() -> None:
    """Ctrl-C during a receive that no message had matched withdraws it; during a send it puts the pair out of step."""
    with torch_ranks(timeout=LONG_S) as (rank, _):
        x = torch.zeros(200_000)
        if rank == 0:
            interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                dist.recv(x, 1)
            dist.barrier()
            dist.recv(x, 1)
            assert (x == 5).all()
            dist.barrier()
            dist.barrier()
            with pytest.raises(BackendAborted, match=r"rank 1 was interrupted .*\(told by rank 1\)"):
                dist.recv(x, 1, tag=1)
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.recv(x, 1, tag=1)
        else:
            dist.barrier()
            dist.send(torch.full((200_000,), 5.0), 0)
            dist.barrier()
            interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                dist.send(torch.full((200_000,), 6.0), 0, tag=1)
            dist.barrier()
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.send(x, 0, tag=1)


def test_interrupted(ranks: Any) -> None:
    ranks(2, interrupted)


def mismatches(kind: str) -> None:
    """Different sizes of a message, types of a kept message, sizes of a collective. What was in step stays so."""
    with torch_ranks(timeout=20) as (rank, _):
        if kind == "size":
            with pytest.raises(BackendMismatch):
                dist.send(torch.zeros(3), 1) if rank == 0 else dist.recv(torch.zeros(4), 0)
            with pytest.raises(BackendAborted, match=REFUSED):
                dist.send(torch.zeros(3), 1) if rank == 0 else dist.recv(torch.zeros(3), 0)
        elif kind == "kept":  # it had been accepted, so it concerns the receiver only
            if rank == 0:
                dist.send(torch.zeros(4), 1, tag=1)
                dist.send(torch.zeros(4), 1, tag=2)
            else:
                dist.recv(torch.zeros(4), 0, tag=2)
                with pytest.raises(BackendMismatch, match=r"receives 4 x int64 with tag 1, but rank 0 sent 4 x float"):
                    dist.recv(torch.zeros(4, dtype=torch.int64), 0, tag=1)
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


@pytest.mark.parametrize("kind", ["size", "kept", "collective"])
def test_mismatches(ranks: Any, kind: str) -> None:
    ranks(2, mismatches, kind)


def peers_that_leave() -> None:
    with torch_ranks(timeout=20) as (rank, size):
        if rank == 1:
            dist.send(torch.ones(2), 0, tag=1)
            return
        x = torch.zeros(2)
        if rank == 0:
            waiting = dist.irecv(torch.empty(2), 1, tag=3)
            with pytest.raises(BackendLost, match="rank 1 closed") as caught:
                waiting.wait()
            assert caught.value.peer == 1
            dist.recv(x, 1, tag=1)  # what it sent before still counts
            assert x[0] == 1
            with pytest.raises(BackendLost):
                dist.recv(x, 1, tag=1)
            if size == 2:
                with pytest.raises(BackendLost):
                    dist.recv(x)
            with pytest.raises(BackendLost):
                dist.send(x, 1)
        if size > 2 and rank == 2:
            dist.send(x, 0, tag=4)
        if size > 2 and rank == 0:
            assert dist.recv(x, tag=4) == 2  # others can still be "any source"
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
        with pytest.raises(hdp.InvalidUsage, match="bitwise operations take integers"):
            dist.all_reduce(x, dist.ReduceOp.BOR)
        with pytest.raises(hdp.InvalidUsage, match="complex tensors can be added"):
            group.allreduce([x.cfloat()], dist.ReduceOp.MAX)
        with pytest.raises(hdp.InvalidUsage, match="cannot be reduced"):
            group.allreduce([x.to(torch.float8_e4m3fn)])
        with pytest.raises(hdp.InvalidUsage, match=r"on meta; this group moves CPU tensors, .*: pass x\.cpu"):
            group.allreduce([x.to("meta")])
        with pytest.raises(hdp.InvalidUsage, match="rank 9"):
            group.broadcast([x], 9)
        with pytest.raises(hdp.InvalidUsage, match="give 2 lists, one a rank"):
            group.allgather_coalesced([[x]], [x])
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
            "split_group": lambda: group.split_group([0]),
            "merge_remote_group": lambda: group.merge_remote_group(None, 2, None),
            "monitored_barrier": lambda: group.monitored_barrier(),
            "_register_on_completion_hook": lambda: group._register_on_completion_hook(print),
            "source_rank of a work": lambda: dist.barrier(async_op=True)._source_rank(),
            "bitwise reduce_scatter": lambda: group.reduce_scatter(
                [torch.zeros(1 + (rank > 0)).int()],
                [[torch.zeros(1 + (peer > 0)).int() for peer in range(size)]],
                dist.ReduceOp.BOR,
            ),
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
