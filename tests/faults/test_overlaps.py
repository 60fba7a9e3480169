"""Buffers of one operation that overlap are refused by name, before a byte moves; the forms in place are right."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import spawn
from tests.harness.fault_cases import LONG_S, still_works

RANKS = 3
N = 1000  # elements of a block


def overlapping(comm: hdp.Communicator) -> list[tuple[str, Callable[[], Any], tuple[str, str]]]:
    """Calls with buffers that overlap, and the two that the error names."""
    all_of = torch.zeros(2 * comm.size * N)
    whole, off = all_of[: comm.size * N], (comm.rank + 1) % comm.size * N
    other, block, late = all_of[N : (comm.size + 1) * N], all_of[off : off + N], all_of[comm.rank * N + 1 :][:N]
    peer, own = (comm.rank + 1) % comm.size, torch.zeros(N)
    splits = [N] * comm.size
    many = [(all_of[2 * i : 2 * i + 1], peer) for i in range(300)]
    tensors = ("x (", "out (")
    return [
        ("all_gather", lambda: comm.all_gather(whole, block), tensors),
        ("all_gather", lambda: comm.all_gather(whole, late), tensors),
        ("reduce_scatter", lambda: comm.reduce_scatter(block, whole), tensors),
        ("reduce_scatter", lambda: comm.reduce_scatter(late, whole), tensors),
        ("all_reduce", lambda: comm.all_reduce(all_of[:N], out=all_of[1 : N + 1]), tensors),
        ("reduce", lambda: comm.reduce(all_of[:N], comm.rank, out=all_of[N - 1 : 2 * N - 1]), tensors),
        ("gather", lambda: comm.gather(whole, block, comm.rank), tensors),
        ("scatter", lambda: comm.scatter(block, whole, comm.rank), tensors),
        ("all_to_all", lambda: comm.all_to_all(whole, whole), tensors),
        ("all_to_all", lambda: comm.all_to_all(whole, other), tensors),
        ("all_to_all", lambda: comm.all_to_all(whole, other, splits, splits), tensors),
        ("exchange", lambda: comm.exchange([(own, peer)], [(own, peer)]), ("sends[0] (", "recvs[0] (")),
        ("exchange", lambda: comm.exchange([], [(own, peer), (own[-1:], peer)]), ("recvs[0] (", "recvs[1] (")),
        ("exchange", lambda: comm.exchange([(all_of, peer)], [(own, peer), (late, peer)]), ("sends[0]", "recvs[1]")),
        ("exchange", lambda: comm.exchange(many, [(all_of[5:7], peer)]), ("sends[3] (", "recvs[0] (")),
        ("exchange", lambda: comm.exchange([(own, peer)], [*many, many[7]]), ("recvs[7] (", "recvs[300] (")),
    ]  # fmt: skip


def refused() -> None:
    with hdp.init(timeout=LONG_S) as comm:
        for name, call, told in overlapping(comm) if comm.rank == 1 else []:
            with pytest.raises(hdp.InvalidUsage) as info:
                call()
            for each in told:
                assert each in str(info.value), (name, str(info.value))
            assert re.search(rf"{name}\(\).* bytes at 0x.* overlap; give buffers", str(info.value))
        still_works(comm)


def in_place() -> None:
    """Every algorithm, and messages beside each other in one storage, some of them sent twice."""
    with hdp.init(timeout=LONG_S) as comm:
        values = torch.arange(float(comm.size * N))
        mine = slice(comm.rank * N, (comm.rank + 1) * N)
        for n, name in itertools.product((1, 7, N), comm.algorithms("all_gather")):
            out = torch.full((comm.size * n,), -1.0)
            out[comm.rank * n : (comm.rank + 1) * n] = values[comm.rank * n : (comm.rank + 1) * n]
            comm.all_gather(out, out[comm.rank * n : (comm.rank + 1) * n], algorithm=name)
            assert out.equal(values[: comm.size * n]), name
        for name in comm.algorithms("reduce_scatter"):
            x = values + comm.rank
            comm.reduce_scatter(x[mine], x, algorithm=name)
            assert x[mine].equal(comm.size * values[mine] + sum(range(comm.size))), name
        for name in comm.algorithms("all_reduce"):
            x = values + comm.rank
            comm.all_reduce(x, out=x, algorithm=name)
            assert x.equal(comm.size * values + sum(range(comm.size))), name
        for root in range(comm.size):
            x = values.clone() if comm.rank == root else torch.empty(comm.size * N)
            comm.scatter(x[mine], x if comm.rank == root else None, root)
            comm.gather(x if comm.rank == root else None, x[mine], root)
            assert x.equal(values) if comm.rank == root else x[mine].equal(values[mine])
        row = torch.stack([torch.full((N,), float(comm.rank)), torch.zeros(N), torch.zeros(N)])
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.exchange([(row[0], after), (row[0], before)], [(row[1], before), (row[2], after)])
        assert row[:, 0].tolist() == [comm.rank, before, after]


@pytest.mark.parametrize("transport", ["shm", "tcp", "sim"])
@pytest.mark.parametrize("program", [refused, in_place])
def test_overlaps(program: Callable[[], None], transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_TRANSPORT", transport)
    spawn(program, RANKS)
