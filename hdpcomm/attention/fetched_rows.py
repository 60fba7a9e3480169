"""Rows of other ranks that a rank needs: asked for by number, each comes once, and one gradient of it goes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.attention.indexer import places_of, rank_in
from hdpcomm.attention.tree_layout import TokenLayout

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Needed", "needed_tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class Needed:
    """Which rows a rank needs, and who needs its rows.

    Attributes:
        numbers: of each token of the pack, the row of what comes; -1: it does not. One more entry, -1.
        recv_rows: by rank, the rows of that rank that come from it, in their order.
        send_rows: by rank, the own rows that go to it.
    """

    numbers: Tensor
    recv_rows: list[Tensor]
    send_rows: list[Tensor]

    def fetch(self, own: Tensor, comm: Communicator | None) -> Tensor:
        """The rows of ``[tokens, width]`` that are needed. Collective."""
        return _swap(
            [own[rows.to(own.device)] for rows in self.send_rows], [len(rows) for rows in self.recv_rows], comm
        )

    def scatter_add_grads(self, sent: Tensor, rows: int, comm: Communicator | None) -> Tensor:
        """``[rows, width]``: what all ranks have for this one's rows, added in the order of ranks. Collective."""
        counts = [len(each) for each in self.send_rows]
        arrived = _swap(list(torch.split(sent, [len(each) for each in self.recv_rows])), counts, comm)
        total = sent.new_zeros(rows, sent.shape[1])
        for own, part in zip(self.send_rows, torch.split(arrived, counts), strict=True):
            total.index_add_(0, own.to(total.device), part)
        return total


def needed_tokens(tokens: Tensor, layout: TokenLayout, comm: Communicator | None) -> Needed:
    """Rows that this rank fetches from each rank for these tokens of a pack, which rise. Collective: ranks tell each
    other what they need."""
    places = places_of(layout)
    owner, row = places.owner, places.row
    rank, size = rank_in(comm), 1 if comm is None else comm.size
    wanted = tokens.cpu()
    order = torch.argsort(owner[wanted], stable=True)  # by owner, then by number
    wanted = wanted[order]
    counts = torch.bincount(owner[wanted], minlength=size)
    recv_rows = list(torch.split(row[wanted], counts.tolist()))
    send_rows = [recv_rows[rank]]
    if comm is not None and comm.size > 1:
        theirs = torch.empty_like(counts)
        comm.all_to_all(theirs, counts)
        flat = torch.empty(int(theirs.sum()), dtype=torch.int64)
        comm.all_to_all(flat, torch.cat(recv_rows), out_splits=theirs.tolist(), in_splits=counts.tolist())
        send_rows = list(torch.split(flat, theirs.tolist()))
    numbers = torch.full((len(owner) + 1,), -1, dtype=torch.int64)
    numbers[wanted] = torch.arange(len(wanted))
    return Needed(numbers, recv_rows, send_rows)


def _swap(parts: list[Tensor], counts: list[int], comm: Communicator | None) -> Tensor:
    """Sends the parts to the ranks and gives what they send, one after the other: ``[sum of counts, width]``."""
    if comm is None or comm.size == 1:
        return parts[0]
    out = parts[0].new_empty(sum(counts), parts[0].shape[1])
    width = out.shape[1]
    comm.all_to_all(
        out.view(-1),
        torch.cat(parts).view(-1),
        out_splits=[count * width for count in counts],
        in_splits=[len(part) * width for part in parts],
    )
    return out
