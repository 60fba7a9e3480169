"""Images and videos of a step: encoded once, by the ranks that the plan says, for the shards that hold their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention import SlicedSequence, SpanPack, as_pack
from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import to_device
from hdpcomm.models.media import FAMILIES, MediaEncoder, TokensWithItems, is_pixels
from hdpcomm.plan import MicroBatch, PlannedStep, Planner, TrajectoryTree
from hdpcomm.plan.items import Item, ItemExchange, PlacedItems, place_items
from hdpcomm.plan.tree import Tree, TreeFragment, join_trees
from hdpcomm.train.losses.label_terms import Batch
from hdpcomm.train.losses.shards import Fetch, FetchParts, PackedShard, pack_of

__all__ = ["ENCODER", "StepItems", "encoding_s", "items_on_devices", "text_alone", "with_items"]

ENCODER = -1
"""In the place of a micro-batch's index, for what the encoder takes."""
_MOST_PATCHES, _MOST_AGAIN = 1 << 15, 1 << 12
"""Patches that the encoder computes at a time, if an item does not have more; and where it computes again in the
backward pass, which then keeps the activations of as many."""


class StepItems:
    """The items of one step on one device: encoded before the passes of the plan by the devices of all stages, for
    those of the first one, whose gradients :meth:`backward` takes through the encoder after them. Collective over the
    mesh, as :meth:`backward`.

    Embeddings and gradients travel once each, in one all-to-all (:class:`hdpcomm.plan.items.ItemExchange`). A device
    fetches each of its sequences once, and keeps all of it but pixels until the step ends.

    Args:
        encoder: of the model, or of a stage of it.
        planned: with ``items``.
    """

    def __init__(
        self, encoder: MediaEncoder, planned: PlannedStep, fetch: Fetch, mesh: Mesh, device: torch.device
    ) -> None:
        assert planned.items is not None
        self._encoder, self._planned, self._fetch, self._mesh, self._device = encoder, planned, fetch, mesh, device
        self._placed: PlacedItems = planned.items
        self._fetched: dict[int, Mapping[str, Any]] = {}
        self._leaves: dict[int, Tensor] = {}
        self._places: dict[int, Tensor | None] = {}
        self._comm = comm = cast("Communicator", mesh.comm.subset(mesh.positions.flatten().tolist()))
        own = next(encoder.parameters())
        self._trained = torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters())
        """Whether gradients go back to the encoder; the same on all devices."""
        self._made = torch.cat([own.new_zeros(0, encoder.width), *self._encoded()])
        self._exchange = exchange = ItemExchange.of(self._placed, self._batches(), self._rows_of, comm.rank, comm.size)
        self._sent = to_device(torch.from_numpy(exchange.sent), device)
        self._order = to_device(torch.from_numpy(exchange.order), device)
        got = self._sends(self._made.detach()[self._sent], exchange.receive_counts, exchange.send_counts)
        self._wanted = torch.empty_like(got)
        self._wanted[self._order] = got

    def fetch(self, place: int) -> Mapping[str, Any]:
        """A sequence as it was fetched, without pixels."""
        if place not in self._fetched:
            self._keep(place, self._whole(place))
        return self._fetched[place]

    def _whole(self, place: int) -> Mapping[str, Any]:
        fetched = self._fetch(place)
        if isinstance(fetched, Mapping):
            return fetched
        tokens, labels = fetched if isinstance(fetched, tuple) else (fetched, None)
        return {"tokens": tokens} | ({} if labels is None else {"labels": labels})

    def _keep(self, place: int, fetched: Mapping[str, Any]) -> None:
        expected, given = self._placed.items[place], self._encoder.items(fetched)
        if list(expected) != given:
            raise InvalidUsage(
                f"fetch({place}) gave {len(given)} images and frames, and the step was planned for {len(expected)}, or "
                "they differ; plan with items_of() of what fetch gives"
            )
        self._fetched[place] = {name: x for name, x in fetched.items() if not is_pixels(name)}

    def _encoded(self) -> Iterator[Tensor]:
        """Embeddings of this rank's items, a number of patches at a time."""
        chosen: list[tuple[Mapping[str, Any], list[int]]] = []
        patches, before = 0, -1
        placed, most = self._placed, _MOST_AGAIN if self._encoder.recompute and self._trained else _MOST_PATCHES
        for item in placed.of_device(self._comm.rank):
            sequence, number = int(placed.sequence[item]), int(placed.number[item])
            if sequence != before:
                fetched, before = self._whole(sequence), sequence
                self._keep(sequence, fetched)
                chosen.append((fetched, []))
            more = placed.items[sequence][number].patches
            if patches and patches + more > most:
                yield self._encoder.encode([each for each in chosen if each[1]], self._device)
                self._comm.tick()  # the others wait for all
                chosen, patches = [(fetched, [])], 0
            chosen[-1][1].append(number)
            patches += more
        if patches:
            yield self._encoder.encode([each for each in chosen if each[1]], self._device)

    def _batches(self) -> list[MicroBatch]:
        """The micro-batches for which this device sends or gets embeddings, in the order of the plan."""
        plan, table = self._planned.plan, self._planned.plan.table
        count = len(self._planned.lengths)
        parts = [self._top(number) for number in range(count, count + len(plan.fragments))]
        whole = np.concatenate((np.arange(count), np.array(parts, dtype=np.int64)))[table.ids]
        sent = self._placed.place[self._placed.of_device(self._comm.rank)]
        rows = table.rows_of_sequences()
        chosen = np.isin(whole, sent)
        if self._mesh.stage == 0:
            gets = table.rows_of_ranks()[table.ranks == self._mesh.hdp_rank]
            chosen |= np.isin(rows, gets) & np.isin(whole, self._placed.place)
        return [plan.micro_batch(row) for row in np.unique(rows[chosen]).tolist()]

    def _top(self, number: int) -> int:
        """The place among what is planned of an id of the plan: of a part of a tree, its tree."""
        lengths = self._planned.lengths
        while number >= len(lengths):
            fragment = self._planned.plan.fragments[number - len(lengths)]
            number = fragment.tree if isinstance(fragment, TreeFragment) else fragment.sequence
        return number

    def _parts(self, batch: MicroBatch) -> Iterator[tuple[int, Any]]:
        """The sequences of a micro-batch, or the one whose slice it is: the place of each among what is planned, and
        which tokens of that it has."""
        lengths, fragments = self._planned.lengths, self._planned.plan.fragments
        sliced = self._planned.plan.slices.get(batch.index)
        for number in [each.id for each in batch.sequences] if sliced is None else [sliced.sequence]:
            chosen: Any = slice(None)
            if number >= len(lengths):
                part = cast(TreeFragment, fragments[number - len(lengths)])
                chosen = cast(Tree, lengths[part.tree]).token_places(part.segments)
            yield self._top(number), chosen

    def _rows_of(self, batch: MicroBatch, place: int) -> Any:
        """See :meth:`hdpcomm.plan.items.ItemExchange.of`."""
        planned, plan, lengths = self._planned, self._planned.plan, self._planned.lengths
        sliced, ranks = plan.slices.get(batch.index), len(batch.ranks)
        pack: Any
        if sliced is not None:
            pack = SlicedSequence(sliced.bounds, planned.tree(sliced.sequence)).slice(sliced.number)
        else:
            parts = [planned.tree(each.id) or each.length for each in batch.sequences]
            trees = any(isinstance(part, Tree) for part in parts)
            pack = join_trees(parts) if trees else pack_of(cast("list[int]", parts), ranks, plan.limit)
        rows = [
            self._placed.rows_of(top, length if isinstance(length := lengths[top], int) else length.num_tokens)[chosen]
            for top, chosen in self._parts(batch)
        ]
        return np.concatenate(rows)[as_pack(pack).places(place, ranks).numpy()]

    def _coordinates(self, top: int) -> Tensor | None:
        """int64 ``[3, tokens]`` of a sequence or tree that is planned; ``None``: the model has none."""
        if top not in self._places:  # slices ask for each
            self._places[top] = self._new_coordinates(self._placed.sources[top])
        return self._places[top]

    def _new_coordinates(self, source: int | TrajectoryTree) -> Tensor | None:
        if isinstance(source, int):
            return self._encoder.coordinates(self.fetch(source))
        found = torch.zeros(3, source.tree.num_tokens, dtype=torch.int64)
        for sequence in source.trajectories:
            own = self._encoder.coordinates(self.fetch(sequence))
            if own is None:
                return None
            found[:, torch.from_numpy(source.token_places(sequence))] = own
        return found

    def add_to(self, packed: PackedShard, batch: MicroBatch) -> PackedShard:
        """The shard of a micro-batch with the embeddings of its items, and the coordinates of its tokens. Local."""
        first, rows = self._exchange.wanted.get(batch.index, (0, np.zeros(0, dtype=np.int64)))
        leaf = self._leaves.get(batch.index)
        if leaf is None and self._mesh.stage == 0:
            leaf = self._wanted[first : first + len(rows)].clone()
            self._leaves[batch.index] = leaf.requires_grad_(self._trained)
        found = [(self._coordinates(top), chosen) for top, chosen in self._parts(batch)]
        coordinates = None
        if found[0][0] is not None:
            place = batch.ranks.index(self._mesh.hdp_rank)
            mine = as_pack(packed.cu_seqlens).places(place, len(batch.ranks))
            coordinates = to_device(
                torch.cat([cast(Tensor, own)[:, chosen] for own, chosen in found], 1)[:, mine], self._device
            )
        here = to_device(torch.from_numpy(rows), self._device)
        items = TokensWithItems(packed.tokens, here, leaf, coordinates)
        if self._encoder.two_way:
            packed = replace(packed, cu_seqlens=SpanPack(packed.cu_seqlens, self._spans(batch)))
        return replace(packed, items=items)

    def _spans(self, batch: MicroBatch) -> list[tuple[int, int]]:
        """Where the images of a micro-batch of whole sequences lie in its pack."""
        spans: list[tuple[int, int]] = []
        first = 0
        for each in batch.sequences:
            for item in self._placed.items[cast(int, self._placed.sources[each.id])]:
                start, stop = first + item.start, first + item.start + item.tokens
                if item.start and spans and spans[-1][1] == start:  # as transformers: nothing between them
                    start, _ = spans.pop()
                spans.append((start, stop))
            first += each.length
        return spans

    def backward(self) -> None:
        """The backward pass of the encoder, with the gradients that the passes have left. Collective over the mesh."""
        if not self._trained:
            return
        exchange, upstream = self._exchange, torch.zeros_like(self._wanted)
        for index, (first, rows) in exchange.wanted.items():
            leaf = self._leaves.get(index)
            if leaf is not None and leaf.grad is not None:
                upstream[first : first + len(rows)] = leaf.grad
        back = self._sends(upstream[self._order], exchange.send_counts, exchange.receive_counts)
        if self._made.requires_grad:
            total = torch.zeros_like(self._made)
            total.index_add_(0, self._sent, back)  # a token that parts of a tree share is sent to each
            self._made.backward(total)  # type: ignore[no-untyped-call]

    def _sends(self, x: Tensor, gets: list[int], sends: list[int]) -> Tensor:
        width = x.shape[1]
        out = x.new_empty(sum(gets), width)
        self._comm.all_to_all(out, x.contiguous(), [n * width for n in gets], [n * width for n in sends])
        return out


def text_alone(fetch: Fetch) -> Fetch:
    """``fetch`` of a step without items, which raises InvalidUsage for a sequence with pixels: they would be lost."""

    def fetched_text(place: int) -> Any:
        fetched = fetch(place)
        if isinstance(fetched, Mapping) and any(map(is_pixels, fetched)):
            raise InvalidUsage(
                f"fetch({place}) gave images, and the step was planned without; give items=, for each sequence "
                "items_of(model, what fetch gives)"
            )
        return fetched

    return fetch if isinstance(fetch, FetchParts) else fetched_text


def with_items(
    planned: PlannedStep, items: Sequence[Sequence[Item]], model: Any, planner: Planner, mesh: Mesh,
    batch: Batch | None = None,
) -> PlannedStep:  # fmt: skip
    """The step with its images and videos on the ranks that encode them, if there are any. The same on all ranks.
    Local.

    Args:
        batch: of a loss of log-probabilities, the sequences of what is planned.

    Raises: InvalidUsage: what this step cannot have beside items, or of :func:`hdpcomm.plan.items.place_items`.
    """
    encoder: MediaEncoder | None = getattr(model, "media", None)
    if not any(items):
        return planned
    if encoder is None:
        raise InvalidUsage(
            f"items were given for {type(model).__name__}, which takes text alone; give a model of transformers with "
            f"images or videos, by adapt(): {', '.join(FAMILIES)}"
        )
    others = [
        ("trees of lengths", batch is None and any(not isinstance(length, int) for length in planned.lengths)),
        ("a queue (Planner(queue=False))", planned.plan.queued > 0),
        ("slices, where images see all of themselves", encoder.two_way and len(planned.plan.slices) > 0),
    ]
    if wrong := [name for name, found in others if found]:
        raise InvalidUsage(f"images and videos do not go together with {', '.join(wrong)} yet; leave out either")
    lengths = cast("Sequence[int]", planned.lengths if batch is None else batch.lengths)
    sources = None if batch is None else batch.sources
    return replace(planned, items=items_on_devices(items, lengths, encoder, planner, mesh, sources))


def items_on_devices(
    items: Sequence[Sequence[Item]], lengths: Sequence[int], encoder: MediaEncoder, planner: Planner, mesh: Mesh,
    sources: Sequence[int | TrajectoryTree] | None = None,
) -> PlacedItems:  # fmt: skip
    """The items of a step and the devices that encode them, whatever its plan is. The same on all ranks. Local.

    Raises: InvalidUsage: of :func:`hdpcomm.plan.items.place_items`.
    """
    seconds = partial(_seconds, encoder, planner)
    return place_items(items, lengths, mesh.comm.size, seconds, tensor=mesh.tensor, sources=sources)


def encoding_s(placed: PlacedItems, encoder: MediaEncoder, planner: Planner) -> float:
    """Seconds until the last device has encoded its items, by the planner's costs. Local."""
    pairs = zip(placed.sequence.tolist(), placed.number.tolist(), strict=True)
    each = [_seconds(encoder, planner, placed.items[sequence][number].patches) for sequence, number in pairs]
    return float(np.bincount(placed.device, weights=each).max(initial=0.0))


def _seconds(encoder: MediaEncoder, planner: Planner, patches: int) -> float:
    return encoder.share_of_tokens(patches) * (planner.cost_model.linear + planner.cost_model.piece)
