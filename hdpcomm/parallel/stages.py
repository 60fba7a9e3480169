"""A model cut into the stages of a pipeline, by layers: :func:`split_llama`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama
from hdpcomm.models.llama import finish_llama, losses_of_routers, rope_tables, run_blocks

if TYPE_CHECKING:
    from hdpcomm.attention import Tree
    from hdpcomm.comm import Communicator
    from hdpcomm.models.expert_group import ExpertGroup
    from hdpcomm.models.tensor_group import TensorGroup

__all__ = ["LlamaStage", "layers_of_stages", "split_llama"]


def layers_of_stages(layers: int, stages: int) -> list[range]:
    """The layers of each stage, as many in each.

    Raises: InvalidUsage if the stages do not divide the layers: one stage would be slower, and all would wait for it.
    """
    if stages < 1 or layers % stages:
        raise InvalidUsage(
            f"{layers} layers cannot be cut into {stages} stages of as many layers each: give a number of layers that "
            f"is a multiple of {max(1, stages)}, or say how many each stage gets (layers=)"
        )
    each = layers // stages
    return [range(stage * each, (stage + 1) * each) for stage in range(stages)]


class LlamaStage(nn.Module):
    """Some consecutive layers of a :class:`hdpcomm.models.Llama`, with its embedding or its head at the ends.

    Called like the model, with the boundary activations ``[tokens, hidden]`` of the stage before in the place of tokens
    unless it is the first, it gives those for the next stage, or, if it is the last, what the model gives. Made by
    :func:`split_llama`; the layers are the model's own modules.

    Attributes:
        layers: which of the model's layers these are.
        first, last: whether the model's embedding and its head are here.
    """

    takes_labels = True
    takes_label_rows = True

    def __init__(self, model: Llama, layers: range) -> None:
        super().__init__()
        self.config = model.config
        self.chunk_tokens = model.chunk_tokens
        self.tensor: TensorGroup | None = None
        self.expert: ExpertGroup | None = None
        self.layers = layers
        self.first, self.last = layers.start == 0, layers.stop == model.config.layers
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)
        if self.first:
            self.embedding = model.embedding
        if self.last:
            self.norm = model.norm
            self.head = model.head
        if self.last and not self.first and model.config.tied_embeddings:
            whole = model.embedding.weight  # a copy of it: the model that was split keeps its one weight
            self.head = nn.Linear(model.config.hidden, model.config.vocabulary, bias=False, device="meta")
            self.head.weight = nn.Parameter(whole.detach().clone(), requires_grad=whole.requires_grad)

    @property
    def tied(self) -> nn.Parameter | None:
        """The parameter whose twin is on the other end of the pipeline, or ``None``. Both start equal."""
        if not self.config.tied_embeddings or self.first == self.last:
            return None
        return cast(nn.Parameter, self.head.weight if self.last else self.embedding.weight)

    def boundary(self, tokens: int) -> Tensor:
        """An uninitialised tensor for what a stage gives the next one, or its gradient: ``[tokens, hidden]``, with
        tensor parallelism this rank's block of them. Local.
        """
        like = next(self.blocks.parameters())
        rows = tokens if self.tensor is None else self.tensor.rows(tokens)
        return torch.empty(rows, self.config.hidden, dtype=like.dtype, device=like.device)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        cu_seqlens: Tensor | Tree,
        comm: Communicator,
        labels: Tensor | None = None,
        label_rows: Tensor | None = None,
        label_weights: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the layers; arguments as of :meth:`hdpcomm.models.Llama.forward`. Collective over ``comm``.

        Args:
            x: the first stage: ``[tokens]`` int64; others: ``[tokens, hidden]``, this rank's shard; of it the block of
                this tensor rank, where there are several.
            labels: of the last stage; of another one with routers whose losses count: then it gives these, too.
            label_rows, label_weights: of the last stage only.
        """
        if self.first:
            x = self.embedding(x)
        tables = rope_tables(positions, self.config.head_dim, theta=self.config.rope_theta, dtype=x.dtype)
        x, router_logits = run_blocks(self.blocks, x, tables, cu_seqlens, comm)
        out = x
        if self.last:
            out = finish_llama(self, x, positions.shape[0], labels, label_rows, label_weights)
        if labels is None or not self.config.has_router_losses:
            return out
        losses = losses_of_routers(self, router_logits, labels, cu_seqlens, comm)
        return out + losses if self.last else (out, losses)

    def name_in_model(self, name: str) -> str:
        """The name that a parameter of this stage has in the model. Local."""
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = str(int(parts[1]) + self.layers.start)
        return ".".join(parts)


def split_llama(model: Llama, stages: int, *, layers: Sequence[int] | None = None) -> list[LlamaStage]:
    """The stages of a model, in order; each rank keeps its own and drops the others. Local.

    The layers are shared with ``model``, which still works. With tied embeddings and more than one stage the last one
    gets a copy of the weight, which training keeps equal to that of the first.

    Args:
        layers: how many each stage gets; default: all as many.

    Raises:
        InvalidUsage: the stages do not divide the layers, or ``layers`` does not sum up to them.
    """
    if not isinstance(model, Llama):
        raise InvalidUsage(f"split_llama() got a {type(model).__name__}; it cuts hdpcomm.models.Llama only")
    if layers is None:
        return [LlamaStage(model, each) for each in layers_of_stages(model.config.layers, stages)]
    if len(layers) != stages or min(layers, default=0) < 1 or sum(layers) != model.config.layers:
        raise InvalidUsage(
            f"layers is {list(layers)} for {stages} stages of a model with {model.config.layers} layers; give one "
            "number of at least 1 for each stage, with that sum"
        )
    bounds = [0, *itertools.accumulate(layers)]
    return [LlamaStage(model, range(first, last)) for first, last in itertools.pairwise(bounds)]
