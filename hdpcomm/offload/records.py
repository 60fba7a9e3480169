"""Copies of tensors in host memory, and the objects that autograd keeps in place of saved tensors."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol, TypeVar

import torch

from hdpcomm._core.device import Device
from hdpcomm._core.offload import CopyEngine, PooledCopy
from hdpcomm.errors import InvalidUsage
from hdpcomm.offload.pool import compute_stream

__all__ = ["HostCopy", "Lane", "ResidentTensor", "StorageRecord", "StoredTensor", "changed_in_place", "flat_bytes"]

_Copy = TypeVar("_Copy", bound="HostCopy")


class Steps(Protocol):
    """Follows the backward pass: :meth:`enter` is called when it needs a tensor that ``layer`` saved."""

    def enter(self, layer: int) -> None: ...


class Lane:
    """The copy engine and the device that all copies of an offload share, and those that nothing needs any more."""

    __slots__ = ("device", "engine", "place", "released", "storing")

    def __init__(self, engine: CopyEngine, device: Device, place: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.place = place
        self.storing: list[HostCopy] = []
        """The last copies to the pool that :class:`HostRows` began: what they read is freed when it begins others."""
        self.released: deque[HostCopy] = deque()
        """One entry for each handle that autograd has dropped. It may drop one at any point, even in other threads,
        so the copy is closed later, by :meth:`sweep`."""

    def compute(self) -> int | None:
        """The current compute stream; ``None`` if this thread computes."""
        return compute_stream(self.device)

    def sweep(self) -> None:
        """Frees the pool blocks of copies that no autograd graph refers to any more."""
        while self.released:
            try:
                copy = self.released.popleft()
            except IndexError:  # another thread was faster
                return
            copy.release()


class HostCopy:
    """Bytes of a tensor's storage, from its begin, of which the first ``cut`` are in the pool, or being copied there,
    while the others stay on the device."""

    __slots__ = ("_copy", "_kept", "_source", "_target", "cut", "lane", "nbytes", "version")

    def __init__(self, lane: Lane, tensor: torch.Tensor, nbytes: int, cut: int, copy: PooledCopy) -> None:
        storage = tensor.untyped_storage()
        self.lane = lane
        self.version = tensor._version
        self.nbytes = nbytes
        self.cut = cut
        self._copy = copy
        self._source: torch.Tensor | None = tensor
        self._kept = flat_bytes(storage)[cut:nbytes].clone() if cut < nbytes else None
        self._target: torch.Tensor | None = None
        """The tensor that is being loaded."""
        lane.device.annotate_read(storage.data_ptr(), nbytes)

    @classmethod
    def start(cls: type[_Copy], lane: Lane, tensor: torch.Tensor, nbytes: int, cut: int) -> _Copy | None:
        """Starts to copy the first ``cut`` of ``nbytes`` bytes of the tensor's storage; ``None`` if the pool is full.

        ``tensor`` must be detached; the copy holds it until :meth:`finish_store`.
        """
        storage = tensor.untyped_storage()
        lane.device.annotate_write(storage.data_ptr(), nbytes)
        copy = lane.engine.store(storage.data_ptr(), cut, compute=lane.compute(), owner=tensor)
        return None if copy is None else cls(lane, tensor, nbytes, cut, copy)

    def finish_store(self, *, check: bool = True) -> None:
        """Makes the compute stream wait for the copy, then releases the tensor on the device.

        With ``check``, raises InvalidUsage if the tensor was changed in place while the copy may still have read it.
        """
        source = self._source
        if source is None:
            return
        self._copy.finish_store(compute=self.lane.compute())
        self._source = None
        self.lane.device.annotate_free(source.untyped_storage().data_ptr(), self.nbytes)
        if check and source._version != self.version:
            raise changed_in_place(source, self.version)

    def load(self, target: torch.Tensor) -> None:
        """Starts to bring all bytes to ``target``, uint8 ``[nbytes]``; it is held until :meth:`finish_load`."""
        self.finish_store()
        self._copy.load(target.data_ptr(), compute=self.lane.compute(), owner=target)
        self._target = target
        if self._kept is not None:
            target[self.cut :].copy_(self._kept)
            self.lane.device.annotate_write(target.data_ptr() + self.cut, self.nbytes - self.cut)

    def finish_load(self) -> None:
        """Makes the compute stream wait for what :meth:`load` began, if it did."""
        if self._target is not None:
            self._copy.finish_load(compute=self.lane.compute())
            self._target = None

    def release(self) -> None:
        """Nothing needs it any more."""
        self.close()

    def close(self) -> None:
        """Frees the pool block; nothing refers to the copy any more."""
        self.finish_store(check=False)
        self.finish_load()  # it may still write to memory that is released below
        self._kept = None
        self._copy.drop()


class StorageRecord(HostCopy):
    """The copy of one whole storage for the saved tensors that are views of it.

    ``handles`` counts those that are alive, and ``waiting`` those that have not asked for their tensor since the
    storage was loaded.
    """

    __slots__ = ("_loaded", "_resident", "handles", "storage", "waiting")

    def __init__(self, lane: Lane, tensor: torch.Tensor, nbytes: int, cut: int, copy: PooledCopy) -> None:
        super().__init__(lane, tensor, nbytes, cut, copy)
        self.storage = weakref.ref(tensor.untyped_storage())
        self._resident: weakref.ref[torch.Tensor] | None = None
        self.handles = self.waiting = 0
        self._loaded: torch.Tensor | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the storage of this record and was not changed since it was saved."""
        storage = self.storage()
        return storage is not None and tensor._version == self.version and tensor.untyped_storage() is storage

    def prefetch(self) -> None:
        """Starts to load the storage, unless it is on the device."""
        if self._loaded is not None or self._source is not None or self._resident_tensor() is not None:
            return
        self.waiting = self.handles
        self._loaded = torch.empty(self.nbytes, dtype=torch.uint8, device=self.lane.place)  # on the compute stream
        self.load(self._loaded)

    def use(self) -> torch.UntypedStorage:
        """The storage on the device, ready for compute. Each handle calls this once per backward pass."""
        present = self._source if self._source is not None else self._resident_tensor()
        if present is not None:
            return present.untyped_storage()
        self.prefetch()
        assert self._loaded is not None
        self.finish_load()
        storage = self._loaded.untyped_storage()
        self.lane.device.annotate_read(storage.data_ptr(), self.nbytes)
        self.waiting -= 1
        if self.waiting <= 0:
            self._loaded = None  # autograd holds it while it computes
        return storage

    def release(self) -> None:
        """A handle was dropped."""
        self.handles -= 1
        self.waiting = min(self.waiting, self.handles)
        if self.handles == 0:
            self.close()

    def close(self) -> None:
        super().close()
        self._loaded = None

    def add_resident(self, tensor: torch.Tensor) -> None:
        """Notes that a resident layer keeps this view of the storage; while it does, no load is needed."""
        self._resident = weakref.ref(tensor)

    def _resident_tensor(self) -> torch.Tensor | None:
        tensor = None if self._resident is None else self._resident()
        return tensor if tensor is not None and tensor._version == self.version else None


class StoredTensor:
    """The handle that autograd keeps in place of a saved tensor whose storage is offloaded."""

    __slots__ = ("_dtype", "_layer", "_offset", "_record", "_size", "_steps", "_stride")

    def __init__(self, record: StorageRecord, tensor: torch.Tensor, steps: Steps, layer: int) -> None:
        record.handles += 1
        record.waiting += 1
        self._record = record
        self._steps = steps
        self._layer = layer
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def unpack(self) -> torch.Tensor:
        """The tensor, ready for compute."""
        self._steps.enter(self._layer)
        tensor = torch.empty(0, dtype=self._dtype, device=self._record.lane.place)
        return tensor.set_(self._record.use(), self._offset, self._size, self._stride)

    def __del__(self) -> None:
        if hasattr(self, "_record"):  # its __init__ may have been interrupted
            self._record.lane.released.append(self._record)


class ResidentTensor:
    """The handle that autograd keeps for a saved tensor that is not offloaded."""

    __slots__ = ("_layer", "_steps", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor, steps: Steps, layer: int) -> None:
        self.tensor = tensor
        self._version = tensor._version
        self._steps = steps
        self._layer = layer

    def unpack(self) -> torch.Tensor:
        """The tensor. Raises InvalidUsage if it was changed in place since it was saved."""
        if self.tensor._version != self._version:
            raise changed_in_place(self.tensor, self._version)
        self._steps.enter(self._layer)
        return self.tensor


def changed_in_place(tensor: torch.Tensor, version: int) -> InvalidUsage:
    """The error for a saved tensor that an operation has changed."""
    return InvalidUsage(
        f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} that the backward pass needs was changed in place "
        f"after it was saved (it is at version {tensor._version}, expected {version}); use the operation that makes a "
        "new tensor, or clone() before it"
    )


def flat_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
