"""Every collective of torch.distributed on the backend, against what each rank can compute from all ranks' data."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import hdpcomm as hdp
from hdpcomm.torch_backend import communicator
from tests.harness.torch_groups import data, torch_ranks

REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stack: stack.to(torch.float64).sum(0),
    dist.ReduceOp.AVG: lambda stack: stack.to(torch.float64).mean(0),
    dist.ReduceOp.PRODUCT: lambda stack: stack.to(torch.float64).prod(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
}


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=0, atol=0)


def everyone(size: int, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    return torch.stack([data(rank, *shape, dtype=dtype, salt=salt) for rank in range(size)])


def cases() -> list[tuple[Any, torch.dtype, tuple[int, ...]]]:
    return [
        (op, dtype, shape)
        for op in REDUCTIONS
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        for shape in ((), (0,), (3, 5))
        if not (op is dist.ReduceOp.AVG and not dtype.is_floating_point)
        if not (op is dist.ReduceOp.PRODUCT and dtype in (torch.uint8, torch.bfloat16))
    ]


def reduce_everything() -> None:
    with torch_ranks() as (rank, size):
        for salt, (op, dtype, shape) in enumerate(cases()):
            expected = REDUCTIONS[op](everyone(size, *shape, dtype=dtype, salt=salt))
            x = data(rank, *shape, dtype=dtype, salt=salt)
            dist.all_reduce(x, op)
            equal(x, expected)
            root = salt % size
            x = data(rank, *shape, dtype=dtype, salt=salt)
            dist.reduce(x, root, op)
            equal(x, expected if rank == root else data(rank, *shape, dtype=dtype, salt=salt))
            blocks = everyone(size, size, *shape, dtype=dtype, salt=salt)
            out = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter(out, list(blocks[rank].unbind()), op)
            equal(out, REDUCTIONS[op](blocks[:, rank]))
            out = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter_tensor(out.reshape(-1), blocks[rank].reshape(-1), op)
            equal(out, REDUCTIONS[op](blocks[:, rank]))


@pytest.mark.parametrize("size", [2, 4])
def test_reductions(ranks: Any, size: int) -> None:
    ranks(size, reduce_everything)


def move_everything() -> None:
    with torch_ranks() as (rank, size):
        types = (torch.float32, torch.float16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16)
        for salt, dtype in enumerate(types):
            for shape in ((), (0,), (7,), (2, 3)):
                move_one(rank, size, dtype, shape, salt)


def move_one(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...], salt: int) -> None:
    all_of = [data(peer, *shape, salt=salt).to(dtype) for peer in range(size)]
    mine, root = all_of[rank], salt % size

    def same(got: torch.Tensor, expected: torch.Tensor) -> None:
        assert got.dtype is dtype
        assert got.tolist() == expected.tolist()

    x = mine.clone()
    dist.broadcast(x, root)
    same(x, all_of[root])
    outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
    dist.all_gather(outs, mine)
    for got, expected in zip(outs, all_of, strict=True):
        same(got, expected)
    flat = torch.empty((size, *shape), dtype=dtype)
    dist.all_gather_into_tensor(flat, mine.unsqueeze(0))
    same(flat, torch.stack([each.float() if dtype is torch.float8_e4m3fn else each for each in all_of]).to(dtype))
    outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
    dist.gather(mine, outs if rank == root else None, root)
    if rank == root:
        for got, expected in zip(outs, all_of, strict=True):
            same(got, expected)
    x = torch.empty(shape, dtype=dtype)
    dist.scatter(x, all_of if rank == root else None, root)
    same(x, mine)
    outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
    dist.all_to_all(outs, [mine] * size)
    for got, expected in zip(outs, all_of, strict=True):
        same(got, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_moves(ranks: Any, size: int) -> None:
    ranks(size, move_everything)


def ragged() -> None:
    with torch_ranks() as (rank, size):
        # all_gather and reduce_scatter of different sizes
        outs = [torch.empty(peer + 1, 2) for peer in range(size)]
        dist.all_gather(outs, data(rank, rank + 1, 2))
        for peer, got in enumerate(outs):
            equal(got, data(peer, peer + 1, 2))
        out = torch.empty(rank + 1)
        dist.reduce_scatter(out, [data(rank, peer + 1, salt=peer) for peer in range(size)])
        equal(out, torch.stack([data(peer, rank + 1, salt=rank) for peer in range(size)]).sum(0))
        # rank r sends (r + p) % 3 rows to p
        rows = lambda source, target: (source + target) % 3
        sends = [data(rank, rows(rank, peer), 5, salt=peer) for peer in range(size)]
        expected = [data(peer, rows(peer, rank), 5, salt=rank) for peer in range(size)]
        outs = [torch.empty(each.shape) for each in expected]
        dist.all_to_all(outs, sends)
        for got, want in zip(outs, expected, strict=True):
            equal(got, want)
        flat = torch.empty(sum(map(len, expected)), 5)
        dist.all_to_all_single(flat, torch.cat(sends), list(map(len, expected)), list(map(len, sends)))
        equal(flat, torch.cat(expected))
        flat = torch.empty(size * 2, dtype=torch.complex64)
        dist.all_to_all_single(flat, data(rank, size * 2).to(torch.complex64))
        want = torch.cat([data(peer, size * 2)[2 * rank : 2 * rank + 2] for peer in range(size)])
        equal(flat.real, want)


@pytest.mark.parametrize("size", [2, 4])
def test_ragged(ranks: Any, size: int) -> None:
    ranks(size, ragged)


def strided() -> None:
    """Views that are not contiguous, inputs that need gradients, conjugates."""
    with torch_ranks() as (rank, size):
        base = torch.full((4, 6), -1.0)
        view = base[:, ::2]
        view.copy_(data(rank, 4, 3))
        dist.all_reduce(view)
        equal(view, everyone(size, 4, 3).sum(0))
        assert (base[:, 1::2] == -1).all()
        base = torch.zeros(3, 4).t()
        dist.broadcast(base if rank else data(0, 4, 3), 0)
        if rank:
            equal(base, data(0, 4, 3))
        outs = [torch.empty(3, 4).t() for _ in range(size)]
        dist.all_gather(outs, data(rank, 3, 4).t().requires_grad_(), async_op=True).wait()
        for peer, out in enumerate(outs):
            equal(out, data(peer, 3, 4).t())
        outs = [torch.empty(3, 4).t() for _ in range(size)]
        dist.all_to_all(outs, [data(rank, 3, 4).t()] * size)
        for peer, out in enumerate(outs):
            equal(out, data(peer, 3, 4).t())
        z = torch.complex(data(rank, 3), data(rank, 3, salt=1)).conj()
        assert z.is_conj()
        dist.group.WORLD.broadcast([z], 1).wait()
        equal(z.resolve_conj().imag, -data(1, 3, salt=1))
        if rank == 0:
            dist.send(base, 1)
        if rank == 1:
            back = torch.empty(3, 4).t()
            dist.recv(back, 0)
            equal(back, torch.zeros(4, 3))


@pytest.mark.parametrize("size", [2, 4])
def test_strided_tensors(ranks: Any, size: int) -> None:
    ranks(size, strided)


def asynchronous() -> None:
    with torch_ranks() as (rank, size):
        tensors = [data(rank, 100, salt=i) for i in range(20)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        works[-1].wait()
        works[-1].wait()  # again does no harm
        for work in works:
            work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
        for i, x in enumerate(tensors):
            equal(x, everyone(size, 100, salt=i).sum(0))
        x = data(rank, 8)
        doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
        equal(doubled.wait(), everyone(size, 8).sum(0) * 2)
        outs = [torch.empty(3) for _ in range(size)]
        work = dist.all_gather(outs, data(rank, 3), async_op=True)
        while not work.is_completed():
            pass
        equal(torch.stack(outs), everyone(size, 3))
        assert work.result()[0] is outs[0]
        for _ in range(50):  # nobody waits for these
            dist.all_reduce(torch.ones(1000), async_op=True)
        dist.barrier(async_op=True).wait()


@pytest.mark.parametrize("size", [2, 4])
def test_async(ranks: Any, size: int) -> None:
    ranks(size, asynchronous)


def objects_and_coalescing() -> None:
    with torch_ranks() as (rank, size):
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank * 100})
        assert [each["rank"] for each in everything] == list(range(size))
        some: list[Any] = [rank, None]
        dist.broadcast_object_list(some, src=size - 1)
        assert some == [size - 1, None]
        gathered: list[Any] | None = [None] * size if rank == 1 else None
        dist.gather_object(("of", rank), gathered, dst=1)
        assert gathered is None or gathered == [("of", peer) for peer in range(size)]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"to {peer}" for peer in range(size)] if rank == 0 else None, src=0)
        assert mine == [f"to {rank}"]
        if rank == 0:
            dist.send_object_list([1, "two"], dst=1)
        if rank == 1:
            got: list[Any] = [None, None]
            assert dist.recv_object_list(got, src=0) == 0
            assert got == [1, "two"]
        tensors = [data(rank, 4, salt=i) for i in range(3)]
        with dist.distributed_c10d._coalescing_manager():
            for x in tensors:
                dist.all_reduce(x)
        for i, x in enumerate(tensors):
            equal(x, everyone(size, 4, salt=i).sum(0))
        outs = [torch.empty(size * 2) for _ in range(3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for i, out in enumerate(outs):
                dist.all_gather_into_tensor(out, data(rank, 2, salt=i))
        manager.wait()
        for i, out in enumerate(outs):
            equal(out, everyone(size, 2, salt=i).reshape(-1))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_objects_and_coalescing(ranks: Any, size: int) -> None:
    ranks(size, objects_and_coalescing)


def functional_collectives() -> None:
    """What DTensor and compiled code call: through C++, by the group's name."""
    with torch_ranks("cpu:hdpcomm") as (rank, size):
        world = dist.group.WORLD
        equal(wait(functional.all_reduce(data(rank, 5), "sum", world)), everyone(size, 5).sum(0))
        equal(wait(functional.all_gather_tensor(data(rank, 2), 0, world)), everyone(size, 2).reshape(-1))
        blocks = everyone(size, size * 2)
        equal(
            wait(functional.reduce_scatter_tensor(data(rank, size * 2), "sum", 0, world)),
            blocks.sum(0)[2 * rank : 2 * rank + 2],
        )
        equal(wait(functional.broadcast(data(rank, 3), 1, world)), data(1, 3))
        equal(
            wait(functional.all_to_all_single(data(rank, size), None, None, world)),
            torch.stack([data(peer, size)[rank] for peer in range(size)]),
        )
        pair = functional.all_reduce_coalesced([data(rank, 2), data(rank, 3)], "avg", world)
        equal(wait(pair[1]), everyone(size, 3).mean(0))
        pair = functional.all_gather_into_tensor_coalesced([data(rank, 2), data(rank, 3)], world)
        equal(wait(pair[0]), everyone(size, 2).reshape(-1))


def wait(x: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(x)


@pytest.mark.parametrize("size", [2, 4])
def test_functional_collectives(ranks: Any, size: int) -> None:
    ranks(size, functional_collectives)


def subgroups() -> dict[str, int]:
    with torch_ranks() as (rank, size):
        before = communicator().stats()
        groups = [
            dist.new_group([0, size - 1]),
            dist.new_group(range(1, size)),
            dist.new_group([size - 1, 0], sort_ranks=False),
        ]
        assert communicator().stats() == before  # nothing was sent
        for ranks_of, group in zip(([0, size - 1], list(range(1, size)), [size - 1, 0]), groups, strict=True):
            if rank not in ranks_of:
                assert group is dist.GroupMember.NON_GROUP_MEMBER
                continue
            assert group.rank() == ranks_of.index(rank)
            assert communicator(group).ranks == tuple(ranks_of)
            x = data(rank, 6)
            dist.all_reduce(x, group=group)
            equal(x, torch.stack([data(peer, 6) for peer in ranks_of]).sum(0))
            x = data(rank, 6)
            dist.broadcast(x, src=ranks_of[-1], group=group)
            equal(x, data(ranks_of[-1], 6))
            dist.barrier(group=group)
        here = dist.new_group([rank], use_local_synchronization=True)
        x = data(rank, 3)
        dist.all_reduce(x, group=here)
        equal(x, data(rank, 3))
        dist.destroy_process_group(here)
        dist.barrier()
        return communicator().stats()


@pytest.mark.parametrize("size", [2, 4])
def test_subgroups(ranks: Any, size: int) -> None:
    stats = ranks(size, subgroups)
    assert all(each["peers"] <= size for each in stats)


def beside_gloo(key: str) -> None:
    """A group of this backend in a job whose default group is gloo's has a world of its own."""
    with torch_ranks("gloo", key=key) as (rank, size):
        members = [0, size - 1]
        group = dist.new_group(members, backend="hdpcomm")
        if rank in members:
            x = data(rank, 4)
            dist.all_reduce(x, group=group)
            equal(x, data(0, 4) + data(size - 1, 4))
            assert communicator(group).size == 2
        dist.barrier()
        with pytest.raises(hdp.InvalidUsage, match="give a group of init_process_group"):
            communicator()


def test_beside_gloo(ranks: Any) -> None:
    ranks(4, beside_gloo, uuid.uuid4().hex)


def again() -> None:
    """Destroyed and initialised again on the same store."""
    for _ in range(2):
        with torch_ranks() as (rank, size):
            x = data(rank, 4)
            dist.all_reduce(x)
            equal(x, everyone(size, 4).sum(0))


def test_initialised_twice(ranks: Any) -> None:
    ranks(2, again)
