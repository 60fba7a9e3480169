"""The sequences in a batch of a collator of transformers, and those of all ranks together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.attention.layout import as_cu_seqlens
from hdpcomm.errors import InvalidUsage
from hdpcomm.train.loss import IGNORE

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Sequences", "gather_sequences", "sequences_of"]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences one after the other.

    Attributes:
        lengths: tokens of each.
        tokens: int64 ``[sum(lengths)]``.
        labels: int64, the same shape: what each token is to predict, -100 for nothing; the last one of a sequence has
            nothing to predict.
        offsets: where each begins, and the last one ends.
    """

    lengths: list[int]
    tokens: Tensor
    labels: Tensor
    offsets: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", [0, *accumulate(self.lengths)])

    @property
    def num_labels(self) -> Tensor:
        """Scalar: the tokens that have a label."""
        return (self.labels != IGNORE).sum()

    def prompts(self) -> list[tuple[Hashable, int]]:
        """For each sequence the name and the tokens of its prompt: what comes before its first label, where that is
        more than one token; equal ones have one name."""
        found: list[tuple[Hashable, int]] = []
        for i in range(len(self.lengths)):
            tokens, labels = self.fetch(i)
            labelled = (labels != IGNORE).nonzero()
            count = int(labelled[0]) + 1 if len(labelled) else 1
            found.append((tokens[:count].numpy().tobytes() if count > 1 else i, count))
        return found

    def fetch(self, place: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of one sequence."""
        start, stop = self.offsets[place], self.offsets[place + 1]
        return self.tokens[start:stop], self.labels[start:stop]


def sequences_of(batch: Mapping[str, Any]) -> Sequences:
    """The sequences of a batch without padding. Local.

    ``batch``: ``input_ids`` and ``labels`` (not shifted), both ``[rows, tokens]``; the sequences are its rows, where
    ``attention_mask`` is not 0, or, of a single row, what ``cu_seq_lens_q`` or the zeros of ``position_ids`` cut it
    into. Raises InvalidUsage for other batches.
    """
    tokens, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(tokens, Tensor) or not isinstance(labels, Tensor) or tokens.ndim != 2:
        raise InvalidUsage(
            f"a batch has {', '.join(batch)}; input_ids and labels [rows, tokens] were expected: give a collator for "
            "causal language models, such as DataCollatorWithFlattening"
        )
    if labels.shape != tokens.shape:
        raise InvalidUsage(
            f"labels have shape {tuple(labels.shape)} and input_ids {tuple(tokens.shape)}; give equal ones"
        )
    tokens, labels = tokens.cpu(), labels.cpu()
    mask, places, bounds = batch.get("attention_mask"), batch.get("position_ids"), batch.get("cu_seq_lens_q")
    if bounds is None and places is not None and mask is None and tokens.shape[0] == 1:
        bounds = [*(places[0] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
    if bounds is not None:
        if tokens.shape[0] != 1:
            raise InvalidUsage(f"cu_seq_lens_q was given with {tokens.shape[0]} rows; flatten the batch to one row")
        cuts = as_cu_seqlens(bounds, name="cu_seq_lens_q").tolist()
        if cuts[-1] != tokens.shape[1]:
            raise InvalidUsage(f"cu_seq_lens_q ends with {cuts[-1]} and the row has {tokens.shape[1]} tokens")
        rows = [(tokens[0, a:b], labels[0, a:b]) for a, b in pairwise(cuts)]
    elif mask is not None:
        if mask.shape != tokens.shape:
            raise InvalidUsage(
                f"attention_mask has shape {tuple(mask.shape)} and input_ids {tuple(tokens.shape)}; masks of pairs of "
                "tokens are not supported"
            )
        seen = mask.cpu().bool()
        rows = [(row[m], label[m]) for row, label, m in zip(tokens, labels, seen, strict=True)]
    else:
        rows = list(zip(tokens, labels, strict=True))
    rows = [(row, label) for row, label in rows if len(row)]
    if not rows:
        raise InvalidUsage("a batch has no token; every rank needs at least one")
    return Sequences(
        [len(row) for row, _ in rows],
        torch.cat([row for row, _ in rows]).long(),
        torch.cat([torch.cat([label[1:], label.new_full((1,), IGNORE)]) for _, label in rows]).long(),
    )


def gather_sequences(own: Sequences, comm: Communicator) -> tuple[Sequences, int]:
    """The sequences of all ranks, in their order, and the number of tokens before this rank's. Collective over
    ``comm``: three all-gathers, 16 bytes a token."""
    if comm.size == 1:
        return own, 0
    sizes = torch.empty(2 * comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([len(own.lengths), len(own.tokens)]))
    counts, tokens = sizes.view(-1, 2).unbind(1)
    most = int(counts.max()), int(tokens.max())
    lengths = _gather(torch.tensor(own.lengths)[None], counts.tolist(), most[0], comm)[0]
    both = _gather(torch.stack([own.tokens, own.labels]), tokens.tolist(), most[1], comm)
    return Sequences(lengths.tolist(), both[0], both[1]), int(tokens[: comm.rank].sum())


def _gather(rows: Tensor, counts: list[int], most: int, comm: Communicator) -> Tensor:
    """``[n, sum(counts)]``: the ``rows`` [n, counts[rank]] of all ranks, side by side."""
    mine = rows.new_zeros(rows.shape[0], most)
    mine[:, : rows.shape[1]] = rows
    everyone = rows.new_empty(comm.size, rows.shape[0], most)
    comm.all_gather(everyone, mine)
    return torch.cat([part[:, :count] for part, count in zip(everyone, counts, strict=True)], dim=1)
