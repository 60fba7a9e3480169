"""Tensor parallelism with sequence parallel regions: :func:`tensor_parallel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import AdaptedCausalLM
from hdpcomm.models.lora import AdaptedLinear
from hdpcomm.models.self_check import check_same_logits, few_logits
from hdpcomm.models.tensor_group import AdaptedRows, RowLinear, TensorGroup, TensorShard, VocabularyShard
from hdpcomm.parallel.agreement import share_values
from hdpcomm.parallel.tensor_plans import TensorPlan, TokensOf, tensor_plan

__all__ = ["tensor_parallel"]

Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(model: Model, mesh: Mesh, *, check: bool = True) -> Model:
    """Leaves on each rank of ``mesh.tensor_comm`` its part of the model, and returns it. Collective over it.

    Linear layers are cut by heads and columns as the model's plan says (``config.base_model_tp_plan`` of transformers),
    embedding and head by the vocabulary. Between them each rank holds a block of the tokens (sequence parallelism), so
    norms and residuals are not computed twice; ring attention runs over the HDP ranks with the heads that are here.
    Several ranks hold a KV head where there are fewer heads than ranks. Adapters of LoRA are cut as their layer is: the
    second matrix by rows beside columns, the first one by columns beside a layer of rows; each rank has the other one
    whole.

    The parameters stay the objects that they were, with the first tensor rank's values: tied weights stay tied, and a
    new optimizer may have been made before. Gradients of parameters that several ranks hold are parts until
    :class:`hdpcomm.train.Trainer` has added them up, once a step. Give the stages of a pipeline one by one.

    Args:
        model: a :class:`hdpcomm.models.Llama`, a causal LM after :func:`hdpcomm.models.adapt`, or a stage of either.
        check: compares the logits of a few tokens with those of the whole model, for models of transformers that are
            not cut into stages.

    Raises:
        InvalidUsage: the model has no plan or one that this cannot follow; heads, columns or vocabulary that the ranks
            do not divide; or the check failed.

    Source: Megatron-LM, arXiv 1909.08053, section 3, and arXiv 2205.05198, section 4.2.
    """
    if mesh.tensor == 1:
        return model
    if getattr(model, "tensor", None) is not None:
        raise InvalidUsage("this model has been cut by tensor_parallel() already; give it once")
    plan = tensor_plan(model, mesh.tensor)
    group = TensorGroup(mesh.tensor_comm)
    checked = check and isinstance(model, AdaptedCausalLM) and not any(p.is_meta for p in model.parameters())
    share_values(group.comm, (t for t in (*model.parameters(), *model.buffers()) if not t.is_meta))
    wanted = few_logits(model) if checked else None
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    cut = _Cut(group, names)
    cut.apply(plan)
    model.tensor = group  # type: ignore[assignment]
    if wanted is not None:
        check_same_logits(
            model, few_logits(model), wanted, f"{type(model).__name__} cut for {mesh.tensor} tensor ranks"
        )
    return model


class _Cut:
    """Cuts parameters in place, each once."""

    def __init__(self, group: TensorGroup, names: Mapping[int, list[str]]) -> None:
        self._group, self._names = group, names

    def apply(self, plan: TensorPlan) -> None:
        size = self._group.comm.size
        for region in plan.regions:
            for layer, parts in region.columns.values():
                self._columns(layer, self._group.shard(parts))
            self._rows(region.row, self._group.shard(size, dim=1))
            region.module.register_forward_pre_hook(_Gathering(self._group, region.tokens_of), with_kwargs=True)
            for name in ("heads", "kv_heads"):  # of our attention, which views by them
                if hasattr(region.module, name):
                    heads = getattr(region.module, name)
                    setattr(region.module, name, heads // min(heads, size))
        if plan.head is not None:
            self._columns(plan.head, self._group.shard(size))
        if plan.embedding is not None:
            self._embedding(plan.embedding, size)

    def _embedding(self, embedding: nn.Embedding, size: int) -> None:
        self._keep(embedding.weight, self._group.shard(size))
        rows = embedding.num_embeddings // size
        if embedding.padding_idx is not None:
            place = embedding.padding_idx - self._group.comm.rank * rows
            embedding.padding_idx = place if 0 <= place < rows else None
        embedding.num_embeddings = rows
        embedding.forward = VocabularyShard(embedding, self._group)  # type: ignore[assignment, method-assign]

    def _columns(self, layer: AdaptedLinear, shard: TensorShard) -> None:
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
        module = layer.module
        if isinstance(module, nn.Linear):
            module.forward = RowLinear(module, self._group)  # type: ignore[assignment, method-assign]
        else:
            module.forward = AdaptedRows(module, layer.linear, self._group)

    def _keep(self, parameter: Tensor, shard: TensorShard) -> None:
        names = self._names[id(parameter)]
        if names[0] in self._group.shards:  # the head that is the embedding
            return
        parameter.data = own_part(parameter.data, shard)
        self._group.shards.update(dict.fromkeys(names, shard))


def own_part(whole: Tensor, shard: TensorShard) -> Tensor:
    """A copy of this rank's part. Local."""
    size = whole.shape[shard.dim] // shard.parts
    return whole.narrow(shard.dim, shard.part * size, size).clone(memory_format=torch.contiguous_format)


class _Gathering:
    """Pre-hook of a region: its input, the first argument or ``hidden_states``, becomes that of all tokens."""

    def __init__(self, group: TensorGroup, tokens_of: TokensOf) -> None:
        self._group, self._tokens_of = group, tokens_of

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = self._tokens_of(args, options)
        if args:
            return (self._group.gather(args[0], tokens), *args[1:]), options
        return args, {**options, "hidden_states": self._group.gather(options["hidden_states"], tokens)}
