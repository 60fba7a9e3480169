"""Models of layers and a head, last layers of those of transformers, and to what the labels of their outputs belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import IGNORE, LabelLoss
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.models.media import MediaEncoder
from hdpcomm.models.moe import AddedLosses, RouterWeights
from hdpcomm.models.mtp import MultiToken
from hdpcomm.models.routes import RoutesShape
from hdpcomm.models.tensor_group import TensorGroup

__all__ = ["NEXT_TOKEN", "SEQUENCE", "TOKEN", "LayeredModel", "classified_token", "head_of"]

NEXT_TOKEN, TOKEN, SEQUENCE = "next token", "token", "sequence"
"""To what a label belongs: to the token after that of the outputs, to that token, or to the sequence, whose last token
that is no padding has the outputs."""
_CLASSIFIERS = {"ForSequenceClassification": SEQUENCE, "ForTokenClassification": TOKEN}


def head_of(model: Any) -> tuple[nn.Module, str] | None:
    """The last layer of a model of transformers, inside of peft's or not, and to what its labels belong. Local.

    Returns: ``None`` where there is neither a head that gives logits of tokens, nor the linear layer ``score`` that
    classifiers over causal decoders have.
    """
    if callable(getattr(model, "get_base_model", None)):
        model = model.get_base_model()
    if (head := model.get_output_embeddings()) is not None:
        return head, NEXT_TOKEN
    score = getattr(model, "score", None)
    names = [kind.__name__ for kind in type(model).__mro__]
    for ending, labels in _CLASSIFIERS.items():
        if isinstance(score, nn.Module) and any(name.endswith(ending) for name in names):
            return score, labels
    return None


def classified_token(tokens: Tensor, padding: int | None) -> int:
    """The place of the token whose outputs classify a sequence: the last that is no padding, as transformers finds
    it. Local.

    Args:
        padding: the token of that name in the model's configuration, which a sequence may have at its end.
    """
    seen = (tokens != (-1 if padding is None else padding)).nonzero()
    return int(seen[-1]) if len(seen) else 0


class LayeredModel(nn.Module):
    """A model of layers and a head in the form that the trainer calls: ``run_layers`` and ``finish`` of its subclasses
    and ``added_losses``, one after the other."""

    takes_labels = True
    takes_label_rows = True
    chunk_tokens: int | None = None
    """Tokens in a chunk of the loss; see :func:`hdpcomm.kernels.linear_cross_entropy`."""
    tensor: TensorGroup | None = None
    """The ranks that share the layers; see :func:`hdpcomm.parallel.tensor_parallel`."""
    expert: ExpertGroup | None = None
    """The ranks that share the experts; see :func:`hdpcomm.parallel.expert_parallel`."""
    routes_shape: RoutesShape | None = None
    """The shape of the routes of all its layers; ``None``: it has no router that is known."""
    loss_terms: AddedLosses | None = None
    """Losses that its routers add."""
    media: MediaEncoder | None = None
    """The encoder of images and videos; ``None``: it takes text alone."""
    mtp: MultiToken | None = None
    """Layers that predict tokens further ahead; see :func:`hdpcomm.models.add_mtp`."""

    def forward(
        self: Any,
        tokens: Tensor,
        *,
        positions: Tensor,
        cu_seqlens: CuSeqlens,
        comm: Communicator | None,
        labels: Tensor | None = None,
        label_rows: Tensor | None = None,
        label_weights: Tensor | LabelLoss | None = None,
        ahead: Tensor | None = None,
        router_weights: RouterWeights | None = None,
    ) -> Any:
        """Logits ``[tokens, vocabulary]`` of the local tokens; with ``labels`` the sum of their losses instead.

        Args:
            tokens: ``[tokens]`` int64, this rank's shard of the pack; may be empty. A model with ``media`` takes
                :class:`hdpcomm.models.media.TokensWithItems`, too.
            positions: ``[tokens]`` int64, the place of each token inside its own sequence.
            cu_seqlens: ``[sequences + 1]`` int32, where the sequences of the whole pack begin and end; or its tree.
            comm: the ranks that share the pack. Collective over all of them, in forward and in backward.
            labels: ``[tokens]`` int64, -100 for a token without a loss. The logits then exist for a chunk of tokens at
                a time (:func:`hdpcomm.kernels.linear_cross_entropy`). With a router's auxiliary loss each labelled
                token adds the coefficient times that of its sequence.
            label_rows: int64, for each label its token's row; a token of a tree may have several. ``None``: one each.
            label_weights: float32, for each label the factor of its loss, or what their losses are
                (:class:`hdpcomm.kernels.LabelLoss`); ``None``: 1.
            ahead: int64 ``[depths, 2, tokens]``, the tokens and labels 1, 2, ... places later in their sequences, for
                multi-token prediction: backward passes get its gradient, too.
            router_weights: by how much losses of routers count; ``None``: once for each label of plain sequences.
        """
        places: dict[str, Any] = {"positions": positions, "cu_seqlens": cu_seqlens, "comm": comm}
        hidden, added = self.run_layers(tokens, **places)
        out = self.finish(hidden, positions.shape[0], labels, label_rows, label_weights)
        if ahead is not None:
            out = out + self.loss_ahead(hidden, ahead, **places)
        if labels is None or not self.has_added_losses:
            return out
        if router_weights is None:
            if label_rows is not None:
                raise InvalidUsage("label_rows were given, and routers add losses: give router_weights, too")
            router_weights = RouterWeights((labels != IGNORE).double())
        return self.joined(out, self.added_losses(added, router_weights, cu_seqlens, comm))

    @property
    def has_added_losses(self) -> bool:
        """Whether routers add to the loss."""
        return self.loss_terms is not None

    def added_losses(
        self, router_logits: Sequence[Tensor], weights: RouterWeights, cu_seqlens: CuSeqlens,
        comm: Communicator | None, **stages: Any,
    ) -> Tensor:  # fmt: skip
        """The routers' losses; see :meth:`hdpcomm.models.moe.AddedLosses.total`. Collective over ``comm``."""
        assert self.loss_terms is not None, "a model without a router adds no loss"
        if self.tensor is not None:
            router_logits = [self.tensor.gather(x, len(weights.tokens), partial=False) for x in router_logits]
        return self.loss_terms.total(router_logits, weights, cu_seqlens, comm, **stages)

    def joined(self, out: Tensor, added: Tensor) -> Any:
        """The loss with those that layers add."""
        return out + added.to(out.dtype)
