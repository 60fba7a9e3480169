"""Random collectives on random overlapping subsets, sync and async, in one global order, each checked."""

from __future__ import annotations

import random
from typing import Any

import torch

import hdpcomm as hdp

__all__ = ["random_mix"]

OPS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "p2p",
)

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


def random_mix(seed: int, count: int, world: hdp.Communicator | None = None) -> None:
    """``count`` operations; every rank calls it with the same seed. Raises AssertionError at the first wrong result."""
    world = world or hdp.init()
    generator = random.Random(seed)
    pending: list[tuple[hdp.Work, torch.Tensor, torch.Tensor]] = []
    for step in range(count):
        members = generator.sample(range(world.size), generator.randint(1, world.size))
        op = generator.choice(OPS)
        elements = generator.choice((0, 1, 3, 17, 300, 5000))
        dtype = generator.choice(DTYPES)
        root = generator.randrange(len(members))
        pick = generator.random()
        background = generator.random() < 0.3
        comm = world.subset(members)
        if comm is None:
            continue
        names = comm.algorithms(op) if op != "p2p" else ("auto",)
        algorithm = names[int(pick * len(names))]
        work, out, expected = issue(comm, op, elements, dtype, root, algorithm, step, background)
        if background:
            pending.append((work, out, expected))
        else:
            assert torch.equal(out, expected), (step, op, algorithm, comm.ranks, elements, dtype)
        if len(pending) > 5:
            check(pending)
    check(pending)


def check(pending: list[tuple[hdp.Work, torch.Tensor, torch.Tensor]]) -> None:
    for work, out, expected in pending:
        work.wait()
        assert torch.equal(out, expected), work
    pending.clear()


def value(rank: int, step: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(elements) * 7 + rank * 3 + step) % 5).to(dtype)


def issue(
    comm: hdp.Communicator,
    op: str,
    n: int,
    dtype: torch.dtype,
    root: int,
    algorithm: str,
    step: int,
    background: bool,
) -> tuple[hdp.Work, torch.Tensor, torch.Tensor]:
    size, rank = comm.size, comm.rank
    inputs = [value(r, step, n, dtype) for r in range(size)]
    mine = inputs[rank].clone()
    kwargs: dict[str, Any] = {"async_op": background, "algorithm": algorithm}
    total = torch.stack(inputs).double().sum(0).to(dtype)
    if op == "all_gather":
        out = torch.empty(size * n, dtype=dtype)
        return comm.all_gather(out, mine, **kwargs), out, torch.cat(inputs)
    if op == "reduce_scatter":
        wide = [value(r, step, n * size, dtype) for r in range(size)]
        out = torch.empty(n, dtype=dtype)
        expected = torch.stack(wide).double().sum(0).to(dtype)[rank * n : (rank + 1) * n]
        return comm.reduce_scatter(out, wide[rank], **kwargs), out, expected
    if op == "all_reduce":
        return comm.all_reduce(mine, **kwargs), mine, total
    if op == "broadcast":
        return comm.broadcast(mine, root, **kwargs), mine, inputs[root]
    if op == "reduce":
        return comm.reduce(mine, root, **kwargs), mine, total if rank == root else inputs[rank]
    if op == "gather":
        out = torch.empty(size * n, dtype=dtype) if rank == root else torch.empty(0, dtype=dtype)
        work = comm.gather(out if rank == root else None, mine, root, **kwargs)
        return work, out, torch.cat(inputs) if rank == root else out
    if op == "scatter":
        whole = torch.cat(inputs)
        out = torch.empty(n, dtype=dtype)
        return comm.scatter(out, whole if rank == root else None, root, **kwargs), out, inputs[rank]
    if op == "all_to_all":
        wide = [value(r, step, n * size, dtype) for r in range(size)]
        out = torch.empty(n * size, dtype=dtype)
        expected = torch.cat([w[rank * n : (rank + 1) * n] for w in wide])
        return comm.all_to_all(out, wide[rank], **kwargs), out, expected
    if op == "barrier":
        return comm.barrier(async_op=background), mine, mine
    out = torch.empty(n, dtype=dtype)  # a ring shift
    work = comm.exchange([(mine, (rank + 1) % size)], [(out, (rank - 1) % size)], async_op=background)
    return work, out, inputs[(rank - 1) % size]
