"""Which layers of a model tensor parallelism cuts, and how: :func:`tensor_plan`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import AdaptedCausalLM, Llama, LlamaConfig
from hdpcomm.models.huggingface import decoder_of
from hdpcomm.models.lora import AdaptedLinear, adapted_linear
from hdpcomm.models.mixers import mixers_of
from hdpcomm.models.moe import expert_blocks, holds_experts
from hdpcomm.parallel.stages import AbsentPart, Stage

__all__ = ["Region", "TensorPlan", "check_sizes", "tensor_plan"]

_LLAMA: Mapping[str, str] = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.ffn.gate": "colwise",
    "blocks.*.ffn.up": "colwise",
    "blocks.*.ffn.out": "rowwise",
}
_LATENT: Mapping[str, str] = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
"""Multi-head latent attention, by heads; what makes the latents is whole on each rank."""
_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of transformers' tensor plans that are known; the last two are of parameters that are not cut here."""

TokensOf = Callable[[tuple[Any, ...], Mapping[str, Any]], "int | None"]
"""From the arguments of a module to the tokens of the pack that its input is of; None: it need not know."""


@dataclass(frozen=True, slots=True)
class Region:
    """A module that looks at all tokens, with some of its heads or columns on each rank. Its other parameters are whole
    on each rank, whose gradients come from its heads or columns alone: their sum over the ranks is the gradient, as the
    module's result is the sum of what the ranks give.

    Attributes:
        columns: linear layers whose outputs are cut, by name, each with the number of parts.
        row: the linear layer whose inputs are cut, which gives the module's result.
    """

    name: str
    module: nn.Module
    columns: Mapping[str, tuple[AdaptedLinear, int]]
    row: AdaptedLinear
    tokens_of: TokensOf


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Parameters that :func:`hdpcomm.parallel.tensor_parallel` cuts. The embedding and the head are cut by the
    vocabulary."""

    regions: tuple[Region, ...]
    embedding: nn.Embedding | None
    head: AdaptedLinear | None


def tensor_plan(model: nn.Module, size: int) -> TensorPlan:
    """The plan of a model for ``size`` ranks. Local.

    Raises: InvalidUsage: the model has no plan or one that this cannot follow, or sizes that ``size`` does not divide.
    """
    whole = model.model if isinstance(model, Stage) else model
    if isinstance(whole, Llama):
        plan = _plan(_regions(whole, _LLAMA, size, _tokens_of_tables), whole.embedding, whole.head)
    elif isinstance(whole, AdaptedCausalLM):
        plan = _transformers_plan(whole, size)
    else:
        raise InvalidUsage(
            f"tensor parallelism got a {type(model).__name__}; it cuts hdpcomm.models.Llama, causal LMs of "
            "transformers (hdpcomm.models.adapt), and stages of both (split_model)"
        )
    ends = (plan.embedding, None if plan.head is None else plan.head.linear)
    vocabulary = [layer.weight.shape[0] for layer in ends if layer is not None]
    if any(columns % size for columns in vocabulary):
        raise InvalidUsage(
            f"a vocabulary of {vocabulary[0]:,} cannot be shared evenly by {size} tensor ranks; give one that is a "
            f"multiple of {size}, or another number of tensor ranks"
        )
    return plan


def _plan(regions: Iterable[Region], embedding: nn.Module, head: nn.Module) -> TensorPlan:
    """Embedding and head may be those of another stage."""
    return TensorPlan(
        tuple(regions),
        embedding if isinstance(embedding, nn.Embedding) else None,
        adapted_linear(head),
    )


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


def _transformers_plan(model: AdaptedCausalLM, size: int) -> TensorPlan:
    causal_lm = model.causal_lm
    name, decoder, head = type(causal_lm).__name__, decoder_of(causal_lm), causal_lm.get_output_embeddings()
    if model.gives_values:
        raise InvalidUsage(f"{name} is a classifier, whose last layer tensor ranks do not share; train it without them")
    styles = getattr(causal_lm.config.get_text_config(), "base_model_tp_plan", None)
    if not styles:
        raise InvalidUsage(f"{name} has no tensor parallel plan (config.base_model_tp_plan); train it without")
    if mixers_of(causal_lm):
        raise InvalidUsage(
            f"{name} has linear or state-space layers, which tensor parallelism does not cut; train it without"
        )
    for place, module in decoder.named_modules():
        if holds_experts(module) and ".base_layer" in place:
            raise InvalidUsage(
                f"{name} has adapters on the experts of {place.partition('.experts')[0]}, which tensor parallelism "
                "does not know; name other targets of LoRA, as q_proj+v_proj"
            )
    experts = tuple(f"{place}." for place in expert_blocks(decoder))
    for place, module in decoder.named_modules():
        if _has_latent(module):  # which the plans of some models leave out
            styles = {**styles, **{f"{_pattern(place)}.{layer}": style for layer, style in _LATENT.items()}}
    regions = tuple(_regions(decoder, styles, size, _tokens_of_rope, whole=experts))
    embedding = causal_lm.get_input_embeddings()
    last = adapted_linear(head)
    if not isinstance(embedding, (nn.Embedding, AbsentPart)) or (last is None and not isinstance(head, AbsentPart)):
        raise InvalidUsage(
            f"the embedding of {name} is a {type(embedding).__module__}.{type(embedding).__name__} and its head a "
            f"{type(head).__module__}.{type(head).__name__}; an nn.Embedding, without LoRA, and an nn.Linear, or LoRA "
            "of one, were expected"
        )
    layers = [layer for region in regions for layer in (*(each for each, _ in region.columns.values()), region.row)]
    layers += [] if last is None else [last]
    cut = {id(embedding)}
    cut |= {id(linear) for each in layers for linear in (each.linear, *(a for pair in each.adapters for a in pair))}
    cut |= {id(module) for place, module in decoder.named_modules() if place.startswith(experts)}
    cut |= {id(module) for region in regions if _has_latent(region.module) for module in region.module.modules()}
    for place, module in causal_lm.named_modules():
        if id(module) not in cut and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            raise InvalidUsage(
                f"{place} of {name} has matrices and is not in its tensor parallel plan (config.base_model_tp_plan); "
                "train it without"
            )
    return _plan(regions, embedding, head)


def _regions(
    model: nn.Module, styles: Mapping[str, str], size: int, tokens_of: TokensOf, *, whole: tuple[str, ...] = ()
) -> Iterator[Region]:
    """``whole``: beginnings of names of what is not cut, whatever the styles say."""
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if not name.startswith(whole)]
    asked = {styles[pattern] for pattern in map(_pattern, named) if pattern in styles}
    unknown = sorted(asked.difference(_STYLES))
    if unknown:
        raise InvalidUsage(
            f"the tensor parallel plan of {type(model).__name__} asks for {', '.join(unknown)}, and only "
            f"{', '.join(_STYLES)} are known here (no fused projections); train it without"
        )
    for place, parent in model.named_modules():
        found: dict[str, dict[str, AdaptedLinear]] = {"colwise": {}, "rowwise": {}}
        for name, child in parent.named_children():
            path = f"{place}.{name}" if place else name
            style = styles.get(_pattern(path))
            if style not in found or path.startswith(whole):
                continue
            if (layer := adapted_linear(child)) is None:
                raise InvalidUsage(
                    f"{path} is a {type(child).__module__}.{type(child).__name__}, and tensor parallelism cuts "
                    "nn.Linear, and LoRA of it without dropout, only (no DoRA, no quantisation)"
                )
            found[style][name] = layer
        if not found["colwise"] and not found["rowwise"]:
            continue
        if len(found["rowwise"]) != 1 or not found["colwise"]:
            raise InvalidUsage(
                f"{place} has {len(found['colwise'])} colwise and {len(found['rowwise'])} rowwise layers in its tensor "
                "parallel plan; columns and one layer of rows were expected"
            )
        (row,) = found["rowwise"].values()
        head_dim = getattr(parent, "head_dim", None)
        if _has_latent(parent):
            parts = _parts_of_latent(place, parent, found["colwise"], size)
        else:
            parts = _parts(place, found["colwise"], row, head_dim, size)
        columns = {name: (layer, parts[name]) for name, layer in found["colwise"].items()}
        attends = head_dim is not None or _has_latent(parent)
        yield Region(place, parent, columns, row, tokens_of if attends else _no_tokens)


def _has_latent(module: nn.Module) -> bool:
    """Multi-head latent attention, with projections that all heads share."""
    return hasattr(module, "kv_b_proj") and hasattr(module, "num_heads")


def _parts_of_latent(place: str, module: Any, columns: Mapping[str, AdaptedLinear], size: int) -> dict[str, int]:
    """Layers of queries, and of keys and values, by heads."""
    heads = int(module.num_heads)
    if heads % size:
        raise InvalidUsage(
            f"{place} has {heads} heads, which {size} tensor ranks cannot share evenly; the number of heads must be a "
            f"multiple of {size}"
        )
    return dict.fromkeys(columns, size)


def _pattern(name: str) -> str:
    """As plans write the names of modules and parameters."""
    return re.sub(r"\b\d+\b", "*", name)


def _parts(
    place: str, columns: Mapping[str, AdaptedLinear], rows: AdaptedLinear, head_dim: int | None, size: int
) -> dict[str, int]:
    """Into how many parts each layer is cut: KV heads that are fewer than the ranks are held by several each."""
    parts, row = {}, rows.linear
    for name, layer in ((name, each.linear) for name, each in columns.items()):
        if layer.out_features > row.in_features:
            raise InvalidUsage(
                f"{place}.{name} has {layer.out_features} columns where the layer of rows takes {row.in_features}: "
                "several projections in one, which tensor parallelism does not cut; train it without"
            )
        if head_dim is None:
            if layer.out_features % size:
                raise InvalidUsage(
                    f"{place}.{name} has {layer.out_features} columns, which {size} tensor ranks cannot share evenly; "
                    f"give a width (ffn) that is a multiple of {size}"
                )
            parts[name] = size
            continue
        heads, most = layer.out_features // head_dim, row.in_features // head_dim
        if most % size or (heads % size and size % heads):
            raise InvalidUsage(
                f"{place}.{name} has {heads} heads, and the layer {most} query heads, which {size} tensor ranks cannot "
                f"share evenly; the number of query heads must be a multiple of {size}, and that of KV heads a "
                "multiple or a divisor of it"
            )
        parts[name] = min(heads, size)
    return parts


def _tokens_of_tables(args: tuple[Any, ...], _: Mapping[str, Any]) -> int | None:
    return int(args[1][0].shape[0])


def _tokens_of_rope(_: tuple[Any, ...], options: Mapping[str, Any]) -> int | None:
    tables = options.get("position_embeddings")
    if tables is None:
        raise InvalidUsage("the attention of this model gets no position_embeddings, which tensor parallelism needs")
    return int(tables[0].shape[-2])


def _no_tokens(*_: Any) -> int | None:
    return None
