"""The process group that torch gets: torch's names, each passed on to the object that does it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.checks import Lists, Tensors
from hdpcomm.torch_backend.collectives import Collectives
from hdpcomm.torch_backend.engine import Engine
from hdpcomm.torch_backend.messages import Messages
from hdpcomm.torch_backend.state import GroupState
from hdpcomm.torch_backend.work import BackendWork

__all__ = ["HdpProcessGroup"]

Timeout = datetime.timedelta | None


class HdpProcessGroup(dist.ProcessGroup):
    """A group of torch ranks: a subset of the world of its :class:`Engine`. Made by torch, see ``init_process_group``.

    The collectives of overlapping groups must be called in one order on all ranks, whether waited for or not;
    point-to-point messages are free of that order. Methods take torch's options, as torch.distributed's functions pass
    them, or their plain values, as its C++ groups also do.

    Raises (all): InvalidUsage (ValueError) for bad arguments, before anything is sent; NotImplementedError naming what
    there is not; BackendTimeout, BackendLost, BackendMismatch, BackendAborted (``dist.DistBackendError``) from the call
    or the work's ``wait()``.
    """

    def __init__(
        self,
        engine: Engine,
        communicator: Communicator,
        store: Any,
        *,
        name: str,
        timeout: float,
        owner: bool = False,
    ) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self.engine = engine
        self.communicator = communicator
        self._state = GroupState(engine, communicator, name=name, timeout=timeout)
        self._collectives = Collectives(self._state)
        self._messages = Messages(self._state)
        self._store = store
        self._owner = owner
        self._description = ""

    # --- what torch asks of a group ----------------------------------------------------------------------------------

    # pybind calls these by their C++ names.
    def getBackendName(self) -> str:
        return "hdpcomm"

    def getGroupName(self) -> str:
        return self._state.name

    def setGroupName(self, name: str) -> None:
        self._state.name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """The time that an operation may take from now on. Local."""
        seconds = timeout.total_seconds()
        if not seconds > 0:
            raise InvalidUsage(f"set_timeout() got {timeout}; give a time above 0")
        self._state.seconds = seconds

    @property
    def _device_types(self) -> list[torch.device]:
        device = getattr(self.communicator, "device", torch.device("cpu"))  # of a world with streams
        return [torch.device(kind) for kind in dict.fromkeys(("cpu", device.type))]

    def _get_backend(self, device: torch.device) -> HdpProcessGroup:  # type: ignore[override]
        if torch.device(torch.device(device).type) not in self._device_types:
            raise RuntimeError(
                f"No backend type associated with device type {device}: this group moves tensors on "
                f"{', '.join(each.type for each in self._device_types)}"
            )
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the core numbers the operations itself."""

    def abort(self) -> None:
        """Ends this rank's pending operations, of all groups of its world, and tells the ranks concerned. Local."""
        self.engine.abort("abort() of a process group")

    def shutdown(self) -> None:
        """Ends the group, for ``destroy_process_group``. The world ends with the group that began it. Local."""
        if self._owner:
            self.engine.close()

    # --- collectives -------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> BackendWork:  # type: ignore[override]
        return self._collectives.barrier(opts, timeout)

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: Timeout = None) -> BackendWork:
        return self._collectives.broadcast(tensors, opts, timeout)

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Timeout = None) -> BackendWork:
        return self._collectives.allreduce(tensors, opts, timeout)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> BackendWork:
        return self._collectives.allreduce_coalesced(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Timeout = None) -> BackendWork:
        return self._collectives.reduce(tensors, opts, op, timeout)

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> BackendWork:
        return self._collectives.allgather(outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> BackendWork:
        return self._collectives.allgather_coalesced(outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self._collectives.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> BackendWork:
        return self._collectives.all_gather_single_coalesced(outputs, inputs, opts)

    def gather(self, outputs: Lists, inputs: Tensors, opts: Any = None, timeout: Timeout = None) -> BackendWork:
        return self._collectives.gather(outputs, inputs, opts, timeout)

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any = None, timeout: Timeout = None) -> BackendWork:
        return self._collectives.scatter(outputs, inputs, opts, timeout)

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any = None, timeout: Timeout = None) -> BackendWork:
        return self._collectives.reduce_scatter(outputs, inputs, opts, timeout)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self._collectives.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> BackendWork:
        return self._collectives.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> BackendWork:
        return self._collectives.all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> BackendWork:
        return self._collectives.alltoall(outputs, inputs, opts)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
        return self._messages.send(tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
        return self._messages.recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> BackendWork:
        return self._messages.recv_anysource(tensors, tag)

    # --- coalescing --------------------------------------------------------------------------------------------------

    def _start_coalescing(self, _device: torch.device) -> None:
        self._state.start_coalescing()

    def _end_coalescing(self, _device: torch.device) -> BackendWork:
        return self._state.end_coalescing()

    # --- what there is not -------------------------------------------------------------------------------------------

    def split_group(self, *_args: Any, **_options: Any) -> dist.ProcessGroup | None:
        raise NotImplementedError("hdpcomm backend: split_group; new_group() of any ranks is free here")

    def merge_remote_group(self, *_args: Any, **_options: Any) -> dist.ProcessGroup:
        raise NotImplementedError("hdpcomm backend: merge_remote_group")

    def monitored_barrier(self, *_args: Any, **_options: Any) -> None:
        raise NotImplementedError(
            "hdpcomm backend: monitored_barrier; barrier() names the absent ranks at its deadline"
        )

    def _register_on_completion_hook(self, _hook: Any) -> None:
        raise NotImplementedError("hdpcomm backend: _register_on_completion_hook")
