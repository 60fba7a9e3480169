"""Buffers that a model changes in its forward passes."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage

__all__ = ["ChangedBuffers"]


class ChangedBuffers:
    """Which of a model's buffers its passes have changed since :meth:`begin`: ranks run other passes and would drift
    apart. Those that are no part of its state (``persistent=False``), as tables of angles, do not count.

    Args:
        model: whose buffers are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, tuple[Tensor, int]] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins. Local."""
        self._before = {name: (tensor, tensor._version) for name, tensor in _buffers(self._model)}

    @property
    def changed(self) -> list[str]:
        """Names of the buffers that have other values, or another tensor in their place, than at the beginning."""
        found = []
        for name, tensor in _buffers(self._model):
            before, version = self._before.get(name, (None, 0))
            if before is not tensor or version != tensor._version:
                found.append(name)
        return found

    def refuse(self) -> NoReturn:
        """Raises InvalidUsage."""
        names = self.changed
        what = f"the buffer {names[0]}" if names else "a buffer on another rank"
        raise InvalidUsage(
            f"a forward pass has changed {what}: each rank runs passes of its own, so ranks would go on with other "
            "values; update it between steps, from numbers that all ranks have alike (after comm.all_reduce, say), "
            "or register it with persistent=False if it is a cache"
        )


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    found = []
    for prefix, module in model.named_modules():
        for name, tensor in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found.append((name, tensor))
    return found
