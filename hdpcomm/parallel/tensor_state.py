"""The state of a model that tensor or expert ranks share as that of the whole model, and back: what checkpoints
hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.models.tensor_group import TensorGroup, TensorShard
from hdpcomm.parallel.tensor import own_part

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.parallel.mesh import Mesh

__all__ = ["TensorParts"]


class TensorParts:
    """Which tensors of a module's state are parts, by the names that they have there.

    Args:
        modules: by the prefix of their names in the state; cut by :func:`hdpcomm.parallel.tensor_parallel` and
            :func:`hdpcomm.parallel.expert_parallel`, or not.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._shards: dict[str, tuple[TensorShard, Communicator]] = {}
        self._parameters: dict[int, int] = {}
        self._experts: set[int] = set()
        self._of_experts: set[str] = set()
        for prefix, module in modules.items():
            tensor: TensorGroup | None = getattr(module, "tensor", None)
            expert = getattr(module, "expert", None)
            expert = expert if isinstance(expert, ExpertGroup) else None
            for group in (tensor, expert):
                if group is not None:
                    self._shards |= {prefix + name: (shard, group.comm) for name, shard in group.shards.items()}
            if expert is not None:
                self._of_experts |= {prefix + name for name in expert.shards}
            for name, parameter in module.named_parameters():
                if tensor is not None and name in tensor.shards:
                    self._parameters[id(parameter)] = tensor.shards[name].parts
                if expert is not None and name in expert.shards:
                    self._experts.add(id(parameter))

    @classmethod
    def of_stages(cls, stages: Sequence[nn.Module]) -> TensorParts:
        """Of one module, or of the ``nn.ModuleList`` of several."""
        if len(stages) == 1:
            return cls({"": stages[0]})
        return cls({f"{place}.": stage for place, stage in enumerate(stages)})

    @property
    def by_parameter(self) -> Mapping[int, int]:
        """By the parameter's id, into how many parts the tensor ranks have cut it."""
        return self._parameters

    @property
    def experts(self) -> Collection[int]:
        """The ids of the parameters of which an expert rank has the part of its own experts."""
        return self._experts

    def place(self, name: str, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        """The shape of the whole tensor of which this rank has a part of ``shape``, and where it begins. Local."""
        whole, offsets = list(shape), [0] * len(shape)
        if name in self._shards:
            shard, _ = self._shards[name]
            offsets[shard.dim] = shard.part * whole[shard.dim]
            whole[shard.dim] *= shard.parts
        return whole, offsets

    def is_of_expert(self, name: str) -> bool:
        """Whether an expert rank has the part of its own experts. Local."""
        return name in self._of_experts

    def is_first(self, name: str, mesh: Mesh) -> bool:
        """Whether this rank is the first of the tensor ranks that have the same part. Local."""
        cut = name in self._shards and name not in self._of_experts
        parts = self._shards[name][0].parts if cut else 1
        return bool(mesh.tensor_rank % (mesh.tensor // parts) == 0)

    def joined(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's ``model``, ``optimizer`` and ``masters`` by name, with whole tensors. Collective over the tensor
        and the expert ranks."""
        return self._changed(state, _joined)

    def joined_tensor(self, name: str, part: Tensor) -> Tensor:
        """One of them, contiguous. Collective over the tensor or the expert ranks, if it is cut among them."""
        return _joined(part, *self._shards[name]) if name in self._shards else part.detach().contiguous()

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`joined` was given on this rank, from whole tensors. Local."""
        return self._changed(state, lambda tensor, shard, _: own_part(tensor, shard))

    def _changed(
        self, state: Mapping[str, Any], change: Callable[[Tensor, TensorShard, Communicator], Tensor]
    ) -> dict[str, Any]:
        model = state["model"]

        def changed(name: str, value: Any) -> Any:
            shard = self._shards.get(name)
            # An optimizer's step counts and the like have no part for each element.
            if shard is None or not isinstance(value, Tensor) or value.shape != model[name].shape:
                return value
            return change(value, *shard)

        found: dict[str, Any] = {
            kind: {name: changed(name, value) for name, value in values.items()}
            for kind, values in state.items()
            if kind != "optimizer"
        }
        states = {
            name: {key: changed(name, value) for key, value in values.items()}
            for name, values in state["optimizer"]["state"].items()
        }
        return {**found, "optimizer": {**state["optimizer"], "state": states}}


def _joined(part: Tensor, shard: TensorShard, comm: Communicator) -> Tensor:
    part = part.detach().contiguous()
    size = comm.size
    parts = part.new_empty(size, *part.shape)
    comm.all_gather(parts, part)
    return parts[:: size // shard.parts].movedim(0, shard.dim).flatten(shard.dim, shard.dim + 1)
