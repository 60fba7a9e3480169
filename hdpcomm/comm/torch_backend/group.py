"""The process group that torch gets: collectives, messages with tags, and torch's coalescing."""

from __future__ import annotations

import torch

from hdpcomm.comm.torch_backend.base import Tensors
from hdpcomm.comm.torch_backend.collectives import Collectives
from hdpcomm.comm.torch_backend.errors import translated
from hdpcomm.comm.torch_backend.staging import one
from hdpcomm.comm.torch_backend.work import BackendWork, chain
from hdpcomm.errors import InvalidUsage

__all__ = ["HdpProcessGroup"]


class HdpProcessGroup(Collectives):
    """A group of torch ranks: a subset of the world of its :class:`Engine`. Made by torch, see ``init_process_group``.

    The collectives of overlapping groups must be called in one order on all ranks, whether waited for or not;
    point-to-point messages are free of that order. Methods take torch's options, as torch.distributed's functions pass
    them, or their plain values, as its C++ groups also do.

    Raises (all): InvalidUsage (ValueError) for bad arguments, before anything is sent; NotImplementedError naming what
    there is not; BackendTimeout, BackendLost, BackendMismatch, BackendAborted (``dist.DistBackendError``) from the call
    or the work's ``wait()``.
    """

    # --- point to point ----------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
        operation = self._begin("send", None)
        x = operation.source(one(tensors, "send", "tensors"))
        with translated():
            part = self.engine.mailbox.send(x, self._world_rank(dst, "send"), tag, self._context)
        work = BackendWork([part], [], timeout=operation.timeout, in_background=self.engine.complete_alone)
        self.engine.hold_send(part)
        return self._coalesce(work)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
        return self._receive(tensors, frozenset([self._world_rank(src, "recv")]), tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> BackendWork:
        others = frozenset(self.communicator.ranks) - {self.communicator.global_rank}
        if not others:
            raise InvalidUsage("recv() from any source in a group of one rank would wait for ever")
        return self._receive(tensors, others, tag)

    def _receive(self, tensors: Tensors, sources: frozenset[int], tag: int) -> BackendWork:
        operation = self._begin("recv", None)
        tensor = one(tensors, "recv", "tensors")
        target = operation.target(tensor)
        part = self.engine.mailbox.receive(target, sources, tag, self._context, operation.finish)
        work = BackendWork(
            [part],
            [tensor],
            timeout=operation.timeout,
            in_background=self.engine.complete_alone,
            source=lambda: self.communicator.ranks.index(part.source),
        )
        return self._coalesce(work)

    def _world_rank(self, rank: int, call: str) -> int:
        if not 0 <= rank < self.communicator.size:
            raise InvalidUsage(f"{call}() got rank {rank}; this group has ranks 0..{self.communicator.size - 1}")
        if rank == self.communicator.rank:
            raise InvalidUsage(f"{call}() of rank {rank} with itself; copy the tensor instead")
        return self.communicator.ranks[rank]

    # --- coalescing --------------------------------------------------------------------------------------------------

    def _start_coalescing(self, _device: torch.device) -> None:
        if self._coalesced is not None:
            raise InvalidUsage("this group coalesces operations already; coalescing cannot be nested")
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device) -> BackendWork:
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise InvalidUsage("_end_coalescing() without _start_coalescing()")
        return chain(works, self._timeout)

    def _coalesce(self, work: BackendWork) -> BackendWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
