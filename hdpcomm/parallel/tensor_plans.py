"""Tensor parallelism with sequence parallel regions (:func:`tensor_parallel`): which layers of a model it cuts, and how
(:func:`tensor_plan`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from hdpcomm.attention import current_pack
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import AdaptedCausalLM, Llama, LlamaConfig
from hdpcomm.models.huggingface import decoder_of
from hdpcomm.models.lean_layers import plain_norm
from hdpcomm.models.lora import AdaptedLinear, adapted_linear
from hdpcomm.models.mixers import PACK_ARGUMENT, mixers_of
from hdpcomm.models.moe import expert_blocks, holds_experts
from hdpcomm.models.tensor_group import (
    Block,
    RowLinear,
    SplitNorm,
    TensorGroup,
    TensorShard,
    VocabularyShard,
    rows_of,
)
from hdpcomm.parallel.stages import AbsentPart, Stage, same_logits

__all__ = ["Region", "check_sizes", "tensor_parallel", "tensor_plan"]

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


_COLUMNS = (
    *("q", "k", "v", "q_proj", "k_proj", "v_proj", "g_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value"),
    *("gate", "up", "gate_proj", "up_proj", "gate_up_proj", "input_linear", "fc1", "c_fc", "dense_h_to_4h"),
)
_ROWS = ("out", "o_proj", "dense", "down_proj", "output_linear", "fc2", "c_proj", "dense_4h_to_h")
"""Names of linear layers of attention and MLPs, here and in transformers: those whose outputs are cut, and those that
give the result, whose inputs are."""
_HALVES = ("gate_up_proj", "input_linear")
"""Projections to the gate and to what it multiplies, one half each."""
_WHOLE = ("f_a_proj", "g_a_proj", "eh_proj")
"""Projections of KDA to what all heads use, and those of multi-token prediction, between layers."""


@dataclass(frozen=True, slots=True)
class Region:
    """A module that looks at all tokens, with some of its heads or columns on each rank. Its other parameters are whole
    on each rank, whose gradients come from its heads or columns alone: their sum over the ranks is the gradient, as the
    module's result is the sum of what the ranks give.

    Attributes:
        columns: linear layers whose outputs are cut, in the order of ``cut.columns``.
        row: the linear layer whose inputs are cut, which gives the module's result.
    """

    module: nn.Module
    cut: Cut
    columns: tuple[AdaptedLinear, ...]
    row: AdaptedLinear


def tensor_plan(model: nn.Module, size: int) -> tuple[tuple[Region, ...], nn.Embedding | None, AdaptedLinear | None]:
    """The regions of a model that ``size`` ranks share, and the embedding and the head, which they cut by the
    vocabulary; ``None``: another stage's. Local.

    Raises: InvalidUsage: the model has layers that are not known, or sizes that ``size`` does not divide.
    """
    whole = model.model if isinstance(model, Stage) else model
    if isinstance(whole, Llama):
        regions, embedding, head = tuple(_regions(whole, size)), whole.embedding, whole.head
    elif isinstance(whole, AdaptedCausalLM):
        regions = _regions_of_transformers(whole, size)
        embedding, head = whole.embedding, whole.last_layer
    else:
        raise InvalidUsage(
            f"tensor parallelism got a {type(model).__name__}; it cuts hdpcomm.models.Llama, causal LMs of "
            "transformers (hdpcomm.models.adapt), and stages of both (split_model)"
        )
    first, last = embedding if isinstance(embedding, nn.Embedding) else None, adapted_linear(head)
    ends = (first, None if last is None else last.linear)
    vocabulary = [layer.weight.shape[0] for layer in ends if layer is not None]
    if any(columns % size for columns in vocabulary):
        raise InvalidUsage(
            f"a vocabulary of {vocabulary[0]:,} cannot be shared evenly by {size} tensor ranks; give one that is a "
            f"multiple of {size}, or another number of tensor ranks"
        )
    return regions, first, last


def check_sizes(config: LlamaConfig, size: int) -> None:
    """Raises InvalidUsage unless ``size`` tensor ranks can share a Llama of these sizes. Local."""
    whole = {"heads": config.heads, "ffn": config.ffn, "vocabulary": config.vocabulary}
    if config.experts:  # are not cut
        del whole["ffn"]
    wrong = {name: value for name, value in whole.items() if value % size}
    if config.kv_heads % size and size % config.kv_heads:
        wrong["kv_heads"] = config.kv_heads
    if wrong:
        raise InvalidUsage(
            f"{size} tensor ranks cannot share {', '.join(f'{name} {value:,}' for name, value in wrong.items())} "
            f"evenly: heads, ffn and vocabulary must be multiples of {size}, and kv_heads a multiple or a divisor of it"
        )


def _regions_of_transformers(model: AdaptedCausalLM, size: int) -> tuple[Region, ...]:
    causal_lm, embedding, head = model.causal_lm, model.embedding, model.last_layer
    name, decoder = type(causal_lm).__name__, decoder_of(causal_lm)
    if model.gives_values:
        raise InvalidUsage(f"{name} is a classifier, whose last layer tensor ranks do not share; train it without them")
    for place, module in decoder.named_modules():
        if holds_experts(module) and ".base_layer" in place:
            raise InvalidUsage(
                f"{name} has adapters on the experts of {place.partition('.experts')[0]}, which tensor parallelism "
                "does not know; name other targets of LoRA, as q_proj+v_proj"
            )
    experts = tuple(f"{place}." for place in expert_blocks(decoder))
    regions = tuple(_regions(decoder, size, experts))
    last = adapted_linear(head)
    if not isinstance(embedding, (nn.Embedding, AbsentPart)) or (last is None and not isinstance(head, AbsentPart)):
        raise InvalidUsage(
            f"the embedding of {name} is a {type(embedding).__module__}.{type(embedding).__name__} and its head a "
            f"{type(head).__module__}.{type(head).__name__}; an nn.Embedding, without LoRA, and an nn.Linear, or LoRA "
            "of one, were expected"
        )
    layers = [layer for region in regions for layer in (*region.columns, region.row)]
    layers += [] if last is None else [last]
    cut = {id(embedding)}
    cut |= {id(linear) for each in layers for linear in (each.linear, *(a for pair in each.adapters for a in pair))}
    cut |= {id(module) for place, module in decoder.named_modules() if place.startswith(experts)}
    for region in regions:
        inside = dict(region.module.named_modules())
        cut |= {id(inside[path.rpartition(".")[0]]) for path in region.cut.tensors}
        cut |= {id(module) for module in inside.values() if _has_latent(region.module)}
    if model.media is not None:  # each rank has the whole encoder
        cut |= {id(module) for part in model.media.modules() for module in part.modules()}
    for place, module in causal_lm.named_modules():
        matrices = any(p.dim() > 1 for p in module.parameters(recurse=False))
        if matrices and id(module) not in cut and place.rpartition(".")[2] not in _WHOLE:
            raise InvalidUsage(
                f"{place} of {name} has matrices, and tensor parallelism does not know how to cut them, or what they "
                "are part of; train it without"
            )
    return regions


def _regions(model: nn.Module, size: int, whole: tuple[str, ...] = ()) -> Iterator[Region]:
    """``whole``: beginnings of names of what is not cut."""
    mixers = mixers_of(model)
    for place, parent in model.named_modules():
        if f"{place}.".startswith(whole):
            continue
        if parent in mixers:
            cut, whole = mixer_cut(place, parent, size), (*whole, f"{place}.")
        elif (named := _named_layers(parent)) is not None:
            cut = _cut(place, parent, *named, size)
        else:
            continue
        columns = tuple(_linear(f"{place}.{name}", parent.get_submodule(name)) for name in cut.columns)
        row = _linear(f"{place}.{cut.row}", parent.get_submodule(cut.row))
        yield Region(parent, cut, columns, row)


def _named_layers(parent: nn.Module) -> tuple[list[str], str] | None:
    """Layers of attention or an MLP whose outputs are cut, and the one whose inputs are, by their names. ``None``: it
    is neither, or has other layers, too."""
    linear = [name for name, child in parent.named_children() if any(p.dim() > 1 for p in child.parameters())]
    columns, rows = ([name for name in linear if name in names] for names in (_COLUMNS, _ROWS))
    others = len(linear) > len(columns) + 1 and not _has_latent(parent)
    return None if len(rows) != 1 or not columns or others else (columns, rows[0])


def _linear(path: str, layer: nn.Module) -> AdaptedLinear:
    found = adapted_linear(layer)
    if found is None:
        raise InvalidUsage(
            f"{path} is a {type(layer).__module__}.{type(layer).__name__}, and tensor parallelism cuts nn.Linear, and "
            "LoRA of it without dropout, only (no DoRA, no quantisation)"
        )
    return found


def _has_latent(module: nn.Module) -> bool:
    """Multi-head latent attention, with projections that all heads share."""
    return hasattr(module, "kv_b_proj") and hasattr(module, "num_heads")


def _cut(place: str, parent: Any, columns: list[str], row: str, size: int) -> Cut:
    """By heads, of which those of keys and values may be fewer than the ranks; an MLP by columns."""
    outputs = {name: _linear(f"{place}.{name}", parent.get_submodule(name)).linear.out_features for name in columns}
    inputs = _linear(f"{place}.{row}", parent.get_submodule(row)).linear.in_features
    dim = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
    width = dim if isinstance(dim, int) else None
    sizes: dict[str, int] = {}
    if _has_latent(parent):
        heads = int(parent.num_heads)
        check_heads(place, size, (heads, "heads"))
        blocks: dict[str, Blocks] = {name: (Block(heads, 0, (count // heads,)),) for name, count in outputs.items()}
    elif width is None:
        heads = 0
        if inputs % size:
            raise InvalidUsage(
                f"{place}.{row} takes {inputs} columns, which {size} tensor ranks cannot share evenly; give a width "
                f"(ffn) that is a multiple of {size}"
            )
        blocks = {name: (Block(1, 0, (inputs,)),) * (1 + (name in _HALVES)) for name in columns}
    else:
        number: Any = getattr(getattr(parent, "config", None), "num_attention_heads", None)
        by_number = isinstance(number, int) and inputs % number == 0  # values may have another width than queries
        heads = number if by_number else max(1, inputs // width)
        shared = max(1, outputs.get("k_proj", outputs.get("k", heads * width)) // width)
        if "qkv_proj" in columns:
            shared = int(parent.num_key_value_heads)
            sizes["config.num_attention_heads"] = heads // size
        check_heads(place, size, (heads, "query heads"), (shared, "KV heads"))
        sizes |= dict.fromkeys(("heads", "num_heads", "num_attention_heads"), heads // size)
        sizes |= dict.fromkeys(("kv_heads", "num_key_value_heads"), max(1, shared // size))
        sizes |= {"hidden_size": inputs // size} if getattr(parent, "hidden_size", None) == inputs else {}
        blocks = {name: _of_heads(name, count, heads, shared, width) for name, count in outputs.items()}
    for name, count in outputs.items():
        if count != rows_of(blocks[name]):
            raise InvalidUsage(
                f"{place}.{name} has {count} columns and {row} takes {inputs}: projections whose order tensor "
                "parallelism does not know; train it without"
            )
    if _has_latent(parent):
        own = parent.named_parameters(recurse=False)
        return Cut(blocks, row, {name: (0, (Block(heads, 0, (1,)),)) for name, p in own if tuple(p.shape) == (heads,)})
    tensors = _other_parameters(place, parent, {**blocks, row: (Block(inputs, 1),)}, heads, width)
    norms = dict.fromkeys((name.removesuffix(".weight") for name in tensors if "." in name), size)
    return Cut(blocks, row, tensors, sizes, norms)


def _of_heads(name: str, count: int, heads: int, shared: int, width: int) -> Blocks:
    query = Block(heads, 0, (width,))
    if name == "qkv_proj":
        return (query, *(Block(shared, width),) * 2)
    if name == "query_key_value" or (name == "q_proj" and count == 2 * heads * width):  # by heads, with all of each
        return (Block(heads, 0, (count // heads,)),)
    if name[0] in "kv" and shared != heads:  # values may have another width
        return (Block(shared, count // shared),)
    return (Block(heads, 0, (1 if count == heads and name[0] not in "kv" else count // heads,)),)


def _other_parameters(
    place: str, parent: nn.Module, layers: Mapping[str, Blocks], heads: int, width: int | None
) -> dict[str, tuple[int, Blocks]]:
    """Parameters beside the layers that are cut with these: a number for each head, as sinks, and the weights of
    RMSNorms over what a layer gives or takes. Those over a head, and single numbers, are whole."""
    found: dict[str, tuple[int, Blocks]] = {}
    for path, parameter in parent.named_parameters():
        name, shape = path.partition(".")[0], tuple(parameter.shape)
        if name in layers or parameter.numel() == 1 or (shape == (width,) and name != path):
            continue
        if shape == (heads,) and name == path:
            found[path] = 0, (Block(heads, 0, (1,)),)
            continue
        beside = f"{name[0]}_proj" if name in ("q_norm", "k_norm") else [*layers][-1]
        norm = None if name == path else plain_norm(parent.get_submodule(name))
        if norm is None or shape != (rows_of(layers[beside]),):
            raise InvalidUsage(
                f"{place}.{path} has the shape {shape}, and tensor parallelism does not know what of it belongs to "
                "which heads or columns; train it without"
            )
        found[path] = 0, layers[beside]
    return found


Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(model: Model, mesh: Mesh, *, check: bool = True) -> Model:
    """Leaves on each rank of ``mesh.tensor_comm`` its part of the model, and returns it. Collective over it.

    Linear layers are cut by the heads, groups or columns that their rows are of, embedding and head by the vocabulary.
    Between them each rank holds a block of the tokens (sequence parallelism), so norms and residuals are not computed
    twice; ring attention runs over the HDP ranks with the heads that are here. Several ranks hold a KV head, key head
    or group where there are fewer of them than ranks. Adapters of LoRA are cut as their layer is: the second matrix by
    rows beside columns, the first one by columns beside a layer of rows; each rank has the other one whole.

    The parameters stay the objects that they were, with the first tensor rank's values: tied weights stay tied, and a
    new optimizer may have been made before. Gradients of parameters that several ranks hold are parts until
    :class:`hdpcomm.train.Trainer` has added them up, once a step. Give the stages of a pipeline one by one.

    Args:
        model: a :class:`hdpcomm.models.Llama`, a causal LM after :func:`hdpcomm.models.adapt`, or a stage of either.
        check: compares the logits of a few tokens with those of the whole model, for models of transformers that are
            not cut into stages.

    Raises:
        InvalidUsage: the model has layers that this does not know; heads, columns or vocabulary that the ranks do not
            divide; or the check failed.

    Source: Megatron-LM, arXiv 1909.08053, section 3, and arXiv 2205.05198, section 4.2.
    """
    if mesh.tensor == 1:
        return model
    if getattr(model, "tensor", None) is not None:
        raise InvalidUsage("this model has been cut by tensor_parallel() already; give it once")
    regions, embedding, head = tensor_plan(model, mesh.tensor)
    group = TensorGroup(mesh.tensor_comm)
    names: dict[int, list[str]] = {}
    for each in (model.named_parameters, model.named_buffers):
        for name, tensor in each(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    what = f"{type(model).__name__} cut for {mesh.tensor} tensor ranks"
    with same_logits(model, group.comm, what, check=check):
        cut = _Cut(group, names)
        for region in regions:
            cut.region(region)
        if head is not None:
            cut.columns(head, group.shard(Block(head.linear.out_features, 1)))
        if embedding is not None:
            cut.embedding(embedding)
        model.tensor = group  # type: ignore[assignment]
    return model


class _Cut:
    """Cuts parameters in place, each once."""

    def __init__(self, group: TensorGroup, names: Mapping[int, list[str]]) -> None:
        self._group, self._names = group, names

    def region(self, region: Region) -> None:
        module, cut = region.module, region.cut
        for layer, blocks in zip(region.columns, cut.columns.values(), strict=True):
            self.columns(layer, self._group.shard(*blocks))
        self._rows(region.row, self._group.shard(Block(region.row.linear.in_features, 1), dim=1))
        for name, (dim, blocks) in cut.tensors.items():
            self._keep(_inside(module, name), self._group.shard(*blocks, dim=dim))
        if any(name.startswith("config.") for name in cut.sizes):
            module.config = copy.copy(module.config)
        for name, value in cut.sizes.items():
            path, _, last = name.rpartition(".")
            owner = _inside(module, path)
            if hasattr(owner, last):
                setattr(owner, last, value)
        for name, ranks in cut.norms.items():
            norm, first = _inside(module, name), self._group.comm.rank // ranks * ranks
            sharing = self._group.comm.subset(range(first, first + ranks))
            assert sharing is not None
            norm.forward = SplitNorm(norm, sharing)
        for conv in (each for each in module.modules() if isinstance(each, nn.Conv1d)):
            conv.in_channels = conv.out_channels = conv.groups = conv.weight.shape[0]
        module.register_forward_pre_hook(_Gathering(self._group), with_kwargs=True)

    def embedding(self, embedding: nn.Embedding) -> None:
        self._keep(embedding.weight, self._group.shard(Block(embedding.num_embeddings, 1)))
        rows = embedding.weight.shape[0]
        if embedding.padding_idx is not None:
            place = embedding.padding_idx - self._group.comm.rank * rows
            embedding.padding_idx = place if 0 <= place < rows else None
        embedding.num_embeddings = rows
        embedding.forward = VocabularyShard(embedding, self._group)  # type: ignore[assignment, method-assign]

    def columns(self, layer: AdaptedLinear, shard: TensorShard) -> None:
        """A layer whose outputs are cut: of its adapters the second matrices' rows."""
        for linear in (layer.linear, *(second for _, second in layer.adapters)):
            self._keep(linear.weight, shard)
            if linear.bias is not None:
                self._keep(linear.bias, shard)
            linear.out_features = linear.weight.shape[0]

    def _rows(self, layer: AdaptedLinear, shard: TensorShard) -> None:
        """A layer whose inputs are cut: of its adapters the first matrices' columns."""
        for linear in (layer.linear, *(first for first, _ in layer.adapters)):
            self._keep(linear.weight, shard)
            linear.in_features = linear.weight.shape[1]
        layer.module.forward = RowLinear(layer.module, layer.linear, self._group)

    def _keep(self, parameter: Tensor, shard: TensorShard) -> None:
        names = self._names[id(parameter)]
        if names[0] in self._group.shards:  # the head that is the embedding
            return
        parameter.data = shard.take(parameter.data)
        self._group.shards.update(dict.fromkeys(names, shard))


def _inside(module: nn.Module, path: str) -> Any:
    """The attribute of a module, or of one of its parts, with this name; the module itself: an empty one."""
    return functools.reduce(getattr, path.split("."), module) if path else module


class _Gathering:
    """Pre-hook of a region: its input, the first argument or ``hidden_states``, becomes that of all tokens of the
    pack."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = (options.get(PACK_ARGUMENT) or current_pack()).tokens
        if args:
            return (self._group.gather(args[0], tokens), *args[1:]), options
        return args, {**options, "hidden_states": self._group.gather(options["hidden_states"], tokens)}
