"""Runs that go on with the ranks that are left when some die: :class:`Elastic`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from hdpcomm.arguments import ranks_text
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import from_rank
from hdpcomm.errors import Aborted, CommTimeout, InvalidUsage, Mismatch, PeerLost
from hdpcomm.log import LOG
from hdpcomm.run.checkpoints import newest_checkpoint
from hdpcomm.run.peer_saves import KeptCheckpoint, PeerSaves

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Elastic", "active_ranks", "run_with_survivors"]

T = TypeVar("T")
_OVER, _LOAD = range(2)
"""Messages to spare ranks."""
_FOR_EVER_S = 1e7
"""Seconds that a spare rank waits for the run: deaths end the wait, and so do ranks that begin again."""


_LOST = (Aborted, CommTimeout, PeerLost)


@dataclass(frozen=True, slots=True)
class Elastic:
    """How a run goes on when some of its ranks die.

    Attributes:
        folder: of the run: the newest checkpoint of ``folder / "checkpoints"`` is where it goes on if the living ranks
            hold no state together.
        pipeline, tensor, expert: the mesh, which is made of as many ranks as there can be; the others are spares.
        resume: where the run begins, as of :class:`hdpcomm.run.Saving`.
    """

    folder: Path
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    resume: str | None = None

    def run(
        self,
        comm: Communicator,
        attempt: Callable[[Communicator, str | KeptCheckpoint | None, PeerSaves], T],
        on_change: Callable[[Communicator, Sequence[int]], None] = lambda *_: None,
    ) -> T | None:
        """Runs ``attempt(comm, resume, peers)`` on the ranks that train, again whenever some die, and returns its
        result; ``None`` on a rank that is a spare at the end, or had to leave. Collective over ``comm``.

        Args:
            attempt: :func:`hdpcomm.run.train` with ``saving=Saving(..., resume=resume, peers=peers)``.
            on_change: (communicator of all living ranks, positions of those that are to train), before the next
                attempt.

        Raises: as :func:`run_with_survivors`.
        """
        peers = PeerSaves()
        place: str | KeptCheckpoint | None = self.resume

        def change(living: Communicator, what: str) -> None:
            nonlocal place
            active = self._active(living)
            place = peers.newest(living) or self._newest_on_disk(living)
            on_change(living, active)
            if living.rank == active[0]:
                LOG.info(what)
                LOG.info(_goes_on(len(active), living.size, place))

        def once(living: Communicator) -> T | None:
            active = self._active(living)
            spares = [rank for rank in range(living.size) if rank not in active]
            first = living.rank == active[0]
            peers.next_attempt()
            kept = place if isinstance(place, KeptCheckpoint) else None
            if living.rank in spares:
                _wait_as_spare(living, active[0], kept)
                return None
            begins: str | KeptCheckpoint | None = place
            if kept is not None and first:
                begins = replace(kept, call_spares=lambda: _call_spares(living, spares))
            training = living.subset(active)
            assert training is not None  # this rank is one of them
            with _lead_spares(living, spares if first else []):
                return attempt(training, begins, peers)

        try:
            return run_with_survivors(comm, once, change)
        except Mismatch as error:
            if error.rank not in error.unlike:
                raise
            LOG.error(f"rank {error.rank} leaves the run: {error}")
            return None

    def _active(self, living: Communicator) -> list[int]:
        return active_ranks(living, pipeline=self.pipeline, tensor=self.tensor, expert=self.expert)

    def _newest_on_disk(self, living: Communicator) -> str | None:
        """Where a run goes on that has lost what its ranks had in memory: its newest checkpoint, or where it began."""
        folder = self.folder / "checkpoints"
        found = newest_checkpoint(folder)[0] if living.rank == 0 and folder.is_dir() else None
        return from_rank(living, (self.resume or "") if found is None else str(found.path)) or None


def _goes_on(active: int, living: int, resume: str | KeptCheckpoint | None) -> str:
    spares = f" ({living - active} spare)" if living > active else ""
    if resume is None:
        place = "step 0, since there is no checkpoint yet"
    else:
        place = resume if isinstance(resume, str) else str(resume.path)
    in_memory = resume is not None and not isinstance(resume, str)
    lost = "" if in_memory else "; what other ranks kept in memory is lost, too"
    return f"going on with {ranks_text(active)}{spares} from {place}{lost}"


def run_with_survivors(
    comm: Communicator,
    attempt: Callable[[Communicator], T],
    on_change: Callable[[Communicator, str], None],
) -> T:
    """Runs ``attempt(comm)`` and returns its result. When ranks die, the others call ``on_change`` and ``attempt``
    again, on the communicator of those that are there then, also where a death comes in ``on_change``. Collective over
    ``comm``.

    Args:
        attempt: goes on from a checkpoint, and keeps nothing of the attempt before.
        on_change: (communicator of all ranks, what has happened).

    Raises:
        InvalidUsage: ``comm`` has devices, whose operations end with the first error.
        CommTimeout: a rank that lives has not come to the others within the communicator's timeout.
        Mismatch: on the ranks that are not like most (``unlike``), which leave; the others go on.
        What ``attempt`` raises if no rank has died, or if it is no error of communication.
    """
    if isinstance(comm, DeviceCommunicator):
        raise InvalidUsage(
            "operations of devices end for good when a rank dies, so the others cannot go on by themselves (elastic): "
            "start the ranks by torchrun --max-restarts, which starts all of them anew"
        )
    what = ""
    while True:
        try:
            if what:
                on_change(comm, what)
            return attempt(comm)
        except (*_LOST, Mismatch) as error:
            failure = error.with_traceback(None)  # whose frames hold the model
            failure.__cause__ = failure.__context__ = None
            if isinstance(failure, Mismatch) and comm.global_rank in (failure.unlike or [comm.global_rank]):
                raise failure from None
        living = comm.shrink()
        if living.size == comm.size:
            raise failure
        gone = sorted({*comm.ranks} - {*living.ranks})
        what = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} died or left"
        comm = living


def active_ranks(living: Communicator, *, pipeline: int, tensor: int, expert: int) -> list[int]:
    """Positions of the ranks that train on a mesh of these sizes, as many as there can be: tensor ranks are of one
    host, so hosts give multiples of them. The others are spares. The same on all ranks; local.

    Raises: InvalidUsage where not even one HDP replica can be made.
    """
    world, unit = nodes_of(living), pipeline * tensor * expert
    by_host: dict[int, list[int]] = defaultdict(list)
    for position, rank in enumerate(living.ranks):
        by_host[world[rank]].append(position)
    usable = [position for own in by_host.values() for position in own[: len(own) // tensor * tensor]]
    count = len(usable) // unit * unit
    if not count:
        raise InvalidUsage(
            f"too few ranks are left ({living.size}): pipeline {pipeline} x tensor {tensor} x expert {expert} needs "
            f"{unit} (tensor ranks on one host): start the run again on more ranks, with --resume auto"
        )
    return sorted(usable[:count])


@contextmanager
def _lead_spares(living: Communicator, spares: Sequence[int]) -> Iterator[None]:
    """On the first active rank, around the run: at its end spares are told that it is over, unless ranks have died."""
    try:
        yield
    except (*_LOST, Mismatch):
        raise
    except BaseException:
        _tell(living, spares, _OVER)
        raise
    _tell(living, spares, _OVER)


def _call_spares(living: Communicator, spares: Sequence[int]) -> None:
    """On the first active rank, before :meth:`KeptCheckpoint.load_into` of all: spares take part."""
    _tell(living, spares, _LOAD)


def _wait_as_spare(living: Communicator, first: int, kept: KeptCheckpoint | None) -> None:
    """On a spare: gives what it keeps when the active ranks load it, and returns when the run is over.

    Args:
        first: position of the first active rank.

    Raises: PeerLost, Aborted: ranks have died, or begin again.
    """
    told = torch.zeros(1, dtype=torch.int64)
    while True:
        living.recv(told, first, async_op=True).wait(_FOR_EVER_S)
        if int(told) == _OVER or kept is None:
            return
        try:
            kept.load_into({})
        except InvalidUsage:
            continue  # the others have the same error, and do without


def _tell(living: Communicator, spares: Sequence[int], what: int) -> None:
    for spare in spares:
        with suppress(PeerLost):  # one that has died needs nothing
            living.send(torch.tensor([what]), spare)
