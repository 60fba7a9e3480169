"""Lean norms, gates and rotations (:mod:`hdpcomm.models.lean`) inside models of transformers.

A layer is known by what it computes, not by its name: the function of its class runs on random rows, and where a lean
form gives its values and gradients, the layer gets that as a forward of its own. Parameters, names, hooks and classes
stay. Compiled code computes as the class does, since compilers fuse by themselves.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cache, partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.models.lean import ACTIVATIONS, gate_clamped, gate_halves, gated, rms_norm, rotate
from hdpcomm.models.mixers import with_globals
from hdpcomm.models.moe import holds_experts

__all__ = ["plain_norm", "put_lean", "take_lean_off"]

_ROWS = 6
_EXACT, _SINGLE = 1e-10, 2e-5
"""Relative errors of fp64, and of layers that compute in fp32 whatever they are given."""
_ROUNDING = 1.25
"""A lean form's error in bf16 by the layer's own may be that."""
_MODES = (False, True)
"""Whether a layer is in training."""
_Function = Callable[..., Any]


def put_lean(model: nn.Module) -> None:
    """Gives the layers of a model whose function is known their lean forms; again, it changes nothing. Local."""
    kinds: dict[Any, Callable[[nn.Module], _Lean] | None] = {}
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        for layer in model.modules():
            if "forward" in vars(layer) or _GATE in vars(layer):
                continue
            key = _kind_of(layer)
            if key not in kinds:
                kinds[key] = _lean_form(layer)
            form = kinds[key]
            if form is not None:
                lean = form(layer)
                setattr(layer, lean.replaces, lean)


def take_lean_off(model: nn.Module) -> Callable[[], None]:
    """Undoes :func:`put_lean`; returns what puts the same forms back. Local."""
    taken = list(_lean_layers(model))
    for layer, lean in taken:
        delattr(layer, lean.replaces)

    def put_back() -> None:
        for layer, lean in taken:
            setattr(layer, lean.replaces, lean)

    return put_back


def _lean_layers(model: nn.Module) -> Iterator[tuple[nn.Module, _Lean]]:
    for layer in model.modules():
        for name in ("forward", _GATE):
            if isinstance(vars(layer).get(name), _Lean):
                yield layer, vars(layer)[name]


def _kind_of(layer: nn.Module) -> Any:
    """Equal for layers that compute the same function of their parameters."""
    settings = [
        (name, value) for name, value in vars(layer).items() if isinstance(value, int | float | str) or callable(value)
    ]
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters(recurse=False)]
    inner = [(name, type(child) if child._modules else _kind_of(child)) for name, child in layer.named_children()]
    return type(layer), str(settings), str(shapes), str(inner)


def _lean_form(layer: nn.Module) -> Callable[[nn.Module], _Lean] | None:
    if type(layer).__module__.startswith("torch."):
        return None
    for find in (_find_norm, _find_gate, _find_experts, _find_rotation):
        form = find(layer)
        if form is not None:
            return form
    return None


@dataclass(eq=False)
class _Lean:
    """A function of a layer in place of that of its class, which does not keep the layer alive.

    Attributes:
        replaces: the name of the attribute.
    """

    of: InitVar[nn.Module]
    replaces = "forward"

    def __post_init__(self, of: nn.Module) -> None:
        self._layer = weakref.ref(of)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layer": self.layer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _layer=weakref.ref(state["_layer"]))

    @property
    def layer(self) -> Any:
        """The layer that has it."""
        return self._layer()

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the function of its class."""
        return getattr(type(self.layer), self.replaces)(self.layer, *args, **kwargs)


def _fits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the lean form takes what a layer is called with: one plain tensor (no DTensor), outside of compilers."""
    return len(args) == 1 and type(args[0]) is Tensor and not kwargs and not torch.compiler.is_compiling()


@dataclass(eq=False)
class _Norm(_Lean):
    eps: float
    offset: float
    keeps_type: bool
    """Whether the result has the type of the input, whatever the weight's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _fits(args, kwargs) or type(self.layer.weight) not in (nn.Parameter, Tensor):
            return self.own(*args, **kwargs)
        dtype = args[0].dtype if self.keeps_type else None
        return rms_norm(args[0], self.layer.weight, self.eps, offset=self.offset, dtype=dtype)


@dataclass(eq=False)
class _Gate(_Lean):
    names: Sequence[str]
    """Children for gate, up and result; or for gate with up, and result."""
    activation: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        children = self.layer._modules
        unused = (child for name, child in children.items() if name not in self.names)
        hooked = any(child._forward_hooks or child._forward_pre_hooks for child in unused)
        if not _fits(args, kwargs) or hooked:
            return self.own(*args, **kwargs)
        return _gate([children[name] for name in self.names], self.activation, args[0])


def _gate(layers: Sequence[Any], activation: str, x: Tensor) -> Any:
    first, *others, last = layers
    gate = first(x)
    return last(gated(gate, others[0](x), activation) if others else gate_halves(gate, activation))


_GATE = "_apply_gate"
"""Method of transformers' experts from the products of gate and up to the input of the last matrices."""


@dataclass(eq=False)
class _ExpertGate(_Lean):
    function: Callable[[Tensor], Tensor]
    replaces = _GATE

    def __call__(self, gate_up: Tensor) -> Any:
        return self.function(gate_up) if _fits((gate_up,), {}) else self.own(gate_up)


@dataclass(eq=False)
class _Rotary:
    """A rotation of queries and keys, with a lean form for the tables that it was compared with.

    Attributes:
        halves: tables of half of the dimensions that are turned.
        partial: tables of fewer dimensions than a head has.
    """

    own: _Function
    halves: bool
    partial: bool

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        width, table = q.shape[-1], cos.shape[-1] * (2 if self.halves else 1)
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape and k.shape[-1] == width
        fits = table == width or (self.partial and table < width and table % 2 == 0)
        if not (alike and fits) or type(q) is not Tensor or cos.requires_grad or sin.requires_grad:
            return self.own(q, k, cos, sin, unsqueeze_dim)
        return _turn(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), self.halves)


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin, halves=halves), rotate(k, cos, sin, halves=halves)


@dataclass(eq=False)
class _Attention(_Lean):
    """The forward of its class with rotations under the names of its own."""

    rotations: dict[str, _Rotary]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        return with_globals(type(self.layer).forward, self.rotations)(self.layer, *args, **kwargs)


def _find_norm(layer: nn.Module) -> Callable[[nn.Module], _Lean] | None:
    weight = layer._parameters.get("weight")
    alone = len(layer._parameters) == 1 and not layer._modules and not layer._buffers
    if weight is None or weight.dim() != 1 or not alone or not weight.is_floating_point():
        return None
    epsilons = {value for value in vars(layer).values() if isinstance(value, float) and 0 < value < 1e-2}
    rows, scale = _random(_ROWS, weight.shape[0]), 0.1 * _random(weight.shape[0], seed=1)
    for place in range(_ROWS):  # eps counts in some of them
        rows[place] *= 10.0 ** (place - 3)

    def own(training: bool, x: Tensor, scale: Tensor) -> Any:
        return type(layer).forward(_probe(layer, training, parameters={"weight": scale}), x)

    owns = [partial(own, training) for training in _MODES]
    for eps, offset in product(epsilons, (0.0, 1.0)):
        if _equal(owns, partial(rms_norm, eps=eps, offset=offset), (rows, scale), _SINGLE):
            keeps_type = own(True, rows.bfloat16(), scale.float()).dtype == torch.bfloat16
            return partial(_Norm, eps=eps, offset=offset, keeps_type=keeps_type)
    return None


def plain_norm(layer: nn.Module) -> _Norm | None:
    """The lean form of an RMSNorm without an offset of its weights. Local."""
    form = _find_norm(layer)
    made: Any = None if form is None else form(layer)
    return made if made is not None and not made.offset else None


def _find_gate(layer: nn.Module) -> Callable[[nn.Module], _Lean] | None:
    linear = [name for name, child in layer.named_children() if any(True for _ in child.parameters())]
    if len(linear) not in (2, 3) or layer._parameters or not 0 <= len(layer._modules) - len(linear) <= 1:
        return None
    if any("in_features" not in dir(layer._modules[name]) for name in linear):
        return None
    width, inner = 4, 6
    sizes = [(width, 2 * inner)] if len(linear) == 2 else [(width, inner)] * 2
    small = [_small_linear(*size, seed) for seed, size in enumerate([*sizes, (inner, width)])]
    x = _random(_ROWS, width)
    for names in permutations(linear):
        modules = layer._modules | dict(zip(names, small, strict=True))
        owns = [partial(type(layer).forward, _probe(layer, training, modules=modules)) for training in _MODES]
        for activation in ACTIVATIONS:
            if _equal(owns, partial(_gate, small, activation), (x,), _EXACT):
                return partial(_Gate, names=names, activation=activation)
    return None


def _find_experts(layer: nn.Module) -> Callable[[nn.Module], _Lean] | None:
    if not holds_experts(layer) or not hasattr(type(layer), _GATE):
        return None
    functions: list[Callable[[Tensor], Tensor]] = [partial(gate_halves, activation=name) for name in ACTIVATIONS]
    alpha, limit = getattr(layer, "alpha", None), getattr(layer, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        functions.append(partial(gate_clamped, alpha=alpha, limit=limit))
    rows = 5 * _random(_ROWS, 16)
    owns = [partial(getattr(type(layer), _GATE), _probe(layer, training)) for training in _MODES]
    for function in functions:
        if _equal(owns, function, (rows,), _EXACT):
            return partial(_ExpertGate, function=function)
    return None


def _find_rotation(layer: nn.Module) -> Callable[[nn.Module], _Lean] | None:
    own = type(layer).forward
    if not inspect.isfunction(own) or hasattr(own, "__wrapped__"):
        return None
    functions = ((name, own.__globals__.get(name)) for name in own.__code__.co_names)
    rotations = {name: _rotary(function) for name, function in functions if inspect.isfunction(function)}
    lean = {name: rotation for name, rotation in rotations.items() if rotation is not None}
    return partial(_Attention, rotations=lean) if lean else None


@cache
def _rotary(function: _Function) -> _Rotary | None:
    if list(inspect.signature(function).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return None
    q, k = _random(1, 2, _ROWS, 8), _random(1, 1, _ROWS, 8)

    def equal(halves: bool, table: int) -> bool:
        cos, sin = _random(1, _ROWS, table, seed=1), _random(1, _ROWS, table, seed=2)

        def own(q: Tensor, k: Tensor) -> Any:
            return function(q, k, cos.to(q.dtype), sin.to(q.dtype))

        def lean(q: Tensor, k: Tensor) -> Any:
            return _turn(q, k, cos.to(q.dtype)[:, None], sin.to(q.dtype)[:, None], halves)

        return _equal([own], lean, (q, k), _EXACT)

    for halves, full, part in ((False, 8, 4), (True, 4, 2)):
        if equal(halves, full):
            return _Rotary(function, halves, equal(halves, part))
    return None


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _small_linear(inputs: int, outputs: int, seed: int) -> Callable[[Tensor], Tensor]:
    """A linear layer for inputs of any type."""
    weight, bias = _random(outputs, inputs, seed=seed), _random(outputs, seed=seed)
    return lambda x: nn.functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def _probe(layer: nn.Module, training: bool, *, parameters: Any = None, modules: Any = None) -> Any:
    """The layer in that mode, with other parameters or children; the layer itself keeps its own."""
    probe = copy.copy(layer)
    probe.training = training
    if parameters is not None:
        probe.__dict__["_parameters"] = parameters
    if modules is not None:
        probe.__dict__["_modules"] = modules
    return probe


def _equal(owns: Sequence[_Function], lean: _Function, tensors: Sequence[Tensor], limit: float) -> bool:
    """Whether all give the same values and gradients, and in bf16 the lean one is as exact as the layer's own."""
    try:
        exact, rounded = (_results(lean, tensors, dtype) for dtype in (torch.float64, torch.bfloat16))
        for own in owns:
            if any(map(partial(_differ, limit), _results(own, tensors, torch.float64), exact)):
                return False
            if any(map(_less_exact, rounded, _results(own, tensors, torch.bfloat16), exact)):
                return False
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return False  # it takes other tensors
    return True


def _results(function: _Function, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs, and the gradients of the tensors."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    out = function(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    upstream = [_random(*x.shape).to(x.dtype) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def _differ(limit: float, one: Tensor, other: Tensor) -> bool:
    """Whether a row differs by more."""
    return one.shape != other.shape or not bool((_norms(one - other, -1) <= limit * _norms(other, -1)).all())


def _less_exact(one: Tensor, other: Tensor, exact: Tensor) -> bool:
    """Whether the first is of another type than the second, or has a larger error."""
    errors = [_norms(x - exact, None) for x in (one, other)]
    return one.dtype != other.dtype or not bool(errors[0] <= _ROUNDING * errors[1] + 2**-9 * _norms(exact, None))


def _norms(x: Tensor, dim: int | None) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.double(), dim=dim)
    return norms
