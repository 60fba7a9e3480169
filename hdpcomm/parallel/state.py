"""The state of a pipeline's stages as that of the whole model, and back: what checkpoints hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hdpcomm.comm import Communicator
from hdpcomm.parallel.mesh import Mesh
from hdpcomm.parallel.stages import LlamaStage
from hdpcomm.parallel.tensor_state import TensorParts
from hdpcomm.train.optimizer_state import own_state

__all__ = ["load_whole_state", "whole_state"]

_TIED = ("head.weight", "embedding.weight")
"""The copy on the last stage, and the name under which an optimizer of the whole model knows the one weight."""


def whole_state(
    module: nn.Module,
    stages: Sequence[LlamaStage],
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    parts: TensorParts,
) -> dict[str, Any]:
    """``model`` and ``optimizer`` as :meth:`hdpcomm.train.Trainer.state_dict` of the whole model gives them.

    Collective over the mesh: every rank gets all stages' tensors, those of its own live. A trainer without pipelines
    can take it over, or one with another number of stages.

    Args:
        module: this rank's only stage, or the list of its stages.
        parts: what of their state is cut for tensor ranks.
    """
    model, optimized = parts.joined(*get_state_dict(module, optimizer))
    names = _names(stages, model)
    copied = _copied(stages)
    states = {names[name]: values for name, values in optimized["state"].items()}
    own = {f"model {names[name]}": tensor for name, tensor in model.items()}
    own |= {
        f"state {name} {key}": value
        for name, values in states.items()
        if name not in copied
        for key, value in values.items()
    }
    groups = [[names[name] for name in group["params"]] for group in optimized["param_groups"]]
    groups = [[name for name in group if name not in copied] for group in groups]
    found, all_groups = _gather(own, groups, mesh.pipeline_comm)
    whole: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
    for name, value in found.items():
        kind, name, *key = name.split(" ")
        if kind == "model":
            whole["model"][name] = value
        else:
            whole["optimizer"]["state"].setdefault(name, {})[key[0]] = value
    for place, group in enumerate(optimized["param_groups"]):
        params = [name for each in all_groups for name in each[place]]
        whole["optimizer"]["param_groups"].append({**group, "params": params})
    return whole


def load_whole_state(
    module: nn.Module,
    stages: Sequence[LlamaStage],
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    parts: TensorParts,
) -> None:
    """Takes the part of these stages of what :func:`whole_state`, or a trainer of the whole model, gave. Local."""
    names = _names(stages, module.state_dict())
    model = {name: state["model"][there] for name, there in names.items()}
    copied = _copied(stages)
    states, groups = state["optimizer"]["state"], state["optimizer"]["param_groups"]
    there = {name: _TIED[1] if whole in copied else whole for name, whole in names.items()}
    mine: Mapping[str, Any] = get_state_dict(module, optimizer)[1]
    optimized: dict[str, Any] = {
        "state": {name: states[there[name]] for name in mine["state"]},
        "param_groups": [
            {**group, "params": own["params"]} for group, own in zip(groups, mine["param_groups"], strict=True)
        ],
    }
    model, optimized = parts.cut(model, optimized)
    with own_state(optimizer):
        set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=optimized)


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
    for stage, (told, theirs) in enumerate(_told(comm, [facts, groups])):
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


def _told(comm: Communicator, own: Any) -> list[Any]:
    """What each rank tells, as JSON. Collective over ``comm``."""
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
    everyone = torch.empty(comm.size, int(sizes.max()), dtype=torch.uint8)
    comm.all_gather(everyone, torch.nn.functional.pad(data, (0, everyone.shape[1] - len(data))))
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(everyone, sizes.tolist(), strict=True)]
