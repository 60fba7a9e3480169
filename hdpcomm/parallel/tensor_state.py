"""The state of a model that tensor ranks share as that of the whole model, and back: what checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hdpcomm.models.tensor_group import TensorGroup, TensorShard
from hdpcomm.parallel.tensor import own_part

__all__ = ["TensorParts"]


class TensorParts:
    """Which tensors of a module's state are parts, by the names that they have there.

    Args:
        modules: by the prefix of their names in the state; cut by :func:`hdpcomm.parallel.tensor_parallel`, or not.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._group: TensorGroup | None = None
        self._shards: dict[str, TensorShard] = {}
        self._parameters: dict[int, int] = {}
        for prefix, module in modules.items():
            group: TensorGroup | None = getattr(module, "tensor", None)
            if group is None:
                continue
            self._group = group
            self._shards |= {prefix + name: shard for name, shard in group.shards.items()}
            for name, parameter in module.named_parameters():
                if name in group.shards:
                    self._parameters[id(parameter)] = group.shards[name].parts

    @classmethod
    def of_stages(cls, stages: Sequence[nn.Module]) -> TensorParts:
        """Of one module, or of the ``nn.ModuleList`` of several."""
        if len(stages) == 1:
            return cls({"": stages[0]})
        return cls({f"{place}.": stage for place, stage in enumerate(stages)})

    @property
    def by_parameter(self) -> Mapping[int, int]:
        """By the parameter's id, into how many parts it is cut."""
        return self._parameters

    def joined(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """``get_state_dict`` of this rank with whole tensors. Collective over the tensor ranks."""
        return self._changed(model, optimizer, lambda tensor, shard: _joined(tensor, shard, self._group))

    def cut(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``set_state_dict`` takes on this rank, from whole tensors. Local."""
        return self._changed(model, optimizer, own_part)

    def _changed(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        change: Callable[[Tensor, TensorShard], Tensor],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        def changed(name: str, value: Any) -> Any:
            shard = self._shards.get(name)
            # An optimizer's step counts and the like have no part for each element.
            if shard is None or not isinstance(value, Tensor) or value.shape != model[name].shape:
                return value
            return change(value, shard)

        states = {
            name: {key: changed(name, value) for key, value in state.items()}
            for name, state in optimizer["state"].items()
        }
        return {name: changed(name, value) for name, value in model.items()}, {**optimizer, "state": states}


def _joined(part: Tensor, shard: TensorShard, group: TensorGroup | None) -> Tensor:
    assert group is not None
    part = part.detach().contiguous()
    size = group.comm.size
    parts = part.new_empty(size, *part.shape)
    group.comm.all_gather(parts, part)
    return parts[:: size // shard.parts].movedim(0, shard.dim).flatten(shard.dim, shard.dim + 1)
