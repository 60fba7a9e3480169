"""Communicators over any ordered set of ranks. Making one is local and free; all bytes move by P2P in one transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm.device.landing_zone import LandingZone
from hdpcomm.comm.membership import Membership
from hdpcomm.comm.tensors import describe, like, same_type
from hdpcomm.comm.work import ENDED, Collective, Ragged, Work, algorithm_code
from hdpcomm.errors import InvalidUsage

__all__ = ["Communicator", "Work"]

_OPS = _core.comm.OPS
_ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE = _OPS["all_gather"], _OPS["reduce_scatter"], _OPS["all_reduce"]
_BROADCAST, _ALL_TO_ALL = _OPS["broadcast"], _OPS["all_to_all"]
_REDOPS = _core.comm.REDOPS
_ALGORITHMS = _core.comm.ALGORITHMS
_NO_REDOP = 255
_subset = _core.comm.subset
_run_send = _core.comm.run_send
_run_recv = _core.comm.run_recv
_run_exchange = _core.comm.run_exchange
_exchange_plain = _core.comm.exchange_plain
_run_collective = _core.comm.run_collective
_NOTHING = (0, 0, 0)


class Communicator(Membership):
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

    __slots__ = ()

    _describe = staticmethod(describe)
    # Runs a blocking collective of plain CPU tensors in one call of the core; False for anything else, errors too:
    # then the long way, which says what is wrong.
    _plain = staticmethod(_core.comm.collective_plain)

    # --- other communicators ---------------------------------------------------------------------------------------

    def subset(self, ranks: Sequence[int]) -> Communicator | None:
        """The communicator of the given positions of this one, in that order.

        Local: no message, no handshake, nothing created; the other ranks need not call it. Returns ``None`` on a rank
        that is not in the list. Equal lists make equal communicators on all ranks.

        Raises: InvalidUsage for an empty list, a duplicate, or a position that does not exist.
        """
        try:
            made = _subset(self._core, ranks)
        except TypeError as error:
            raise InvalidUsage(f"subset() got {ranks!r}; give a sequence of integers") from error
        return None if made is None else Communicator(*made)

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
        address, count, dtype = self._describe(x, "x")
        if async_op:
            return Work(self._core.start_exchange([(address, count, dtype, dst)], []), (x,))
        if dst == self.rank:
            raise self._self_message("send")
        _run_send(self._core, address, count, dtype, dst)
        return ENDED

    def recv(self, x: Any, src: int, *, async_op: bool = False) -> Work:
        """Receives into ``x`` from position ``src``, which calls :meth:`send` (or :meth:`exchange`)."""
        address, count, dtype = self._describe(x, "x", writable=True)
        if async_op:
            return Work(self._core.start_exchange([], [(address, count, dtype, src)]), (x,))
        if src == self.rank:
            raise self._self_message("recv")
        _run_recv(self._core, address, count, dtype, src)
        return ENDED

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
        right there, without the copy out of a slot, once all that the receiver's stream held has run. Where NCCL puts
        it (HDPCOMM_NCCL_ONE_SIDED), what two ranks exchange with places in one call they must on both sides.
        """
        if not async_op and _exchange_plain(self._core, sends, recvs):
            return ENDED
        if any(len(message) != 2 for message in (*sends, *recvs)):
            raise InvalidUsage("exchange() got a landing place for host memory; only device messages have one")
        outgoing = [(*self._describe(x, f"sends[{i}]"), dst) for i, (x, dst) in enumerate(sends)]
        incoming = [(*self._describe(y, f"recvs[{i}]", writable=True), src) for i, (y, src) in enumerate(recvs)]
        if async_op:
            return Work(self._core.start_exchange(outgoing, incoming), (tuple(sends), tuple(recvs)))
        _run_exchange(self._core, outgoing, incoming)
        return ENDED

    def landing_zone(self, x: Any, source: int | None = None) -> LandingZone | None:
        """This rank's landing zone for messages of the kind of ``x``; ``None`` where messages have no landing place.

        ``source``: for messages of that rank of this communicator. A rank may have two zones, one for peers whose
        devices map each other's memory, which is the default if there are such peers, and one for those to which NCCL
        puts messages.

        Its size is the same on all ranks that have one, and both sides of a message must agree on a place in it; only
        messages with peers that :meth:`lands` names may have one. Collectives by ``one_shot`` and ``two_shot`` read an
        operand there without a copy; it must have one place on all ranks. Local.
        """
        del x, source
        return None

    def lands(self, peer: int) -> bool:
        """Whether device messages with ``peer`` may name a landing place: the two devices map each other's memory, or
        NCCL puts messages there.

        Both ranks of a pair get the same answer. Local. Raises: InvalidUsage for a peer that is no rank of this
        communicator, where there are devices.
        """
        del peer
        return False

    # --- collectives -----------------------------------------------------------------------------------------------

    def all_gather(self, out: Any, x: Any, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [size * n] = the ``x`` [n] of rank 0, 1, ... In place when ``x`` is this rank's part of ``out``."""
        code = _ALGORITHMS.get(algorithm)
        if not async_op and self._plain(self._core, _ALL_GATHER, x, out, 1, self.size, _NO_REDOP, -1, code):
            return ENDED
        return self._blocks("all_gather", x, out, "out", self.size, None, algorithm, async_op)

    def reduce_scatter(
        self, out: Any, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """``out`` [n] = part ``rank`` of the reduction of all ranks' ``x`` [size * n].

        ``x`` is not changed, unless ``out`` is its part ``rank`` (in place).

        ``op``: sum, avg, min, max, prod. 16-bit floats are added in fp32 and rounded after each addition. The order of
        summation is fixed by the algorithm and the ranks, so results are the same from run to run.
        """
        code = _ALGORITHMS.get(algorithm)
        if not async_op and self._plain(self._core, _REDUCE_SCATTER, x, out, self.size, 1, _REDOPS.get(op), -1, code):
            return ENDED
        return self._blocks("reduce_scatter", out, x, "x", self.size, op, algorithm, async_op)

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduces the ``x`` of all ranks, in place or into ``out``; all ranks get the same bits."""
        code = _ALGORITHMS.get(algorithm)
        into = x if out is None else out
        if not async_op and self._plain(self._core, _ALL_REDUCE, x, into, 1, 1, _REDOPS.get(op), -1, code):
            return ENDED
        source = self._describe(x, "x", writable=out is None)
        target = source if out is None else like(source, self._describe(out, "out", writable=True), "out")
        return self._collective("all_reduce", source, target, source[1], op, -1, algorithm, async_op, (x, out))

    def broadcast(self, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``x`` of position ``root`` goes to all ranks' ``x``."""
        code = _ALGORITHMS.get(algorithm)
        if not async_op and self._plain(self._core, _BROADCAST, x, x, 1, 1, _NO_REDOP, root, code):
            return ENDED
        buffer = self._describe(x, "x", writable=self.rank != root)
        return self._collective("broadcast", buffer, buffer, buffer[1], None, root, algorithm, async_op, (x,))

    def reduce(
        self, x: Any, root: int, op: str = "sum", *, out: Any = None, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduces the ``x`` of all ranks at position ``root``, in place or into ``out``; elsewhere ``x`` stays."""
        source = self._describe(x, "x", writable=out is None and self.rank == root)
        target = source if out is None else like(source, self._describe(out, "out", writable=True), "out")
        return self._collective("reduce", source, target, source[1], op, root, algorithm, async_op, (x, out))

    def gather(self, out: Any, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [size * n] of position ``root`` = the ``x`` [n] of all ranks; elsewhere ``out`` may be ``None``."""
        if self.rank == root:
            return self._blocks("gather", x, out, "out", self.size, None, algorithm, async_op, root)
        source = self._describe(x, "x")
        return self._collective("gather", source, source, source[1], None, root, algorithm, async_op, (x,))

    def scatter(self, out: Any, x: Any, root: int, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """``out`` [n] = part ``rank`` of the ``x`` [size * n] of position ``root``; elsewhere ``x`` may be ``None``."""
        if self.rank == root:
            return self._blocks("scatter", out, x, "x", self.size, None, algorithm, async_op, root)
        target = self._describe(out, "out", writable=True)
        return self._collective("scatter", target, target, target[1], None, root, algorithm, async_op, (out,))

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
        parts, code = self.size, _ALGORITHMS.get(algorithm)
        equal = out_splits is None and in_splits is None and not async_op
        if equal and self._plain(self._core, _ALL_TO_ALL, x, out, parts, parts, _NO_REDOP, -1, code):
            return ENDED
        source = self._describe(x, "x")
        target = same_type(source, self._describe(out, "out", writable=True), "out")
        if (out_splits is None) != (in_splits is None):
            raise InvalidUsage("all_to_all() got one of out_splits and in_splits; give both or neither")
        if out_splits is None or in_splits is None:
            if source[1] != target[1] or source[1] % self.size:
                raise InvalidUsage(
                    f"all_to_all() got x with {source[1]} and out with {target[1]} elements; without splits they must "
                    f"be equal and divisible by the {self.size} ranks"
                )
            count = source[1] // self.size
            return self._collective("all_to_all", source, target, count, None, -1, algorithm, async_op, (x, out))
        for name, splits, total in (("in_splits", in_splits, source[1]), ("out_splits", out_splits, target[1])):
            if len(splits) != self.size or min(splits) < 0 or sum(splits) != total:
                raise InvalidUsage(
                    f"all_to_all() got {name}={list(splits)}; it must hold {self.size} counts, none below 0, that sum "
                    f"up to the tensor's {total} elements"
                )
        operands = source[0], target[0], source[2], list(out_splits), list(in_splits), algorithm_code(algorithm)
        return self._run_ragged(operands, async_op, (x, out))

    def barrier(self, *, async_op: bool = False) -> Work:
        """Ends when all ranks have called it. It says nothing about what streams have yet to do."""
        return self._collective("barrier", _NOTHING, _NOTHING, 0, None, -1, "auto", async_op, ())

    def synchronize(self, timeout: float | None = None) -> None:
        """The host waits until all device operations of this rank so far have ended, in whatever communicator. Local.

        Before a CUDA graph that holds operations is captured; or to hear of an error now.
        Raises: what the first of them raises that failed.
        """
        del timeout  # host operations have been waited for already, or have a Work

    @staticmethod
    def algorithms(op: str) -> tuple[str, ...]:
        """The names that ``algorithm=`` takes for an operation, besides ``auto``."""
        if op not in _OPS:
            raise InvalidUsage(f"operation {op!r} is unknown; known are: {', '.join(_OPS)}")
        return tuple(_core.comm.algorithms_of(_OPS[op]))

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _collective(
        self,
        name: str,
        source: tuple[int, int, int],
        target: tuple[int, int, int],
        count: int,
        op: str | None,
        root: int,
        algorithm: str,
        async_op: bool,
        buffers: tuple[Any, ...],
    ) -> Work:
        redop = _NO_REDOP if op is None else _REDOPS.get(op)
        if redop is None:
            raise InvalidUsage(f"{name}() got op={op!r}; known are: {', '.join(_REDOPS)}")
        code = algorithm_code(algorithm)
        operands = _OPS[name], source[0], target[0], count, source[2], redop, root, code
        return self._run(operands, async_op, buffers)

    def _run(self, operands: Collective, async_op: bool, buffers: tuple[Any, ...]) -> Work:
        """Runs a checked collective; ``buffers`` are its tensors."""
        if async_op:
            return Work(self._core.start_collective(*operands), buffers)
        _run_collective(self._core, *operands)
        return ENDED

    def _run_ragged(self, operands: Ragged, async_op: bool, buffers: tuple[Any, ...]) -> Work:
        """Runs a checked all_to_all of unequal parts."""
        work = Work(self._core.start_all_to_all(*operands), buffers)
        if not async_op:
            work.wait()
        return work

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
        one = self._describe(small, small_name, writable=not small_is_input)
        many = same_type(one, self._describe(large, large_name, writable=small_is_input), large_name)
        if many[1] != one[1] * parts:
            raise InvalidUsage(
                f"{name}() got {small_name} with {one[1]} and {large_name} with {many[1]} elements; on {parts} ranks "
                f"{large_name} must have {one[1] * parts}"
            )
        source, target = (one, many) if small_is_input else (many, one)
        return self._collective(name, source, target, one[1], op, root, algorithm, async_op, (small, large))

    def _self_message(self, name: str) -> InvalidUsage:
        return InvalidUsage(
            f"{name}() from rank {self.rank} to itself would wait for ever; use exchange() with both, or async_op=True"
        )
