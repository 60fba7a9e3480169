"""How an operation on device tensors reaches the core: which engine runs it, behind which stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm.costs import cost_names, link_costs, load_costs
from hdpcomm.comm.machine import machine
from hdpcomm.comm.tensors import Buffer, describe, describe_torch, untraced
from hdpcomm.errors import InvalidUsage

__all__ = ["AUTOMATIC", "DEVICE_TRANSPORTS", "Devices", "LandingZone", "StreamMark", "arena_bytes", "join_devices"]


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


DEVICE_TRANSPORTS = ("sim", "cuda", "nccl", "cuda+nccl")

#: The device transport that ``auto`` adds where every rank sees a GPU.
AUTOMATIC = "cuda+nccl"


def join_devices(transport: str, world: _core.comm.World) -> Devices:
    """Collective over the world, on its host transport. Raises: InvalidUsage, Mismatch, DeviceError, CommTimeout."""
    comm, join, here, rank = world.communicator(), _core.comm.StreamEngine, machine(), world.rank
    device = here.device(transport, rank, world.size)
    if "nccl" not in transport:
        return Devices(join.join_links(comm, device, _links(transport)))
    nccl = _nccl(lambda: here.nccl(rank, device))
    if transport == "nccl":
        return Devices(join.join_nccl(comm, device, nccl))
    return Devices(join.join_paths(comm, device, _links("cuda"), nccl))


def arena_bytes(num_ranks: int) -> int:
    """Device memory that each of so many ranks of a host takes for messages by links (``cuda``, ``sim``). Local."""
    return _links("cuda").arena_bytes(num_ranks)


def _links(transport: str) -> _core.comm.LinkJoining:
    settings = _core.settings()
    return _core.comm.LinkJoining(
        slot_bytes=settings.device_slot_bytes,
        num_slots=settings.device_slots,
        num_lanes=settings.device_lanes,
        landing_bytes=settings.device_landing_bytes,
        window_bytes=settings.device_window_bytes,
        small_bytes=settings.device_small_bytes,
        costs=_core.collective.DeviceTransportCosts(**load_costs(transport)),  # rank 0's count
    )


def _nccl(library: Callable[[], Any]) -> _core.comm.NcclJoining:
    settings = _core.settings()
    inside, between = (link_costs(load_costs(name)) for name in cost_names("nccl"))  # rank 0's count
    return _core.comm.NcclJoining(
        library=library,
        connect_distance=settings.nccl_connect,
        inside=inside,
        between=between,
    )
