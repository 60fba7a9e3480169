"""From the sequences of a micro-batch to this rank's shard of their pack."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hdpcomm.attention import BalancedPack, SequenceSlice, SlicedSequence, shard
from hdpcomm.attention import positions as positions_of
from hdpcomm.attention.layout import sequences_layout
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.queue import fixed_for_rank
from hdpcomm.plan.tree import Tree
from hdpcomm.train.loss import IGNORE, next_token_labels

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.kernels import LabelLoss
    from hdpcomm.plan import MicroBatch, StepPlan
    from hdpcomm.plan.micro_batch import PlannedSlice

__all__ = [
    "Fetch",
    "FetchAhead",
    "FetchParts",
    "PackedShard",
    "checked",
    "empty_shard",
    "no_tokens",
    "pack_of",
    "pack_shard",
    "pack_slice",
    "parts_of_rank",
]

Fetch = Callable[[int], "Tensor | tuple[Tensor, Tensor] | Mapping[str, Any]"]
"""Gives the tokens ``[length]`` (int64) of a sequence of the global batch by its place in the lengths.

It may also give (tokens, labels); a dictionary of "tokens", "labels" if there are any, and columns for losses of
log-probabilities (:mod:`hdpcomm.train.losses`); or for a tree (tokens, weights): float32 ``[tokens]``, the factor of
each token's loss as what is to be predicted; by default, how many trajectories contain it."""


@runtime_checkable
class FetchParts(Protocol):
    """A :data:`Fetch` that can also read a part of a sequence: then a rank reads no more than its shards."""

    def __call__(self, place: int, /) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of a whole sequence."""

    def part(self, place: int, start: int, stop: int, /) -> tuple[Tensor, Tensor]:
        """(tokens, labels) ``[stop - start]`` of a part of it; the label of the last token is still the next one."""


@runtime_checkable
class FetchAhead(FetchParts, Protocol):
    """:class:`FetchParts` that reads many parts at once where it is told before."""

    def ahead(self, parts: Sequence[tuple[int, int, int]], /) -> None:
        """Begins to read (place, start, stop), which are about to be asked for. Does not wait."""


_ENOUGH = 8
"""Labels that equal their tokens by chance are fewer than these."""


@dataclass(frozen=True, slots=True)
class PackedShard:
    """This rank's part of a micro-batch.

    Attributes:
        tokens, labels, positions: ``[local tokens]`` int64, in the order of the shard.
        cu_seqlens: ``[sequences + 1]`` int32, where the sequences of the whole pack begin and end; or these with what
            balances their shards, or its tree, or the slice that it is, for one forward pass.
        label_rows: of a tree, where a token has any number of labels: ``labels`` are ``[local labels]``, each of the
            token ``label_rows[i]``.
        label_weights: of a tree, float32 ``[local labels]``, the factor of each label's loss; or what the labels'
            losses are (:class:`hdpcomm.kernels.LabelLoss`).
        mass: scalar, what this shard adds to the number by which the losses of a batch are divided; ``None``: its
            labels.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor | BalancedPack | Tree | SequenceSlice
    label_rows: Tensor | None = None
    label_weights: Tensor | LabelLoss | None = None
    mass: Tensor | None = None

    @property
    def trained(self) -> Tensor:
        """Scalar: the labels of this shard, each as often as its weight says."""
        if self.mass is not None:
            return self.mass
        if isinstance(self.label_weights, Tensor):
            return self.label_weights.double().sum()
        return (self.labels != IGNORE).sum()


def no_tokens(device: torch.device) -> PackedShard:
    """For a rank that has to run a pass and has no sequence: one token without a loss. Local."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedShard(zero, torch.full_like(zero, IGNORE), zero, torch.tensor([0, 1], dtype=torch.int32))


def empty_shard(device: torch.device) -> PackedShard:
    """For a rank that has to run a pass of a model that takes no tokens, too. Local."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return PackedShard(none, none, none, torch.zeros(1, dtype=torch.int32))


def pack_of(lengths: Iterable[int], size: int, limit: tuple[float, float]) -> Tensor | BalancedPack:
    """The ``cu_seqlens`` of sequences over ``size`` ranks; ``limit``: of the plan (:attr:`StepPlan.limit`)."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return BalancedPack(cu_seqlens, *limit) if size > 1 and limit[1] else cu_seqlens


def pack_shard(
    micro_batch: MicroBatch,
    fetch: Fetch,
    *,
    comm: Communicator,
    device: torch.device,
    limit: tuple[float, float] = (0.0, 0.0),
) -> PackedShard:
    """Fetches a micro-batch's sequences, makes labels, packs them and takes this rank's shard. Local.

    Args:
        comm: the communicator over the micro-batch's ranks.
        limit: of the plan (:attr:`StepPlan.limit`).

    Raises:
        InvalidUsage: ``fetch`` gave something else than a sequence of the planned length.
    """
    rank, size = comm.rank, comm.size
    cu_seqlens = pack_of((sequence.length for sequence in micro_batch.sequences), size, limit)
    if size > 1 and isinstance(fetch, FetchParts):
        tokens, labels = _own_parts(micro_batch, fetch, cu_seqlens, rank=rank, size=size)
    else:
        if isinstance(fetch, FetchAhead):
            fetch.ahead([(each.id, 0, each.length) for each in micro_batch.sequences])
        whole = [checked(fetch(each.id), each.id, each.length) for each in micro_batch.sequences]
        tokens, labels = (shard(torch.cat(each), cu_seqlens, rank=rank, size=size) for each in zip(*whole, strict=True))
    return PackedShard(
        tokens=tokens.to(device),
        labels=labels.to(device),
        positions=positions_of(cu_seqlens, rank=rank, size=size, device=device),
        cu_seqlens=cu_seqlens,
    )


def pack_slice(
    planned: PlannedSlice, part: SequenceSlice, fetch: Fetch, *, comm: Communicator, device: torch.device
) -> PackedShard:
    """Like :func:`pack_shard`, for a micro-batch that is the slice ``part`` of a plain sequence. Local."""
    where = {"rank": comm.rank, "size": comm.size}
    if isinstance(fetch, FetchParts):
        read = [
            checked(fetch.part(*span), planned.sequence, span[2] - span[1])
            for span in _spans_of_slice(planned, **where)
        ]
        tokens, labels = (torch.cat([each[i] for each in read]) if read else torch.zeros(0).long() for i in (0, 1))
    else:
        whole = checked(fetch(planned.sequence), planned.sequence, planned.bounds[-1])
        tokens, labels = (shard(each[part.start : part.stop], part, **where) for each in whole)
    return PackedShard(tokens.to(device), labels.to(device), positions_of(part, **where, device=device), part)


def _spans_of_slice(planned: PlannedSlice, *, rank: int, size: int) -> list[tuple[int, int, int]]:
    layout = SlicedSequence(planned.bounds).slice(planned.number).layouts(size)[0]
    return [(planned.sequence, span.start, span.stop) for span in layout.own_spans(rank).get(0, [])]


def parts_of_rank(plan: StepPlan, rank: int) -> list[tuple[int, int, int]]:
    """Parts that :func:`pack_shard` will fetch for all micro-batches that a plan binds to a rank: (place, first token,
    token after the last) of parts of plain sequences. Which ones it takes from the queue, nobody knows before.
    Local."""
    found = []
    for micro_batch in fixed_for_rank(plan, rank):
        if (planned := plan.slices.get(micro_batch.index)) is not None:
            ranks = micro_batch.ranks
            found += _spans_of_slice(planned, rank=ranks.index(rank), size=len(ranks))
        elif len(micro_batch.ranks) == 1:
            found += [(sequence.id, 0, sequence.length) for sequence in micro_batch.sequences]
        else:
            size = len(micro_batch.ranks)
            pack = pack_of((sequence.length for sequence in micro_batch.sequences), size, plan.limit)
            found += _spans(micro_batch, pack, rank=micro_batch.ranks.index(rank), size=size)
    return found


def _spans(
    micro_batch: MicroBatch, cu_seqlens: Tensor | BalancedPack, *, rank: int, size: int
) -> list[tuple[int, int, int]]:
    layout = sequences_layout(cu_seqlens, size=size)
    return [
        (sequence.id, start, stop)
        for sequence, heads_and_tails in zip(micro_batch.sequences, layout.spans(rank).tolist(), strict=True)
        for start, stop in heads_and_tails
    ]


def _own_parts(
    micro_batch: MicroBatch, fetch: FetchParts, cu_seqlens: Tensor | BalancedPack, *, rank: int, size: int
) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of this rank's shard, of which no other token is read."""
    parts = [
        checked(fetch.part(place, start, stop), place, stop - start)
        for place, start, stop in _spans(micro_batch, cu_seqlens, rank=rank, size=size)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([labels for _, labels in parts])


def checked(
    fetched: Tensor | tuple[Tensor, Tensor] | Mapping[str, Any], sequence: int, length: int
) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of a sequence as ``fetch`` gave them. Raises InvalidUsage."""
    given: Any = (fetched.get("tokens"), fetched.get("labels")) if isinstance(fetched, Mapping) else fetched
    tokens, labels = given if isinstance(given, tuple) else (given, None)
    for name, given in (("tokens", tokens), ("labels", labels)):
        if not isinstance(given, Tensor) and (name == "tokens" or given is not None):
            raise InvalidUsage(f"fetch({sequence}) gave {name} = {given!r}; expected a tensor of int64 [{length}]")
        if given is not None and (given.shape != (length,) or given.dtype != torch.int64):
            raise InvalidUsage(
                f"fetch({sequence}) gave {name} of shape {tuple(given.shape)} and {given.dtype}; the step was "
                f"planned for int64 [{length}]"
            )
    if labels is None:
        return tokens, next_token_labels(tokens)
    _refuse_identity(sequence, tokens, labels)
    return tokens, labels


def _refuse_identity(sequence: int, tokens: Tensor, labels: Tensor) -> None:
    """Labels as transformers' models take them equal the tokens: not shifted, they would train to repeat the input."""
    trained = labels[labels != IGNORE]
    if (
        len(trained) < _ENOUGH
        or not torch.equal(trained, tokens[labels != IGNORE])
        or bool((trained == trained[0]).all())
    ):
        return
    raise InvalidUsage(
        f"fetch({sequence}) gave labels that equal the tokens at all {len(trained)} labelled places; label i is what "
        "token i is to predict, the next token: leave the labels out, or shift them (labels[:-1] = tokens[1:], the "
        f"last one {IGNORE})"
    )
