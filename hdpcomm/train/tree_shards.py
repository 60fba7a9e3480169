"""From the trees of a micro-batch to this rank's shard of their pack, with the losses of every branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention import SequenceSlice, positions, shard
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import SequenceFragment, Tree, TreeFragment, join_trees
from hdpcomm.train.loss import IGNORE
from hdpcomm.train.shards import Fetch, PackedShard, checked

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.plan import MicroBatch

__all__ = ["holds_trees", "pack_tree_slice", "pack_trees", "rows_of_shard"]


def holds_trees(micro_batch: MicroBatch, items: Sequence[int | Tree]) -> bool:
    """Whether a sequence of the micro-batch is a tree, or a fragment of one."""
    return any(s.id >= len(items) or isinstance(items[s.id], Tree) for s in micro_batch.sequences)


def pack_trees(
    micro_batch: MicroBatch,
    items: Sequence[int | Tree],
    fragments: Sequence[TreeFragment | SequenceFragment],
    fetch: Fetch,
    *,
    comm: Communicator,
    device: torch.device,
) -> PackedShard:
    """Like :func:`hdpcomm.train.shards.pack_shard`, for a micro-batch with trees. Local.

    The token after a branch is one of several, so a token has any number of labels: each of the shard's labels tells
    its row, and its weight: how many trajectories train on it.

    Args:
        items: what the step was planned for.
        fragments: of the step's plan.
    """
    trees, parts = [], []
    first = 0
    for sequence in micro_batch.sequences:
        tree, part = _fetched(sequence.id, items, fragments, fetch)
        trees.append(tree)
        parts.append(replace(part, places=part.places + first))
        first += tree.num_tokens
    whole = _Losses(*(torch.cat([getattr(part, name) for part in parts]) for name in _Losses.__slots__))
    return _packed(join_trees(trees), whole, comm, device)


def pack_tree_slice(
    sequence: int,
    part: SequenceSlice,
    items: Sequence[int | Tree],
    fragments: Sequence[TreeFragment | SequenceFragment],
    fetch: Fetch,
    *,
    comm: Communicator,
    device: torch.device,
) -> PackedShard:
    """Like :func:`pack_trees`, for the slice ``part`` of the tree ``sequence`` of a plan. It has the labels of its own
    tokens, wherever the tokens are that they come from. Local."""
    return _packed(part, _fetched(sequence, items, fragments, fetch)[1], comm, device)


def _packed(pack: Tree | SequenceSlice, whole: _Losses, comm: Communicator, device: torch.device) -> PackedShard:
    """``whole``: all of the pack; of a slice, of its whole tree."""
    rank, size = comm.rank, comm.size
    mine, here, rows = rows_of_shard(pack, whole.places, rank=rank, size=size)
    return PackedShard(
        tokens=whole.tokens[mine].to(device),
        labels=whole.labels[here].to(device),
        positions=positions(pack, rank=rank, size=size, device=device),
        cu_seqlens=pack,
        label_rows=rows.to(device),
        label_weights=whole.weights[here].to(device),
    )


def rows_of_shard(pack: Tree | SequenceSlice, places: Tensor, *, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(places of the shard's tokens in the pack, which labels are here, the rows of these in the shard); ``places``:
    those of the labels' tokens. Those of a slice are in its whole tree. Local."""
    tree, first, end = (pack, 0, None) if isinstance(pack, Tree) else (pack.sequence.tree, pack.start, pack.stop)
    end, total = tree.num_tokens if end is None else end, tree.num_tokens
    mine = shard(torch.arange(first, end), pack, rank=rank, size=size)
    row = torch.full((total,), -1, dtype=torch.int64)
    row[mine] = torch.arange(len(mine))
    here = row[places] >= 0
    return mine, here, row[places[here]]


@dataclass(frozen=True, slots=True)
class _Losses:
    """The tokens of a tree, and all that is to be predicted: a label after the token at a place, with a weight."""

    tokens: Tensor
    places: Tensor
    labels: Tensor
    weights: Tensor


def _fetched(
    i: int, items: Sequence[int | Tree], fragments: Sequence[TreeFragment | SequenceFragment], fetch: Fetch
) -> tuple[Tree, _Losses]:
    fragment = fragments[i - len(items)] if i >= len(items) else None
    assert not isinstance(fragment, SequenceFragment)  # those are alone in their micro-batches
    item = items[i] if fragment is None else items[fragment.tree]
    if not isinstance(item, Tree):
        tokens, labels = checked(fetch(i), i, item)
        places = (labels != IGNORE).nonzero()[:, 0]
        return Tree([-1], [item]), _Losses(tokens, places, labels[places], torch.ones(len(places)))
    tokens, weights = _checked_tree(fetch(i if fragment is None else fragment.tree), i, item)
    tree = item
    if fragment is not None:
        tree = item.part(fragment.segments)
        chosen = torch.from_numpy(item.token_places(fragment.segments))
        repeated = torch.from_numpy(np.repeat(fragment.repeated, tree.lengths))
        tokens, weights = tokens[chosen], weights[chosen].masked_fill(repeated, 0.0)
    previous = torch.from_numpy(tree.previous.copy())
    trained = ((previous >= 0) & (weights != 0)).nonzero()[:, 0]
    return tree, _Losses(tokens, previous[trained], tokens[trained], weights[trained])


def _checked_tree(fetched: Any, i: int, tree: Tree) -> tuple[Tensor, Tensor]:
    tokens, weights = fetched if isinstance(fetched, tuple) else (fetched, None)
    if weights is None:
        weights = torch.from_numpy(np.repeat(tree.trajectories, tree.lengths)).float()
    for name, given, dtype in (("tokens", tokens, torch.int64), ("weights", weights, torch.float32)):
        if not isinstance(given, Tensor):
            raise InvalidUsage(f"fetch({i}) gave {name} = {given!r}; expected a tensor of {dtype} [{tree.num_tokens}]")
        if given.shape != (tree.num_tokens,) or given.dtype != dtype:
            raise InvalidUsage(
                f"fetch({i}) gave {name} of shape {tuple(given.shape)} and {given.dtype}; the step was planned for a "
                f"tree, whose {name} are {dtype} [{tree.num_tokens}]"
            )
    return tokens, weights
