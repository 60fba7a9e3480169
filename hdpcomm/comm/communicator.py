"""Communicators over any ordered set of ranks. Making one is local and free; all bytes move by P2P in one transport."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm.landing import LandingZone
from hdpcomm.comm.paths import Devices, Handle, HostPath, Path
from hdpcomm.comm.tensors import dtype_name
from hdpcomm.errors import InvalidUsage

__all__ = ["Communicator", "Work"]

_OPS = _core.comm.OPS
_REDOPS = _core.comm.REDOPS
_ALGORITHMS = _core.comm.ALGORITHMS
_NO_REDOP = 255
_HOST = HostPath()


class Work:
    """An operation that was started; it keeps its tensors alive until it was waited for.

    On CUDA tensors an operation is work of streams: ``wait()`` makes the current stream wait, and the host goes on.
    What the operation reads and writes may be freed or changed by that stream afterwards (no ``record_stream`` needed).
    """

    __slots__ = ("_buffers", "_handle", "_path")

    def __init__(self, handle: Handle | None, buffers: tuple[Any, ...], path: Path = _HOST) -> None:
        self._handle = handle  # None: it had ended when it was made
        self._buffers = buffers
        self._path = path

    def wait(self, timeout: float | None = None) -> None:
        """Afterwards the outputs are valid and the inputs may be changed; for CUDA tensors, on the current stream.

        Host tensors (and all tensors of the ``sim`` transport): blocks until the operation has ended. CUDA tensors:
        the current stream waits, the host only if a ``timeout`` is given. ``timeout``: seconds; the communicator's by
        default. Past it the operation is given up on all ranks concerned.
        Raises: CommTimeout, PeerLost, Mismatch, Aborted.
        """
        if self._handle is not None:
            self._path.wait(self._handle, timeout)
        self._buffers = ()

    def done(self) -> bool:
        """Whether the operation has ended; never blocks. ``wait()`` raises its error if it failed."""
        return self._handle is None or self._handle.done()

    def __repr__(self) -> str:
        return "<Work, ended>" if self._handle is None else repr(self._handle)


_ENDED = Work(None, ())


def _to(place: Sequence[int]) -> tuple[int, int | None]:
    """(peer, landing offset) of a message."""
    return place[0], place[1] if len(place) > 1 else None


class Communicator:
    """An ordered set of ranks.

    Every collective is called by all its ranks, with equal arguments. A rank issues the operations of all its
    communicators in one order, and all ranks must agree on that order where their communicators overlap; then no mix of
    overlapping subsets can deadlock. Disjoint subsets run side by side. Tensors are torch CPU tensors, numpy arrays or
    DLPack objects; with the ``cuda`` transport also torch, CuPy and other CUDA tensors; contiguous, and in one
    operation all on the same device. Operations on CUDA tensors are ordered on the current stream of the tensors'
    library and do not block the host.

    Every operation takes ``async_op``: then it returns at once and proceeds in the background, and ``Work.wait()`` ends
    it; without it the returned Work has ended. With ``algorithm="auto"`` the library chooses; :meth:`algorithms` lists
    the names.
    """

    __slots__ = ("_core", "_devices", "_ranks", "rank", "size")

    def __init__(self, core: _core.comm.Communicator, devices: Devices | None = None) -> None:
        self._core = core
        self._devices = devices
        self._ranks: tuple[int, ...] | None = None
        #: Position of this rank in the communicator.
        self.rank: int = core.rank
        #: Number of ranks.
        self.size: int = core.size

    # --- what it is ------------------------------------------------------------------------------------------------

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
        """The name of the transport that moves the bytes (of device tensors, where it moves these)."""
        return self._core.world.transport if self._devices is None else self._devices.name

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors should be: its GPU with the ``cuda`` transport, else the CPU."""
        return torch.device("cpu") if self._devices is None else self._devices.torch_device

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take by default."""
        return self._core.world.timeout

    def stats(self) -> dict[str, int]:
        """This rank's traffic since ``init()``, over all communicators: bytes, messages, distinct peers."""
        counts = self._core.world.stats()
        if self._devices is None:
            return counts
        devices = self._devices.engine.stats()
        return {name: max(n, devices[name]) if name == "peers" else n + devices[name] for name, n in counts.items()}

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, ranks {self.ranks}, transport {self.transport}>"

    # --- other communicators ---------------------------------------------------------------------------------------

    def subset(self, ranks: Sequence[int]) -> Communicator | None:
        """The communicator of the given positions of this one, in that order.

        Local: no message, no handshake, nothing created; the other ranks need not call it. Returns ``None`` on a rank
        that is not in the list. Equal lists make equal communicators on all ranks.

        Raises: InvalidUsage for an empty list, a duplicate, or a position that does not exist.
        """
        try:
            core = self._core.subset(ranks)
        except TypeError as error:
            raise InvalidUsage(f"subset() got {ranks!r}; give a sequence of integers") from error
        return None if core is None else Communicator(core, self._devices)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The familiar form: ranks with equal ``color`` form a communicator, ordered by ``key``, then by rank.

        Collective over this communicator (one all-gather). ``color=None``: this rank joins none and gets ``None``.
        """
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
        path = self._path(x)
        address, count, dtype = path.describe(x, "x")
        if dst == self.rank and not async_op:
            raise self._self_message("send")
        if async_op or path is not _HOST:
            handle = path.exchange(self._core, [(address, count, dtype, dst, None)], [], async_op)
            return self._finish(handle, (x,), path, async_op)
        self._core.send(address, count, dtype, dst, -1.0)
        return _ENDED

    def recv(self, x: Any, src: int, *, async_op: bool = False) -> Work:
        """Receives into ``x`` from position ``src``, which calls :meth:`send` (or :meth:`exchange`)."""
        path = self._path(x)
        address, count, dtype = path.describe(x, "x", writable=True)
        if src == self.rank and not async_op:
            raise self._self_message("recv")
        if async_op or path is not _HOST:
            handle = path.exchange(self._core, [], [(address, count, dtype, src, None)], async_op)
            return self._finish(handle, (x,), path, async_op)
        self._core.recv(address, count, dtype, src, -1.0)
        return _ENDED

    def exchange(
        self,
        sends: Sequence[tuple[Any, ...]] = (),
        recvs: Sequence[tuple[Any, ...]] = (),
        *,
        async_op: bool = False,
    ) -> Work:
        """Any sends ``(x, dst)`` and receives ``(y, src)`` at once; messages of a pair match in the order of the lists.

        The building block of neighbour exchanges: all are in flight together, so no order of ranks can deadlock.

        A message between devices may name its place in the receiver's landing zone, in bytes, on both sides:
        ``(x, dst, offset)`` and ``(y, src, offset)`` with ``y`` a view of :meth:`landing_zone` there. It is then put
        right there, without the copy out of a slot, once all that the receiver's stream held has run.
        """
        first = sends[0][0] if sends else recvs[0][0] if recvs else None
        path = self._path(first)
        outgoing = [(*path.describe(x, f"sends[{i}]"), *_to(place)) for i, (x, *place) in enumerate(sends)]
        incoming = [
            (*path.describe(y, f"recvs[{i}]", writable=True), *_to(place)) for i, (y, *place) in enumerate(recvs)
        ]
        handle = path.exchange(self._core, outgoing, incoming, async_op)
        return self._finish(handle, (tuple(sends), tuple(recvs)), path, async_op)

    def landing_zone(self, x: Any) -> LandingZone | None:
        """This rank's landing zone for messages of the kind of ``x``; ``None`` where messages have no landing place.

        Its size is the same on all ranks, and both sides of a message must agree on a place in it. Local.
        """
        if self._devices is None or self._path(x) is _HOST:
            return None
        return self._devices.landing_zone()

    # --- collectives -----------------------------------------------------------------------------------------------

    def all_gather(self, out: Any, x: Any, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [size * n] = the ``x`` [n] of rank 0, 1, ... In place when ``x`` is this rank's part of ``out``."""
        return self._blocks("all_gather", x, out, "out", self.size, None, algorithm, async_op)

    def reduce_scatter(
        self, out: Any, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """``out`` [n] = part ``rank`` of the reduction of all ranks' ``x`` [size * n].

        ``x`` is not changed, unless ``out`` is its part ``rank`` (in place).

        ``op``: sum, avg, min, max, prod. 16-bit floats are added in fp32 and rounded after each addition. The order of
        summation is fixed by the algorithm and the ranks, so results are the same from run to run.
        """
        return self._blocks("reduce_scatter", out, x, "x", self.size, op, algorithm, async_op)

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduces the ``x`` of all ranks, in place or into ``out``; all ranks get the same bits."""
        path = self._path(x)
        source = path.describe(x, "x", writable=out is None)
        target = source if out is None else self._like(source, path.describe(out, "out", writable=True), "out")
        handle = self._collective(path, "all_reduce", source, target, source[1], op, -1, algorithm, async_op)
        return self._finish(handle, (x, out), path, async_op)

    def broadcast(self, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``x`` of position ``root`` goes to all ranks' ``x``."""
        path = self._path(x)
        buffer = path.describe(x, "x", writable=self.rank != root)
        handle = self._collective(path, "broadcast", buffer, buffer, buffer[1], None, root, algorithm, async_op)
        return self._finish(handle, (x,), path, async_op)

    def reduce(
        self, x: Any, root: int, op: str = "sum", *, out: Any = None, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduces the ``x`` of all ranks at position ``root``, in place or into ``out``; elsewhere ``x`` stays."""
        path = self._path(x)
        source = path.describe(x, "x", writable=out is None and self.rank == root)
        target = source if out is None else self._like(source, path.describe(out, "out", writable=True), "out")
        handle = self._collective(path, "reduce", source, target, source[1], op, root, algorithm, async_op)
        return self._finish(handle, (x, out), path, async_op)

    def gather(self, out: Any, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [size * n] of position ``root`` = the ``x`` [n] of all ranks; elsewhere ``out`` may be ``None``."""
        if self.rank == root:
            return self._blocks("gather", x, out, "out", self.size, None, algorithm, async_op, root)
        path = self._path(x)
        source = path.describe(x, "x")
        handle = self._collective(path, "gather", source, source, source[1], None, root, algorithm, async_op)
        return self._finish(handle, (x,), path, async_op)

    def scatter(self, out: Any, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [n] = part ``rank`` of the ``x`` [size * n] of position ``root``; elsewhere ``x`` may be ``None``."""
        if self.rank == root:
            return self._blocks("scatter", out, x, "x", self.size, None, algorithm, async_op, root)
        path = self._path(out)
        target = path.describe(out, "out", writable=True)
        handle = self._collective(path, "scatter", target, target, target[1], None, root, algorithm, async_op)
        return self._finish(handle, (out,), path, async_op)

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
        path = self._path(x)
        source = path.describe(x, "x")
        target = self._same_type(source, path.describe(out, "out", writable=True), "out")
        code = self._algorithm(algorithm)
        if (out_splits is None) != (in_splits is None):
            raise InvalidUsage("all_to_all() got one of out_splits and in_splits; give both or neither")
        if out_splits is None or in_splits is None:
            if source[1] != target[1] or source[1] % self.size:
                raise InvalidUsage(
                    f"all_to_all() got x with {source[1]} and out with {target[1]} elements; without splits they must "
                    f"be equal and divisible by the {self.size} ranks"
                )
            count = source[1] // self.size
            handle = path.all_to_all(self._core, source[0], target[0], count, source[2], [], [], code, async_op)
            return self._finish(handle, (x, out), path, async_op)
        for name, parts, total in (("in_splits", in_splits, source[1]), ("out_splits", out_splits, target[1])):
            if len(parts) != self.size or min(parts) < 0 or sum(parts) != total:
                raise InvalidUsage(
                    f"all_to_all() got {name}={list(parts)}; it must hold {self.size} counts, none below 0, that sum "
                    f"up to the tensor's {total} elements"
                )
        splits = list(out_splits), list(in_splits)
        handle = path.all_to_all(self._core, source[0], target[0], 0, source[2], *splits, code, async_op)
        return self._finish(handle, (x, out), path, async_op)

    def barrier(self, *, async_op: bool = False) -> Work:
        """Ends when all ranks have called it. The host waits; it says nothing about what streams have yet to do."""
        path = self._path(None)
        handle = path.collective(self._core, _OPS["barrier"], 0, 0, 0, 0, _NO_REDOP, -1, 0, async_op)
        return self._finish(handle, (), path, async_op)

    def synchronize(self, timeout: float | None = None) -> None:
        """The host waits until all device operations of this rank so far have ended, in whatever communicator. Local.

        Before a CUDA graph that holds operations is captured; or to hear of an error now.
        Raises: what the first of them raises that failed.
        """
        if self._devices is not None:
            self._devices.engine.synchronize(-1.0 if timeout is None else timeout)

    @staticmethod
    def algorithms(op: str) -> tuple[str, ...]:
        """The names that ``algorithm=`` takes for an operation, besides ``auto``."""
        if op not in _OPS:
            raise InvalidUsage(f"operation {op!r} is unknown; known are: {', '.join(_OPS)}")
        return tuple(_core.comm.algorithms_of(_OPS[op]))

    # --- the end ---------------------------------------------------------------------------------------------------

    def abort(self, reason: str = "") -> None:
        """Ends this rank's pending operations with Aborted, tells the ranks concerned, and leaves the world. Local."""
        self._core.world.abort(reason)

    def close(self) -> None:
        """Leaves the world, for this communicator and all its subsets. Local; ranks that still wait get PeerLost."""
        self._core.world.close("")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._core.world.close("" if error is None else f"{type(error).__name__}: {error}")

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _path(self, x: Any) -> Path:
        """Over the device's streams, or over host memory, by where the first tensor of an operation lies."""
        if self._devices is None:
            return _HOST
        return self._devices.path(x) or _HOST

    def _collective(
        self,
        path: Path,
        name: str,
        source: tuple[int, int, int],
        target: tuple[int, int, int],
        count: int,
        op: str | None,
        root: int,
        algorithm: str,
        async_op: bool,
    ) -> Handle:
        redop = _NO_REDOP if op is None else _REDOPS.get(op)
        if redop is None:
            raise InvalidUsage(f"{name}() got op={op!r}; known are: {', '.join(_REDOPS)}")
        code = self._algorithm(algorithm)
        place = source[0], target[0], count, source[2]
        return path.collective(self._core, _OPS[name], *place, redop, root, code, async_op)

    def _blocks(
        self,
        name: str,
        small: Any,
        large: Any,
        large_name: str,
        parts: int,
        op: str | None,
        algorithm: str,
        async_op: bool,
        root: int = -1,
    ) -> Work:
        """The operations between a tensor of n and one of size * n elements."""
        small_is_input = large_name == "out"
        small_name = "x" if small_is_input else "out"
        path = self._path(small)
        one = path.describe(small, small_name, writable=not small_is_input)
        many = self._same_type(one, path.describe(large, large_name, writable=small_is_input), large_name)
        if many[1] != one[1] * parts:
            raise InvalidUsage(
                f"{name}() got {small_name} with {one[1]} and {large_name} with {many[1]} elements; on {parts} ranks "
                f"{large_name} must have {one[1] * parts}"
            )
        source, target = (one, many) if small_is_input else (many, one)
        handle = self._collective(path, name, source, target, one[1], op, root, algorithm, async_op)
        return self._finish(handle, (small, large), path, async_op)

    @staticmethod
    def _same_type(expected: tuple[int, int, int], given: tuple[int, int, int], name: str) -> tuple[int, int, int]:
        if given[2] != expected[2]:
            raise InvalidUsage(
                f"{name} has dtype {dtype_name(given[2])}, the other tensor {dtype_name(expected[2])}; give equal types"
            )
        return given

    def _like(self, expected: tuple[int, int, int], given: tuple[int, int, int], name: str) -> tuple[int, int, int]:
        if given[1] != expected[1]:
            raise InvalidUsage(f"{name} has {given[1]} elements, x {expected[1]}; give equal sizes")
        return self._same_type(expected, given, name)

    @staticmethod
    def _algorithm(name: str) -> int:
        code = _ALGORITHMS.get(name)
        if code is None:
            raise InvalidUsage(f"algorithm {name!r} is unknown; known are: {', '.join(_ALGORITHMS)}")
        return code

    def _self_message(self, name: str) -> InvalidUsage:
        return InvalidUsage(
            f"{name}() from rank {self.rank} to itself would wait for ever; use exchange() with both, or async_op=True"
        )

    @staticmethod
    def _finish(handle: Handle, buffers: tuple[Any, ...], path: Path, async_op: bool) -> Work:
        if async_op:
            return Work(handle, buffers, path)
        if path.blocking:
            path.wait(handle, None)
        return _ENDED
