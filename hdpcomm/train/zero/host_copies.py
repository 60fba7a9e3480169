"""Device memory given back while others need it, and its bytes in host memory meanwhile: :class:`HostCopies`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdpcomm.comm.tensors import plain_tensors
from hdpcomm.comm.window import Window
from hdpcomm.train.zero.buckets import BucketShards, SharedShards

__all__ = ["HostCopies"]

_SMALLEST = 4096
"""Bytes of a storage below which it stays."""
_CHUNK = 64 << 20
"""Bytes of a pinned block: torch rounds each up to a power of two."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes in host memory; ``chunks`` is None where all of them are 0."""

    chunks: Sequence[Tensor] | None

    @classmethod
    def begin(cls, values: Tensor) -> _Copy:
        """Begins to copy the bytes of a tensor ``[n]``, on the current stream."""
        whole = values.view(torch.uint8)
        if not bool(whole.any()):
            return cls(None)
        chunks = []
        for part in torch.split(whole, _CHUNK):
            chunk = torch.empty(len(part), dtype=torch.uint8, pin_memory=not part.is_cpu)
            chunks.append(chunk.copy_(part, non_blocking=True))
        return cls(chunks)

    def fill(self, values: Tensor) -> None:
        """Begins to write them into a tensor, on the current stream."""
        whole = values.view(torch.uint8)
        if self.chunks is None:
            whole.zero_()
            return
        for part, chunk in zip(torch.split(whole, _CHUNK), self.chunks, strict=True):
            part.copy_(chunk, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in a window's memory, and where it is there."""

    tensor: Tensor
    window: Window
    offset: int
    shape: torch.Size

    def leave(self) -> None:
        self.tensor.data = self.tensor.new_empty(0)

    def come_back(self) -> None:
        window, count = self.window, self.shape.numel()
        values = window.tensor(window.comm.rank, self.offset, count, self.tensor.dtype)
        self.tensor.data = values.view(self.shape)


class HostCopies:
    """Tensors whose device memory is given back, and taken again with the same bytes.

    A tensor stays the object that it is, and has no memory meanwhile: storages of torch's are resized to nothing, and
    windows, which other ranks map, are given back by all ranks. What ranks share in host memory stays there, and so do
    storages of a few bytes. Bytes that are all 0 are not copied.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.away = False
        """Whether the tensors have no memory now."""
        self._device = device
        self._storages: list[tuple[torch.UntypedStorage, int, _Copy]] = []
        self._windows: list[Window] = []
        self._parts: list[tuple[BucketShards, _Copy]] = []
        self._views: list[_View] = []

    @torch.no_grad()
    def store(
        self, tensors: Iterable[Tensor], *, but: Iterable[Tensor] = (), windows: SharedShards | None = None
    ) -> None:
        """Copies what tensors view to pinned host memory, and gives the device's back. Collective, where there are
        windows.

        Args:
            but: tensors whose storages stay.
            windows: whose memory goes with the tensors that view it.
        """
        tensors = list(tensors)
        stay = _storages(but)
        self._storages = [
            (storage, storage.nbytes(), _Copy.begin(_bytes(storage)))
            for key, storage in _storages(tensors).items()
            if key not in stay
        ]
        if windows is not None:
            self._windows = [window for window in windows.windows if window.on_device]
            self._parts = [(parts, _Copy.begin(parts.own)) for parts in windows.made if parts.window in self._windows]
            self._views = [view for window in self._windows for view in _views(window, tensors)]
        self._synchronize()
        for storage, _, _ in self._storages:
            storage.resize_(0)
        for view in self._views:
            view.leave()
        for window in self._windows:
            window.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.away = True

    @torch.no_grad()
    def bring_back(self) -> None:
        """Gives the tensors memory and their bytes again. Collective, where there are windows; others read this rank's
        after the next operation of all."""
        if self._windows and self._device.type == "cuda":
            torch.cuda.empty_cache()  # windows are made by another allocator
        while self._windows:  # what does not fit is tried again by the next call, here and below
            self._windows[-1].restore()
            self._windows.pop()
        for parts, copy in self._parts:
            copy.fill(parts.own)
        for view in self._views:
            view.come_back()
        self._parts, self._views = [], []
        while self._storages:
            storage, size, copy = self._storages[-1]
            storage.resize_(size)
            copy.fill(_bytes(storage))
            self._storages.pop()
        self._synchronize()
        self.away = False

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages whose memory can be given back, each once."""
    found = (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor))
    return {each._cdata: each for each in found if each.nbytes() >= _SMALLEST and each.resizable()}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _views(window: Window, tensors: Iterable[Tensor]) -> Iterator[_View]:
    first = window.tensor(window.comm.rank, 0, window.nbytes, torch.uint8).data_ptr()
    for tensor in tensors:
        offset = tensor.data_ptr() - first
        if tensor.numel() and 0 <= offset < window.nbytes:
            yield _View(tensor, window, offset, tensor.shape)
