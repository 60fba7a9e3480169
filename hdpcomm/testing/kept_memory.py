"""Keeps the memory of all tensors until a check is over, so that no address stands for two tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["KeptMemory"]


class KeptMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the storage of every tensor that an operation of this thread returns, until the object itself is gone.

    The storages are kept, not the tensors: a tensor that autograd has given a graph would keep all of that graph.
    Operations of a backward pass count, too. Not kept: what threads that the program starts itself make, what
    ``resize_`` frees, and memory that torch did not allocate.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):  # type: ignore[attr-defined]
            return NotImplemented  # a subclass, as DTensor: the tensors that it is made of come here by themselves
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
        return result


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in result:
            yield from _tensors(each)
