"""Sequences that each rank has of its own, and those of all ranks together."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.train.loss import IGNORE

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Sequences", "gather_sequences"]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences one after the other.

    Attributes:
        lengths: tokens of each.
        tokens: int64 ``[sum(lengths)]``.
        labels: int64, the same shape: what each token is to predict, -100 for nothing.
        targets: floating point ``[sequences, outputs]`` of losses of outputs, which ``fetch`` gives as the columns "0",
            "1", ...; ``None``: there are none.
        offsets: where each begins, and the last one ends.
    """

    lengths: list[int]
    tokens: Tensor
    labels: Tensor
    targets: Tensor | None = None
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
            place = slice(*self.offsets[i : i + 2])
            tokens, labels = self.tokens[place], self.labels[place]
            labelled = (labels != IGNORE).nonzero()
            count = int(labelled[0]) + 1 if len(labelled) else 1
            found.append((tokens[:count].numpy().tobytes() if count > 1 else i, count))
        return found

    def fetch(self, place: int) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """(tokens, labels) of one sequence, or a dictionary of them and its targets."""
        part = slice(*self.offsets[place : place + 2])
        tokens, labels = self.tokens[part], self.labels[part]
        if self.targets is None:
            return tokens, labels
        return {"tokens": tokens, "labels": labels} | {str(k): each for k, each in enumerate(self.targets[place])}


def gather_sequences(own: Sequences, comm: Communicator) -> tuple[Sequences, int]:
    """The sequences of all ranks, in their order, and the number of tokens before this rank's. Collective over
    ``comm``: three all-gathers, 16 bytes a token, and one of targets if there are any."""
    if comm.size == 1:
        return own, 0
    sizes = torch.empty(2 * comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([len(own.lengths), len(own.tokens)]))
    counts, tokens = sizes.view(-1, 2).unbind(1)
    most = int(counts.max()), int(tokens.max())
    lengths = _gather(torch.tensor(own.lengths)[None], counts.tolist(), most[0], comm)[0]
    both = _gather(torch.stack([own.tokens, own.labels]), tokens.tolist(), most[1], comm)
    targets = own.targets
    if targets is not None:
        targets = _gather(targets.double().T, counts.tolist(), most[0], comm).T
    return Sequences(lengths.tolist(), both[0], both[1], targets), int(tokens[: comm.rank].sum())


def _gather(rows: Tensor, counts: list[int], most: int, comm: Communicator) -> Tensor:
    """``[n, sum(counts)]``: the ``rows`` [n, counts[rank]] of all ranks, side by side."""
    mine = rows.new_zeros(rows.shape[0], most)
    mine[:, : rows.shape[1]] = rows
    everyone = rows.new_empty(comm.size, rows.shape[0], most)
    comm.all_gather(everyone, mine)
    return torch.cat([part[:, :count] for part, count in zip(everyone, counts, strict=True)], dim=1)
