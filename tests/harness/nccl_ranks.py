"""Many ranks over one fake NCCL, and what their operations must give."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdpcomm import _core
from hdpcomm._core import comm
from tests.harness.native import _testing

__all__ = ["NONE", "ROOTED", "Operation", "World"]

NONE = 255  # no reduction
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


class Operation:
    """A collective on some ranks: inputs, outputs and what the outputs must be, by position."""

    def __init__(
        self,
        op: str,
        ranks: list[int],
        count: int,
        *,
        algorithm: str = "auto",
        root: int = 0,
        redop: str = "sum",
        hosts: list[int] | None = None,
    ) -> None:
        self.op, self.ranks, self.count, self.algorithm = op, ranks, count, algorithm
        self.root = root if op in ROOTED else -1
        self.redop = redop if op in REDUCING else ""
        # The host of each position, numbered by first appearance; none: one host.
        self.nodes = [list(dict.fromkeys(hosts)).index(host) for host in hosts] if hosts else []
        n = len(ranks)
        wide = n * count
        sizes = {"reduce_scatter": (wide, count), "all_gather": (count, wide), "gather": (count, wide)}
        sizes |= {"scatter": (wide, count), "all_to_all": (wide, wide), "barrier": (0, 0)}
        size_in, size_out = sizes.get(op, (count, count))
        base = np.arange(size_in) % 5
        self.inputs = [(base + 3 * rank + len(op)).astype(np.float32) % 7 for rank in ranks]
        self.outputs = [np.full(size_out, -1, np.float32) for _ in ranks]
        self.expected = self._expected(n, count)

    def _expected(self, n: int, count: int) -> list[np.ndarray[Any, Any] | None]:
        inputs = self.inputs
        blocks = [slice(i * count, (i + 1) * count) for i in range(n)]
        if self.op in REDUCING:
            stack = np.stack(inputs).astype(np.float64)
            total = {"sum": stack.sum(0), "max": stack.max(0), "avg": stack.mean(0)}[self.redop].astype(np.float32)
            if self.op == "reduce_scatter":
                return [total[block] for block in blocks]
            return [total if self.op == "all_reduce" or i == self.root else None for i in range(n)]
        if self.op in ("all_gather", "gather"):
            whole = np.concatenate(inputs)
            return [whole if self.op == "all_gather" or i == self.root else None for i in range(n)]
        if self.op == "broadcast":
            return [inputs[self.root]] * n
        if self.op == "scatter":
            return [inputs[self.root][block] for block in blocks]
        if self.op == "all_to_all":
            return [np.concatenate([x[block] for x in inputs]) for block in blocks]
        return [None] * n

    def enqueue(self, member: _testing.NcclMember, rank: int) -> None:
        """On one rank."""
        i = self.ranks.index(rank)
        source, target = self.inputs[i], self.outputs[i]
        redop = comm.REDOPS[self.redop] if self.redop else NONE
        member.collective(
            comm.OPS[self.op], comm.ALGORITHMS[self.algorithm], self.ranks, source.ctypes.data, target.ctypes.data,
            self.count, _core.DTYPES["float32"], redop, self.root, self.nodes,
        )  # fmt: skip

    def check(self) -> None:
        """After the run."""
        for i, expected in enumerate(self.expected):
            if expected is not None:
                np.testing.assert_allclose(self.outputs[i], expected, rtol=1e-6, err_msg=str(self))

    def __repr__(self) -> str:
        return f"{self.op}({self.count}, {self.algorithm}) on {self.ranks} of hosts {self.nodes}"


class World:
    """All ranks of a fake."""

    def __init__(self, size: int) -> None:
        self.fake = _testing.FakeNccl(size)
        self.members = [self.fake.join(rank) for rank in range(size)]

    def enqueue(self, operations: list[Operation], swap: tuple[int, int] | None = None) -> None:
        """On all ranks in the order of the list; ``swap=(rank, i)``: on this one, i after i + 1."""
        for rank, member in enumerate(self.members):
            order = [i for i, operation in enumerate(operations) if rank in operation.ranks]
            if swap is not None and swap[0] == rank:
                i = order.index(swap[1])
                order[i], order[i + 1] = order[i + 1], order[i]
            for i in order:
                self.fake.label(rank, f"operation {i}: {operations[i]}")
                operations[i].enqueue(member, rank)
