"""Masks of one's own: :class:`BlockMask` says by a function which keys a query sees, as in torch's FlexAttention."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention.layout import Layout, Window, local_rows
from hdpcomm.attention.packs import Pack, check_size
from hdpcomm.attention.tiles import Atoms, Band, Int64, Span, Tile, Visible, join_tiles, window_pair
from hdpcomm.attention.tree_layout import TokenLayout
from hdpcomm.errors import InvalidUsage

__all__ = ["BlockMask"]

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class BlockMask(Pack):
    """A pack whose mask is a function; in attention it takes the place of ``cu_seqlens``.

    The general fallback: any mask is right, and blocks of it that hide all their pairs are neither sent nor computed.
    Planning looks at every pair, so plain sequences, windows and trees are better given as such. The backends ``cpu``
    and ``reference`` compute it.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` as of ``torch.nn.attention.flex_attention``: True where the query
            sees the key. The indices are int64 CPU tensors of places in the pack that broadcast against each other;
            ``b`` and ``h`` are 0, as all heads have one mask. Must give the same on all ranks and in every call: it is
            called for all pairs once, and again for the blocks that it hides in part.
        num_tokens: of the pack.
        positions: int64 [num_tokens], what :func:`hdpcomm.attention.positions` gives; default: the place in the pack.
        block: tokens of a block, which one rank holds as a whole; made smaller where ranks would hold none.

    Raises:
        InvalidUsage: a size below 1, or positions of another shape. What ``mask_mod`` does wrong is found by the first
            call that uses the mask.

    Examples:
        >>> prefix = BlockMask(lambda b, h, q, kv: (kv <= q) | (kv < 100), 4096)  # the first 100 tokens see each other
    """

    def __init__(
        self, mask_mod: MaskMod, num_tokens: int, *, positions: Tensor | None = None, block: int = 128
    ) -> None:
        if num_tokens < 1 or block < 1:
            raise InvalidUsage(f"num_tokens is {num_tokens} and block {block}; expected at least 1")
        if positions is not None and (positions.shape != (num_tokens,) or positions.dtype != torch.int64):
            raise InvalidUsage(
                f"positions have shape {tuple(positions.shape)} and type {positions.dtype}; expected int64 "
                f"[{num_tokens}], one for each token"
            )
        self.mask_mod, self.num_tokens, self.block = mask_mod, num_tokens, block
        self._given_positions = None if positions is None else positions.clone()
        self._layouts: dict[int, MaskLayout] = {}

    def visible(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """[queries, keys] bool, for [first, last) places in the pack. Raises InvalidUsage where mask_mod is wrong."""
        zero = torch.zeros((), dtype=torch.int64)
        shape = (queries[1] - queries[0], keys[1] - keys[0])
        try:
            with torch.no_grad():
                seen = self.mask_mod(zero, zero, torch.arange(*queries)[:, None], torch.arange(*keys)[None, :])
        except Exception as error:
            raise InvalidUsage(
                f"mask_mod failed on queries {queries} and keys {keys} ({type(error).__name__}: {error}); it is called "
                "with index tensors on the CPU that broadcast: b, h [], q_idx [queries, 1], kv_idx [1, keys]"
            ) from error
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool or seen.device.type != "cpu":
            kind = f"{seen.dtype} on {seen.device}" if isinstance(seen, Tensor) else type(seen).__name__
            raise InvalidUsage(
                f"mask_mod gave {kind}; expected a bool tensor on the CPU, True where a query sees a key"
            )
        try:
            return seen.expand(shape)
        except RuntimeError as error:
            raise InvalidUsage(
                f"mask_mod gave the shape {tuple(seen.shape)} for {shape[0]} queries and {shape[1]} keys; expected one "
                "that broadcasts to these"
            ) from error

    @property
    def longest(self) -> int:
        return self.num_tokens if self._given_positions is None else int(self._given_positions.max()) + 1

    def positions(self, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
        given = self._given_positions
        return super().positions(rank, size, device) if given is None else self.shard(given, rank, size).to(device)

    def layout(self, size: int) -> MaskLayout:
        check_size(size)
        if size not in self._layouts:
            self._layouts[size] = mask_layout(self, size)
        return self._layouts[size]

    def token_layouts(self, size: int) -> tuple[TokenLayout, TokenLayout]:  # noqa: ARG002
        raise self.no_sequences()


@dataclass(frozen=True, slots=True, eq=False)
class MaskLayout(Layout):
    """Which rank holds which blocks of a masked pack; the pieces are the blocks."""

    mask: BlockMask
    seen: Int64
    """[blocks, blocks]: pairs of each block of queries and block of keys that the mask allows."""
    digest: str
    """Hash of the whole mask."""

    @property
    def masked(self) -> bool:
        return True

    def band(self, causal: bool, window: Window) -> Band:  # noqa: ARG002
        if window is not None and window_pair(window) != (-1, -1):
            raise InvalidUsage(f"window={window} was given with a mask, which says by itself what is visible")
        return Band(None, None)

    @property
    def facts(self) -> tuple[str, str]:
        pairs = int(self.seen.sum())
        given = self.mask._given_positions
        positions = None if given is None else hashlib.sha256(given.numpy().tobytes()).hexdigest()
        name = f"mask {self.digest} of blocks of {self.block}, positions {positions}"
        return name, f"a mask over {self.tokens} tokens with {pairs} pairs (hash {self.digest[:12]})"

    @property
    def block(self) -> int:
        """Tokens of a block; the last one may have fewer."""
        return int(self.count[0])

    def atoms(self, keys: Layout, band: Band) -> Atoms:  # noqa: ARG002
        holds = self.owner[:, None] == np.arange(self.size)[None, :]
        needed = ((self.seen > 0).T.astype(np.int64) @ holds.astype(np.int64)) > 0
        needed[holds] = False
        return Atoms(self.segment, self.start, self.start + self.count, self.owner, self.row, needed)

    def tiles(self, keys: Layout, rank: int, k_spans: dict[int, list[Span]], band: Band) -> list[Tile]:  # noqa: ARG002
        mine = np.flatnonzero(self.owner == rank).tolist()
        return join_tiles(tile for key in k_spans.get(0, []) for piece in mine for tile in self._tiles(piece, key))

    def _tiles(self, piece: int, key: Span) -> list[Tile]:
        """The queries of a block and the keys of a span, which begins and ends where blocks do."""
        first, last = key.start // self.block, -(-key.stop // self.block)
        seen, area = self.seen[piece, first:last], self.count[piece] * self.count[first:last]
        kind = np.where(seen == 0, 0, np.where(seen == area, 1, 2))
        q_start, row = int(self.start[piece]), int(self.row[piece])
        q_count = int(self.count[piece])
        tiles = []
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
        for a, b in pairwise(edges):
            if a == b or kind[a] == 0:
                continue
            keys = (first + a) * self.block, min((first + b) * self.block, key.stop)
            k_row = key.row + keys[0] - key.start
            visible = None
            if kind[a] == 2:
                visible = Visible(self.mask.visible((q_start, q_start + q_count), keys).numpy().copy())
            tiles.append(Tile(row, row + q_count, k_row, k_row + keys[1] - keys[0], visible=visible))
        return tiles

    def pairs(self, keys: Layout, band: Band) -> float:  # noqa: ARG002
        return float(self.seen.sum())


def mask_layout(mask: BlockMask, size: int) -> MaskLayout:
    """Deals the blocks to ``size`` ranks: as many to each, and by falling work to the rank with the least."""
    tokens = mask.num_tokens
    block = max(1, min(mask.block, tokens // (2 * size)))
    blocks = -(-tokens // block)
    start = np.arange(blocks, dtype=np.int64) * block
    count = np.minimum(block, tokens - start)
    seen = np.zeros((blocks, blocks), dtype=np.int64)
    digest = hashlib.sha256()
    for i in range(blocks):
        visible = mask.visible((int(start[i]), int(start[i] + count[i])), (0, tokens)).numpy()
        seen[i] = np.add.reduceat(visible.sum(axis=0, dtype=np.int64), start)
        digest.update(np.packbits(visible).tobytes())
    owner = _deal(seen.sum(axis=1), size)
    return MaskLayout(
        size=size,
        segment=np.zeros(blocks, dtype=np.int64),
        start=start,
        source=start,
        count=count,
        owner=owner,
        row=local_rows(owner, count, size),
        mask=mask,
        seen=seen,
        digest=digest.hexdigest(),
    )


def _deal(work: Int64, size: int) -> Int64:
    owner = np.zeros(len(work), dtype=np.int64)
    most = -(-len(work) // size)
    loads, held = [0] * size, [0] * size
    for block in np.argsort(-work, kind="stable").tolist():
        rank = min((r for r in range(size) if held[r] < most), key=lambda r: (loads[r], r))
        owner[block] = rank
        loads[rank] += int(work[block])
        held[rank] += 1
    return owner
