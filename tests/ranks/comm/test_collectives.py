"""Every collective against sums and copies written with torch, over worlds, sizes, types, algorithms and subsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads

SIZES = (0, 1, 5, 1025, 70_001)  # empty, one, odd, more than a page, larger than eager messages
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small integers: sums and products of a few of them are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


def reduced(op: str, count: int, dtype: torch.dtype, size: int, seed: int = 0) -> torch.Tensor:
    stack = torch.stack([values(rank, count, dtype, seed).double() for rank in range(size)])
    result = {
        "sum": lambda: stack.sum(0),
        "avg": lambda: stack.sum(0) / size,
        "prod": lambda: stack.prod(0),
        "min": lambda: stack.amin(0),
        "max": lambda: stack.amax(0),
    }[op]()
    return result.to(dtype)


def check_gathers(comm: hdp.Communicator, count: int, dtype: torch.dtype) -> None:
    n = comm.size
    blocks = [values(rank, count, dtype) for rank in range(n)]
    everything = torch.cat(blocks)
    for algorithm in ("auto", *comm.algorithms("all_gather")):
        out = torch.zeros(n * count, dtype=dtype)
        comm.all_gather(out, blocks[comm.rank], algorithm=algorithm)
        assert torch.equal(out, everything), (algorithm, count, dtype)
        out = torch.zeros(n * count, dtype=dtype)
        mine = out[comm.rank * count : (comm.rank + 1) * count]
        mine.copy_(blocks[comm.rank])
        comm.all_gather(out, mine, algorithm=algorithm)  # in place
        assert torch.equal(out, everything)
    for root in {0, n - 1}:
        for algorithm in ("auto", *comm.algorithms("broadcast")):
            x = blocks[root].clone() if comm.rank == root else torch.zeros(count, dtype=dtype)
            comm.broadcast(x, root, algorithm=algorithm)
            assert torch.equal(x, blocks[root])
        for algorithm in ("auto", *comm.algorithms("gather")):
            out = torch.zeros(n * count, dtype=dtype) if comm.rank == root else None
            comm.gather(out, blocks[comm.rank], root, algorithm=algorithm)
            assert out is None or torch.equal(out, everything)
        for algorithm in ("auto", *comm.algorithms("scatter")):
            x = torch.zeros(count, dtype=dtype)
            comm.scatter(x, everything if comm.rank == root else None, root, algorithm=algorithm)
            assert torch.equal(x, blocks[comm.rank])


def check_reductions(comm: hdp.Communicator, count: int, dtype: torch.dtype, op: str) -> None:
    n = comm.size
    mine = values(comm.rank, count, dtype)
    expected = reduced(op, count, dtype, n)
    for algorithm in ("auto", *comm.algorithms("all_reduce")):
        x = mine.clone()
        comm.all_reduce(x, op, algorithm=algorithm)
        assert torch.equal(x, expected), (algorithm, count, dtype, op)
        out = torch.zeros_like(mine)
        comm.all_reduce(mine, op, out=out, algorithm=algorithm)
        assert torch.equal(out, expected)
        assert torch.equal(mine, values(comm.rank, count, dtype))  # the input stays
    for algorithm in ("auto", *comm.algorithms("reduce_scatter")):
        whole = values(comm.rank, n * count, dtype, seed=1)
        part = reduced(op, n * count, dtype, n, seed=1)[comm.rank * count : (comm.rank + 1) * count]
        out = torch.zeros(count, dtype=dtype)
        comm.reduce_scatter(out, whole, op, algorithm=algorithm)
        assert torch.equal(out, part), (algorithm, count, dtype, op)
        assert torch.equal(whole, values(comm.rank, n * count, dtype, seed=1))
        inside = whole[comm.rank * count : (comm.rank + 1) * count]
        comm.reduce_scatter(inside, whole, op, algorithm=algorithm)  # in place
        assert torch.equal(inside, part), (algorithm, count, dtype, op)
    for root in {0, n - 1}:
        for algorithm in ("auto", *comm.algorithms("reduce")):
            x = mine.clone()
            comm.reduce(x, root, op, algorithm=algorithm)
            assert torch.equal(x, expected if comm.rank == root else mine), (algorithm, count, dtype, op)


def check_all_to_all(comm: hdp.Communicator, count: int, dtype: torch.dtype) -> None:
    n = comm.size
    sent = [values(rank, n * count, dtype) for rank in range(n)]
    expected = torch.cat([part[comm.rank * count : (comm.rank + 1) * count] for part in sent])
    splits = [[(3 * i + 5 * j + count) % 7 for j in range(n)] for i in range(n)]  # elements from i to j
    ragged = [values(rank, sum(splits[rank]), dtype, seed=2) for rank in range(n)]
    ragged_expected = torch.cat([ragged[i].split(splits[i])[comm.rank] for i in range(n)])
    for algorithm in ("auto", *comm.algorithms("all_to_all")):
        out = torch.zeros(n * count, dtype=dtype)
        comm.all_to_all(out, sent[comm.rank], algorithm=algorithm)
        assert torch.equal(out, expected), algorithm
    out = torch.zeros(len(ragged_expected), dtype=dtype)
    from_ranks = [splits[i][comm.rank] for i in range(n)]
    comm.all_to_all(out, ragged[comm.rank], from_ranks, splits[comm.rank])
    assert torch.equal(out, ragged_expected)


def everything(communicators: tuple[tuple[int, ...], ...]) -> None:
    with hdp.init() as world:
        for positions in communicators:
            comm = world.subset(positions)
            if comm is None:
                continue
            for count in SIZES:
                for dtype in (torch.float32, torch.int16):
                    check_gathers(comm, count, dtype)
                    check_all_to_all(comm, count, dtype)
                    check_reductions(comm, count, dtype, "sum")
            for dtype in (*FLOATS, *INTEGERS):
                check_gathers(comm, 33, dtype)
                for op in ("sum", "prod", "min", "max", *(["avg"] if dtype.is_floating_point else [])):
                    check_reductions(comm, 33, dtype, op)
            comm.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_processes(ranks: Any, world_size: int) -> None:
    ranks(world_size, everything, (tuple(range(world_size)),))


def test_subsets_of_processes(ranks: Any) -> None:
    ranks(4, everything, ((2, 0), (3, 1, 2), (0,), (1, 3, 0, 2)))


def test_threads() -> None:
    run_threads(everything, 5, ((0, 1, 2, 3, 4), (4, 2, 0), (1, 3)))


def strided_and_numpy() -> None:
    import numpy as np

    comm = hdp.init()
    x = np.full(7, comm.rank, dtype=np.float64)
    out = np.empty(7 * comm.size)
    comm.all_gather(out, x)
    assert out.tolist() == [float(rank) for rank in range(comm.size) for _ in range(7)]
    torch_out = torch.empty(7 * comm.size, dtype=torch.float64)
    comm.all_gather(torch_out, x)  # kinds may be mixed
    assert torch_out.tolist() == out.tolist()
    with pytest.raises(hdp.InvalidUsage, match=r"not contiguous.*contiguous\(\)"):
        comm.all_gather(torch.empty(7 * comm.size, 2, dtype=torch.float64)[:, 0], x)
    with pytest.raises(hdp.InvalidUsage, match="not contiguous"):
        comm.all_reduce(np.zeros((4, 4))[:, 1])
    x.flags.writeable = False
    with pytest.raises(hdp.InvalidUsage, match="read-only"):
        comm.all_reduce(x)
    comm.all_reduce(torch_out)  # and the communicator works on


def test_numpy_and_layouts(ranks: Any) -> None:
    ranks(2, strided_and_numpy)


def bad_arguments() -> None:
    comm = hdp.init()
    two, four, longs = torch.zeros(2), torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: comm.all_gather(two, two),
            r"all_gather\(\) got x with 2 and out with 2 .* on 2 ranks out must have 4",
        ),
        (lambda: comm.reduce_scatter(four, two), r"got out with 4 and x with 2 elements; on 2 ranks x must have 8"),
        (lambda: comm.all_gather(longs, two), "out has dtype int64, the other tensor float32; give equal types"),
        (lambda: comm.reduce_scatter(two, longs), "x has dtype int64, the other tensor float32"),
        (lambda: comm.all_reduce(two, out=four), "out has 4 elements, x 2; give equal sizes"),
        (lambda: comm.reduce(two, 0, out=longs[:2]), "out has dtype int64"),
        (lambda: comm.gather(two, two, comm.rank), "on 2 ranks out must have 4"),
        (lambda: comm.gather(None, two, comm.rank), "out is a NoneType; give a torch tensor"),
        (lambda: comm.scatter(four, four, comm.rank), "on 2 ranks x must have 8"),
        (lambda: comm.all_to_all(torch.zeros(3), torch.zeros(3)), "equal and divisible by the 2 ranks"),
        (lambda: comm.all_to_all(two, two, [1, 1]), "one of out_splits and in_splits; give both or neither"),
        (lambda: comm.all_to_all(two, two, [1, 1], [2, 1]), r"in_splits=\[2, 1\]; it must hold 2 counts.* 2 elements"),
        (lambda: comm.all_to_all(two, two, [3, -1], [1, 1]), r"out_splits=\[3, -1\]; it must hold 2 counts"),
        (lambda: comm.all_to_all(two, longs[:2], [1, 1], [1, 1]), "out has dtype float32, the other tensor int64"),
        (lambda: comm.all_reduce(two, "mean"), r"all_reduce\(\) got op='mean'; known are: sum, prod, min, max, avg"),
        (lambda: comm.all_reduce(two, None), "got op=None; known are"),  # type: ignore[arg-type]
        (lambda: comm.all_reduce(two, algorithm="best"), "algorithm 'best' is unknown; known are: auto, ring"),
        (lambda: comm.broadcast(two, 2), "broadcast.. got rank 2, but this communicator has ranks 0..1"),
        (lambda: comm.broadcast(two, 1 << 40), "got rank 1099511627776"),
        (lambda: comm.send(two, comm.rank), "to itself would wait for ever"),
        (lambda: comm.exchange([], [(two, 0), ([1.0], 0)]), r"recvs\[1\] is a list"),
    ]
    on_the_host: list[tuple[Callable[[], object], str]] = [
        (lambda: comm.send([1.0], 1 - comm.rank), "x is a list"),
        (lambda: comm.exchange([(two, 0), (two, 0, 3)], []), "landing place for host memory"),
    ]
    for call, message in calls + (on_the_host if comm.transport == "shm" else []):
        with pytest.raises(hdp.InvalidUsage, match=message):
            call()
    for wrong in (lambda: comm.broadcast(two, "0"), lambda: comm.exchange(3), lambda: comm.exchange([3])):  # type: ignore
        with pytest.raises(hdp.InvalidUsage, match=r"'0'|3"):
            wrong()
    comm.exchange([[two + 1, 1 - comm.rank]], [[two, 1 - comm.rank]])  # lists are pairs, too; and it works on
    assert two.tolist() == [1.0, 1.0]
    name = "".join(["s", "u", "m"])  # equal to the name that the core keeps, but another object
    comm.all_reduce(two, name)
    assert two.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("transport", ["shm", "sim"])
def test_bad_arguments_are_named(transport: str) -> None:
    run_threads(bad_arguments, 2, transport=transport)


def same_bits() -> list[bytes]:
    comm = hdp.init()
    results = []
    for algorithm in comm.algorithms("all_reduce"):
        x = torch.randn(10_007, generator=torch.Generator().manual_seed(comm.rank))
        comm.all_reduce(x, algorithm=algorithm)
        results.append(x.numpy().tobytes())
    return results


def test_all_reduce_gives_the_same_bits_on_all_ranks_and_runs(ranks: Any) -> None:
    runs = [ranks(4, same_bits) for _ in range(2)]
    for run in runs:
        assert all(rank == run[0] for rank in run)
    assert runs[0] == runs[1]
