"""Layers whose computation torch's tools change: each goes through torch.compile once, for packs of any lengths on any
ranks (:func:`compile_layers`), or has the products of its linear layers in FP8, by torchao (:func:`use_float8`).
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from hdpcomm.attention.pack_context import CurrentPack, current_routes, find_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.lean_layers import take_lean_off
from hdpcomm.models.mixers import PACK_ARGUMENT, mixers_of
from hdpcomm.models.moe import MixtureOfExperts, expert_blocks
from hdpcomm.models.recompute import inner_forward, set_inner_forward
from hdpcomm.models.routes import RoutedBlock
from hdpcomm.offload.layers import find_layers, is_compiled_whole

__all__ = ["RECIPES", "compile_layers", "refuse_compiled", "use_float8"]


def compile_layers(
    model: nn.Module, *, backend: str = "inductor", mode: str | None = None, fullgraph: bool = False
) -> int:
    """Compiles the layers of a model one by one; returns how many. They keep their parameters, names and hooks. Local.

    Layers of one kind share their code, which is made when they first run, and once more for passes without gradients;
    other numbers of tokens, sequences and ranks do not make it anew. Layers run as they came outside of packs, on fewer
    than two tokens of this rank, on slices of sequences (:class:`hdpcomm.attention.SlicedSequence`), whose keys outlast
    the call, with routes of experts, and under a TorchDispatchMode, as where a step's memory on the CPU is measured;
    layers of linear attention and state spaces always.

    Args:
        model: whole, or a stage of a pipeline; not cut for tensor or expert ranks. Its layers are those of its largest
            ``nn.ModuleList``. Before or after :func:`hdpcomm.models.set_recompute`.
        backend, mode, fullgraph: of ``torch.compile``.

    Raises: InvalidUsage: an unknown backend, or no layer that can be compiled.
    """
    if backend not in torch._dynamo.list_backends(None):
        known = ", ".join(torch._dynamo.list_backends())
        raise InvalidUsage(f"compile_layers() got the backend {backend!r}; torch has {known}")
    experts = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    left_out = {id(module) for module in (*mixers_of(model), *experts)}
    wanted = [layer for layer in find_layers(model) if not left_out & {id(module) for module in layer.modules()}]
    if any(is_compiled_whole(layer) for layer in wanted):
        raise InvalidUsage("layers of the model are compiled already, by torch.compile; give the model without")
    if not wanted:
        raise InvalidUsage(
            f"no layer of {type(model).__name__} can be compiled: linear attention, state spaces and the experts of "
            "LlamaConfig go by packs themselves; train it without compile"
        )
    code = _Code({"backend": backend, "mode": mode, "fullgraph": fullgraph}, {})
    for layer in wanted:
        forward = inner_forward(layer)
        if not isinstance(forward, _Compiled):
            set_inner_forward(layer, _Compiled(forward, code))
    return len(wanted)


def refuse_compiled(models: Sequence[nn.Module], what: str) -> None:
    """Raises InvalidUsage if layers of the models are compiled. Local."""
    if any(isinstance(inner_forward(module), _Compiled) for model in models for module in model.modules()):
        raise InvalidUsage(f"compiled layers do not go together with {what} yet; leave out either")


@dataclass(frozen=True, slots=True)
class _Code:
    """Functions of a model's layers with code objects of their own, by which torch counts what it has compiled: other
    models of the process do not count.

    Attributes:
        options: of ``torch.compile``.
        functions: by function of a class, and whether gradients are computed.
    """

    options: dict[str, Any]
    functions: dict[tuple[Any, bool], Any]

    def compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, compiled for the present mode of gradients."""
        if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
            function = forward.__func__
            if _makes_checkpoints(forward):
                function = function.__wrapped__  # type: ignore[attr-defined]
            key = function, torch.is_grad_enabled()
            if key not in self.functions:
                self.functions[key] = _copied(function)
            forward = types.MethodType(self.functions[key], forward.__self__)
        made: Callable[..., Any] = torch.compile(forward, **self.options)
        return made


def _makes_checkpoints(forward: Any) -> bool:
    """Whether it is transformers' function around the forward of a layer, which makes activation checkpoints of it."""
    return getattr(getattr(forward, "__code__", None), "co_name", "") == "forward_with_checkpointing"


def _copied(function: types.FunctionType) -> types.FunctionType:
    code, known = function.__code__.replace(), function.__globals__
    made = types.FunctionType(code, known, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Compiled:
    """A layer's forward, compiled for packs."""

    def __init__(self, forward: Callable[..., Any], code: _Code) -> None:
        self.forward, self._code = forward, code
        self._made: dict[bool, Callable[..., Any]] = {}
        """By whether gradients are computed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        return _Compiled(copy.deepcopy(self.forward, memo), self._code)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pack = kwargs.get(PACK_ARGUMENT) or find_pack()
        x = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        apart = pack is None or pack.padded or pack.cu_seqlens.keeps or current_routes() is not None
        if apart or x is None or x.shape[-2] < 2 or x.is_meta or _get_current_dispatch_mode_stack():
            return self.forward(*args, **kwargs)
        kwargs.pop(PACK_ARGUMENT, None)
        layer: Any = self.forward.__self__ if _makes_checkpoints(self.forward) else None  # type: ignore[attr-defined]
        with CurrentPack(pack):
            if layer is not None and layer.gradient_checkpointing and layer.training:
                return layer._gradient_checkpointing_func(partial(self._run, x.shape[-2], **kwargs), *args)
            return self._run(x.shape[-2], *args, **kwargs)

    def _run(self, rows: int, /, *args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((args, kwargs)):  # the tokens come before the widths
            if isinstance(tensor, Tensor) and rows in tensor.shape:
                torch._dynamo.maybe_mark_dynamic(tensor, tensor.shape.index(rows))
        mode = torch.is_grad_enabled()
        if mode not in self._made:
            self._made[mode] = self._code.compiled(self.forward)
        layer = getattr(self.forward, "__self__", None)
        with nullcontext() if layer is None else _plain(layer):
            return self._made[mode](*args, **kwargs)


@contextmanager
def _plain(layer: nn.Module) -> Iterator[None]:
    """The layer's modules without forwards for eager passes (lean forms, routes), for each of which torch would compile
    again."""
    put_back = take_lean_off(layer)
    routed = [(each, each.forward) for each in layer.modules() if isinstance(vars(each).get("forward"), RoutedBlock)]
    for module, _ in routed:
        del module.forward
    try:
        yield
    finally:
        for module, forward in routed:
            module.forward = forward
        put_back()


RECIPES = {"rowwise": (9, 0), "tensorwise": (8, 9)}
"""Compute capability that torch's products need, by the name of torchao's recipe."""
_WIDTHS = 16
"""Multiple of the widths of a matrix, for these products."""


def use_float8(model: nn.Module, recipe: str = "rowwise", *, exclude: Sequence[str] = ()) -> list[str]:
    """Lets the linear layers inside of a model's layers multiply in FP8; returns their names. Local.

    Embedding, head, routers, adapters of LoRA, experts that are one tensor, and matrices whose widths are no multiples
    of 16 compute as before. Parameters stay the same objects, with their types and names. Call it after
    :func:`hdpcomm.models.adapt`, before or after :func:`hdpcomm.models.compile_layers`. On CPUs products are emulated.

    Args:
        recipe: ``rowwise``: a scale for each token and each row of a matrix; ``tensorwise``: one for all tokens of a
            pack, so that results depend on the plan.
        exclude: parts of names of linear layers that stay as they are, as ``o_proj`` or ``layers.0.``

    Raises:
        InvalidUsage: another recipe, no torchao, an older device, layers that are cut for tensor ranks, a name that
            fits no layer, or no layer that is left.
    """
    if recipe not in RECIPES:
        raise InvalidUsage(f"fp8 is {recipe!r}; choose from {', '.join(RECIPES)}")
    if getattr(model, "tensor", None) is not None:
        raise InvalidUsage("the model is cut for tensor ranks, which FP8 does not know yet; leave out either")
    if isinstance(exclude, str):
        raise InvalidUsage(f"exclude is {exclude!r}; give a list of parts of names")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise InvalidUsage("FP8 needs torchao; install it with pip install torchao==0.18.0") from error
    device = next(p.device for p in model.parameters())
    if device.type == "cuda":
        check_capability(recipe, torch.cuda.get_device_capability(device))
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=device.type != "cuda")
    chosen = _linear_layers(model)
    for part in exclude:
        if not any(part in name for name in chosen):
            some = ", ".join(chosen[:3]) or "(there is none)"
            raise InvalidUsage(f"exclude has {part!r}, which is in the name of no linear layer, as {some}")
    wanted = {name for name in chosen if not any(part in name for part in exclude)}
    if not wanted:
        raise InvalidUsage(
            f"{type(model).__name__} has no linear layer for FP8 inside of its layers, with widths of multiples of "
            f"{_WIDTHS}, that is not excluded"
        )
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in wanted, config=config)
    for name in wanted:
        model.get_submodule(name).__class__ = _linear_class()
    return sorted(wanted)


def check_capability(recipe: str, found: tuple[int, int]) -> None:
    """Raises InvalidUsage for a device without the products of the recipe."""
    if found < RECIPES[recipe]:
        needed = ".".join(map(str, RECIPES[recipe]))
        raise InvalidUsage(
            f"fp8={recipe!r} needs a device of compute capability {needed} or more, and this one has "
            f"{'.'.join(map(str, found))}; train in bf16 on it"
        )


@cache
def _linear_class() -> Any:
    from torchao.float8.float8_linear import Float8Linear

    class Linear(Float8Linear):  # type: ignore[misc]
        """torchao's layer, also for no tokens, which have no scale."""

        def forward(self, input: Tensor) -> Tensor:
            if not input.numel():
                return nn.functional.linear(input, self.weight, self.bias)
            made: Tensor = super().forward(input)
            return made

    return Linear


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers that may be in FP8."""
    inside = {id(module) for layer in find_layers(model) for module in layer.modules()}
    blocks = expert_blocks(model)
    blocks |= {name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside
        and "forward" not in vars(module)
        and name.rpartition(".")[0] not in blocks  # a router
        and ".lora_" not in name
        and not (module.in_features % _WIDTHS or module.out_features % _WIDTHS)
    ]
