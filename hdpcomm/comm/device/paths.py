"""How an operation on device tensors reaches the core: which engine runs it, behind which stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm.device.landing_zone import LandingZone
from hdpcomm.comm.device.tensors import CudaTensors, SimTensors, Tensors
from hdpcomm.comm.untraced import untraced

__all__ = ["DevicePath", "Devices", "StreamMark"]

Core = _core.comm.Communicator


@untraced
class StreamMark:
    """A point in a stream: it ends when the work that the stream held at this point has ended."""

    __slots__ = ("_device", "_event", "_tensors")

    on_stream = True

    def __init__(self, device: _core.device.Device, tensors: Tensors) -> None:
        self._device, self._tensors = device, tensors
        self._event = device.create_event()
        device.record(self._event, tensors.stream())

    def __del__(self) -> None:
        if hasattr(self, "_event"):  # making it may fail
            self._device.destroy_event(self._event)

    def wait(self, timeout: float | None = None) -> None:
        """The current stream waits, or, with a timeout, the host. Raises: CommTimeout."""
        if timeout is None:
            self._device.wait(self._tensors.stream(), self._event)
        else:
            self._device.synchronize_event(self._event, timeout)

    def follow(self) -> None:
        """The current stream waits."""
        self.wait()

    def done(self) -> bool:
        """Whether it has ended; never blocks."""
        return self._device.query(self._event)


class DevicePath:
    """Device memory, by a stream engine: operations are enqueued behind torch's current stream."""

    __slots__ = ("_engine", "_tensors", "blocking", "describe")

    def __init__(self, engine: _core.comm.StreamEngine, tensors: Tensors) -> None:
        self._engine, self._tensors = engine, tensors
        self.blocking = tensors.blocking
        self.describe = tensors.describe

    def enqueue(
        self, call: Callable[..., _core.comm.StreamWork | None], core: Core, *arguments: Any, background: bool
    ) -> _core.comm.StreamWork | None:
        """One of the core's operations on streams. ``None``: the current stream waits for its end, and nobody else has
        to."""
        return call(self._engine, core, self.describe, *arguments, self._tensors.stream(), background)

    def wait(self, handle: _core.comm.StreamWork, timeout: float | None) -> None:
        """The current stream waits; the host only where tensors have no stream, or where a timeout was given."""
        if self.blocking or timeout is not None:
            handle.wait(-1.0 if timeout is None else timeout)
        else:
            handle.wait_on(self._tensors.stream())

    def mark(self) -> StreamMark:
        """Marks the end of the current stream's queue."""
        return StreamMark(self._engine.device, self._tensors)


class Devices:
    """The device side of a world: which tensors go over its streams, and how."""

    __slots__ = ("_path", "_zone", "engine", "name")

    def __init__(self, engine: _core.comm.StreamEngine) -> None:
        self.engine = engine
        #: The name of the transport.
        self.name = engine.name
        tensors: Tensors = (
            SimTensors(engine.host_stream) if engine.device.is_sim else CudaTensors(engine.device.ordinal)
        )
        self._path = DevicePath(engine, tensors)
        self._zone: LandingZone | None = None

    def landing_zone(self) -> LandingZone | None:
        """This rank's landing zone, if it has any bytes."""
        if self._zone is None:
            address, size = self.engine.landing()
            self._zone = LandingZone(address, size, self.torch_device) if size > 0 else None
        return self._zone

    def mark(self) -> StreamMark:
        """Marks the end of torch's current stream."""
        return self._path.mark()

    @property
    def torch_device(self) -> torch.device:
        """Where torch's tensors for these streams are."""
        return torch.device("cpu") if self.is_sim else torch.device("cuda", self.engine.device.ordinal)

    @property
    def is_sim(self) -> bool:
        """Whether host tensors stand for device memory."""
        return self._path.blocking

    def path(self, x: Any) -> DevicePath | None:
        """The path of a tensor; None for one in host memory."""
        return self._path if self.is_sim or (isinstance(x, torch.Tensor) and x.is_cuda) else None
