"""Measures the peak of the device memory that is in use."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MemoryMeter"]


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live storages that operations on the CPU have allocated. Memory that a kernel allocates and frees
    internally is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.alive = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside: torch need not guard each operation against that."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if type(results) is torch.Tensor and results.untyped_storage()._cdata in self._known:
            return results  # a view, or an operation in place, as most are
        given: set[int] | None = None  # storages of the arguments
        for storage in _storages((results,)):
            if storage._cdata in self._known:
                continue
            if given is None:
                given = {each._cdata for each in _storages((*args, *(kwargs or {}).values()))}
            if storage._cdata not in given:
                self._add(storage)
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            if self._known.pop(key, None) is not None:
                self.alive -= size

        self._known[key] = weakref.ref(storage, gone)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Storages of the dense CPU tensors among an operation's arguments or results, which nest in lists at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and value.device.type in ("cpu", "meta"):
                yield value.untyped_storage()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)


class MemoryMeter:
    """The peak of device memory inside the ``with``, in bytes above what was in use before.

    On CUDA this is the caching allocator's count. On the CPU, whose memory stands for a simulated device's, every
    storage that this thread's operations allocate is counted while it lives (each operation takes some 10 us more).

    Examples:
        >>> with MemoryMeter("cpu") as meter:
        ...     x = torch.ones(1000)
        ...     del x
        >>> meter.peak
        4000
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._mode: _LiveStorages | None = None
        self._before = 0
        self.peak = 0

    @property
    def in_use(self) -> int:
        """Bytes in use now, inside of the ``with``."""
        if self._mode is not None:
            return self._mode.alive
        return torch.cuda.memory_allocated(self._device) - self._before

    def __enter__(self) -> MemoryMeter:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._mode = _LiveStorages()
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*failure)  # type: ignore[no-untyped-call]
            self.peak, self._mode = self._mode.peak, None
        else:
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
