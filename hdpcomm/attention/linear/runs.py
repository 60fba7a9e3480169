"""Runs of consecutive tokens of a rank, cut into chunks of one size. All functions are pure and local."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Runs", "chunked"]

_CHUNKS = (16, 32, 64)
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of tokens (maybe empty ones), in chunks of ``chunk`` tokens.

    Chunks are ordered by their place in their run, and runs by their number of chunks, longest first: the i-th chunks
    of all runs that have one are neighbours, and step i of a scan over all runs at once is one range of chunks.
    """

    count: int
    """Runs, also empty ones."""
    chunk: int
    chunks: int
    active: tuple[int, ...]
    """For each step, the runs that have a chunk there."""
    starts: Int64
    """[runs]: the first local row of each run."""
    lengths: Int64
    """[runs]: its tokens."""
    _order: Int64
    _rows: Int64
    """[chunks * chunk]: the local row of each place, -1 where the last chunk of a run is filled up."""
    _on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(order of runs, places that hold a token, their rows)."""
        if device not in self._on_device:
            places = np.flatnonzero(self._rows >= 0)
            tables = (self._order, places, self._rows[places])
            order, where, rows = (torch.from_numpy(table).to(device) for table in tables)
            self._on_device[device] = order, where, rows
        return self._on_device[device]

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T_local, heads, ...] -> [chunks * heads, chunk, ...], zeros where no token is."""
        _, places, rows = self._tables(x.device)
        shape = (self.chunks * self.chunk, *x.shape[1:])
        if len(places) == shape[0]:
            flat = x.index_select(0, rows).to(dtype)
        else:
            flat = torch.zeros(shape, dtype=dtype, device=x.device)
            flat.index_copy_(0, places, x.index_select(0, rows).to(dtype))
        split = flat.view(self.chunks, self.chunk, *x.shape[1:]).transpose(1, 2)
        return split.reshape(self.chunks * x.shape[1], self.chunk, *x.shape[2:])

    def put(self, out: Tensor, x: Tensor) -> None:
        """Writes [chunks * heads, chunk, ...] to the rows of ``out`` [T_local, heads, ...]."""
        _, places, rows = self._tables(x.device)
        heads = out.shape[1]
        flat = x.view(self.chunks, heads, self.chunk, *x.shape[2:]).transpose(1, 2)
        flat = flat.reshape(self.chunks * self.chunk, heads, *x.shape[2:])
        if len(places) < flat.shape[0]:
            flat = flat.index_select(0, places)
        out.index_copy_(0, rows, flat.to(out.dtype))

    def take_states(self, states: Tensor) -> Tensor:
        """[runs, heads, ...] -> [runs that are not empty * heads, ...]; a copy."""
        order, _, _ = self._tables(states.device)
        return states.index_select(0, order).flatten(0, 1)

    def put_states(self, states: Tensor, x: Tensor) -> Tensor:
        """``states`` with those of the runs that are not empty replaced by ``x`` [such runs * heads, ...]."""
        order, _, _ = self._tables(x.device)
        return states.index_copy(0, order, x.view(len(order), *states.shape[1:]))


def _best_chunk(lengths: Int64, dim: int) -> int:
    """The chunk with the least work: 5 chunk^2 dim products inside of it, and 3 chunk dim^2 with the state."""
    work = [(-(-lengths // c)).sum() * (5 * c * c * dim + 3 * c * dim * dim) for c in _CHUNKS]
    return _CHUNKS[int(np.argmin(work))]


def chunked(start: Int64, lengths: Int64, dim: int) -> Runs:
    """The runs of ``lengths`` tokens from the local rows ``start`` on.

    ``dim``: the rows of the state, by which the size of chunks is chosen.
    """
    chunk = _best_chunk(lengths, dim)
    counts = -(-lengths // chunk)
    order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    first, tokens, counts = start[order], lengths[order], counts[order]
    run = np.repeat(np.arange(len(order)), counts)
    step = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_step = np.lexsort((run, step))
    run, step = run[by_step], step[by_step]
    inside = step[:, None] * chunk + np.arange(chunk)[None, :]
    rows = np.where(inside < tokens[run][:, None], first[run][:, None] + inside, -1)
    active = tuple(np.bincount(step).tolist()) if len(step) else ()
    return Runs(len(lengths), chunk, len(run), active, start, lengths, order, rows.reshape(-1))
