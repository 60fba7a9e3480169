"""How tensor ranks share linear and state-space layers: by heads, and by the groups that heads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.tensor_group import Block

__all__ = ["Cut", "check_heads", "mixer_cut"]

Blocks = tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How some ranks share a module, by names inside of it.

    Attributes:
        columns: linear layers, by what their outputs are.
        row: the linear layer that gives the module's result, whose inputs are cut.
        tensors: other parameters, and buffers, by a dimension and what they are along it.
        sizes: numbers that the module's forward goes by, as they are on a rank; those of ``config`` are the module's
            alone.
        norms: RMSNorms over channels that several ranks share: how many.
    """

    columns: Mapping[str, Blocks]
    row: str
    tensors: Mapping[str, tuple[int, Blocks]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    norms: Mapping[str, int] = field(default_factory=dict)


def check_heads(place: str, size: int, heads: tuple[int, str], shared: tuple[int, str] | None = None) -> None:
    """Raises InvalidUsage unless ``size`` ranks can share heads, and what several of them have in common, which are
    given with their names. Local."""
    number, name = shared or (size, "")
    if heads[0] % size or (number % size and size % number):
        both = f" and {number} {name}" if name else ""
        rule = f", and that of {name} a multiple or a divisor of it" if name else ""
        raise InvalidUsage(
            f"{place} has {heads[0]} {heads[1]}{both}, which {size} tensor ranks cannot share evenly; the number of "
            f"{heads[1]} must be a multiple of {size}{rule}"
        )


def mixer_cut(place: str, layer: nn.Module, size: int) -> Cut:
    """How ``size`` ranks share one of :func:`hdpcomm.models.mixers.mixers_of`. Local.

    Raises: InvalidUsage: heads or groups that they cannot share evenly, or a layer that is not known.
    """
    for attribute, make in _KINDS.items():
        if hasattr(layer, attribute):
            cut, there = make(place, layer, size), dict(layer.named_modules())
            own = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
            return replace(
                cut,
                columns={name: blocks for name, blocks in cut.columns.items() if name in there},
                row=next(name for name in ("out_proj", "o_proj") if name in there),
                tensors={name: each for name, each in cut.tensors.items() if name in own},
                norms={name: ranks for name, ranks in cut.norms.items() if f"{name}.weight" in own and ranks > 1},
            )
    raise InvalidUsage(
        f"{place} is a {type(layer).__name__}, a linear layer of which tensor parallelism does not know what its "
        "parameters hold; train it without"
    )


def _gated_delta(place: str, layer: Any, size: int) -> Cut:
    """Rows of queries and keys are shared by the values' heads that use them."""
    keys, values = int(layer.num_k_heads), int(layer.num_v_heads)
    check_heads(place, size, (values, "value heads"), (keys, "key heads"))
    each = values // keys
    key, value = Block(keys, layer.head_k_dim), Block(values, 0, (layer.head_v_dim,))
    number, mixed = Block(values, 0, (1,)), (key, key, value)
    columns: dict[str, Blocks] = {
        "in_proj_qkvz": (Block(keys, 2 * layer.head_k_dim, (each * layer.head_v_dim,) * 2),),
        "in_proj_ba": (Block(keys, 0, (each, each)),),
        "in_proj_qkv": mixed,
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (value,)),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj"), (number,)),
        **dict.fromkeys(("q_proj", "k_proj"), (key,)),
    }
    keys, values = max(1, keys // size), values // size
    sizes = {"num_k_heads": keys, "key_dim": keys * layer.head_k_dim}
    sizes |= {"num_v_heads": values, "value_dim": values * layer.head_v_dim}
    sizes["conv_dim"] = 2 * sizes["key_dim"] + sizes["value_dim"]
    tensors = {"conv1d.weight": (0, mixed), "A_log": (0, (number,)), "dt_bias": (0, (number,))}
    return Cut(columns, "", tensors, sizes)


def _kimi_delta(place: str, layer: Any, size: int) -> Cut:
    heads, width, gate = int(layer.num_heads), int(layer.head_dim), layer.forget_gate
    check_heads(place, size, (heads, "heads"))
    vector, number = Block(heads, 0, (width,)), Block(heads, 0, (1,))
    names = ("q_proj", "k_proj", "v_proj", "g_b_proj", "g_proj", "forget_gate.f_b_proj", "forget_gate.f_proj")
    columns = {**dict.fromkeys(names, (vector,)), "b_proj": (number,)}
    tensors = {
        "conv1d.weight": (0, (vector,) * 3),
        "forget_gate.dt_bias": (0, (vector,)),
        "forget_gate.A_log": (tuple(gate.A_log.shape).index(heads), (number,)),
    }
    sizes = {"num_heads": heads // size, "qkv_dim": heads // size * width}
    inner = {f"forget_gate.{name}": value for name, value in sizes.items()}
    return Cut(columns, "", tensors, {**sizes, **inner, "conv_dim": 3 * sizes["qkv_dim"]})


def _mamba(place: str, layer: Any, size: int) -> Cut:
    """In its projection are [gate, x, B, C, steps]; heads share B and C in groups."""
    heads, groups, states = int(layer.num_heads), int(layer.n_groups), int(layer.ssm_state_size)
    check_heads(place, size, (heads, "heads"), (groups, "groups"))
    x, b, number = Block(heads, 0, (layer.head_dim,)), Block(groups, states), Block(heads, 0, (1,))
    projected, mixed = (x, x, b, b, number), (x, b, b)
    tensors: dict[str, tuple[int, Blocks]] = {
        "conv1d.weight": (0, mixed),
        "conv1d.bias": (0, mixed),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (0, (number,))),
        "norm.weight": (0, (x,)),
        "mup_vector": (2, projected),
    }
    own, inner = max(1, groups // size), heads // size * int(layer.head_dim)
    sizes = {"num_heads": heads // size, "n_groups": own, "intermediate_size": inner}
    sizes |= {"conv_dim": inner + 2 * own * states, "groups_time_state_size": own * states, "norm.n_groups": own}
    return Cut({"in_proj": projected}, "", tensors, sizes, {"norm": size // groups})


_KINDS: Mapping[str, Callable[[str, Any, int], Cut]] = {
    "num_k_heads": _gated_delta,
    "forget_gate": _kimi_delta,
    "ssm_state_size": _mamba,
}
"""By an attribute that only they have: the gated delta rule, KDA and Mamba-2."""
