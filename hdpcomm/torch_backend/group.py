"""The process group that torch gets: collectives, messages with tags, and torch's coalescing."""

from __future__ import annotations

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.messages import Messages
from hdpcomm.torch_backend.work import BackendWork, chain

__all__ = ["HdpProcessGroup"]


class HdpProcessGroup(Messages):
    """A group of torch ranks: a subset of the world of its :class:`Engine`. Made by torch, see ``init_process_group``.

    The collectives of overlapping groups must be called in one order on all ranks, whether waited for or not;
    point-to-point messages are free of that order. Methods take torch's options, as torch.distributed's functions pass
    them, or their plain values, as its C++ groups also do.

    Raises (all): InvalidUsage (ValueError) for bad arguments, before anything is sent; NotImplementedError naming what
    there is not; BackendTimeout, BackendLost, BackendMismatch, BackendAborted (``dist.DistBackendError``) from the call
    or the work's ``wait()``.
    """

    # --- coalescing --------------------------------------------------------------------------------------------------

    def _start_coalescing(self, _device: torch.device) -> None:
        if self._coalesced is not None:
            raise InvalidUsage("this group coalesces operations already; coalescing cannot be nested")
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device) -> BackendWork:
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise InvalidUsage("_end_coalescing() without _start_coalescing()")
        return chain(works, self.seconds)
