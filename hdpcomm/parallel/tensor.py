"""Tensor parallelism with sequence parallel regions: :func:`tensor_parallel`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from hdpcomm.attention import current_pack
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.lora import AdaptedLinear
from hdpcomm.models.mixers import PACK_ARGUMENT
from hdpcomm.models.tensor_group import (
    Block,
    RowLinear,
    SplitNorm,
    TensorGroup,
    TensorShard,
    VocabularyShard,
)
from hdpcomm.parallel.agreement import same_logits
from hdpcomm.parallel.tensor_plans import Region, tensor_plan

__all__ = ["tensor_parallel"]

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
