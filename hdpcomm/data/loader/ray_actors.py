"""The actors of a loader on a Ray cluster: servers that make tokens, and one scheduler that cuts them into batches.

All that they answer follows from the arguments of the call, so that Ray may start a dead one again and repeat the call.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdpcomm.data.loader.block import Payload, SequencePart, TokenBlock, make_block
from hdpcomm.data.loader.order import BlockPlace, LoadedBatch, StreamSampler
from hdpcomm.data.loader.ray_calls import get, import_ray
from hdpcomm.data.loader.stream import DocumentStream

__all__ = ["LoaderScheduler", "LoaderServer", "PackedParts", "PlacedPart", "pack_parts", "unpack_parts"]

_CACHE_BYTES = 512 << 20
_BATCHES = 64


class PlacedPart(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sequence of a block."""

    block: int
    number: int
    start: int
    stop: int


class PackedParts(NamedTuple):
    """Parts of sequences as few arrays.

    Attributes:
        sizes: tokens of each part, next ones included.
        masked: which parts have masks, which stand in ``counted``.
        payloads: by part, of those that have any.
    """

    tokens: npt.NDArray[Any]
    sizes: npt.NDArray[np.int64]
    masked: npt.NDArray[np.bool_]
    counted: npt.NDArray[np.bool_]
    payloads: Mapping[int, tuple[Payload, ...]]


def pack_parts(parts: Sequence[SequencePart]) -> PackedParts:
    """The inverse of :func:`unpack_parts`."""
    masks = [part.counted for part in parts if part.counted is not None]
    return PackedParts(
        tokens=np.concatenate([part.tokens for part in parts]) if parts else np.zeros(0, np.uint8),
        sizes=np.array([len(part.tokens) for part in parts], dtype=np.int64),
        masked=np.array([part.counted is not None for part in parts], dtype=np.bool_),
        counted=np.concatenate(masks) if masks else np.zeros(0, np.bool_),
        payloads={place: part.payloads for place, part in enumerate(parts) if part.payloads},
    )


def unpack_parts(packed: PackedParts) -> list[SequencePart]:
    """Views of the arrays."""
    found, mask = [], 0
    ends = np.cumsum(packed.sizes).tolist()
    for place, (end, size) in enumerate(zip(ends, packed.sizes.tolist(), strict=True)):
        counted = None
        if packed.masked[place]:
            counted = packed.counted[mask : mask + size]
            mask += size
        found.append(SequencePart(packed.tokens[end - size : end], counted, packed.payloads.get(place, ())))
    return found


class LoaderServer:
    """Makes tokens of blocks, one after the other in a thread, and keeps the latest ones. Its calls may overlap."""

    def __init__(self, stream: DocumentStream) -> None:
        self._stream = stream
        self._instance = secrets.token_hex(8)
        self._guard = threading.Lock()
        self._blocks: OrderedDict[int, Future[TokenBlock]] = OrderedDict()
        self._maker = ThreadPoolExecutor(1)

    def instance(self) -> str:
        """Another one after each start."""
        return self._instance

    def want(self, blocks: Sequence[int]) -> None:
        """Begins to make blocks; does not wait."""
        for block in blocks:
            self._begin(block)

    def lengths(self, block: int) -> tuple[str, npt.NDArray[np.int64]]:
        """(instance, tokens of each sequence). Raises what :func:`make_block` raises."""
        return self._instance, self._made(block).lengths

    def read(self, parts: Sequence[PlacedPart]) -> tuple[str, PackedParts]:
        """(instance, these parts). Raises what :func:`make_block` raises."""
        blocks = {block: self._made(block) for block in {part.block for part in parts}}
        found = [blocks[each.block].part(each.number, each.start, each.stop) for each in parts]
        return self._instance, pack_parts(found)

    def _made(self, block: int) -> TokenBlock:
        made = self._begin(block).result()
        with self._guard:
            done = {key: each for key, each in self._blocks.items() if each.done() and each.exception() is None}
            size = sum(each.result().nbytes for each in done.values())
            for key, each in done.items():
                if size <= _CACHE_BYTES or key == block:
                    break
                size -= each.result().nbytes
                del self._blocks[key]
        return made

    def _begin(self, block: int) -> Future[TokenBlock]:
        with self._guard:
            if block not in self._blocks:
                self._blocks[block] = self._maker.submit(make_block, self._stream, block)
            self._blocks.move_to_end(block)
            return self._blocks[block]


class LoaderScheduler:
    """Gathers lengths from the servers and cuts the stream into batches, for all ranks.

    Args:
        servers: names of actors of :class:`LoaderServer`.
        options: keyword arguments of :class:`StreamSampler`, but for the state.
        deadline_s: longest wait for a server.
    """

    def __init__(self, blocks: int, servers: Sequence[str], options: Mapping[str, Any], deadline_s: float) -> None:
        ray = import_ray()
        self._count, self._options = blocks, options
        self._servers = [ray.get_actor(name) for name in servers]
        self._deadline_s = deadline_s
        self._instances: set[str] = set()
        self._sampler: StreamSampler | None = None
        self._next = -1
        self._batches: OrderedDict[int, LoadedBatch] = OrderedDict()
        self._left = 0

    def batch(self, step: int, state: Mapping[str, Any]) -> tuple[LoadedBatch, list[str]]:
        """(the batch of a step, instances of servers that were seen).

        Args:
            state: of the sampler before this step, from which a scheduler that was started again goes on.
        """
        if step not in self._batches:
            if self._sampler is None or self._next != step:
                self._sampler = StreamSampler(self._count, self._lengths, self._want, state=state, **self._options)
            self._next = -1  # until it is made: an error leaves the sampler between two steps
            self._batches[step] = self._sampler.next()
            self._next = step + 1
            while len(self._batches) > _BATCHES:
                self._batches.popitem(last=False)
        return self._batches[step], sorted(self._instances)

    def leave(self) -> int:
        """A client needs nothing any more; how many have said so."""
        self._left += 1
        return self._left

    def left(self) -> int:
        """How many clients have left."""
        return self._left

    def _lengths(self, place: BlockPlace) -> npt.NDArray[np.int64]:
        server = self._servers[place.position % len(self._servers)]
        instance, lengths = get(server.lengths.remote(place.block), self._deadline_s, what="a server of the loader")
        self._instances.add(instance)
        return np.asarray(lengths)

    def _want(self, places: Sequence[BlockPlace]) -> None:
        for number, server in enumerate(self._servers):
            if own := [place.block for place in places if place.position % len(self._servers) == number]:
                server.want.remote(own)
