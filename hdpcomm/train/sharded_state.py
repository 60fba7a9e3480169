"""A sharded optimizer's state by parameter, as a checkpoint holds it: for any number of ranks, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.train.sharded import ShardedParameters
from hdpcomm.train.tensor_part import TensorPart

__all__ = ["load_sharded_state", "own_parts", "sharded_state"]


def sharded_state(sharded: ShardedParameters, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """``{"optimizer": ...}`` in the form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, and
    ``"masters"``: the wide weights of narrower parameters, by name, if there are any.

    Whole tensors, copies, equal on every rank. Collective over the ranks that train together.
    """
    names = _names(model)
    _make_state(sharded, optimizer)
    state: dict[str, dict[str, Any]] = {}
    masters: dict[str, Tensor] = {}
    groups = _groups(optimizer)
    for bucket, master in zip(sharded.buckets, sharded.masters, strict=True):
        own = optimizer.state[master]
        wholes = {
            key: sharded.gather(bucket, value) if _is_part(value, master) else value for key, value in own.items()
        }
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            name, span = names[id(parameter)], slice(offset, offset + parameter.numel())
            state[name] = {
                key: value[span].view(parameter.shape).clone() if _is_part(own[key], master) else _copy(value)
                for key, value in wholes.items()
            }
            groups[bucket.group]["params"].append(name)
        if bucket.dtype != master.dtype:
            whole = sharded.gather(bucket, master.detach())
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                masters[names[id(parameter)]] = whole[offset : offset + parameter.numel()].view(parameter.shape).clone()
    found: dict[str, Any] = {"optimizer": {"state": state, "param_groups": groups}}
    return found | {"masters": masters} if masters else found


def own_parts(sharded: ShardedParameters, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """As :func:`sharded_state`, with a :class:`TensorPart` of this rank's live tensors in place of each whole one.

    Local: nothing is gathered. Without ranks to share with, the parts are whole tensors.
    """
    names = _names(model)
    _make_state(sharded, optimizer)
    state: dict[str, dict[str, Any]] = {}
    masters: dict[str, Any] = {}
    groups = _groups(optimizer)
    for bucket, master in zip(sharded.buckets, sharded.masters, strict=True):
        own = optimizer.state[master]
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            name = names[id(parameter)]
            state[name] = {
                key: sharded.live_part(bucket, value, parameter, offset) if _is_part(value, master) else value
                for key, value in own.items()
            }
            groups[bucket.group]["params"].append(name)
            if bucket.dtype != master.dtype:
                masters[name] = sharded.live_part(bucket, master.detach(), parameter, offset)
    found: dict[str, Any] = {"optimizer": {"state": state, "param_groups": groups}}
    return found | {"masters": masters} if masters else found


@torch.no_grad()
def load_sharded_state(
    sharded: ShardedParameters, optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Any]
) -> None:
    """Takes this rank's part of what :func:`sharded_state` gave, on any number of ranks; of :func:`own_parts`, what is
    not in place already. The parameters of the wide type must hold their values already. Local.

    Raises:
        InvalidUsage: the state has no entry for a parameter, or no master weights where there have to be some.
    """
    names = _names(model)
    _make_state(sharded, optimizer)
    found, masters = state["optimizer"]["state"], state.get("masters", {})
    for bucket, master in zip(sharded.buckets, sharded.masters, strict=True):
        keys = [names[id(parameter)] for parameter in bucket.parameters]
        narrow = bucket.dtype != master.dtype
        if missing := [key for key in keys if key not in found or (narrow and key not in masters)]:
            raise InvalidUsage(
                f"the state has no optimizer state or no master weights for {missing[0]}; give that of a trainer of "
                "the same model and dtype"
            )
        own = optimizer.state[master]
        for name, value in own.items():
            if isinstance(found[keys[0]][name], TensorPart):
                continue
            if _is_part(value, master):
                value.copy_(sharded.part_of(bucket, [found[key][name] for key in keys]))
            elif isinstance(value, Tensor):
                value.copy_(found[keys[0]][name])
            else:
                own[name] = found[keys[0]][name]
        if narrow and not isinstance(masters[keys[0]], TensorPart):
            master.copy_(sharded.part_of(bucket, [masters[key] for key in keys]))
    for group, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups, without their parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": []}
        for group in optimizer.param_groups
    ]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _is_part(value: Any, master: nn.Parameter) -> bool:
    """Does it hold a number for each element of the part?"""
    return isinstance(value, Tensor) and value.shape == master.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _make_state(sharded: ShardedParameters, optimizer: torch.optim.Optimizer) -> None:
    """Before the first step an optimizer has no state yet: a step of learning rate 0 makes it and changes nothing."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    for master in sharded.masters:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for master in sharded.masters:
        master.grad = None
