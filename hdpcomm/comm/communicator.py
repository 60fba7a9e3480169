"""Communicators over any ordered set of ranks. Making one is local and free; all bytes move by P2P in one transport.
Their ranks may share a counter, of which each number is handed out once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch

from hdpcomm import _core
from hdpcomm.arguments import check_number, check_seconds, check_whole
from hdpcomm.comm import recovery
from hdpcomm.comm.device.paths import LandingZone
from hdpcomm.comm.tensors import check_shape, describe, untraced
from hdpcomm.comm.work import ENDED, Work, messages, operands, peers, profiler, recorded
from hdpcomm.errors import InvalidUsage

__all__ = ["Communicator", "SharedCounter", "Work", "open_counter"]

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
_Self = TypeVar("_Self", bound="Communicator")
_BUSY_LIMIT_S = 1800.0
_LONGEST_NAME = 60  # of an activity


@contextlib.contextmanager
def _liveness_deadlines(world: _core.comm.World) -> Iterator[None]:
    world.go_by_liveness(True)
    try:
        yield
    finally:
        world.go_by_liveness(False)


@contextlib.contextmanager
def _busy(world: _core.comm.World, what: str, limit_s: float) -> Iterator[None]:
    activity = world.begin_activity(what, limit_s)
    try:
        yield
    finally:
        world.end_activity(activity)


def _check_activity(what: Any, limit_s: Any) -> float:
    """The limit of an activity in seconds. Raises: InvalidUsage for a name that no error could show, or a bad limit."""
    if not isinstance(what, str) or not 0 < len(what) <= _LONGEST_NAME or not (what.isascii() and what.isprintable()):
        raise InvalidUsage(
            f"busy() got what={what!r}; give 1 to {_LONGEST_NAME} printable ASCII characters that say what this rank "
            "does, such as 'reads data'"
        )
    return check_number("busy()", "limit_s", limit_s, above=0)


@untraced
class Communicator:
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

    __slots__ = ("_core", "_ranks", "rank", "size")

    def __init__(self, core: _core.comm.Communicator, rank: int, size: int) -> None:
        self._core = core
        self._ranks: tuple[int, ...] | None = None
        #: Position of this rank in the communicator.
        self.rank = rank
        #: Number of ranks.
        self.size = size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, in the order of the communicator."""
        if self._ranks is None:
            self._ranks = self._core.ranks
        return self._ranks

    @property
    def global_rank(self) -> int:
        """This rank in the world."""
        return self._core.world.rank

    @property
    def transport(self) -> str:
        """The name of the transport that moves the bytes."""
        return self._core.world.transport

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take by default."""
        return self._core.world.timeout

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors should be: its GPU with the ``cuda`` transport, else the CPU."""
        return torch.device("cpu")

    def stats(self) -> dict[str, int]:
        """This rank's counts since ``init()``, over all communicators.

        Bytes and messages, sent and received; ``peers``, the distinct ranks it sent to; ``wait_ns``, the nanoseconds
        that its threads waited in operations or ``Work.wait()`` for other ranks (on CUDA tensors: that its host did).
        """
        return self._core.world.stats()

    def waited_s(self) -> float:
        """Seconds that this rank has waited in operations of this communicator since the first such question.

        A part of ``stats()["wait_ns"]``. Each ``subset()`` is a communicator of its own, also on the same ranks. Local.
        """
        return self._core.waited_s()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor from which messages go out fastest: with the shm transport, other processes map it.

        A large message (above ``HDPCOMM_SHM_EAGER_BYTES``) from ordinary memory costs a system call that pins each of
        its pages; from here it is one plain copy. Worth it for buffers that are sent again and again; what is received
        may lie anywhere. The tensor stays valid after ``close()``. Other transports give ordinary memory. Local.

        Raises: InvalidUsage for a size that no tensor has, another kind of dtype, or a closed communicator.

        Examples:
            >>> import torch, hdpcomm as hdp
            >>> with hdp.init() as comm:
            ...     comm.empty(2, 3, dtype=torch.float64).shape
            torch.Size([2, 3])
        """
        count = check_shape("empty()", shape, dtype)
        block = self._core.world.allocate(count * dtype.itemsize)
        if block is None or not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(block, dtype=dtype, count=count).view(shape)

    # --- what the others know of this rank ----------------------------------------------------------------------------

    def liveness_deadlines(self) -> AbstractContextManager[None]:
        """Inside, operations of this rank without a ``timeout`` of their own wait as long as the awaited ranks move.

        One is given up when an awaited rank has not moved for :attr:`timeout` seconds: it has neither called nor ended
        an operation, sent or received a message, called :meth:`tick` nor been :meth:`busy`. A rank that itself waits
        for others moves as they do. The error names the rank that does not move, and what it did last. After
        ``HDPCOMM_LONGEST_WAIT_S`` an operation is given up anyway. Ranks that never called this, :meth:`tick` or
        :meth:`busy` tell nothing of their moves, so an operation waits :attr:`timeout` seconds for them.

        For all communicators of this rank, from any thread, nested as wished; other ranks' operations go by their own
        deadlines, so all ranks should ask for it. Local. The trainers do so in each step.
        """
        return _liveness_deadlines(self._core.world)

    def busy(self, what: str, *, limit_s: float = _BUSY_LIMIT_S) -> AbstractContextManager[None]:
        """Inside, this rank does something that takes long and is no operation; ranks with :meth:`liveness_deadlines`
        that wait for it go on waiting, at most until ``limit_s`` seconds from the begin.

        Time in which the thread that entered it waits in an operation does not count. From any thread, nested as
        wished: the rank is busy while one of its activities is within its limit. A rank whose process dies or is
        stopped meanwhile is noticed as ever. Local.

        Args:
            what: shown in the errors of others, 1 to 60 printable ASCII characters.

        Raises: InvalidUsage for another name, a limit that is no number above 0, or a closed communicator.

        Examples:
            >>> import hdpcomm as hdp
            >>> with hdp.init() as comm, comm.busy("reads data", limit_s=600):
            ...     pass
        """
        return _busy(self._core.world, what, _check_activity(what, limit_s))

    def tick(self) -> None:
        """Tells ranks with :meth:`liveness_deadlines` that wait for this one that it has just got on. Local.

        For long work in parts, once a part. Raises: InvalidUsage or Aborted on a communicator that is over.
        """
        self._core.world.tick()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, ranks {self.ranks}, transport {self.transport}>"

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

    # --- the end ---------------------------------------------------------------------------------------------------

    def abort(self, reason: str = "") -> None:
        """Ends this rank's pending operations with Aborted, tells the ranks concerned, and leaves the world. Local."""
        self._core.world.abort(reason)

    def close(self) -> None:
        """Leaves the world, for this communicator and all its subsets. Local; ranks that still wait get PeerLost."""
        self._core.world.close("")
        _core.comm.free_ended()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._core.world.close("" if error is None else f"{type(error).__name__}: {error}")
        _core.comm.free_ended()

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


_fetch_add = _core.comm.fetch_add
_NONE = -1  # in place of a word: the owner has none left


@untraced
class SharedCounter:
    """A count that starts at 0 and that ranks add to, each when it likes; from :meth:`Communicator.counter`.

    Rank 0 of the communicator, the owner, holds it; its program takes no part. The ranks of its host add in shared
    memory, the others ask its host by a frame, which the threads of its transport answer. They are Python threads, so
    an owner that holds the interpreter's lock delays them. When the owner dies, the ranks of its host go on counting
    until an operation tells them of the death; the ranks of other hosts get PeerLost.

    Examples:
        >>> import hdpcomm as hdp
        >>> with hdp.init() as comm, comm.counter() as counter:
        ...     first, second = counter.fetch_add(), counter.fetch_add(5)
        ...     comm.barrier()  # no rank counts any more
        >>> first, second
        (0, 1)
    """

    __slots__ = ("_core",)

    def __init__(self, core: _core.comm.SharedCounter) -> None:
        self._core = core

    def fetch_add(self, amount: int = 1) -> int:
        """Adds ``amount`` (1 to 2^32 - 1) and returns the count before: atomic over all ranks and threads.

        Local: no other rank takes part. From another host it waits for the answer, by the same deadline as operations,
        and it is no operation: an error leaves the communicator usable. After CommTimeout or Ctrl-C the amount may have
        been added or not.

        Raises: InvalidUsage for another amount, a sum above 2^32 - 1 (nothing is added), or a counter that its owner or
        this rank has closed; PeerLost if the owner has left, or has died on another host; CommTimeout.
        """
        return _fetch_add(self._core, amount)

    def close(self) -> None:
        """Ends the counter: the owner for all ranks, another rank for itself. Local; also done when it is dropped.

        A ``fetch_add`` that comes later raises InvalidUsage, so the owner closes it after an operation that all ranks
        join when they are done, such as a barrier.
        """
        self._core.close()

    def __enter__(self) -> SharedCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SharedCounter {self._core.word}, generation {self._core.generation}, of rank {self._core.owner}>"


def open_counter(core: _core.comm.Communicator, broadcast: Callable[[torch.Tensor], Any]) -> SharedCounter:
    """Collective: rank 0 opens a counter and tells the others of it by ``broadcast``."""
    place = torch.empty(2, dtype=torch.int64)
    if core.rank:
        broadcast(place)
        word, generation = place.tolist()
        if word == _NONE:
            raise InvalidUsage(
                f"counter(): rank {core.ranks[0]} owns as many counters as it may: close those that are over",
                rank=core.world.rank,
                peer=core.ranks[0],
            )
        return SharedCounter(_core.comm.join_counter(core, word, generation))
    try:
        own = _core.comm.open_counter(core)
    except InvalidUsage:
        if not core.world.over:
            place.fill_(_NONE)
            broadcast(place)
        raise
    counter = SharedCounter(own)
    place[0], place[1] = own.word, own.generation
    try:
        broadcast(place)
    except BaseException:
        counter.close()
        raise
    return counter
