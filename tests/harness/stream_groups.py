"""Process groups whose tensors have streams, without a GPU: for ranks that are threads of this process.

Host tensors stand for device memory, and each thread has a current stream of the simulated device, as torch has one of
CUDA. So what the backend does for CUDA tensors runs, in check mode too: works that make the current stream wait, hosts
that go on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.comm.device.paths import Devices
from hdpcomm.torch_backend import HdpProcessGroup
from hdpcomm.torch_backend.work import Engine

__all__ = ["Caller", "joined", "tensors_with_streams"]

_current = threading.local()  # .stream, .side_streams (by the rank that they receive from), .device


class _DevicesWithStreams(Devices):
    def __init__(self, engine: _core.comm.StreamEngine) -> None:
        super().__init__(engine)
        self.blocking = False

    def stream(self) -> int:
        return int(_current.stream)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.engine.device.ordinal)


@contextmanager
def _on_side_stream(_device: torch.device, source: int | None = None, uses: object = ()) -> Iterator[None]:
    del uses  # host memory is not given to another stream
    if source not in _current.side_streams:
        _current.side_streams[source] = _current.device.create_stream()
    before, _current.stream = _current.stream, _current.side_streams[source]
    try:
        yield
    finally:
        _current.stream = before


@contextmanager
def tensors_with_streams() -> Iterator[None]:
    """Worlds that are joined inside take host tensors for device memory behind the threads' current streams."""
    with (
        mock.patch("hdpcomm.comm.device.paths.Devices", _DevicesWithStreams),
        mock.patch("hdpcomm.torch_backend.work.on_side_stream", _on_side_stream),
    ):
        yield


@dataclass
class Caller:
    """A rank with a process group and two streams."""

    group: HdpProcessGroup
    device: _core.device.Device
    streams: tuple[int, int]

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Makes a stream the current one."""
        before, _current.stream = _current.stream, stream
        try:
            yield
        finally:
            _current.stream = before

    def made(self, count: int, value: int = 0) -> torch.Tensor:
        """Bytes that work of the current stream writes: the rank + 1, or ``value``."""
        x = torch.empty(count, dtype=torch.uint8)
        written = value or self.group.rank() + 1
        self.device.fill(x.data_ptr(), written, bytes=count, stream=_current.stream)
        return x

    @property
    def current(self) -> int:
        """The current stream."""
        return int(_current.stream)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """What work of the current stream reads there."""
        copy = torch.empty_like(x)
        self.device.copy(copy.data_ptr(), x.data_ptr(), bytes=x.numel(), stream=_current.stream)
        self.device.synchronize_stream(_current.stream)
        self.device.annotate_read(copy.data_ptr(), x.numel())
        return copy


@contextmanager
def joined() -> Iterator[Caller]:
    """This thread's rank of the run's world."""
    with hdp.init() as comm:
        assert isinstance(comm, DeviceCommunicator)
        device = comm.streams.device
        streams = device.create_stream(), device.create_stream()
        _current.stream, _current.device, _current.side_streams = streams[0], device, {}
        engine = Engine(comm, comm)
        group = HdpProcessGroup(engine, comm, None, name="streams", timeout=comm.timeout)
        yield Caller(group, device, streams)
        for stream in (*streams, *_current.side_streams.values()):
            device.synchronize_stream(stream)
            device.destroy_stream(stream)
