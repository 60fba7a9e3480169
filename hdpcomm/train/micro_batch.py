"""The forward pass of a micro-batch, down to its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hdpcomm.train.loss import summed_loss

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.train.shards import PackedShard

__all__ = ["micro_batch_loss"]


def micro_batch_loss(
    model: nn.Module,
    packed: PackedShard,
    comm: Communicator,
    loss: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The summed loss of this rank's shard of a micro-batch; the forward pass. Collective over ``comm``.

    A model with ``takes_labels = True`` gets the labels and returns the sum, unless ``loss(logits, labels)`` is given;
    with any other, the logits exist as a whole. The labels of a tree, and those with losses of their own, go only to a
    model with ``takes_label_rows = True``; ``loss(logits, labels, weights)`` gets the logits of each label's token and
    the label's factor.
    """
    places = {"positions": packed.positions, "cu_seqlens": packed.cu_seqlens, "comm": comm}
    rows, weights = packed.label_rows, packed.label_weights
    plain = rows is None and weights is None
    if loss is None and getattr(model, "takes_labels" if plain else "takes_label_rows", False):
        more = {} if plain else {"label_rows": rows, "label_weights": weights}
        total: Tensor = model(packed.tokens, **places, labels=packed.labels, **more)
        return total
    logits = model(packed.tokens, **places)
    if plain:
        return (loss or summed_loss)(logits, packed.labels)
    return (loss or summed_loss)(logits if rows is None else logits[rows], packed.labels, weights)
