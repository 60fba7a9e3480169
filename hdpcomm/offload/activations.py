"""``ActivationOffload``: copies part of what a forward pass saves to host memory, and loads it for backward; and
``HostRows``: rows that are needed again and again, a share of them in host memory between the times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hdpcomm._core.offload import CopyEngine
from hdpcomm.arguments import check_number, check_type, check_whole, size_text
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.offload.layers import find_layers, parameter_storages
from hdpcomm.offload.pool import PinnedPool, PoolStats
from hdpcomm.offload.records import HostCopy, Lane, ResidentTensor, StorageRecord, StoredTensor

__all__ = ["ActivationOffload", "HostRows", "OffloadStats", "SMALLEST_OFFLOAD"]

SMALLEST_OFFLOAD = 4096
"""Bytes; steps that are planned leave smaller tensors on the device."""

_MAX_STORAGE_RATIO = 16
"""A saved tensor whose storage is more than this many times its size is not offloaded: it is a small view."""


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counters of an :class:`ActivationOffload`, in bytes and tensors.

    Attributes:
        stored_bytes, loaded_bytes: bytes copied to and from host memory.
        stores, loads: number of copies each way.
        shared: saved tensors that needed no copy because their storage was copied already.
        refused_bytes: bytes that stayed on the device because the pool was full (``when_full="keep"``).
        held: storages that are in host memory now.
        host_wait_s: seconds that a simulated device's computing thread waited for copies; 0 on CUDA.
        pool: statistics of the pool.
    """

    stored_bytes: int
    loaded_bytes: int
    stores: int
    loads: int
    shared: int
    refused_bytes: int
    held: int
    host_wait_s: float
    pool: PoolStats


class _MicroBatch:
    """The records of one forward pass, and of the backward pass that belongs to it."""

    def __init__(self, owner: ActivationOffload, ratio: float, tokens: int | None) -> None:
        self._owner = owner
        self._ratio = ratio
        self._tokens = tokens
        self._excluded: set[int] = set()
        """Storages of the parameters and buffers of the layers that have run: a parameter may have another one between
        its uses."""
        self._records: list[list[StorageRecord]] = [[] for _ in owner.layers]
        self._by_storage: dict[int, StorageRecord] = {}
        self._inside = False
        self._next = 0  # the layer that runs now, or the next one
        self._backward = -1  # the layer that backward has reached

    # --- forward ------------------------------------------------------------------------------------------------------

    def begin_layer(self, *_: Any) -> None:
        if not _in_backward():
            self._inside = True

    def exclude(self, layer: nn.Module, *_: Any) -> None:
        """Right before a layer runs: hooks of others may have brought its parameters."""
        self._excluded |= parameter_storages([layer])

    def end_layer(self, *_: Any) -> None:
        """Releases what the layer before this one saved: its copies had the time of one layer to finish."""
        if self._inside and not _in_backward():
            self._inside = False
            self._next += 1
            if 2 <= self._next <= len(self._records) + 1:
                for record in self._records[self._next - 2]:
                    record.finish_store()

    def pack(self, tensor: torch.Tensor) -> StoredTensor | ResidentTensor:
        owner, layer = self._owner, self._next
        owner.lane.sweep()
        plain = tensor.detach()  # shares storage and version; holding the tensor itself would hold the graph
        if _in_backward() or not self._offloadable(plain):
            return ResidentTensor(plain, self, layer)
        storage = plain.untyped_storage()
        record = self._by_storage.get(storage._cdata)
        if record is not None and not (record.handles and record.holds(plain)):  # without handles it was closed
            del self._by_storage[storage._cdata]
            record = None
        if layer >= len(self._records) - owner.resident_layers:
            if record is not None:
                record.add_resident(plain)
            return ResidentTensor(plain, self, layer)
        if record is None:
            record = StorageRecord.start(owner.lane, plain, storage.nbytes(), self._cut(storage.nbytes()))
            if record is None:
                return self._refused(plain, layer)
            self._by_storage[storage._cdata] = record
        else:
            owner.shared += 1
        if record not in self._records[layer]:
            self._records[layer].append(record)
        return StoredTensor(record, plain, self, layer)

    def _offloadable(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided or type(tensor) is not torch.Tensor or self._ratio == 0:
            return False
        place = self._owner.lane.place
        if tensor.device.type != place.type or (place.type == "cuda" and tensor.device != place):
            return False
        size = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if size < max(1, self._owner.min_bytes) or storage.nbytes() > _MAX_STORAGE_RATIO * size:
            return False
        return storage._cdata not in self._excluded

    def _cut(self, nbytes: int) -> int:
        """Bytes of the first ratio x tokens of a storage, rounded up: no more than planned stays on the device."""
        units = self._tokens if self._tokens and nbytes % self._tokens == 0 else max(1, nbytes // 512)
        return min(nbytes, max(1, math.ceil(self._ratio * units - 1e-9)) * -(-nbytes // units))

    def _refused(self, tensor: torch.Tensor, layer: int) -> ResidentTensor:
        size = self._cut(tensor.untyped_storage().nbytes())
        self._owner.refuse(
            size,
            f"a tensor of shape {tuple(tensor.shape)} in layer {layer} of {len(self._records)} at ratio "
            f"{self._ratio:.3f}",
        )
        return ResidentTensor(tensor, self, layer)

    def end(self, *, failed: bool) -> None:
        """Ends the forward pass: finishes all stores, so no device memory is held for a copy any more."""
        for records in self._records:
            for record in records:
                if failed:
                    with contextlib.suppress(Error):
                        record.finish_store(check=False)
                else:
                    record.finish_store()
        self._by_storage.clear()

    # --- backward -----------------------------------------------------------------------------------------------------

    def unpack(self, handle: StoredTensor | ResidentTensor) -> torch.Tensor:
        return handle.unpack()

    def enter(self, layer: int) -> None:
        """Called when backward needs a tensor of ``layer``: loads the layer before it while this one computes."""
        if layer == self._backward:
            return
        self._backward = layer
        self._owner.sweep_after_backward()
        for wanted in (layer, layer - 1):
            if 0 <= wanted < len(self._records):
                for record in reversed(self._records[wanted]):
                    if record.handles:
                        record.prefetch()


class ActivationOffload:
    """Offloads a share of the activations of a model's layers. Local; each rank makes its own.

    Wrap the forward pass; the backward pass needs no call::

        offload = ActivationOffload(PinnedPool(64 << 30), model)
        with offload.micro_batch(ratio=0.5, tokens=len(tokens)):
            loss = model(tokens)
        loss.backward()

    The first ``ratio`` x tokens of every storage that a layer saves for its backward pass are copied to the pool as
    soon as they are saved, on a separate stream; the rest is kept. One layer later the compute stream waits for the
    copies, and the device memory is free. The last ``resident_layers`` stay on the device. In the backward pass a layer
    is loaded while the one after it computes. Several micro-batches may be in flight, as in gradient accumulation and
    pipelines.

    Never offloaded: parameters and buffers, tensors under ``min_bytes``, what is saved outside of the layers, and what
    an activation checkpoint computes again (its input is offloaded). Views of one storage are copied once.

    Args:
        pool: the host memory that takes the activations.
        model: the model (its largest ``nn.ModuleList`` holds the layers), or the layers in their order. Layers may be
            compiled one by one (``torch.compile(layer)``), not the model as a whole and not by ``layer.compile()``.
        ratio: the ratio of a :meth:`micro_batch` that gives none.
        resident_layers: number of layers at the end that are not offloaded.
        min_bytes: smallest tensor that is offloaded.
        when_full: ``raise`` InvalidUsage when the pool is full, or ``keep`` the tensor on the device.
        timeout: seconds for a copy on a simulated device.

    Raises:
        InvalidUsage: no layers are found, or an argument is out of range.

    Examples:
        >>> from torch import nn
        >>> layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        >>> offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), layers, min_bytes=1)
        >>> x = torch.ones(5, 8)
        >>> with offload.micro_batch(ratio=1.0, tokens=5):
        ...     for layer in layers:
        ...         x = layer(x)
        >>> x.sum().backward()
        >>> offload.stats().stored_bytes
        320
    """

    def __init__(
        self,
        pool: PinnedPool,
        model: nn.Module | Sequence[nn.Module],
        *,
        ratio: float = 1.0,
        resident_layers: int = 2,
        min_bytes: int = 256 << 10,
        when_full: str = "raise",
        timeout: float = 60.0,
    ) -> None:
        _check_ratio(ratio)
        check_type("ActivationOffload", "pool", pool, PinnedPool)
        check_whole("ActivationOffload", "resident_layers", resident_layers, least=0)
        check_whole("ActivationOffload", "min_bytes", min_bytes, least=0)
        if when_full not in ("raise", "keep"):
            raise InvalidUsage(f"when_full is {when_full!r}; give 'raise' or 'keep'")
        self.pool = pool
        self.layers = find_layers(model)
        self.ratio = ratio
        self.resident_layers = resident_layers
        self.min_bytes = min_bytes
        self.when_full = when_full
        self.shared = 0
        self.refused_bytes = 0
        device = pool.device
        place = torch.device("cpu") if device.is_sim else torch.device("cuda", device.ordinal)
        self.lane = Lane(CopyEngine(pool.core, timeout=timeout), device, place)
        self._active = False

    @contextlib.contextmanager
    def micro_batch(self, ratio: float | None = None, *, tokens: int | None = None) -> Iterator[None]:
        """Context manager for the forward pass of one micro-batch.

        Args:
            ratio: share of the tokens that goes to host memory, 0 to 1 (``MicroBatch.offload_ratio``).
            tokens: tokens of this rank's shard; storages are cut at whole tokens, or without it at multiples of 512
                bytes.

        Raises:
            InvalidUsage: the ratio or tokens are out of range, another forward pass of this object is open, the pool is
                full, or a saved tensor was changed in place. Afterwards the next forward pass works.
        """
        ratio = self.ratio if ratio is None else ratio
        _check_ratio(ratio)
        if tokens is not None and tokens < 0:
            raise InvalidUsage(f"tokens is {tokens}; give the tokens of this rank's shard, or None")
        if self._active:
            raise InvalidUsage("a forward pass is open already; one ActivationOffload runs one forward pass at a time")
        self.lane.sweep()
        if ratio == 0:
            yield
            return
        for place, layer in enumerate(self.layers):
            if layer._compiled_call_impl is not None:
                raise InvalidUsage(
                    f"layer {place} ({type(layer).__name__}) was compiled by its compile() method, which hides where "
                    "it begins and ends; put torch.compile(layer) in its place"
                )
        batch = _MicroBatch(self, ratio, tokens)
        handles = [layer.register_forward_pre_hook(batch.begin_layer, prepend=True) for layer in self.layers]
        handles += [layer.register_forward_pre_hook(batch.exclude) for layer in self.layers]
        handles += [layer.register_forward_hook(batch.end_layer) for layer in self.layers]
        self._active = failed = True
        try:
            with saved_tensors_hooks(batch.pack, batch.unpack):
                yield
            failed = False
        finally:
            self._active = False
            for handle in handles:
                handle.remove()
            batch.end(failed=failed)

    def sweep_after_backward(self) -> None:
        """Frees pool blocks that the backward pass has released, now and at its end. Call it in a backward pass."""
        self.lane.sweep()
        if _in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self.lane.sweep)

    def refuse(self, size: int, what: str) -> None:
        """The pool has no room of ``size`` bytes for ``what``: raises InvalidUsage, or counts it (``when_full``)."""
        if self.when_full == "keep":
            self.refused_bytes += size
            return
        pool = self.pool.stats()
        raise InvalidUsage(
            f"the pinned pool is full: {size_text(size)} are needed for {what}, {size_text(pool.in_use)} of "
            f"{size_text(pool.capacity)} are in use and the largest free piece has {size_text(pool.largest_free)}; "
            'make the pool larger, lower the ratio, or give when_full="keep"'
        )

    def stats(self) -> OffloadStats:
        """Counters so far, after blocks that nothing needs any more were freed."""
        self.lane.sweep()
        found = self.lane.engine.stats()
        return OffloadStats(
            stored_bytes=found["bytes_stored"],
            loaded_bytes=found["bytes_loaded"],
            stores=found["stores"],
            loads=found["loads"],
            shared=self.shared,
            refused_bytes=self.refused_bytes,
            held=found["tickets"],
            host_wait_s=found["host_wait_s"],
            pool=self.pool.stats(),
        )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _check_ratio(ratio: float) -> None:
    check_number("offload", "ratio, the share of the tokens to offload,", ratio, least=0, most=1)


class HostRows:
    """The rows of some tensors in parts that were added one after the other. Local.

    The first ``ratio`` x rows of each part are in the pool of ``offload``, the others on the device. Their copies to
    the pool end beside what computes until the next rows of any of its :class:`HostRows` are added; those back begin
    with :meth:`prefetch`, or with :meth:`read`.
    """

    def __init__(self, offload: ActivationOffload, ratio: float) -> None:
        self._offload, self._ratio = offload, ratio
        self._parts: list[list[HostCopy | torch.Tensor]] = []
        """By part, by tensor; what is not in the pool as it is."""
        self._like: tuple[torch.Tensor, ...] = ()
        self._rows: list[int] = []
        self._coming: tuple[int, list[torch.Tensor]] | None = None
        """(parts, tensors) that are being read."""

    def __del__(self) -> None:
        for part in self._parts:
            self._offload.lane.released.extend(_copies(part))

    def __len__(self) -> int:
        """Parts."""
        return len(self._parts)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """One more part: ``[rows, ...]`` each, of one number of rows; nobody may change them in place.

        Raises: InvalidUsage: the pool is full, or a part before this one was changed while its copy read it.
        """
        lane = self._offload.lane
        lane.sweep()
        for copy in lane.storing:
            copy.finish_store()
        part: list[HostCopy | torch.Tensor] = []
        try:
            part.extend(self._kept(x.detach()) for x in tensors)
        finally:
            lane.storing = _copies(part)
            if len(part) < len(tensors):
                lane.released.extend(lane.storing)
        self._like = self._like or tuple(x.new_empty((0, *x.shape[1:])) for x in tensors)
        self._parts.append(part)
        self._rows.append(tensors[0].shape[0])

    def drop_last(self) -> None:
        """Forgets the last part."""
        self._forget_coming()
        self._rows.pop()
        for copy in _copies(self._parts.pop()):
            copy.close()

    def prefetch(self, parts: int, rows: int) -> None:
        """Starts to bring the first ``parts`` together, at the begin of tensors with ``rows`` rows."""
        if self._coming is not None:
            if self._coming[0] == parts and self._coming[1][0].shape[0] == rows:
                return
            self._forget_coming()
        found = [x.new_empty((rows, *x.shape[1:])) for x in self._like]
        end = 0
        for part, count in zip(self._parts[:parts], self._rows, strict=False):
            for each, target in zip(part, found, strict=True):
                into = target[end : end + count]
                if isinstance(each, HostCopy):
                    each.load(into.view(-1).view(torch.uint8))
                else:
                    into.copy_(each)
            end += count
        self._coming = parts, found

    def read(self, parts: int, rows: int) -> list[torch.Tensor]:
        """The tensors that :meth:`prefetch` tells of, ready for compute; rows after those of the parts are not set."""
        self.prefetch(parts, rows)
        assert self._coming is not None
        _, found = self._coming
        self._forget_coming()
        device = self._offload.lane.device
        for x in found:
            if x.numel():
                device.annotate_read(x.data_ptr(), x.nbytes)
        return found

    def _kept(self, x: torch.Tensor) -> HostCopy | torch.Tensor:
        """Holder of a tensor: a copy in the pool that has begun, or itself."""
        owner, rows = self._offload, x.shape[0]
        if x.nbytes < max(1, owner.min_bytes):
            return x.clone()
        if not x.is_contiguous() or x.storage_offset():
            x = x.clone(memory_format=torch.contiguous_format)
        cut = math.ceil(self._ratio * rows - 1e-9) * (x.nbytes // rows)
        copy = HostCopy.start(owner.lane, x, x.nbytes, cut)
        if copy is None:
            owner.refuse(cut, f"kept rows of shape {tuple(x.shape)} at ratio {self._ratio:.3f}")
            return x.clone()
        return copy

    def _forget_coming(self) -> None:
        """Memory that copies still write to must not be freed: the compute stream waits for them."""
        if self._coming is None:
            return
        for part in self._parts[: self._coming[0]]:
            for copy in _copies(part):
                copy.finish_load()
        self._coming = None


def _copies(part: list[HostCopy | torch.Tensor]) -> list[HostCopy]:
    return [each for each in part if isinstance(each, HostCopy)]
