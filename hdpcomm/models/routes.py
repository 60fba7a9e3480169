"""Experts of tokens that one pass has chosen and another takes again: router replay.

Reinforcement learning of mixtures of experts goes astray where training routes tokens otherwise than the engine that
sampled them, or than the pass that gave their old log-probabilities (Ma et al., arXiv 2510.11370). Routes are numbers
of experts ``[tokens, layers, top_k]``; where they are -1, a router chooses itself. A router's weights are still made of
its own scores, at the experts that it is told, so it learns as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hdpcomm.attention.pack_context import current_routes, find_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import to_device
from hdpcomm.models.moe import MixtureOfExperts, expert_blocks, holds_experts
from hdpcomm.models.mtp import is_ahead
from hdpcomm.offload.layers import find_layers

__all__ = ["KeptRoutes", "RoutedBlock", "RoutesShape", "ShardRoutes", "TakenRoutes", "number_routers"]

_TOP_K = ("num_experts_per_tok", "top_k", "moe_topk")
"""Names in configurations of how many experts a token goes through."""


@dataclass(frozen=True, slots=True)
class RoutesShape:
    """The shape of a model's routes, and their numbers.

    Attributes:
        routed: layers that have routers; others may be in the routes, too, with any numbers.
        layers: all.
        top_k: experts that a token goes through.
        experts: of a layer.
    """

    routed: int
    layers: int
    top_k: int
    experts: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A router's number among the layers with routers and among all; ``shape``: of the model's routes."""

    routed: int
    layer: int
    shape: RoutesShape


class TakenRoutes:
    """Routes of a shard's tokens that routers are told."""

    def __init__(self, numbers: Tensor, device: torch.device) -> None:
        """``[tokens, layers, top_k]`` in host memory; ``device``: the model's."""
        self._ends = tuple(map(int, numbers.aminmax())) if numbers.numel() else (0, 0)
        self._numbers = to_device(numbers, device)

    def of(self, model: nn.Module) -> TakenRoutes:
        """The routes of a tensor rank's tokens. Raises InvalidUsage where they do not fit the model."""
        shape = _shape_of(model)
        layers, top_k = self._numbers.shape[1:]
        least, most = self._ends
        if layers not in (shape.routed, shape.layers) or top_k != shape.top_k or least < -1 or most >= shape.experts:
            raise InvalidUsage(
                f"routes are of {layers} layers and {top_k} experts a token, with numbers from {least} to {most}; the "
                f"model has {shape.routed} layers with routers (of {shape.layers}), {shape.top_k} experts a token, and "
                f"experts 0 to {shape.experts - 1} (-1: as its router chooses)"
            )
        group = getattr(model, "tensor", None)
        if group is None:
            return self
        own = copy.copy(self)
        own._numbers = group.own_rows(self._numbers)
        return own

    def choose(self, place: _Place, own: Callable[[], Tensor]) -> Tensor:
        """Experts ``[tokens, top_k]`` int64 of the router's tokens."""
        every = self._numbers.shape[1] == place.shape.layers
        chosen = self._numbers[:, place.layer if every else place.routed].long()
        return chosen if self._ends[0] >= 0 else torch.where((chosen < 0).any(1, keepdim=True), own(), chosen)


class KeptRoutes:
    """Routes of the tokens of a batch that this rank has seen, others 0.

    Attributes:
        values: ``[entries, routed, top_k]``, integers that hold the number of experts.
    """

    def __init__(self, entries: int, model: nn.Module, device: torch.device) -> None:
        """Raises InvalidUsage for a model without routers that are known."""
        shape = _shape_of(model)
        dtype = next(t for t in (torch.uint8, torch.int16, torch.int32) if shape.experts <= torch.iinfo(t).max + 1)
        self.values = torch.zeros(entries, shape.routed, shape.top_k, dtype=dtype, device=device)

    def of(self, entries: Tensor, taken: TakenRoutes | None) -> ShardRoutes:
        """Keeps the routes of a shard with these entries; ``taken``: those that its routers are told."""
        return ShardRoutes(self, entries.to(self.values.device), taken)


@dataclass(frozen=True, slots=True, eq=False)
class ShardRoutes:
    """Where the routes of a shard's tokens are kept."""

    kept: KeptRoutes
    entries: Tensor
    taken: TakenRoutes | None

    def of(self, model: nn.Module) -> ShardRoutes:
        """For a tensor rank's tokens."""
        taken, group = None if self.taken is None else self.taken.of(model), getattr(model, "tensor", None)
        rows = len(self.entries) if group is None else group.rows(len(self.entries))
        first = 0 if group is None else group.comm.rank * rows
        return ShardRoutes(self.kept, self.entries[first : first + rows], taken)

    def choose(self, place: _Place, own: Callable[[], Tensor]) -> Tensor:
        """Keeps what the router chooses; rows that only fill up a block are not kept."""
        chosen = own() if self.taken is None else self.taken.choose(place, own)
        rows = chosen[: len(self.entries)].to(self.kept.values.dtype)
        self.kept.values[self.entries, place.routed] = rows
        return chosen


def _shape_of(model: Any) -> RoutesShape:
    shape: RoutesShape | None = getattr(model, "routes_shape", None)
    if shape is None:
        raise InvalidUsage(
            f"routes were given for {type(model).__name__}, which has no routers that are known (those of "
            "LlamaConfig(experts=) and of transformers 5, where all layers have as many experts); train it without"
        )
    return shape


def number_routers(model: nn.Module) -> RoutesShape | None:
    """Lets the routers of a model take routes and give them. Before it is cut. Local.

    Args:
        model: a :class:`hdpcomm.models.Llama`, or a causal LM of transformers 5.

    Returns: ``None`` where it has no router that is known.
    """
    if not (names := _blocks(model)):
        return None
    own = [layer for layer in find_layers(model) if not is_ahead(layer)]
    layers = {id(module): number for number, layer in enumerate(own) for module in layer.modules()}
    blocks = [block for name, block in model.named_modules() if name in names and id(block) in layers]
    sizes = [_sizes(block, model) for block in blocks]
    if not blocks or None in sizes or len(set(sizes)) > 1:
        return None
    top_k, experts = sizes[0]  # type: ignore[misc]
    shape = RoutesShape(len(blocks), len(own), top_k, experts)
    for number, block in enumerate(blocks):
        place = _Place(number, layers[id(block)], shape)
        if isinstance(block, MixtureOfExperts):
            block.router_place = place
        elif not isinstance(vars(block).get("forward"), RoutedBlock):
            block.forward = RoutedBlock(block.forward, place)
    return shape


def _blocks(model: nn.Module) -> set[str]:
    own = {name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    return own or expert_blocks(model)


def _sizes(block: Any, model: Any) -> tuple[int, int] | None:
    """(top_k, experts) of a layer."""
    if isinstance(block, MixtureOfExperts):
        return block.top_k, block.router.out_features
    experts = next(each.num_experts for each in block.children() if holds_experts(each))
    config = model.config.get_text_config()
    counts = [value for name in _TOP_K if isinstance(value := getattr(config, name, None), int)]
    return (counts[0], int(experts)) if counts else None


class RoutedBlock:
    """The forward of a module of transformers that holds a layer's router and experts."""

    def __init__(self, forward: Callable[..., Any], place: _Place) -> None:
        self.forward, self.place = forward, place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routes = None if torch.compiler.is_compiling() else current_routes()
        pack = find_pack()
        if routes is None or (pack is not None and pack.padded):  # one token stands for none
            return self.forward(*args, **kwargs)
        with (choice := _Choice(routes, self.place)):
            out = self.forward(*args, **kwargs)
        if not choice.made:
            raise InvalidUsage(
                "routes were given, or asked for, and a layer's router chooses its experts by something else than "
                "torch.topk over all of them, which cannot be told; train this model without routes"
            )
        return out


class _Choice(TorchFunctionMode):
    """Answers a router's top-k over the scores ``[tokens, experts]``; a choice of groups before it has other sizes."""

    def __init__(self, routes: Any, place: _Place) -> None:
        super().__init__()
        self._routes, self._place = routes, place
        self.made = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **named)
        scores, shape = args[0] if args else named["input"], self._place.shape
        k = args[1] if len(args) > 1 else named["k"]
        if k != shape.top_k or scores.dim() != 2 or scores.shape[1] != shape.experts:
            return func(*args, **named)
        self.made = True
        chosen = self._routes.choose(self._place, lambda: func(*args, **named).indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
