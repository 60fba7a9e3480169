"""Images and videos of a step: encoded once, by the ranks that the plan says, for the shards that hold their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention import SlicedSequence, as_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import to_device
from hdpcomm.models.media import FAMILIES, MediaEncoder, TokensWithItems
from hdpcomm.plan.items import Item, ItemExchange, PlacedItems, place_items
from hdpcomm.train.losses.shards import Fetch, FetchParts, PackedShard, pack_of

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.plan import MicroBatch, PlannedStep, Planner

__all__ = ["StepItems", "text_alone", "with_items"]

_MOST_PATCHES = 1 << 15
"""Patches that the encoder computes at a time, if an item does not have more."""


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
        self._comm = comm = cast("Communicator", mesh.comm.subset(mesh.positions.flatten().tolist()))
        own = next(encoder.parameters())
        self._made = torch.cat([own.new_zeros(0, encoder.width), *self._encoded()])
        self._exchange = exchange = ItemExchange.of(self._placed, self._batches(), self._rows_of, comm.rank, comm.size)
        self._sent = torch.from_numpy(exchange.sent).to(device)
        self._order = torch.from_numpy(exchange.order).to(device)
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
        self._fetched[place] = {name: x for name, x in fetched.items() if not name.startswith("pixel_values")}

    def _encoded(self) -> Iterator[Tensor]:
        """Embeddings of this rank's items, a number of patches at a time."""
        chosen: list[tuple[Mapping[str, Any], list[int]]] = []
        patches, before, first = 0, -1, 0
        for number in self._placed.of_device(self._comm.rank):
            place = int(self._placed.sequence[number])
            if place != before:
                fetched, before = self._whole(place), place
                self._keep(place, fetched)
                first = int(np.searchsorted(self._placed.sequence, place))
                chosen.append((fetched, []))
            item = self._placed.items[place][number - first]
            if patches and patches + item.patches > _MOST_PATCHES:
                yield self._encoder.encode([each for each in chosen if each[1]], self._device)
                chosen, patches = [(fetched, [])], 0
            chosen[-1][1].append(int(number - first))
            patches += item.patches
        if patches:
            yield self._encoder.encode([each for each in chosen if each[1]], self._device)

    def _batches(self) -> list[MicroBatch]:
        """The micro-batches for which this device sends or gets embeddings, in the order of the plan."""
        plan, table = self._planned.plan, self._planned.plan.table
        whole = table.ids.copy()  # the sequences, those of slices, too
        for each in plan.slices.values():
            whole[table.sequence_bounds[each.rows[each.number]]] = each.sequence
        sent = self._placed.sequence[self._placed.of_device(self._comm.rank)]
        rows = table.rows_of_sequences()
        if self._mesh.stage == 0:
            gets = table.rows_of_ranks()[table.ranks == self._mesh.hdp_rank]
            chosen = np.isin(whole, sent) | (np.isin(rows, gets) & np.isin(whole, self._placed.sequence))
        else:
            chosen = np.isin(whole, sent)
        return [plan.micro_batch(row) for row in np.unique(rows[chosen]).tolist()]

    def _places(self, batch: MicroBatch) -> list[int]:
        planned = self._planned.plan.slices.get(batch.index)
        return [each.id for each in batch.sequences] if planned is None else [planned.sequence]

    def _rows_of(self, batch: MicroBatch, place: int) -> Any:
        """See :meth:`hdpcomm.plan.items.ItemExchange.of`."""
        plan, lengths = self._planned.plan, cast("tuple[int, ...]", self._planned.lengths)
        planned, places = plan.slices.get(batch.index), self._places(batch)
        pack = pack_of((lengths[place] for place in places), len(batch.ranks), plan.limit)
        if planned is not None:
            pack = SlicedSequence(planned.bounds).slice(planned.number)
        rows = np.concatenate([self._placed.rows_of(each, lengths[each]) for each in places])
        return rows[as_pack(pack).places(place, len(batch.ranks)).numpy()]

    def add_to(self, packed: PackedShard, batch: MicroBatch) -> PackedShard:
        """The shard of a micro-batch with the embeddings of its items, and the coordinates of its tokens. Local."""
        first, rows = self._exchange.wanted.get(batch.index, (0, np.zeros(0, dtype=np.int64)))
        leaf = self._leaves.get(batch.index)
        if leaf is None and self._mesh.stage == 0:
            leaf = self._wanted[first : first + len(rows)].clone()
            self._leaves[batch.index] = leaf.requires_grad_(self._trained)
        found = [self._encoder.coordinates(self.fetch(place)) for place in self._places(batch)]
        coordinates = None
        if found[0] is not None:
            place = batch.ranks.index(self._mesh.hdp_rank)
            mine = as_pack(packed.cu_seqlens).places(place, len(batch.ranks))
            coordinates = to_device(torch.cat(cast("list[Tensor]", found), 1)[:, mine], self._device)
        items = TokensWithItems(packed.tokens, torch.from_numpy(rows).to(self._device), leaf, coordinates)
        return replace(packed, items=items)

    @property
    def _trained(self) -> bool:
        """Whether gradients go back to the encoder; the same on all devices."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self._encoder.parameters())

    def backward(self) -> None:
        """The backward pass of the encoder, with the gradients that the passes have left."""
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
            total[self._sent] = back
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
        if isinstance(fetched, Mapping) and any(name.startswith("pixel_values") for name in fetched):
            raise InvalidUsage(
                f"fetch({place}) gave images, and the step was planned without; give items=, for each sequence "
                "items_of(model, what fetch gives)"
            )
        return fetched

    return fetch if isinstance(fetch, FetchParts) else fetched_text


def with_items(
    planned: PlannedStep, items: Sequence[Sequence[Item]], model: Any, planner: Planner, mesh: Mesh
) -> PlannedStep:
    """The step with its images and videos on the ranks that encode them, if there are any. The same on all ranks.
    Local.

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
        ("trees", any(not isinstance(length, int) for length in planned.lengths)),
        ("a queue (Planner(queue=False))", planned.plan.queued > 0),
    ]
    if wrong := [name for name, found in others if found]:
        raise InvalidUsage(f"images and videos do not go together with {', '.join(wrong)} yet; leave out either")
    each = planner.cost_model.linear + planner.cost_model.piece
    lengths = cast("tuple[int, ...]", planned.lengths)

    def seconds(patches: int) -> float:
        return encoder.share_of_tokens(patches) * each

    return replace(planned, items=place_items(items, lengths, mesh.comm.size, seconds, mesh.tensor))
