"""A model's layers as its passes go through them: what ZeRO-2 and ZeRO-3 move at a time."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hdpcomm.errors import InvalidUsage
from hdpcomm.offload.layers import find_layers
from hdpcomm.train.zero.buckets import Bucket, make_buckets

if TYPE_CHECKING:
    from hdpcomm.train.state.layout import Layout

__all__ = ["Unit", "Units", "unit_buckets"]


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
