"""The state of a pipeline's stages as that of the whole model, and back: what checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel.checkpoint import NamesInModel, told_by_all
from hdpcomm.parallel.mesh import Mesh
from hdpcomm.parallel.stages import LlamaStage

__all__ = ["names_in_model", "state_of_stages", "whole_state"]

_TIED = ("head.weight", "embedding.weight")
"""The copy on the last stage, and the name under which an optimizer of the whole model knows the one weight."""


def whole_state(state: Mapping[str, Any], stages: Sequence[LlamaStage], mesh: Mesh) -> dict[str, Any]:
    """``model``, ``optimizer`` and ``masters``, if there are any, as :meth:`hdpcomm.train.Trainer.state_dict` of the
    whole model gives them.

    Collective over the mesh: every rank gets all stages' tensors. A trainer without pipelines can take it over, or one
    with another number of stages.

    Args:
        state: the same of this rank's module, which is its only stage or the list of its stages, with whole tensors.
    """
    optimized = state["optimizer"]
    names = _names(stages, state["model"])
    copied = _copied(stages)
    own = {
        f"{kind} {names[name]}": tensor
        for kind in ("model", "masters")
        for name, tensor in state.get(kind, {}).items()
        if kind == "model" or names[name] not in copied
    }
    own |= {
        f"state {names[name]} {key}": value
        for name, values in optimized["state"].items()
        if names[name] not in copied
        for key, value in values.items()
    }
    groups = [[names[name] for name in group["params"]] for group in optimized["param_groups"]]
    groups = [[name for name in group if name not in copied] for group in groups]
    found, all_groups = _gather(own, groups, mesh.pipeline_comm)
    whole: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
    for name, value in found.items():
        kind, name, *key = name.split(" ")
        if kind == "state":
            whole["optimizer"]["state"].setdefault(name, {})[key[0]] = value
        else:
            whole.setdefault(kind, {})[name] = value
    for place, group in enumerate(optimized["param_groups"]):
        params = [name for each in all_groups for name in each[place]]
        whole["optimizer"]["param_groups"].append({**group, "params": params})
    return whole


def state_of_stages(
    module: nn.Module, stages: Sequence[LlamaStage], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """The part of these stages of what :func:`whole_state`, or a trainer of the whole model, gave, by the names of
    ``module``; its tensors are whole. Local.

    Args:
        optimizer: over the module's parameters, or over this rank's parts of them.

    Raises: InvalidUsage: the state is that of another model.
    """
    names = _names(stages, module.state_dict())
    copied = _copied(stages)
    there = {name: _TIED[1] if whole in copied else whole for name, whole in names.items()}
    trained = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    states, masters = state["optimizer"]["state"], state.get("masters", {})
    if missing := [there[name] for name in trained.values() if there[name] not in states]:
        raise InvalidUsage(
            f"the state has no optimizer state for {missing[0]}; give that of a trainer of the same model"
        )
    groups = [
        {**saved, "params": [trained[id(parameter)] for parameter in own["params"] if id(parameter) in trained]}
        for saved, own in zip(state["optimizer"]["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {
        "model": {name: state["model"][whole] for name, whole in names.items()},
        "masters": {name: masters[there[name]] for name in trained.values() if there[name] in masters},
        "optimizer": {"state": {name: states[there[name]] for name in trained.values()}, "param_groups": groups},
    }


def names_in_model(stages: Sequence[LlamaStage], model: Mapping[str, Any]) -> NamesInModel:
    """Of this rank's stages.

    Args:
        model: the state of their module.
    """
    return NamesInModel(_names(stages, model), dict.fromkeys(_copied(stages), _TIED[1]))


def _names(stages: Sequence[LlamaStage], model: Mapping[str, Any]) -> dict[str, str]:
    """By the names of this rank's module, those in the model."""
    if len(stages) == 1:
        return {name: stages[0].name_in_model(name) for name in model}
    split = {name: name.split(".", 1) for name in model}
    return {name: stages[int(place)].name_in_model(rest) for name, (place, rest) in split.items()}


def _copied(stages: Sequence[LlamaStage]) -> tuple[str, ...]:
    """Parameters of these stages that are copies of another's."""
    return (_TIED[0],) if any(stage.tied is not None and stage.last for stage in stages) else ()


def _gather(
    own: Mapping[str, Any], groups: list[list[str]], comm: Communicator
) -> tuple[dict[str, Any], list[list[list[str]]]]:
    """The entries of all stages in their order, by broadcasts; and each stage's groups of names. Collective."""
    facts = {
        name: [list(value.shape), str(value.dtype).removeprefix("torch.")] if isinstance(value, torch.Tensor) else value
        for name, value in own.items()
    }
    found: dict[str, Any] = {}
    all_groups = []
    for stage, (told, theirs) in enumerate(told_by_all(comm, [facts, groups])):
        all_groups.append(theirs)
        for name, fact in told.items():
            if not isinstance(fact, list):
                found[name] = fact
                continue
            like = next(each for each in own.values() if isinstance(each, torch.Tensor))
            tensor = own[name] if stage == comm.rank else like.new_empty(fact[0], dtype=getattr(torch, fact[1]))
            whole = tensor.detach().contiguous()
            comm.broadcast(whole, stage)
            found[name] = tensor if stage == comm.rank else whole
    return found, all_groups
