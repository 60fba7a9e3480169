"""What torch asks of any process group, and what all operations of the backend share."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.engine import Engine
from hdpcomm.torch_backend.staging import Operation, one
from hdpcomm.torch_backend.work import BackendWork, seconds_of

__all__ = ["GroupBase", "Lists", "Tensors"]

Tensors = torch.Tensor | Sequence[torch.Tensor]
Lists = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


def context_of(name: str) -> int:
    """The number of a group in messages, from its name, which is equal on all its ranks. Signed, 64 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class GroupBase(dist.ProcessGroup):
    """The part of the group that torch asks for names, devices and times, and the checks of tensors."""

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
        self._store = store
        self.seconds = timeout  # that an operation may take
        self._ranks = communicator.ranks  # of the world
        self._world_seconds = communicator.timeout
        self._owner = owner
        self._name = name
        self._description = ""
        self._context = context_of(name)
        self._coalesced: list[BackendWork] | None = None

    # --- what torch asks of a group ----------------------------------------------------------------------------------

    # pybind calls these by their C++ names.
    def getBackendName(self) -> str:
        return "hdpcomm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        self._context = context_of(name)

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
        self.seconds = seconds

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> GroupBase:  # type: ignore[override]
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}: hdpcomm has the CPU only")
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
        """What ``destroy_process_group`` calls. The world ends with the group that began it. Local."""
        if self._owner:
            self.engine.close()

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

    # --- helpers -----------------------------------------------------------------------------------------------------

    # Where torch has several signatures, `options` is its options object or, in those without one, what stands there.
    def _begin(self, call: str, options: Any, timeout: datetime.timedelta | None = None) -> Operation:
        given = options if isinstance(options, datetime.timedelta) else getattr(options, "timeout", None)
        seconds = seconds_of(given if timeout is None else timeout, self.seconds)
        # A deadline of its own can be given to wait() only.
        background = getattr(options, "asyncOp", True) or seconds != self._world_seconds
        return Operation(call, self.communicator, timeout=seconds, background=background)

    def _end(self, operation: Operation, outputs: Sequence[torch.Tensor]) -> BackendWork:
        if operation.over:
            work = BackendWork.ended(outputs)
        else:
            work = operation.work(outputs, self.engine.complete_in_order)
            if operation.parts and operation.copies:
                self.engine.hold(work, operation.parts)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @staticmethod
    def _op_of(options: Any) -> Any:
        return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)

    @staticmethod
    def _root_of(options: Any) -> int:
        return options if isinstance(options, int) else int(getattr(options, "rootRank", 0))

    # --- checks ------------------------------------------------------------------------------------------------------

    def _list_of(self, lists: Any, call: str, what: str) -> Sequence[torch.Tensor]:
        """The list of one tensor a rank, of the lists of lists that torch's calls take."""
        tensors = lists
        if len(lists) == 0 or not isinstance(lists[0], torch.Tensor):
            tensors = one(lists, call, f"{what} lists")
        if len(tensors) != self.size():
            raise InvalidUsage(f"{call}() got {len(tensors)} {what}s; give one for each of the {self.size()} ranks")
        return list(tensors)

    def _check_count(self, operation: Operation, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != self.size():
            raise InvalidUsage(
                f"{operation.call}() got {len(tensors)} {what}s; give one for each of the {self.size()} ranks"
            )

    @staticmethod
    def _check_types(operation: Operation, tensors: Sequence[torch.Tensor]) -> None:
        types = {tensor.dtype for tensor in tensors}
        if len(types) != 1:
            names = ", ".join(sorted(map(str, types)))
            raise InvalidUsage(f"{operation.call}() got tensors of {names}; give all one type")

    def _check_equal(self, operation: Operation, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._check_types(operation, [*parts, tensor])
        sizes = {part.numel() for part in parts}
        if sizes != {tensor.numel()}:
            raise InvalidUsage(
                f"{operation.call}() got a list of {sorted(sizes)} elements a rank and a tensor of {tensor.numel()}; "
                "give equal sizes"
            )

    def _check_pairs(self, operation: Operation, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor]) -> None:
        if len(large) != len(small):
            raise InvalidUsage(f"{operation.call}() got {len(large)} and {len(small)} tensors; give pairs")
        for many, few in zip(large, small, strict=True):
            self._check_types(operation, [many, few])
            if many.numel() != few.numel() * self.size():
                raise InvalidUsage(
                    f"{operation.call}() got tensors of {many.numel()} and {few.numel()} elements; on {self.size()} "
                    f"ranks one has {self.size()} times the elements of the other"
                )

    def _elements_of(
        self, operation: Operation, tensor: torch.Tensor, rows: Sequence[int] | None, what: str
    ) -> list[int]:
        """The elements for each rank, from rows of dimension 0."""
        num_rows = tensor.shape[0] if tensor.dim() > 0 else 1
        row = math.prod(tensor.shape[1:])
        if rows is None or len(rows) == 0:
            if num_rows % self.size():
                raise InvalidUsage(
                    f"{operation.call}() got an {what} of {num_rows} rows without splits; they must be divisible by "
                    f"the {self.size()} ranks"
                )
            return [num_rows // self.size() * row] * self.size()
        if len(rows) != self.size() or min(rows) < 0 or sum(rows) != num_rows:
            raise InvalidUsage(
                f"{operation.call}() got {what} splits {list(rows)}; give {self.size()} counts, none below 0, that sum "
                f"up to the tensor's {num_rows} rows"
            )
        return [count * row for count in rows]
