"""Counts the operators of a pass, the bytes that they read and write, and the bytes kept for its backward pass."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OpCounts"]

_FUSED = ("_fused_rms_norm",)
"""Operators that are one kernel on CUDA and several operators elsewhere."""
_NO_KERNELS = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "_unsafe_view", "lift_fresh", "prims::promote_types", "promote_types"),
)
"""Allocations and views besides those that tell so."""


class _CountsFused(TorchFunctionMode):
    """Counts an operator of ``_FUSED`` in place of its parts."""

    def __init__(self, counts: OpCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counts, kwargs = self._counts, kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _FUSED:
            return func(*args, **kwargs)
        counts.paused = True
        try:
            result = func(*args, **kwargs)
        finally:
            counts.paused = False
        counts.count(getattr(func, "default", func), name, args, kwargs, result)
        return result


class OpCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that this thread calls, on any device, ``meta`` included; those of a backward pass, too.

    Views and allocations launch nothing and are not counted. An operand is read once, and an expanded one as often as
    it has values of its own.

    Args:
        parameters: their memory is not counted among what is kept.

    Attributes:
        launches: by the operator's name.
        read, written: bytes, by the operator's name.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.paused = False
        self._fused = _CountsFused(self)
        self._kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._uncounted = {p.untyped_storage()._cdata for p in parameters}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    @property
    def kept_bytes(self) -> int:
        """Memory of the tensors that the graph keeps at the moment."""
        alive = (storage() for storage in self._kept.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._uncounted:
            self._kept[storage._cdata] = weakref.ref(storage)
        return x

    def __enter__(self) -> OpCounts:
        self._hooks.__enter__()
        self._fused.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._fused.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not self.paused and not func.is_view and name not in _NO_KERNELS:
            self.count(func, name, args, kwargs or {}, result)
        return result

    def count(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Adds one call of an operator."""
        self.launches[name] += 1
        storages = set()
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                if written:
                    self.written[name] += _bytes(tensor)
                    storages.add(tensor.untyped_storage()._cdata)
                if not (written and argument.is_out):
                    self.read[name] += _bytes(tensor)
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in storages:
                self.written[name] += _bytes(tensor)


def _bytes(tensor: Tensor) -> int:
    values = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        values *= size if stride else min(size, 1)
    return values * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
