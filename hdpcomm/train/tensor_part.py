"""A rank's part of a tensor, in the form in which torch.distributed.checkpoint writes and reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["TensorPart", "boxes"]


class TensorPart:
    """The elements from ``start`` on, in row-major order, of a tensor of which other ranks have the rest.

    torch's checkpoints know parts as boxes, so it is handed over as a few of these; a file with the boxes of all ranks
    holds the whole tensor, of which any other parts can be read.

    Args:
        shape: of the whole tensor.
        values: ``[n]`` contiguous, the elements ``start`` to ``start + n``; reading writes into it. May be empty.
    """

    def __init__(self, shape: Sequence[int], start: int, values: Tensor) -> None:
        self._shape = torch.Size(shape)
        self._boxes: list[tuple[torch.Size, Tensor]] = []
        self.start = start
        self.values = values
        place = 0
        for offsets, sizes in boxes(shape, start, start + values.numel()):
            count = math.prod(sizes)
            self._boxes.append((torch.Size(offsets), values[place : place + count].view(sizes)))
            place += count

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self._shape

    def copy(self) -> TensorPart:
        """The same part with memory of its own, in host memory."""
        return TensorPart(self._shape, self.start, self.values.detach().to("cpu", copy=True))

    def box(self, offsets: Sequence[int] | None) -> Tensor:
        """The box that begins at ``offsets``."""
        return next(tensor for place, tensor in self._boxes if place == offsets)

    # What torch.distributed.checkpoint asks of an object that is sharded. It takes a second to import, so only it does.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self._shape),
            )
            for box in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(place, tensor.size()) for place, tensor in self._boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.box(index.offset)


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
