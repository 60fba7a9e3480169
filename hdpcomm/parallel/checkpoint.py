"""What each rank of a mesh writes into a checkpoint and reads of one: the boxes that it holds of the whole model's
tensors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hdpcomm.parallel.mesh import Mesh
from hdpcomm.parallel.tensor_state import TensorParts
from hdpcomm.train.tensor_part import TensorPart

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["NamesInModel", "mesh_parts", "own_of_parts", "take_what_is_no_tensor", "told_by_all", "whole_model"]


class NamesInModel:
    """The names in the whole model of what is on this rank.

    Args:
        names: by the names of this rank's module.
        copies: parameters of this rank that stand for one of another stage, by their names in the model; and the name
            of that one.
    """

    def __init__(self, names: Mapping[str, str], copies: Mapping[str, str]) -> None:
        self._names, self._copies = names, copies

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def in_model(self, name: str) -> str:
        """Where the values of a tensor of the module are in the model."""
        return self._names[name]

    def trained(self, name: str) -> str:
        """Where an optimizer of the whole model has the state of a parameter."""
        return self._copies.get(self._names[name], self._names[name])

    def is_copy(self, name: str) -> bool:
        """Whether another stage has the state of this parameter, too."""
        return self._names[name] in self._copies


def mesh_parts(state: Mapping[str, Any], parts: TensorParts, names: NamesInModel, mesh: Mesh) -> dict[str, Any]:
    """A state of this rank's module as its part of that of the whole model.

    The tensors become :class:`TensorPart` of the live ones. Each element of the model is written by one rank; nothing
    is gathered but names and numbers. Collective over the pipeline.

    Args:
        state: ``model``, ``optimizer`` and ``masters``, if there are any, by the module's names, of live tensors or of
            :class:`TensorPart` of them, if HDP ranks have cut them.
    """
    model = state["model"]

    def part(name: str, value: Any, *, copy: bool = False) -> Any:
        if not isinstance(value, (Tensor, TensorPart)):
            return value
        if (
            isinstance(value, Tensor) and value.shape != model[name].shape
        ):  # a step count, say: the same on all ranks that have the parameter
            first = mesh.hdp_rank == 0 and mesh.tensor_rank == 0 and not copy
            return TensorPart(value.size(), [([0] * value.dim(), value)], written=first)
        shape, offsets = parts.place(name, model[name].shape)
        alone = parts.is_first(name, mesh) and not copy
        if isinstance(value, TensorPart):
            return value.within(shape, offsets, written=alone)
        replica = mesh.expert_replica_comm.rank if parts.is_of_expert(name) else mesh.hdp_rank
        return TensorPart(shape, [(offsets, value)], written=alone and replica == 0)

    def state_of(name: str, value: Any) -> Any:
        return part(name, value, copy=names.is_copy(name))

    states = {
        names.trained(name): {key: state_of(name, value) for key, value in values.items()}
        for name, values in state["optimizer"]["state"].items()
    }
    groups = state["optimizer"]["param_groups"]
    plain = {
        names.trained(name): {key: each for key, each in values.items() if not isinstance(each, (Tensor, TensorPart))}
        for name, values in state["optimizer"]["state"].items()
        if not names.is_copy(name)
    }
    named = [[names.trained(name) for name in group["params"] if not names.is_copy(name)] for group in groups]
    told = told_by_all(mesh.pipeline_comm, [named, {name: values for name, values in plain.items() if values}])
    for _, others in told:  # the first rank writes what are no tensors, for all stages
        for name, values in others.items():
            states.setdefault(name, {}).update(values)
    found = {
        "model": {names.in_model(name): part(name, value) for name, value in model.items()},
        "optimizer": {
            "state": states,
            "param_groups": [
                {**group, "params": list(itertools.chain.from_iterable(each[place] for each, _ in told))}
                for place, group in enumerate(groups)
            ],
        },
    }
    if "masters" in state:
        found["masters"] = {names.trained(name): state_of(name, value) for name, value in state["masters"].items()}
    return found


def own_of_parts(state: Mapping[str, Any], names: NamesInModel) -> dict[str, Any]:
    """What :func:`mesh_parts` was given on this rank, of what it gave; :class:`TensorPart` stand for tensors. Local."""
    of_model, masters = state["optimizer"]["state"], state.get("masters", {})
    trained = {name: names.trained(name) for name in names}
    return {
        "model": {name: state["model"][names.in_model(name)] for name in names},
        "masters": {name: masters[there] for name, there in trained.items() if there in masters},
        "optimizer": {
            "state": {name: of_model[there] for name, there in trained.items() if there in of_model},
            "param_groups": state["optimizer"]["param_groups"],
        },
    }


def take_what_is_no_tensor(state: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Of a state of :func:`own_of_parts` that a checkpoint was read into: its tensors are in place already. Local."""
    for group, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for name, parameter in module.named_parameters():
        if parameter in optimizer.state:
            found = state["optimizer"]["state"][name]
            plain = {key: value for key, value in found.items() if not isinstance(value, TensorPart)}
            optimizer.state[parameter].update(plain)


def whole_model(model: Mapping[str, Any], parts: TensorParts, names: NamesInModel, mesh: Mesh) -> dict[str, Tensor]:
    """The tensors of all stages by their names in the model, in host memory, on the first rank of ``mesh.comm``; empty
    on the others. One tensor at a time is gathered. Collective over the mesh."""
    own = {names.in_model(name): name for name in model}
    facts = {
        there: [parts.place(name, model[name].shape)[0], str(model[name].dtype).removeprefix("torch.")]
        for there, name in own.items()
    }
    found = {}
    for stage, told in enumerate(told_by_all(mesh.pipeline_comm, facts)):
        for there, (shape, dtype) in told.items():
            if stage == mesh.stage:
                tensor = parts.joined_tensor(own[there], model[own[there]])
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=next(iter(model.values())).device)
            mesh.pipeline_comm.broadcast(tensor, stage)
            if mesh.comm.rank == 0:
                found[there] = tensor.to("cpu", copy=True)
    return found


def told_by_all(comm: Communicator, own: Any) -> list[Any]:
    """What each rank tells, as JSON. Collective over ``comm``."""
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
    everyone = torch.empty(comm.size, int(sizes.max()), dtype=torch.uint8)
    comm.all_gather(everyone, torch.nn.functional.pad(data, (0, everyone.shape[1] - len(data))))
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(everyone, sizes.tolist(), strict=True)]
