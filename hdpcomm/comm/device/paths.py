"""How an operation on device tensors reaches the core: which engine runs it, behind which stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm.device.landing_zone import LandingZone
from hdpcomm.comm.tensors import Buffer, describe, describe_torch
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage

__all__ = ["Devices", "StreamMark"]


@untraced
class StreamMark:
    """A point in a stream: it ends when the work that the stream held at this point has ended."""

    __slots__ = ("_device", "_event", "_stream")

    on_stream = True

    def __init__(self, device: _core.device.Device, stream: Callable[[], int]) -> None:
        self._device, self._stream = device, stream
        self._event = device.create_event()
        device.record(self._event, stream())

    def __del__(self) -> None:
        if hasattr(self, "_event"):  # making it may fail
            self._device.destroy_event(self._event)

    def wait(self, timeout: float | None = None) -> None:
        """The current stream waits, or, with a timeout, the host. Raises: CommTimeout."""
        if timeout is None:
            self._device.wait(self._stream(), self._event)
        else:
            self._device.synchronize_event(self._event, timeout)

    def follow(self) -> None:
        """The current stream waits."""
        self.wait()

    def done(self) -> bool:
        """Whether it has ended; never blocks."""
        return self._device.query(self._event)


class Devices:
    """The device side of a world: which tensors go over its streams, and how.

    Operations are enqueued behind torch's current stream. With a simulated device host tensors stand for device memory
    and one stream for the host's own work: the tensors have no streams, so the host must wait (``blocking``).
    """

    __slots__ = ("_host_stream", "_ordinal", "_zone", "blocking", "engine", "name")

    def __init__(self, engine: _core.comm.StreamEngine) -> None:
        self.engine = engine
        #: The name of the transport.
        self.name = engine.name
        self.blocking = engine.device.is_sim
        # The stream or the device number, whichever counts; properties of the core cost more.
        self._host_stream = engine.host_stream if engine.device.is_sim else None
        self._ordinal = engine.device.ordinal
        self._zone: LandingZone | None = None

    def takes(self, x: Any) -> bool:
        """Whether an operation on a tensor is enqueued; else it goes by the host."""
        return self._host_stream is not None or (isinstance(x, torch.Tensor) and x.is_cuda)

    def describe(self, x: Any, what: str, *, writable: bool = False) -> Buffer:
        """As :func:`describe`, of a tensor on the engine's device."""
        if self._host_stream is not None:
            return describe(x, what, writable=writable)
        if not isinstance(x, torch.Tensor) or x.device.type != "cuda" or x.device.index != self._ordinal:
            where = x.device if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidUsage(
                f"{what} is on {where}, the communicator's device operations run on cuda:{self._ordinal}; give tensors "
                "of that device, all of one operation"
            )
        return describe_torch(x, what)

    def stream(self) -> int:
        """Torch's current stream."""
        if self._host_stream is not None:
            return self._host_stream
        # Its handle alone, as torch's own generated code asks for it: torch.cuda.current_stream() makes objects.
        return torch._C._cuda_getCurrentRawStream(self._ordinal)

    def wait(self, handle: _core.comm.StreamWork, timeout: float | None) -> None:
        """The current stream waits; the host only where tensors have no stream, or where a timeout was given."""
        if self.blocking or timeout is not None:
            handle.wait(-1.0 if timeout is None else timeout)
        else:
            handle.wait_on(self.stream())

    def mark(self) -> StreamMark:
        """Marks the end of the current stream's queue."""
        return StreamMark(self.engine.device, self.stream)

    def landing_zone(self) -> LandingZone | None:
        """This rank's landing zone, if it has any bytes."""
        if self._zone is None:
            address, size = self.engine.landing()
            self._zone = LandingZone(address, size, self.torch_device) if size > 0 else None
        return self._zone

    @property
    def torch_device(self) -> torch.device:
        """Where torch's tensors for these streams are."""
        return torch.device("cpu") if self._host_stream is not None else torch.device("cuda", self._ordinal)
