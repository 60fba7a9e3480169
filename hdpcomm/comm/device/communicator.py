"""Communicators of a world with device streams: operations on device tensors are enqueued, others go by the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.arguments import check_seconds
from hdpcomm.comm.communicator import NAMES, Communicator, Splits
from hdpcomm.comm.device.paths import Devices, LandingZone, StreamMark
from hdpcomm.comm.tensors import check_shape, untraced
from hdpcomm.comm.work import ENDED, Work, event, messages, operands, profiler
from hdpcomm.errors import InvalidUsage

__all__ = ["DeviceCommunicator", "DeviceWork"]

_exchange = _core.comm.stream_exchange
_collective = _core.comm.stream_collective


@untraced
class DeviceWork(Work):
    """An operation on device tensors; it keeps them alive until it was waited for.

    On CUDA it is work of streams: ``wait()`` makes the current stream wait, and the host goes on (with a ``timeout``
    the host waits). What the operation reads and writes may be freed or changed by that stream afterwards; no
    ``record_stream`` is needed. On a simulated device the host waits.
    """

    __slots__ = ("_devices", "_stream_work")

    def __init__(self, handle: _core.comm.StreamWork, devices: Devices) -> None:
        super().__init__(handle)
        self._stream_work = handle
        self._devices = devices

    @property
    def on_stream(self) -> bool:  # type: ignore[override]
        """See :class:`Work`."""
        return not self._devices.blocking

    def wait(self, timeout: float | None = None) -> None:
        """As the class says. Raises: CommTimeout, PeerLost, Mismatch, Aborted."""
        self._devices.wait(self._stream_work, None if timeout is None else check_seconds("wait", timeout))
        self._stream_work.release_buffers()

    def follow(self) -> None:
        """As ``wait()``, but the tensors stay alive: for a stream that is not the one that frees them."""
        self._devices.wait(self._stream_work, None)

    def mark(self) -> StreamMark:
        """Marks the end of the current stream's queue, to be waited for like a work. Local."""
        return self._devices.mark()


@untraced
class DeviceCommunicator(Communicator):
    """A communicator whose ranks have device streams; see :class:`Communicator`."""

    __slots__ = ("_devices",)

    def __init__(self, core: _core.comm.Communicator, rank: int, size: int, devices: Devices) -> None:
        super().__init__(core, rank, size)
        self._devices = devices

    @property
    def transport(self) -> str:
        """The name of the transport that moves device tensors."""
        return self._devices.name

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors should be."""
        return self._devices.torch_device

    @property
    def streams(self) -> _core.comm.StreamEngine:
        """The engine that runs the device operations."""
        return self._devices.engine

    def stats(self) -> dict[str, int]:
        """See :meth:`Communicator.stats`.

        Where NCCL takes part, also ``nccl_groups``, the groups of messages so far, and ``predicted_buffer_bytes``, the
        device memory that NCCL, by its source, takes for this rank's peers. What NCCL's own collectives move is not
        counted.
        """
        counts, devices = super().stats(), self._devices.engine.stats()
        found = {
            name: max(n, devices[name]) if name == "peers" else n + devices.get(name, 0) for name, n in counts.items()
        }
        if "nccl" in self.transport:
            found |= {name: devices[name] for name in ("nccl_groups", "predicted_buffer_bytes")}
        return found

    def waited_s(self) -> float:
        """See :meth:`Communicator.waited_s`."""
        return super().waited_s() + self._devices.engine.waited_s(self._core)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor on this rank's device. Raises: InvalidUsage for a negative size."""
        check_shape("empty()", shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def landing_zone(self, x: Any) -> LandingZone | None:
        """See :meth:`Communicator.landing_zone`."""
        return self._devices.landing_zone() if self._devices.takes(x) else None

    def lands(self, peer: int) -> bool:
        """See :meth:`Communicator.lands`."""
        return self._devices.engine.lands(self._core, peer)

    def subset(self, ranks: Sequence[int]) -> DeviceCommunicator | None:
        """See :meth:`Communicator.subset`."""
        made = super().subset(ranks)
        return None if made is None else type(self)(made._core, made.rank, made.size, self._devices)

    def algorithms(self, op: str) -> tuple[str, ...]:  # type: ignore[override]
        """See :meth:`Communicator.algorithms`; for device tensors, with what this transport's kernels do."""
        names = Communicator.algorithms(op)
        reads = self._devices.engine.reads_peers(self._core)
        return names + tuple(_core.comm.peer_readers_of(_core.comm.OPS[op])) if reads else names

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Communicator.synchronize`."""
        self._devices.engine.synchronize(-1.0 if timeout is None else timeout)

    def mark(self) -> StreamMark:
        """Marks the end of torch's current stream, to be waited for like a work. Local."""
        return self._devices.mark()

    def send(self, x: Any, dst: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`; on CUDA it ends when the message is in the receiver's memory."""
        if not self._devices.takes(x):
            return super().send(x, dst, async_op=async_op)
        if dst == self.rank and not async_op:
            raise self._self_message("send", dst)
        return self._exchange([(x, dst)], (), async_op)

    def recv(self, x: Any, src: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        if not self._devices.takes(x):
            return super().recv(x, src, async_op=async_op)
        if src == self.rank and not async_op:
            raise self._self_message("recv", src)
        return self._exchange((), [(x, src)], async_op)

    def exchange(
        self,
        sends: Sequence[tuple[Any, ...]] = (),
        recvs: Sequence[tuple[Any, ...]] = (),
        *,
        async_op: bool = False,
    ) -> Work:
        """See :meth:`Communicator.exchange`."""
        try:
            sends, recvs = tuple(sends), tuple(recvs)  # iterators are read once
            by_streams = self._all_by_streams([message[0] for message in (*sends, *recvs)])
        except (TypeError, IndexError):
            by_streams = False  # no (tensor, peer) pairs: the host's side says so
        if not by_streams:
            return super().exchange(sends, recvs, async_op=async_op)
        return self._exchange(sends, recvs, async_op)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _exchange(self, sends: Sequence[tuple[Any, ...]], recvs: Sequence[tuple[Any, ...]], async_op: bool) -> Work:
        with event("exchange", messages(self.ranks, sends, recvs) if profiler._is_profiler_enabled else {}):
            return self._enqueue(_exchange, sends, recvs, async_op=async_op)

    def _by_streams(self, x: Any) -> bool:
        return self._devices.takes(x)

    def _all_by_streams(self, tensors: Sequence[Any]) -> bool:
        """Whether an operation goes by streams, not by the host. Raises: InvalidUsage where its tensors disagree."""
        taken = [self._devices.takes(x) for x in tensors]
        if any(taken) and not all(taken):
            raise InvalidUsage(
                "one operation got tensors in host memory and on a device; give all of one kind (x.cpu(), x.cuda())"
            )
        return taken[0] if taken else self._devices.takes(None)

    def _collective(
        self,
        operation: int,
        x: Any,
        out: Any,
        op: str | None,
        root: int | None,
        algorithm: str,
        async_op: bool,
        splits: Splits | None = None,
    ) -> Work:
        if not self._all_by_streams([tensor for tensor in (x, out) if tensor is not None]):
            return super()._collective(operation, x, out, op, root, algorithm, async_op, splits)
        with event(NAMES[operation], operands(self.ranks, x, out) if profiler._is_profiler_enabled else {}):
            return self._enqueue(_collective, operation, x, out, op, root, algorithm, splits, async_op=async_op)

    def _enqueue(self, call: Callable[..., _core.comm.StreamWork | None], *arguments: Any, async_op: bool) -> Work:
        """One of the core's operations on streams."""
        devices = self._devices
        handle = call(devices.engine, self._core, devices.describe, *arguments, devices.stream(), async_op)
        if handle is None:
            return ENDED  # the current stream waits for its end, and nobody else has to
        work = DeviceWork(handle, devices)
        if async_op:
            return work
        work.wait()  # tensors without streams; or it has failed, and its streams still use the buffers
        return ENDED
