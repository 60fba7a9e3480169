"""Communicators over any ordered set of ranks. Making one is local and free; all bytes move by P2P in one transport."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.arguments import check_seconds, check_whole
from hdpcomm.comm import recovery
from hdpcomm.comm.counter import SharedCounter, open_counter
from hdpcomm.comm.device.landing_zone import LandingZone
from hdpcomm.comm.membership import Membership
from hdpcomm.comm.profiling import messages, operands, peers, profiler, recorded
from hdpcomm.comm.tensors import describe
from hdpcomm.comm.untraced import untraced
from hdpcomm.comm.work import ENDED, Work
from hdpcomm.errors import InvalidUsage

__all__ = ["Communicator", "Work"]

_OPS = _core.comm.OPS
_BARRIER, _BROADCAST, _ALL_REDUCE, _REDUCE = _OPS["barrier"], _OPS["broadcast"], _OPS["all_reduce"], _OPS["reduce"]
_ALL_GATHER, _REDUCE_SCATTER, _GATHER = _OPS["all_gather"], _OPS["reduce_scatter"], _OPS["gather"]
_SCATTER, _ALL_TO_ALL = _OPS["scatter"], _OPS["all_to_all"]
NAMES = {number: name for name, number in _OPS.items()}
_subset = _core.comm.subset
_send = _core.comm.send
_recv = _core.comm.recv
_exchange = _core.comm.exchange
_collective = _core.comm.collective
Splits = tuple[Sequence[int] | None, Sequence[int] | None]  # elements from and for each rank


@untraced
class Communicator(Membership):
    """An ordered set of ranks.

    Every collective is called by all its ranks, with equal arguments. A rank issues the operations of all its
    communicators in one order, and all ranks must agree on that order where their communicators overlap; then no mix of
    overlapping subsets can deadlock. Disjoint subsets run side by side. Tensors are torch CPU tensors or
    numpy arrays, with the ``cuda`` transport also CUDA tensors; contiguous, and in one operation all on the same
    device. Operations on CUDA tensors are ordered on torch's current stream and do not block the host.

    Every operation takes ``async_op``: then it returns at once and proceeds in the background, and ``Work.wait()`` ends
    it; without it the returned Work has ended. With ``algorithm="auto"`` the library chooses; :meth:`algorithms` lists
    the names.
    """

    __slots__ = ()

    # --- other communicators ---------------------------------------------------------------------------------------

    def subset(self, ranks: Sequence[int]) -> Communicator | None:
        """The communicator of the given positions of this one, in that order.

        Local: no message, no handshake, nothing created; the other ranks need not call it. Returns ``None`` on a rank
        that is not in the list. Equal lists make equal communicators on all ranks.

        Raises: InvalidUsage for an empty list, a duplicate, or a position that does not exist.
        """
        made = _subset(self._core, ranks)
        return None if made is None else Communicator(*made)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The familiar form: ranks with equal ``color`` form a communicator, ordered by ``key``, then by rank.

        Collective over this communicator (one all-gather). ``color=None``: this rank joins none and gets ``None``.
        """
        for name, given in (("color", 0 if color is None else color), ("key", key)):
            check_whole("split()", name, given)
        mine = torch.tensor([color is not None, 0 if color is None else color, key], dtype=torch.int64)
        everyone = torch.empty(self.size * 3, dtype=torch.int64)
        self.all_gather(everyone, mine)
        rows = everyone.view(self.size, 3).tolist()
        if color is None:
            return None
        members = sorted((row[2], rank) for rank, row in enumerate(rows) if row[0] and row[1] == color)
        return self.subset([rank for _, rank in members])

    # --- point to point --------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, *, async_op: bool = False) -> Work:
        """Sends ``x`` to position ``dst``, which calls :meth:`recv` (or :meth:`exchange`) with the same size and type.

        It ends when the receiver has accepted the message, whatever its size. Messages of a pair arrive in order.
        """
        if dst == self.rank and not async_op:
            raise self._self_message("send", dst)
        if profiler._is_profiler_enabled:
            told = operands(peers(self.ranks, self.global_rank, dst), x)
            return recorded("send", told, _send, self._core, describe, x, dst, async_op)
        handle = _send(self._core, describe, x, dst, async_op)
        return ENDED if handle is None else Work(handle)

    def recv(self, x: Any, src: int, *, async_op: bool = False) -> Work:
        """Receives into ``x`` from position ``src``, which calls :meth:`send` (or :meth:`exchange`)."""
        if src == self.rank and not async_op:
            raise self._self_message("recv", src)
        if profiler._is_profiler_enabled:
            told = operands(peers(self.ranks, self.global_rank, src), x)
            return recorded("recv", told, _recv, self._core, describe, x, src, async_op)
        handle = _recv(self._core, describe, x, src, async_op)
        return ENDED if handle is None else Work(handle)

    def exchange(
        self,
        sends: Sequence[tuple[Any, ...]] = (),
        recvs: Sequence[tuple[Any, ...]] = (),
        *,
        async_op: bool = False,
    ) -> Work:
        """Any sends ``(x, dst)`` and receives ``(y, src)`` at once; messages of a pair match in the order of the lists.

        The building block of neighbour exchanges: all are in flight together, so no order of ranks can deadlock. No
        ``y`` may overlap another buffer of the call.

        A message between devices may name its place in the receiver's landing zone, in bytes, on both sides:
        ``(x, dst, offset)`` and ``(y, src, offset)`` with ``y`` a view of :meth:`landing_zone` there. It is then put
        right there, without the copy out of a slot, once all that the receiver's stream held has run.
        """
        if profiler._is_profiler_enabled:
            with contextlib.suppress(TypeError):  # which the core tells
                sends, recvs = tuple(sends), tuple(recvs)  # iterators are read once
            told = messages(self.ranks, sends, recvs)
            return recorded("exchange", told, _exchange, self._core, describe, sends, recvs, async_op)
        handle = _exchange(self._core, describe, sends, recvs, async_op)
        return ENDED if handle is None else Work(handle)

    def landing_zone(self, x: Any) -> LandingZone | None:
        """This rank's landing zone for messages of the kind of ``x``; ``None`` where messages have no landing place.

        Its size is the same on all ranks that have one, and both sides of a message must agree on a place in it; only
        messages with peers that :meth:`lands` names may have one. Collectives by ``one_shot`` and ``two_shot`` read an
        operand there without a copy; it must have one place on all ranks. Local.
        """
        del x
        return None

    def lands(self, peer: int) -> bool:
        """Whether device messages with ``peer`` may name a landing place: the two devices map each other's memory.

        Both ranks of a pair get the same answer. Local. Raises: InvalidUsage for a peer that is no rank of this
        communicator, where there are devices.
        """
        del peer
        return False

    # --- collectives -----------------------------------------------------------------------------------------------

    def all_gather(self, out: Any, x: Any, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [size * n] = the ``x`` [n] of rank 0, 1, ... In place when ``x`` is this rank's part of ``out``."""
        return self._collective(_ALL_GATHER, x, out, None, None, algorithm, async_op)

    def reduce_scatter(
        self, out: Any, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """``out`` [n] = part ``rank`` of the reduction of all ranks' ``x`` [size * n].

        ``x`` is not changed, unless ``out`` is its part ``rank`` (in place).

        ``op``: sum, avg, min, max, prod. 16-bit floats are added in fp32 and rounded after each addition. The order of
        summation is fixed by the algorithm and the ranks, so results are the same from run to run.
        """
        return self._collective(_REDUCE_SCATTER, x, out, op, None, algorithm, async_op)

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduces the ``x`` of all ranks, in place or into ``out``; all ranks get the same bits."""
        return self._collective(_ALL_REDUCE, x, out, op, None, algorithm, async_op)

    def broadcast(self, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``x`` of position ``root`` goes to all ranks' ``x``."""
        return self._collective(_BROADCAST, x, None, None, root, algorithm, async_op)

    def reduce(
        self, x: Any, root: int, op: str = "sum", *, out: Any = None, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduces the ``x`` of all ranks at position ``root``, in place or into ``out``; elsewhere ``x`` stays."""
        return self._collective(_REDUCE, x, out, op, root, algorithm, async_op)

    def gather(self, out: Any, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [size * n] of position ``root`` = the ``x`` [n] of all ranks; elsewhere ``out`` may be ``None``.

        In place when the root's ``x`` is its part of ``out``.
        """
        return self._collective(_GATHER, x, out, None, root, algorithm, async_op)

    def scatter(self, out: Any, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [n] = part ``rank`` of the ``x`` [size * n] of position ``root``; elsewhere ``x`` may be ``None``.

        In place when the root's ``out`` is its part of ``x``.
        """
        return self._collective(_SCATTER, x, out, None, root, algorithm, async_op)

    def all_to_all(
        self,
        out: Any,
        x: Any,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Part i of ``x`` goes to rank i; part i of ``out`` comes from rank i.

        Equal parts, or ``in_splits`` / ``out_splits``: elements for and from each rank (their sums are the sizes).
        """
        splits = None if out_splits is None and in_splits is None else (out_splits, in_splits)
        return self._collective(_ALL_TO_ALL, x, out, None, None, algorithm, async_op, splits)

    def barrier(self, *, async_op: bool = False) -> Work:
        """Ends when all ranks have called it. It says nothing about what streams have yet to do."""
        return self._collective(_BARRIER, None, None, None, None, "auto", async_op)

    def counter(self) -> SharedCounter:
        """A new counter at 0 that all ranks may add to, without the help of others. Collective: one small broadcast.

        For work that ranks take when they are free: each number of :meth:`SharedCounter.fetch_add` goes to one rank.
        Position 0 owns it. A rank may own 16 at a time.

        Raises: InvalidUsage on all ranks, if it owns too many; what :meth:`broadcast` raises.
        """
        return open_counter(self._core, lambda place: self.broadcast(place, 0))

    def synchronize(self, timeout: float | None = None) -> None:
        """The host waits until all device operations of this rank so far have ended, in whatever communicator. Local.

        Before a CUDA graph that holds operations is captured; or to hear of an error now.
        Raises: what the first of them raises that failed.
        """
        del timeout  # host operations have been waited for already, or have a Work

    def resync(self, timeout: float | None = None) -> None:
        """Makes this communicator usable again after an error. Collective over its ranks.

        After a failed operation a rank is out of step with the members: which of their next operations belong together
        is unknown, so these are refused with Aborted, which names the first error. This call fails what is under way
        between the ranks of this communicator, also in other communicators, and drops what was sent before. Operations
        on device tensors stay over.

        ``timeout``: seconds; the communicator's by default.
        Raises: CommTimeout, which names the ranks that have not called it; PeerLost if a rank has died: then call it on
        the :meth:`subset` of the others, or :meth:`shrink`. After an error the ranks are out of step still.
        """
        self._core.resync(0.0 if timeout is None else check_seconds("resync", timeout))

    def lost(self) -> list[int]:
        """Global ranks of this communicator that have died, have left, or were cut off, as far as this rank knows.
        Local."""
        world = self._core.world
        return [rank for rank in self.ranks if rank != world.rank and world.has_left(rank)]

    def shrink(self, timeout: float | None = None) -> Communicator:
        """The communicator of the ranks that live, in their order, ready for use. Collective over these ranks.

        For errors after which ranks may be dead. Each living rank calls it, whatever it was doing: as :meth:`resync`,
        it fails what is under way between ranks of this communicator, so that the others get an error and come here
        too. A rank that dies meanwhile is left out. A rank whose peers all died gets a communicator of one.

        If a rank dies in the last moments, some may have returned while the others wait for them: they get an error
        from their next operation with these, and call shrink() on the communicator that they got.

        ``timeout``: seconds; the communicator's by default.
        Raises: CommTimeout when a rank that lives has not called it in time, or the others have lost this rank.
        """
        made = self.subset(recovery.agree(self._core, "shrink", True, self._limit("shrink", timeout)).living)
        assert made is not None  # this rank lives
        return made

    def agree(self, flag: bool, timeout: float | None = None) -> bool:
        """Whether all ranks that live gave a true ``flag``. Collective over these ranks, which get the same answer.

        For "did all of you finish the step?" after errors. It works when ranks are out of step or dead, ends what is
        under way like :meth:`shrink`, and leaves the living ranks in step. Ranks that die have no say.

        Raises: as :meth:`shrink`; Mismatch when others called that.
        """
        return recovery.agree(self._core, "agree", bool(flag), self._limit("agree", timeout)).flag

    @staticmethod
    def algorithms(op: str) -> tuple[str, ...]:
        """The names that ``algorithm=`` takes for an operation, besides ``auto``."""
        if not isinstance(op, str) or op not in _OPS:
            raise InvalidUsage(f"operation {op!r} is unknown; known are: {', '.join(_OPS)}")
        return tuple(_core.comm.algorithms_of(_OPS[op]))

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _collective(
        self,
        operation: int,
        x: Any,
        out: Any,
        op: str | None,
        root: int | None,
        algorithm: str,
        async_op: bool,
        splits: Splits | None = None,
    ) -> Work:
        """Runs or starts any collective; the core's table of operations says which arguments each takes."""
        if profiler._is_profiler_enabled:
            told, arguments = operands(self.ranks, x, out), (operation, x, out, op, root, algorithm, splits, async_op)
            return recorded(NAMES[operation], told, _collective, self._core, describe, *arguments)
        handle = _collective(self._core, describe, operation, x, out, op, root, algorithm, splits, async_op)
        return ENDED if handle is None else Work(handle)

    def _by_streams(self, x: Any) -> bool:
        """Whether operations on a tensor are work of streams."""
        del x  # a host communicator has none
        return False

    def _limit(self, name: str, timeout: float | None) -> float:
        return self.timeout if timeout is None else check_seconds(name, timeout)

    def _self_message(self, name: str, peer: Any) -> InvalidUsage:
        return InvalidUsage(
            f"{name}() got rank {peer!r}: from rank {self.rank} to itself would wait for ever; use exchange() with "
            "both, or async_op=True"
        )
