"""Agreement of the living ranks of a communicator after errors: who they are, and whether all gave a flag.

In rounds. A rank brings itself into step with all members that it believes to live (``resync()``), and exchanges with
each of them whom it believes to live. If all believe the same, they tell each other that they know, and that is the
answer; else the next round takes those who believe in each other. A rank that finds another one dead starts another
round, which ends that of the others: who has heard of all that they know can return, since without another death none
of them starts one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hdpcomm import _core
from hdpcomm.comm.tensors import describe
from hdpcomm.errors import Aborted, CommTimeout, Mismatch, PeerLost

__all__ = ["Agreement", "agree"]

_CALLS = ("shrink", "agree")
# Between two rounds; twice as long after each. The end of a round ends those of the others, which must not happen to
# rounds that have begun again already, or ranks would end each other's rounds for ever.
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.128
_LEAST_S = 1e-3

_Views = dict[int, torch.Tensor]  # by rank: 1 for each rank of the world that it believes to live, its flag, its call


@dataclass(frozen=True, slots=True)
class Agreement:
    """The answer of one round, equal on all ranks that get it."""

    living: tuple[int, ...]  # positions in the communicator, ascending
    flag: bool  # whether all of them gave a true flag


def agree(core: _core.comm.Communicator, call: str, flag: bool, timeout: float) -> Agreement:
    """Collective over the living ranks of ``core``.

    ``call``: what the user called, shrink or agree; ``timeout``: seconds.
    Raises: CommTimeout when ranks that live have not called it, or go on without this one, which they have lost;
    Mismatch when this rank called agree and another one shrink.
    """
    world, ranks = core.world, core.ranks
    limit = time.monotonic() + timeout
    living = sorted(ranks)
    pause = _PAUSE_S
    while True:
        living = [rank for rank in living if rank == world.rank or not world.has_left(rank)]
        try:
            views = _round(core, living, call, flag, limit)
            agreed = all(view[: world.size].nonzero().flatten().tolist() == living for view in views.values())
            if agreed:
                _exchange(core, {rank: torch.ones(1, dtype=torch.uint8) for rank in living}, limit)
        except (Aborted, CommTimeout, Mismatch, PeerLost) as error:
            if world.over:
                raise
            if time.monotonic() >= limit:
                raise CommTimeout(
                    f"rank {world.rank} waited {timeout} s in {call}() for ranks {living}: all that live must call it, "
                    f"and reach each other; the last error: {error}",
                    rank=world.rank,
                    peer=error.peer,
                    op=call,
                    ranks=ranks,
                ) from error
            if isinstance(error, PeerLost) and error.peer != world.rank:
                living = [rank for rank in living if rank != error.peer]
            time.sleep(min(pause, max(0.0, limit - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            continue
        if agreed:
            _check_calls(views, call, world.rank)
            positions = tuple(position for position, rank in enumerate(ranks) if rank in living)
            return Agreement(positions, all(bool(view[-2]) for view in views.values()))
        living = _connected(views)


def _round(core: _core.comm.Communicator, living: list[int], call: str, flag: bool, limit: float) -> _Views:
    """Exchanges views with the living ranks, once they are in step with this one."""
    world, ranks = core.world, core.ranks
    group = _core.comm.subset(core, [position for position, rank in enumerate(ranks) if rank in living])
    assert group is not None  # this rank is one of them
    group[0].resync(_left(limit), quiet=True)
    views = {rank: torch.zeros(world.size + 2, dtype=torch.uint8) for rank in living}
    mine = views[world.rank]
    mine[living] = 1
    mine[-2], mine[-1] = flag, _CALLS.index(call)
    _exchange(core, views, limit)
    return views


def _exchange(core: _core.comm.Communicator, views: _Views, limit: float) -> None:
    """Sends this rank's view to the others, and takes theirs."""
    world = core.world
    others = [rank for rank in views if rank != world.rank]
    if others:
        # On the communicator of all ranks, since two ranks may call shrink() on communicators of different size.
        sends, recvs = [(views[world.rank], rank) for rank in others], [(views[rank], rank) for rank in others]
        work = _core.comm.exchange(world.communicator(), describe, sends, recvs, True)
        assert work is not None  # asynchronous
        work.wait(_left(limit), quiet=True)


def _left(limit: float) -> float:
    return max(limit - time.monotonic(), _LEAST_S)


def _connected(views: _Views) -> list[int]:
    """Ranks of which each believes all others to live: from the lowest one on, each that fits those before it. Where
    the network between two ranks is cut and both reach a third one, the lower one stays."""
    chosen: list[int] = []
    for rank, view in sorted(views.items()):
        if all(view[other] and views[other][rank] for other in chosen):
            chosen.append(rank)
    return chosen


def _check_calls(views: _Views, call: str, own_rank: int) -> None:
    """An agreement needs the flags of all. A rank in shrink() gave none, and goes on."""
    others = [rank for rank, view in views.items() if _CALLS[int(view[-1])] != call]
    if call == "agree" and others:
        raise Mismatch(
            f"rank {own_rank} called agree(), but ranks {others} called shrink(): call the same on all ranks that live",
            rank=own_rank,
            peer=others[0],
            op=call,
            ranks=tuple(views),
        )
