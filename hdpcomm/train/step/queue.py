"""Micro-batches that are bound to no rank: who is free takes the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from hdpcomm.comm import Communicator, SharedCounter
from hdpcomm.errors import Aborted, Error, InvalidUsage, PeerLost
from hdpcomm.plan import MicroBatch, StepPlan
from hdpcomm.plan.step import as_run, pool_rows

__all__ = ["StepQueue"]

_ONCE = 1 << 32  # counts who has run a micro-batch, above the number of the rank


class StepQueue:
    """This rank's end of the queue of one step (:attr:`hdpcomm.plan.StepPlan.queued`).

    Iterating gives the micro-batches that this rank takes, as its own, one at a time: it asks for the next one when it
    comes back, so the device has to be done with the one before. The ranks of a pool ask one counter, and nobody waits
    for anybody. Every rank iterates to the end, which only who has taken the last one knows before. Leave it as a
    context manager only after :meth:`plan_as_run`, when all ranks have come to their ends, or with an error.

    Args:
        plan: the step's, equal on all ranks.
        comm: its ranks. Collective over those of each pool.
        team: ranks that run all micro-batches of this one together, as tensor ranks do: the first one of them asks.
            ``None``: this one alone.

    Attributes:
        ended: none are left after the one that was taken last.

    Raises: what :meth:`hdpcomm.comm.Communicator.counter` raises; while iterating PeerLost and CommTimeout, and
        Aborted where the rank that holds the counter has given up the step and all live.
    """

    def __init__(self, plan: StepPlan, comm: Communicator, team: Communicator | None = None) -> None:
        self._plan, self._comm = plan, comm
        self._team = team if team is not None and team.size > 1 else None
        pool = comm.rank % plan.queue_pools
        self._rows = pool_rows(plan, pool).tolist()
        self._taken: list[int] = []
        self.ended = not self._rows
        self._counter: SharedCounter | None = None
        if self._team is None or self._team.rank == 0:
            ranks = cast("Communicator", comm.subset(range(pool, comm.size, plan.queue_pools)))
            self._counter = ranks.counter()

    def __iter__(self) -> Iterator[MicroBatch]:
        while not self.ended and (place := self._next()) < len(self._rows):
            row = self._rows[place]
            self._taken.append(row)
            self.ended = place == len(self._rows) - 1
            yield replace(self._plan.micro_batch(row), ranks=(self._comm.rank,))

    def _next(self) -> int:
        place = 0 if self._counter is None else self._ask(self._counter)
        if self._team is None:
            return place
        told = torch.tensor([place], dtype=torch.int64)
        self._team.broadcast(told, 0)
        return int(told)

    def _ask(self, counter: SharedCounter) -> int:
        try:
            return counter.fetch_add()
        except InvalidUsage as error:  # it was closed, which only an error does meanwhile
            owner = self._comm.ranks[self._comm.rank % self._plan.queue_pools]
            kind: type[Error] = Aborted
            peer, reason = owner, f"look for the error of rank {owner}"
            if lost := self._comm.lost():
                kind, peer, reason = PeerLost, lost[0], f"rank {lost[0]} died or left"
            raise kind(
                f"rank {owner} has given up the step while rank {self._comm.global_rank} took from its queue: {reason}",
                rank=self._comm.global_rank,
                op="step",
                peer=peer,
            ) from error

    def plan_as_run(self) -> StepPlan:
        """The plan with the ranks that have run the micro-batches of the queue. Collective over ``comm``: 8 bytes for
        each of them; no rank returns before all have come to the end of the queue.

        Raises:
            Error: one was not run, or twice; nothing may be made of the step's gradients then.
        """
        first = len(self._plan.table) - self._plan.queued
        runs = torch.zeros(self._plan.queued, dtype=torch.int64)
        for row in self._taken:
            runs[row - first] += _ONCE + self._comm.rank
        self._comm.all_reduce(runs)
        if bool((runs // _ONCE != 1).any()):
            place = int((runs // _ONCE != 1).nonzero()[0])
            raise Error(
                f"micro-batch {int(self._plan.table.index[first + place])} of the queue was run "
                f"{int(runs[place] // _ONCE)} times in one step, once was expected: this is a defect of hdpcomm; train "
                "without a queue, and report it",
                rank=self._comm.global_rank,
                op="step",
            )
        return as_run(self._plan, (runs % _ONCE).to(torch.int32).numpy())

    def __enter__(self) -> StepQueue:
        return self

    def __exit__(self, *_: object) -> None:
        if self._counter is not None:
            self._counter.close()
