"""Images and videos of rows that each rank was given: the pixels go to the ranks that encode them, and to no others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from hdpcomm.data.agree import gather_json
from hdpcomm.models.media import is_pixels
from hdpcomm.plan import Item

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.models.media import MediaEncoder
    from hdpcomm.plan.items import PlacedItems

__all__ = ["RowMedia"]


class RowMedia:
    """The images and videos in the sequences of all ranks, as the processor has made them: pixels without values but
    for this rank's own, and those that :meth:`send_pixels` has brought.

    Args:
        own: of each of this rank's sequences, as of :meth:`hdpcomm.models.media.MediaEncoder.split`.

    Collective over ``comm``: a message of the sizes of all.
    """

    def __init__(self, own: Sequence[Mapping[str, Tensor]], comm: Communicator) -> None:
        told = gather_json(
            comm,
            [{name: list(x.shape) if is_pixels(name) else x.tolist() for name, x in each.items()} for each in own],
        )
        self._own, self._comm = own, comm
        self._holder = [rank for rank, rows in enumerate(told) for _ in rows]
        self.given: list[dict[str, Tensor]] = [
            {name: torch.empty(x, device="meta") if is_pixels(name) else torch.tensor(x) for name, x in row.items()}
            for rows in told
            for row in rows
        ]
        self._first = self._holder.index(comm.rank) if own else 0
        self.given[self._first : self._first + len(own)] = map(dict, own)

    def items(self, encoder: MediaEncoder, sequences: Sequence[Tensor]) -> list[list[Item]]:
        """The items of each sequence of all ranks, by their tokens; each rank looks at its own. Collective."""
        rows = zip(sequences[self._first : self._first + len(self._own)], self._own, strict=True)
        own = [[astuple(item) for item in encoder.items({"tokens": tokens, **given})] for tokens, given in rows]
        return [[Item(*item) for item in row] for rank in gather_json(self._comm, own) for row in rank]

    def digests(self) -> list[str]:
        """By sequence, equal for equal images and videos; empty without any. Collective."""
        own = [
            hashlib.sha256(b"".join(_bytes_of(x) for _, x in sorted(each.items()))).hexdigest() if each else ""
            for each in self._own
        ]
        return [digest for rows in gather_json(self._comm, own) for digest in rows]

    def send_pixels(self, placed: PlacedItems, mesh: Mesh, like: Tensor) -> None:
        """Sends each sequence's pixels, in the type of ``like``, to all ranks that encode some of its items. Collective
        over the mesh."""
        ranks = mesh.positions.flatten().tolist()
        comm = cast("Communicator", mesh.comm.subset(ranks))
        parts: dict[int, list[Tensor]] = {rank: [] for rank in range(comm.size)}
        gets: list[list[tuple[int, str]]] = [[] for _ in range(comm.size)]
        for place, encoder in np.unique(np.stack((placed.sequence, placed.device)), axis=1).T.tolist():
            given, holder = self.given[place], ranks.index(self._holder[place])
            for name in filter(is_pixels, given if encoder != holder else ()):
                if holder == comm.rank:
                    parts[encoder].append(given[name].to(like).flatten())
                if encoder == comm.rank:
                    gets[holder].append((place, name))
        nothing = like.new_zeros(0)
        out_counts = [sum(self.given[place][name].numel() for place, name in each) for each in gets]
        out = like.new_empty(sum(out_counts))
        x = torch.cat([nothing, *(part for each in parts.values() for part in each)])
        comm.all_to_all(out, x, out_counts, [sum(part.numel() for part in each) for each in parts.values()])
        first = 0
        for place, name in (pair for each in gets for pair in each):
            size = self.given[place][name].shape
            self.given[place][name] = out[first : first + size.numel()].view(size)
            first += size.numel()


def _bytes_of(x: Tensor) -> bytes:
    """In any type; numpy knows no bf16."""
    return x.cpu().contiguous().view(torch.uint8).numpy().tobytes()
