"""A rank's place in an ordered set of ranks: what it is, the memory from which it sends best, and how it is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch

from hdpcomm import _core
from hdpcomm.arguments import check_number
from hdpcomm.comm.shapes import check_shape
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage

__all__ = ["Membership"]

_Self = TypeVar("_Self", bound="Membership")
_BUSY_LIMIT_S = 1800.0
_LONGEST_NAME = 60  # of an activity


@contextmanager
def _liveness_deadlines(world: _core.comm.World) -> Iterator[None]:
    world.go_by_liveness(True)
    try:
        yield
    finally:
        world.go_by_liveness(False)


@contextmanager
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
class Membership:
    """Ranks and facts of a :class:`Communicator`, without its operations."""

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

        Example:
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

        Example:
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
