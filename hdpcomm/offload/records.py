"""What stands for a saved tensor in the autograd graph, and the copies behind it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

import torch

from hdpcomm._core.device import Device
from hdpcomm._core.offload import CopyEngine
from hdpcomm.errors import InvalidUsage
from hdpcomm.offload.devices import compute_stream

__all__ = ["Lane", "ResidentTensor", "StorageRecord", "StoredTensor", "changed_in_place"]


class Steps(Protocol):
    """Hears of the backward pass: something that a layer saved is needed now."""

    def enter(self, layer: int) -> None: ...


class Lane:
    """The way to host memory and back that all records of an offload share."""

    __slots__ = ("device", "engine", "place", "released")

    def __init__(self, engine: CopyEngine, device: Device, place: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.place = place
        self.released: deque[StorageRecord] = deque()
        """One entry for each handle that autograd has dropped: it may do so anywhere, :meth:`sweep` is called in safe
        places."""

    def compute(self) -> int | None:
        """The stream that computes now; ``None``: this thread does."""
        return compute_stream(self.device)

    def sweep(self) -> None:
        """Gives back the blocks of records that nothing in a graph stands for any more."""
        while True:
            try:
                record = self.released.popleft()
            except IndexError:  # empty, or another thread was faster
                return
            record.handles -= 1
            record.waiting = min(record.waiting, record.handles)
            if record.handles == 0:
                record.close()


class StorageRecord:
    """One storage whose first ``cut`` bytes are in the pool (or on the way) and whose rest is kept on the device.

    All saved tensors that are views of the storage share it. ``handles``: how many of them live; ``waiting``: how many
    of these have not asked for their tensor since it was loaded.
    """

    __slots__ = (
        "_arrived",
        "_kept",
        "_loaded",
        "_source",
        "_ticket",
        "_twin",
        "cut",
        "handles",
        "lane",
        "nbytes",
        "storage",
        "version",
        "waiting",
    )

    def __init__(self, lane: Lane, tensor: torch.Tensor, cut: int, ticket: int) -> None:
        storage = tensor.untyped_storage()
        self.lane = lane
        self.storage = weakref.ref(storage)
        self._twin: weakref.ref[torch.Tensor] | None = None
        self.version = tensor._version
        self.nbytes = storage.nbytes()
        self.cut = cut
        self.handles = self.waiting = 0
        self._ticket = ticket
        self._source: torch.Tensor | None = tensor
        self._kept = _flat(storage)[cut:].clone() if cut < self.nbytes else None
        self._loaded: torch.Tensor | None = None
        self._arrived = False
        lane.device.annotate_read(storage.data_ptr(), self.nbytes)

    @classmethod
    def start(cls, lane: Lane, tensor: torch.Tensor, cut: int) -> StorageRecord | None:
        """Starts to copy the first ``cut`` bytes of the tensor's storage; ``None``: the pool is full.

        ``tensor`` is detached, and held until :meth:`settle`.
        """
        storage = tensor.untyped_storage()
        lane.device.annotate_write(storage.data_ptr(), storage.nbytes())
        ticket = lane.engine.store(storage.data_ptr(), cut, compute=lane.compute())
        return cls(lane, tensor, cut, ticket) if ticket else None

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Is it the same storage, unchanged since?"""
        storage = self.storage()
        return storage is not None and tensor._version == self.version and tensor.untyped_storage() is storage

    def settle(self, *, check: bool = True) -> None:
        """Compute waits for the copy, then the device tensor is let go.

        Raises InvalidUsage (``check``) when it was changed in place while the copy may still have read it.
        """
        source = self._source
        if source is None:
            return
        self.lane.engine.settle(self._ticket, compute=self.lane.compute())
        self._source = None
        self.lane.device.annotate_free(source.untyped_storage().data_ptr(), self.nbytes)
        if check and source._version != self.version:
            raise changed_in_place(source, self.version)

    def prefetch(self) -> None:
        """Starts to load the storage, unless it is there."""
        if self._loaded is not None or self._source is not None or self._staying() is not None:
            return
        self.waiting = self.handles
        target = torch.empty(self.nbytes, dtype=torch.uint8, device=self.lane.place)  # on the compute stream
        self.lane.engine.load(self._ticket, target.data_ptr(), compute=self.lane.compute())
        self._loaded, self._arrived = target, False
        if self._kept is not None:
            target[self.cut :].copy_(self._kept)
            self.lane.device.annotate_write(target.data_ptr() + self.cut, self.nbytes - self.cut)

    def use(self) -> torch.UntypedStorage:
        """The storage on the device, for compute from now on; this was one of the handles that wait for it."""
        present = self._source if self._source is not None else self._staying()
        if present is not None:
            return present.untyped_storage()
        self.prefetch()
        assert self._loaded is not None
        if not self._arrived:
            self.lane.engine.arrive(self._ticket, compute=self.lane.compute())
            self._arrived = True
        storage = self._loaded.untyped_storage()
        self.lane.device.annotate_read(storage.data_ptr(), self.nbytes)
        self.waiting -= 1
        if self.waiting <= 0:
            self._loaded = None  # autograd holds it while it computes
        return storage

    def close(self) -> None:
        """Gives the block back; nothing asks for it any more."""
        self.settle(check=False)
        if self._loaded is not None and not self._arrived:
            self.lane.engine.arrive(self._ticket, compute=self.lane.compute())  # before its memory is let go
        self._loaded = self._kept = None
        self.lane.engine.drop(self._ticket)

    def also_stays(self, tensor: torch.Tensor) -> None:
        """A resident layer holds this tensor of the storage: while it does, nothing needs to be loaded."""
        self._twin = weakref.ref(tensor)

    def _staying(self) -> torch.Tensor | None:
        tensor = None if self._twin is None else self._twin()
        return tensor if tensor is not None and tensor._version == self.version else None


class StoredTensor:
    """Stands for a saved tensor of an offloaded storage."""

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
        """The tensor, at the time at which compute may use it."""
        self._steps.enter(self._layer)
        tensor = torch.empty(0, dtype=self._dtype, device=self._record.lane.place)
        return tensor.set_(self._record.use(), self._offset, self._size, self._stride)

    def __del__(self) -> None:
        self._record.lane.released.append(self._record)


class ResidentTensor:
    """Stands for a saved tensor that stays where it is."""

    __slots__ = ("_layer", "_steps", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor, steps: Steps, layer: int) -> None:
        self.tensor = tensor
        self._version = tensor._version
        self._steps = steps
        self._layer = layer

    def unpack(self) -> torch.Tensor:
        """The tensor. Raises InvalidUsage when it was changed in place since."""
        if self.tensor._version != self._version:
            raise changed_in_place(self.tensor, self._version)
        self._steps.enter(self._layer)
        return self.tensor


def changed_in_place(tensor: torch.Tensor, version: int) -> InvalidUsage:
    """The complaint about a saved tensor that an operation has changed."""
    return InvalidUsage(
        f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} that the backward pass needs was changed in place "
        f"after it was saved (it is at version {tensor._version}, expected {version}); use the operation that makes a "
        "new tensor, or clone() before it"
    )


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
