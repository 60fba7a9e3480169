"""From the sequences of a micro-batch to this rank's shard of their pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.attention import positions as positions_of
from hdpcomm.attention import shard
from hdpcomm.errors import InvalidUsage
from hdpcomm.train.loss import next_token_labels

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.plan import MicroBatch

__all__ = ["Fetch", "PackedShard", "pack_shard"]

Fetch = Callable[[int], "Tensor | tuple[Tensor, Tensor]"]
"""Gives the tokens ``[length]`` (int64) of a sequence of the global batch by its place in the lengths.

It may also give (tokens, labels)."""


@dataclass(frozen=True, slots=True)
class PackedShard:
    """This rank's part of a micro-batch.

    Attributes:
        tokens, labels, positions: ``[local tokens]`` int64, in the order of the shard.
        cu_seqlens: ``[sequences + 1]`` int32, where the sequences of the whole pack begin and end.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor


def pack_shard(micro_batch: MicroBatch, fetch: Fetch, *, comm: Communicator, device: torch.device) -> PackedShard:
    """Fetches a micro-batch's sequences, makes labels, packs them and takes this rank's shard. Local.

    Args:
        comm: the communicator over the micro-batch's ranks.

    Raises:
        InvalidUsage: ``fetch`` gave something else than a sequence of the planned length.
    """
    tokens, labels, bounds = [], [], [0]
    for sequence in micro_batch.sequences:
        text, wanted = _checked(fetch(sequence.id), sequence.id, sequence.length)
        tokens.append(text)
        labels.append(wanted)
        bounds.append(bounds[-1] + sequence.length)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    rank, size = comm.rank, comm.size
    return PackedShard(
        tokens=shard(torch.cat(tokens), cu_seqlens, rank=rank, size=size).to(device),
        labels=shard(torch.cat(labels), cu_seqlens, rank=rank, size=size).to(device),
        positions=positions_of(cu_seqlens, rank=rank, size=size, device=device),
        cu_seqlens=cu_seqlens,
    )


def _checked(fetched: Tensor | tuple[Tensor, Tensor], sequence: int, length: int) -> tuple[Tensor, Tensor]:
    tokens, labels = fetched if isinstance(fetched, tuple) else (fetched, None)
    for name, given in (("tokens", tokens), ("labels", labels)):
        if given is not None and (given.shape != (length,) or given.dtype != torch.int64):
            raise InvalidUsage(
                f"fetch({sequence}) gave {name} of shape {tuple(given.shape)} and {given.dtype}; the step was "
                f"planned for int64 [{length}]"
            )
    return tokens, next_token_labels(tokens) if labels is None else labels
