"""The landing zone of a rank: device memory into which peers put messages at the place where they are read."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["LandingZone"]


class _CudaMemory:
    """Bytes on a CUDA device, for ``torch.as_tensor``."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class LandingZone:
    """This rank's zone; a message with an offset goes to that offset of the receiver's (see ``exchange``).

    The zone is one for all users of a rank, who follow each other on its streams: each calls :meth:`enter` before its
    first message, on the stream that its operations follow, and :meth:`leave` after the last work that reads. Inside of
    a CUDA graph nobody else can be waited for: there the replays' stream orders the users.
    """

    __slots__ = ("_left", "memory")

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        #: uint8 [bytes]; valid until the communicator is closed.
        self.memory: torch.Tensor
        if device.type == "cpu":
            self.memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        else:
            self.memory = torch.as_tensor(_CudaMemory(address, size), device=device)
        self._left: Any = None if device.type == "cpu" else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Later work of the current stream comes after what the last user has enqueued."""
        if self._left is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.memory.device).wait_event(self._left)

    def leave(self) -> None:
        """The next user comes after what the current stream holds now."""
        if self._left is not None and not torch.cuda.is_current_stream_capturing():
            self._left.record(torch.cuda.current_stream(self.memory.device))
