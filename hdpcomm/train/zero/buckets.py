"""Parameters side by side in flat memory, cut into equal parts among the ranks that hold them: :class:`Bucket`."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hdpcomm.comm import Communicator
from hdpcomm.comm.topology import nodes_of
from hdpcomm.comm.window import Window
from hdpcomm.errors import InvalidUsage
from hdpcomm.offload.layers import find_layers
from hdpcomm.train.state.layout import Holders, Layout

__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "BucketShards",
    "Sharding",
    "SharedShards",
    "Unit",
    "Units",
    "make_buckets",
    "unit_buckets",
]


BUCKET_BYTES = 32 << 20
"""Long enough for the wire, short enough that the first bucket leaves early."""

_ALIGNED = 16
"""Elements to whose multiple a rank's piece is rounded up, so that pieces begin at whole cache lines."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The ranks that have parts of what some ranks hold alike.

    Attributes:
        owners: each has a part; ``None``: every rank has all of it.
        across: the ranks that have the same part as this one; ``None``: it is the only one.
    """

    owners: Communicator | None
    across: Communicator | None

    @property
    def parts(self) -> int:
        return 1 if self.owners is None else self.owners.size

    @property
    def own(self) -> int:
        """The part of this rank."""
        return 0 if self.owners is None else self.owners.rank

    @property
    def first(self) -> bool:
        """Whether this rank is the first of those that have its part."""
        return self.across is None or self.across.rank == 0

    @property
    def pieces(self) -> int:
        """Into how many pieces a part is cut, of which each rank that has it updates one."""
        return 1 if self.owners is None or self.across is None else self.across.size

    @property
    def updates_alone(self) -> bool:
        """Whether no other rank updates what this one does, or this is the first of those."""
        return self.owners is not None or self.first

    @classmethod
    def of(cls, replicas: Communicator, zero: int) -> Sharding:
        """Sharding of ZeRO's stages (Rajbhandari et al., arXiv 1910.02054): 1 cuts among all replicas, 2 and 3 among
        those of a host, where each reads and writes the memory of the others, and the optimizer's state once more among
        the hosts. Local.

        Raises: InvalidUsage: hosts have other numbers of replicas.
        """
        if zero == 0:
            return cls(None, replicas)
        if zero == 1:
            return cls(replicas, None)
        nodes = nodes_of(replicas)
        hosts: dict[int, list[int]] = {}
        for position, rank in enumerate(replicas.ranks):
            hosts.setdefault(nodes[rank], []).append(position)
        sizes = sorted({len(positions) for positions in hosts.values()})
        if len(sizes) > 1:
            raise InvalidUsage(
                f"zero={zero} cuts weights and gradients among the replicas of a host, and of the {replicas.size} "
                f"ranks {list(replicas.ranks)} hosts have {' or '.join(map(str, sizes))}; place as many on each host "
                "(Mesh(placement=)), or give zero=1"
            )
        own = hosts[nodes[replicas.global_rank]]
        place = own.index(replicas.rank)
        across = replicas.subset([positions[place] for positions in hosts.values()]) if len(hosts) > 1 else None
        return cls(replicas.subset(own), across)


@dataclass(slots=True)
class Bucket:
    """Parameters with the same holders, one after the other, cut into equal parts.

    Attributes:
        holders: the ranks that hold the same parameters.
        shared: (first element, element after the last) from ``start`` on that ``holders.alike`` hold, too.
        sharding: the ranks that have parts of them, of the optimizer's state and of the sums of gradients.
        start: place of its first element in the flat buffer of all buckets.
        offsets: of each parameter, from ``start``.
        part: elements of one part; the last part ends with padding.
        piece: elements of a part that one rank updates: all, unless hosts share the optimizer's state.
    """

    holders: Holders
    sharding: Sharding
    start: int = 0
    part: int = 0
    piece: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    elements: int = 0

    @property
    def parts(self) -> int:
        """Into how many parts it is cut."""
        return self.sharding.parts

    @property
    def length(self) -> int:
        """Elements, with the padding."""
        return self.part * self.parts

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's part of ``[length]``: a view."""
        return whole[self.sharding.own * self.part : (self.sharding.own + 1) * self.part]

    def own_piece(self, part: Tensor) -> Tensor:
        """The piece of this rank's part ``[part]`` that it updates: a view."""
        return part[self._piece * self.piece : (self._piece + 1) * self.piece]

    @property
    def _piece(self) -> int:
        across = self.sharding.across
        return across.rank if across is not None and self.sharding.pieces > 1 else 0

    def spans(self, part: int) -> Iterator[tuple[nn.Parameter, int, int, slice]]:
        """For each parameter the first and last (exclusive) of its elements in a part, equal if there are none, and
        where they are in the part."""
        return self._spans(part * self.part, self.part)

    def piece_spans(self) -> Iterator[tuple[nn.Parameter, int, int, slice]]:
        """:meth:`spans` of the piece that this rank updates."""
        return self._spans(self.sharding.own * self.part + self._piece * self.piece, self.piece)

    def _spans(self, first: int, count: int) -> Iterator[tuple[nn.Parameter, int, int, slice]]:
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            begin, size = first - offset, parameter.numel()
            start, stop = min(max(begin, 0), size), min(max(begin + count, 0), size)
            yield parameter, start, stop, slice(start - begin, stop - begin)

    def split_shared(self, piece: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of what this rank updates, ``[piece]``: those that ``holders.alike`` hold, too, and the others."""
        if not self.holders.mixed:
            return [piece], []
        first = self.sharding.own * self.part + self._piece * self.piece
        edges = [0, *(min(max(edge - first, 0), self.piece) for span in self.shared for edge in span), self.piece]
        views = [piece[start:stop] for start, stop in itertools.pairwise(edges)]
        return [each for each in views[1::2] if each.numel()], [each for each in views[::2] if each.numel()]

    def add(self, parameter: nn.Parameter, shared: Iterable[tuple[int, int]]) -> None:
        self.parameters.append(parameter)
        self.shared += ((self.elements + start, self.elements + stop) for start, stop in shared)
        self.offsets.append(self.elements)
        self.elements += parameter.numel()


def make_buckets(
    parameters: Iterable[nn.Parameter],
    layout: Layout,
    *,
    zero: int = 0,
    elements: float = float("inf"),
    group_of: Callable[[nn.Parameter], Hashable] = lambda _: None,
) -> list[Bucket]:
    """Buckets of about ``elements`` elements, in the order in which a backward pass ends them: from the last parameter.

    The same on all ranks that hold the same parameters. Local.

    Args:
        group_of: parameters with other keys are never in one bucket.
    """
    shardings: dict[int, Sharding] = {}
    open_buckets: dict[tuple[int, Hashable], Bucket] = {}
    buckets: list[Bucket] = []
    for parameter in reversed(list(parameters)):
        placement = layout.of(parameter)
        holders = placement.holders
        key = id(holders), group_of(parameter)
        if key not in open_buckets:
            if id(holders) not in shardings:
                shardings[id(holders)] = Sharding.of(holders.replicas, zero)
            open_buckets[key] = Bucket(holders, shardings[id(holders)])
        bucket = open_buckets[key]
        bucket.add(parameter, placement.shared)
        if bucket.elements >= elements:
            buckets.append(open_buckets.pop(key))
    buckets += open_buckets.values()
    start = 0
    for bucket in buckets:
        bucket.start = start
        pieces = bucket.sharding.pieces
        bucket.piece = -(-bucket.elements // (bucket.parts * pieces * _ALIGNED)) * _ALIGNED
        bucket.part = pieces * bucket.piece
        start += bucket.length
    return buckets


_ALIGNED_BYTES = 64
"""Bytes to whose multiple parts begin: a cache line."""


@dataclass(slots=True)
class BucketShards:
    """The shards of one bucket, in the memory of their owners.

    Attributes:
        count: elements of a part.
        word: of each owner's window, which tells how many have added to its part.
    """

    owners: Communicator
    count: int
    dtype: torch.dtype
    offset: int
    word: int
    window: Window | None = None

    def part(self, owner: int) -> Tensor:
        """``[count]``, a view of the owner's memory."""
        assert self.window is not None
        return self.window.tensor(owner, self.offset, self.count, self.dtype)

    @property
    def own(self) -> Tensor:
        return self.part(self.owners.rank)


class SharedShards:
    """Collects what is to lie in shared memory, and makes one window for each set of owners."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, ...], list[BucketShards]] = {}
        self.windows: list[Window] = []
        self.made: list[BucketShards] = []
        """All that are in the windows."""

    def reserve(self, bucket: Bucket, dtype: torch.dtype) -> BucketShards:
        """The shards of a bucket, whose memory :meth:`make` brings. Local; in one order on all owners."""
        owners = bucket.sharding.owners
        assert owners is not None
        wanted = self._wanted.setdefault(owners.ranks, [])
        end = wanted[-1].offset + wanted[-1].count * wanted[-1].dtype.itemsize if wanted else 0
        made = BucketShards(owners, bucket.part, dtype, -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES, len(wanted))
        wanted.append(made)
        return made

    def make(self) -> None:
        """Collective over all owners, which have reserved alike."""
        for wanted in self._wanted.values():
            last = wanted[-1]
            window = Window(last.owners, words=len(wanted), nbytes=last.offset + last.count * last.dtype.itemsize)
            for parts in wanted:
                parts.window = window
            self.windows.append(window)
            self.made += wanted
        self._wanted.clear()


@dataclass(eq=False, slots=True)
class Unit:
    """A layer, or what of a model is in none: the root.

    Attributes:
        chunk: of a pipeline's stages on this rank, the one that it is of; 0 without pipelines.
        layer: ``None``: the root.
        parameters: each is of one unit; those that several layers share are the root's.
        before, after: the layers beside it in the forward pass; ``None``: there is none.
    """

    chunk: int
    layer: nn.Module | None
    parameters: list[nn.Parameter] = field(default_factory=list)
    before: Unit | None = None
    after: Unit | None = None


class Units:
    """The units of a model, and hooks that tell when passes come to them (:meth:`listen`).

    Args:
        chunks: the model, or the stages of a pipeline on this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.roots: list[Unit] = []
        self.layers: list[Unit] = []
        self.of: dict[int, Unit] = {}
        """By the id of each parameter."""
        self._listeners: list[weakref.WeakMethod[Callable[[Unit, bool], None]]] = []
        self.is_open = False
        self.chunks = chunks
        for number, chunk in enumerate(chunks):
            self._add(number, chunk)

    def _add(self, number: int, chunk: nn.Module) -> None:
        try:
            found = find_layers(chunk)
        except InvalidUsage:  # it has no layers
            found = ()
        layers = [layer for layer in found if any(True for _ in layer.parameters())]  # not those of other stages
        root, units = Unit(number, None), [Unit(number, layer) for layer in layers]
        users = Counter(id(p) for layer in layers for p in layer.parameters())
        inside = {id(p): unit for unit, layer in zip(units, layers, strict=True) for p in layer.parameters()}
        elsewhere = {id(p) for p in _outside(chunk, layers)}
        for parameter in chunk.parameters():
            key = id(parameter)
            if key not in self.of:
                unit = inside[key] if users[key] == 1 and key not in elsewhere else root
                unit.parameters.append(parameter)
                self.of[key] = unit
        for one, other in itertools.pairwise(units):
            one.after, other.before = other, one
        self.roots.append(root)
        self.layers += units

    def listen(self, listener: Callable[[Unit, bool], None]) -> None:
        """``listener(unit, backward)`` is called when a forward or a backward pass comes to a layer: a method of an
        object that uses these units, which does not live longer for it."""
        if not self._listeners:
            for unit in self.layers:
                self._watch(unit)
        self._listeners.append(weakref.WeakMethod(listener))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hooks tell of passes inside of this block only: a model may have another trainer by then."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def _watch(self, unit: Unit) -> None:
        own = weakref.ref(self)

        def tell(backward: bool) -> None:
            if (units := own()) is not None and units.is_open:
                for listener in units._listeners:
                    if (method := listener()) is not None:
                        method(unit, backward)

        def begins(*_: Any) -> None:
            tell(torch._C._current_graph_task_id() != -1)  # in a backward pass: it is computed again

        def ends(_: nn.Module, __: Any, outputs: Any) -> None:
            if torch.is_grad_enabled() and (units := own()) is not None and units.is_open:
                for tensor in tree_leaves(outputs):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(lambda _: tell(True))  # type: ignore[no-untyped-call]

        assert unit.layer is not None
        unit.layer.register_forward_pre_hook(begins, prepend=True)  # before those that look at the weights
        unit.layer.register_forward_hook(ends)


def unit_buckets(units: Units, parameters: Iterable[nn.Parameter], layout: Layout, zero: int) -> list[Bucket]:
    """The buckets of ZeRO-2 and 3: the parameters of a unit that have the same holders and type. Local."""
    return make_buckets(parameters, layout, zero=zero, group_of=lambda p: (id(units.of[id(p)]), p.dtype))


def _outside(chunk: nn.Module, layers: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that a module outside of the layers has, too."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in chunk.modules():
        if id(module) not in inside:
            yield from module._parameters.values()  # type: ignore[misc]
