"""Chunked attention: sequences whose tokens see only their own chunk, where plain sequences put them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from hdpcomm.attention.layout import Layout
from hdpcomm.attention.pieces import local_rows
from hdpcomm.attention.tree_layout import TreeLayout
from hdpcomm.plan.tree import Tree

__all__ = ["chunked_layout", "chunked_slice"]


@lru_cache(maxsize=256)
def chunked_layout(layout: Layout, chunk: int) -> TreeLayout:
    """The chunks of each sequence as segments of their own, in the rows in which the ranks hold the sequences. Local.

    Args:
        chunk: tokens; the last chunk of a sequence may have fewer.
    """
    firsts = np.cumsum(layout.lengths) - layout.lengths
    counts = -(-layout.lengths // chunk)
    numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = np.repeat(firsts, counts) + numbers * chunk
    pieces = (firsts[:, None] + layout.bounds[:, :-1]).reshape(-1)
    holders = np.tile(np.concatenate([np.arange(layout.size), np.arange(layout.size)[::-1]]), len(firsts))
    source = np.unique(np.concatenate([chunks, pieces[pieces < layout.tokens]]))
    count = np.diff(source, append=layout.tokens)
    segment = np.searchsorted(chunks, source, side="right") - 1
    owner = holders[np.searchsorted(pieces, source, side="right") - 1]  # of equal first rows, the piece with tokens
    return TreeLayout(
        size=layout.size,
        segment=segment,
        start=source - chunks[segment],
        source=source,
        count=count,
        owner=owner,
        row=local_rows(owner, count, layout.size),
        tree=Tree([-1] * len(chunks), np.diff(chunks, append=layout.tokens)),
    )


@lru_cache(maxsize=256)
def chunked_slice(layout: TreeLayout, chunk: int) -> TreeLayout:
    """Chunked layout of a slice of a plain sequence: of its queries, or of the keys up to its end. Local."""
    edges = np.arange(0, layout.tree.num_tokens, chunk)
    first, end = layout.start[0], layout.start[-1] + layout.count[-1]
    start = np.unique(np.concatenate([layout.start, edges[(edges > first) & (edges < end)]]))
    piece = np.searchsorted(layout.start, start, side="right") - 1
    apart = start - layout.start[piece]
    return replace(
        layout,
        segment=start // chunk,
        start=start % chunk,
        source=layout.source[piece] + apart,
        count=np.diff(start, append=end),
        owner=layout.owner[piece],
        row=layout.row[piece] + apart,
        tree=Tree([-1] * len(edges), np.diff(edges, append=layout.tree.num_tokens)),
    )
