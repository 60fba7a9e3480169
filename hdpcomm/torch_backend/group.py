"""The process group that torch gets: collectives and messages, and what else torch asks of a group."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.collectives import Collectives
from hdpcomm.torch_backend.engine import Engine
from hdpcomm.torch_backend.work import BackendWork

__all__ = ["HdpProcessGroup"]


class HdpProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
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
        dist.ProcessGroup.__init__(self, communicator.rank, communicator.size)  # type: ignore[call-arg]
        self.engine = engine
        self.communicator = communicator
        self._seconds = timeout
        self._world_seconds = communicator.timeout
        self._name = name
        self._store = store
        self._owner = owner
        self._description = ""

    # --- what torch asks of a group ----------------------------------------------------------------------------------

    # pybind calls these by their C++ names.
    def getBackendName(self) -> str:
        return "hdpcomm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

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
        self._seconds = seconds

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

    # --- one tensor of the calls for several, and names of torch before 2.13 ----------------------------------------

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = Collectives.all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = Collectives.reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = Collectives.all_to_all_single  # type: ignore[assignment]

    # --- what there is not -------------------------------------------------------------------------------------------

    def _start_coalescing(self, _device: torch.device) -> None:
        raise NotImplementedError("hdpcomm backend: coalescing of a device's operations; leave the device out")

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
