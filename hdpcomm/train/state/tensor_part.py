"""A rank's part of a tensor, in the form in which torch.distributed.checkpoint writes and reads it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["TensorPart", "box_slices", "boxes"]


class TensorPart:
    """Some boxes of a tensor of which other ranks have the rest; a file with the boxes of all ranks holds the whole
    tensor, of which any other boxes can be read.

    Args:
        shape: of the whole tensor.
        parts: where each box begins in it, and its elements, which reading writes into. There may be none.
        written: False: another rank has the same elements and writes them; this one only reads them. One for each box,
            or one for all.

    Attributes:
        boxes: where each begins, and its elements.
        written: those that this rank writes.
    """

    def __init__(
        self,
        shape: Sequence[int],
        parts: Iterable[tuple[Sequence[int], Tensor]],
        *,
        written: bool | Sequence[bool] = True,
    ) -> None:
        self._shape = torch.Size(shape)
        self.boxes = [(torch.Size(offsets), tensor) for offsets, tensor in parts]
        flags = [written] * len(self.boxes) if isinstance(written, bool) else written
        self.written = list(itertools.compress(self.boxes, flags))

    @classmethod
    def of_range(cls, shape: Sequence[int], start: int, values: Tensor) -> TensorPart:
        """The elements ``start`` to ``start + n`` in row-major order, as a few boxes.

        Args:
            values: ``[n]`` contiguous; may be empty.
        """
        parts, place = [], 0
        for offsets, sizes in boxes(shape, start, start + values.numel()):
            count = math.prod(sizes)
            parts.append((offsets, values[place : place + count].view(sizes)))
            place += count
        return cls(shape, parts)

    def size(self) -> torch.Size:
        """The shape of the whole tensor, not of this part."""
        return self._shape

    def copy(self) -> TensorPart:
        """A copy in host memory of the boxes that this rank writes."""
        return TensorPart(self._shape, ((at, tensor.detach().to("cpu", copy=True)) for at, tensor in self.written))

    def box(self, offsets: Sequence[int] | None) -> Tensor:
        """The box that begins at ``offsets``."""
        return next(tensor for place, tensor in self.boxes if place == offsets)

    # What torch.distributed.checkpoint asks of an object that is sharded. It takes a second to import, so only it does.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, place),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(place, tensor.size()),
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=self._shape,
                ),
            )
            for place, tensor in self.written
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(place, tensor.size()) for place, tensor in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.box(index.offset)


def box_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The place of a box in a tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that the elements ``start`` to ``stop`` of a tensor are, in row-major order: the
    end of a row, whole rows, the beginning of one."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    found = []
    if head:
        found += _in_row(shape, first, head, inner)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + (_in_row(shape, last, 0, tail) if tail else [])


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start, stop)]
