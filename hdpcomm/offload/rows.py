"""``HostRows``: rows that are needed again and again, a share of them in host memory between the times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hdpcomm.offload.activations import ActivationOffload
from hdpcomm.offload.records import HostCopy

__all__ = ["HostRows"]


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
