"""Experts of a layer on several HDP ranks: :func:`expert_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hdpcomm.attention.pack_context import find_pack
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import AdaptedCausalLM, Llama
from hdpcomm.models.expert_group import ExpertGroup, ExpertLoad, mixture
from hdpcomm.models.moe import MixtureOfExperts, holds_experts
from hdpcomm.models.tensor_group import Block, TensorShard
from hdpcomm.parallel.stages import Stage, same_logits

__all__ = ["expert_parallel", "layers_with_experts"]

Model = TypeVar("Model", bound=nn.Module)


def expert_parallel(model: Model, mesh: Mesh, *, check: bool = True) -> Model:
    """Leaves on each rank of ``mesh.expert_comm`` its experts of every layer, and returns the model. Collective over
    it.

    Rank r of n holds the experts from ``r x experts / n`` on; all else stays whole. From then on every pass through the
    model is collective over the group, also without tokens; :class:`hdpcomm.train.Trainer` takes care of it, and
    sums up gradients over the ranks that hold the same parameters.

    The parameters stay the objects that they were, with the values of the group's first rank. Call it before or after
    :func:`hdpcomm.parallel.tensor_parallel`, where a mesh has both.

    Args:
        model: a :class:`hdpcomm.models.Llama` with ``experts``, a causal LM of transformers after
            :func:`hdpcomm.models.adapt` whose experts are a module with one tensor for all of them (transformers 5:
            Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss), or a stage of either.
        check: compares the logits of a few tokens with those of the whole model, for models of transformers that are
            not cut into stages.

    Raises:
        InvalidUsage: the model has no experts that this knows, a number that the ranks do not divide, was cut before,
            or the check failed.

    Source: GShard, arXiv 2006.16668, section 3.2.
    """
    if mesh.expert == 1:
        return model
    if getattr(model, "expert", None) is not None:
        raise InvalidUsage("the experts of this model have been cut by expert_parallel() already; give it once")
    group = ExpertGroup(mesh.expert_comm, mesh.expert_replicas)
    layers = layers_with_experts(model, mesh.expert)
    what = f"{type(model).__name__} with its experts on {mesh.expert} ranks"
    with same_logits(model, group.comm, what, check=check):
        for place, layer, parameters in layers:
            for name, parameter in parameters.items():
                shard = TensorShard(0, (Block(parameter.shape[0], 1),), group.comm.rank, group.comm.size)
                parameter.data = shard.take(parameter.data)
                group.shards[f"{place}.{name}"] = shard
            if isinstance(layer, MixtureOfExperts):
                layer.group = layer.load.group = group
            else:
                layer.forward = _DistributedExperts(layer, group)
        model.expert = group  # type: ignore[assignment]
    return model


def layers_with_experts(model: nn.Module, size: int) -> list[tuple[str, Any, dict[str, nn.Parameter]]]:
    """The modules with experts: name, module, and by name the parameters whose first dimension is the experts'. Local.

    Raises: InvalidUsage: there is none in a model that is whole, or ``size`` ranks cannot share them.
    """
    whole = _whole(model)
    if isinstance(whole, Llama):
        found: list[tuple[str, Any, dict[str, nn.Parameter]]] = [
            (place, module, {"gate_up": module.gate_up, "out": module.out})
            for place, module in model.named_modules()
            if isinstance(module, MixtureOfExperts)
        ]
    elif isinstance(whole, AdaptedCausalLM):
        found = list(_transformers_layers(model))
    else:
        raise InvalidUsage(
            f"expert parallelism got a {type(model).__name__}; it cuts hdpcomm.models.Llama with experts, causal LMs "
            "of transformers (hdpcomm.models.adapt), and stages of both (split_model)"
        )
    if not found and not isinstance(model, Stage):  # whose layers may be others
        name = type(whole.causal_lm if isinstance(whole, AdaptedCausalLM) else whole).__name__
        raise InvalidUsage(
            f"{name} has no layer with experts that can be shared: LlamaConfig(experts=), or a model of transformers "
            "5 whose experts are one module with a tensor for all of them, was expected; train it without expert "
            "parallelism"
        )
    for place, _, parameters in found:
        (experts,) = {parameter.shape[0] for parameter in parameters.values()}
        if experts % size:
            raise InvalidUsage(
                f"{place} has {experts} experts, which {size} ranks cannot share evenly; give a number of ranks that "
                f"divides {experts}"
            )
    return found


def _whole(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, Stage) else model


def _transformers_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    for place, module in model.named_modules():
        parameters = dict(module.named_parameters())
        experts = getattr(module, "num_experts", None)
        if not holds_experts(module):
            continue
        if place.rpartition(".")[2] == "base_layer":
            raise InvalidUsage(
                f"{place.partition('.base_layer')[0]} has adapters of LoRA, which expert parallelism does not "
                "share out; name other targets of LoRA, as q_proj+v_proj, or train it without expert parallelism"
            )
        if any(each.dim() < 2 or each.shape[0] != experts or "." in name for name, each in parameters.items()):
            raise InvalidUsage(
                f"{place} has {experts} experts and the parameters "
                f"{ {name: tuple(p.shape) for name, p in parameters.items()} }; tensors whose first dimension is the "
                "experts' were expected (no LoRA on experts); train it without expert parallelism"
            )
        yield place, module, parameters


class _DistributedExperts:
    """The forward of a module of transformers that holds the experts of a layer: theirs, wherever they are."""

    def __init__(self, module: Any, group: ExpertGroup) -> None:
        self._module, self._forward, self._group = module, module.forward, group
        self.load = module.load = getattr(module, "load", None) or ExpertLoad(module.num_experts)
        self.load.group = group
        module.num_experts //= group.comm.size

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        pack = find_pack()
        rows = None if pack is None else pack.token_rows
        own = [each for each in self._module._parameters.values() if each is not None]
        chosen, weights = top_k_index[:rows], top_k_weights[:rows]
        made = mixture(x[:rows], chosen, weights, self._run, self.load, self._group, own)
        if rows is not None:
            made = torch.cat((made, torch.zeros_like(x[rows:])))
        return made.view(hidden_states.shape)

    def _run(self, rows: Tensor, experts: Tensor, _: Callable[[], Sequence[int]], replicas: Sequence[Tensor]) -> Tensor:
        if rows.shape[0]:
            with _replaced(self._module, replicas):
                made: Tensor = self._forward(rows, experts[:, None], rows.new_ones(rows.shape[0], 1))
            return made
        # A loop over experts that have rows would leave their parameters out of the graph, and so this rank out of the
        # backward of its group: one row goes through the first one, and is dropped.
        unused = self._forward(rows.new_zeros(1, rows.shape[1]), experts.new_zeros(1, 1), rows.new_ones(1, 1))
        return torch.cat((rows, unused[:0]))


@contextmanager
def _replaced(module: Any, replicas: Sequence[Tensor]) -> Iterator[None]:
    """The module of transformers has these experts meanwhile, if there are any."""
    own, count = dict(module._parameters), module.num_experts
    if replicas:
        module.num_experts = replicas[0].shape[0]
        module._parameters.update(zip((name for name, each in own.items() if each is not None), replicas, strict=True))
    try:
        yield
    finally:
        module._parameters.update(own)
        module.num_experts = count
