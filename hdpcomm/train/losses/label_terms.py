"""How a loss of log-probabilities gets to the labels of a step, wherever the plan puts them.

All labels of a global batch have a number, their entry: those of sequence i begin at the sum of the lengths before it.
Ranks keep entries beside the labels of their shards, so what is known of all labels in order (log-probabilities, or the
derivatives of a loss that couples them) finds its place on any rank, and back. Sequences that share a prefix have
labels of their own, also where a tree computes their common tokens once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hdpcomm.attention import Pack
from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import LabelLoss
from hdpcomm.kernels.transfers import to_device
from hdpcomm.models.media import MEDIA
from hdpcomm.models.routes import KeptRoutes, TakenRoutes
from hdpcomm.plan import PlannedStep, SequenceFragment, StepPlan, TrajectoryTree, Tree, TreeFragment
from hdpcomm.train.losses.functions import COMPUTED, IGNORE, GroupLoss, TokenLoss
from hdpcomm.train.losses.shards import (
    WEIGHTS,
    Fetch,
    LabelledTokens,
    PackedShard,
    checked,
    labelled_shard,
    routes_of,
)

__all__ = [
    "Batch",
    "KeptLogProbs",
    "LabelTerms",
    "checked_groups",
    "given_terms",
    "group_terms",
    "kept_terms",
    "shares_prefixes",
    "shorter_plan",
    "token_terms",
]

Columns = Mapping[str, Tensor]

_LABELS, _ENTRIES = "labels", "tokens"
"""The names, which no column of a user has, under which labels and their entries go with the columns."""


class Batch:
    """The sequences of a global batch, and what is planned of them. Local.

    Args:
        lengths: tokens of each sequence.
        trees: of sequences that share prefixes, each in at most one.

    Attributes:
        items: what is planned: lengths of sequences, and trees.
        sources: of each item, the number of its sequence, or its tree.
        offsets: where the entries of each sequence begin, and where all end.

    Raises: InvalidUsage for lengths that are trees themselves, or trees that do not fit the lengths.
    """

    def __init__(self, lengths: Sequence[int | Tree], trees: Sequence[TrajectoryTree] = ()) -> None:
        given = [i for i, length in enumerate(lengths) if isinstance(length, Tree)]
        if given:
            raise InvalidUsage(
                f"sequence {given[0]} is a tree; log-probabilities, and losses of them, are of whole trajectories: "
                "give their lengths, and trees= of those that share prefixes"
            )
        self.lengths = [int(length) for length in lengths]  # type: ignore[arg-type]
        self.offsets = [0, *itertools.accumulate(self.lengths)]
        taken: set[int] = set()
        for tree in trees:
            for i, last in zip(tree.trajectories, tree.last_segments, strict=True):
                tokens = int(tree.tree.starts[last] + tree.tree.lengths[last])
                if i in taken or not 0 <= i < len(self.lengths) or tokens != self.lengths[i]:
                    raise InvalidUsage(
                        f"a tree has sequence {i} with {tokens} tokens; expected one of the {len(self.lengths)} "
                        "sequences of the batch, with its length, in one tree"
                    )
                taken.add(i)
            leaves = set((tree.tree.ends == np.arange(len(tree.tree)) + 1).nonzero()[0].tolist())
            if unused := leaves - set(tree.last_segments):
                raise InvalidUsage(
                    f"no trajectory ends with segment {min(unused)} of {tree.tree}, which nothing follows; leave it out"
                )
        self.sources: list[int | TrajectoryTree] = [*trees, *(i for i in range(len(self.lengths)) if i not in taken)]
        self.items = [self.lengths[each] if isinstance(each, int) else each.tree for each in self.sources]


def shares_prefixes(parts: Iterable[object]) -> bool:
    """Whether models, or stages of one, may compute the shared prefixes of a loss of log-probabilities once: attention
    with chunks knows no trees. Local."""
    return all(getattr(part, "takes_trees", True) for part in parts)


def shorter_plan(
    plan: Callable[[Sequence[int | Tree]], PlannedStep],
    lengths: Sequence[int | Tree] | PlannedStep,
    trees: Sequence[TrajectoryTree],
    *,
    shares: bool,
) -> tuple[PlannedStep, Batch]:
    """The plan with trees, or the one without if it is shorter, and its sequences. Local.

    Args:
        plan: makes one; what it waits for both counts.
        shares: whether the model may compute shared prefixes once.

    Raises: InvalidUsage for trees of a step that was planned before.
    """
    if isinstance(lengths, PlannedStep):
        if trees:
            raise InvalidUsage("a step that was planned before takes no trees=; give its lengths")
        return lengths, Batch(lengths.lengths)
    plain = Batch(lengths)
    planned = plan(plain.items)
    if not trees or not shares:
        return planned, plain
    shared = Batch(lengths, trees)
    try:
        other = plan(shared.items)
    except InvalidUsage:  # the ranks hold its sequences, but no tree of them
        return planned, plain
    if other.plan.makespan_s >= planned.plan.makespan_s:
        return planned, plain
    return replace(other, waited_s=other.waited_s + planned.waited_s), shared


class LabelTerms:
    """Losses of the labels of a step, for each shard. Local.

    Args:
        batch: the plan's items must be its items.
        make: gives the loss of a shard's labels.
        columns: names that ``fetch`` must give.
        factor: of the losses, also those of routers, of each label of a sequence with so many.
        mass: what a sequence with so many labels adds to the number by which the sum of losses is divided.
        needs_columns: whether ``make`` reads columns.
        routes: keeps those of plain sequences.
    """

    def __init__(
        self,
        batch: Batch,
        make: Callable[[_Labels], LabelLoss],
        *,
        columns: Sequence[str] = (),
        factor: Callable[[int], float] = lambda _: 1.0,
        mass: Callable[[int], float] = lambda _: 0.0,
        needs_columns: bool = False,
        routes: KeptRoutes | None = None,
    ) -> None:
        self._batch, self._make, self._names, self._routes = batch, make, columns, routes
        self._factor, self._mass, self._needs_columns = factor, mass, needs_columns
        self._given: tuple[int, list[str]] | None = None
        """The first sequence that was read, and its columns."""

    def shard(
        self,
        places: Sequence[int],
        pack: Pack | None,
        plan: StepPlan,
        fetch: Fetch,
        *,
        comm: Communicator,
        device: torch.device,
    ) -> PackedShard:
        """This rank's shard of a micro-batch, with the losses of its labels; whole sequences are fetched.

        Args:
            places: of the micro-batch's sequences, as in its plan.
            pack: the slice that it is. What counts labels counts those of the whole sequence or tree; its share of the
                number by which losses are divided comes with the first slice.
        """
        parts = [self._labelled(place, plan.fragments, fetch) for place in places]
        shard, columns = labelled_shard(parts, pack, plan.limit, comm=comm, device=device)
        begins = comm.rank == 0 and (pack is None or pack.begins)
        mass = math.fsum(part.mass for part in parts) if begins else 0.0
        entries = columns.pop(_ENTRIES)
        if self._routes is not None:
            shard = replace(shard, routes=self._routes.of(entries, cast("TakenRoutes | None", shard.routes)))
        columns = {name: to_device(column, device) for name, column in columns.items()}
        own = _Labels(shard.labels, entries, columns.pop(WEIGHTS), columns)
        return replace(
            shard, label_weights=self._make(own), mass=torch.full((), mass, dtype=torch.float64, device=device)
        )

    def _labelled(
        self, item: int, fragments: Sequence[TreeFragment | SequenceFragment], fetch: Fetch
    ) -> LabelledTokens:
        """One sequence of a micro-batch: a sequence of the batch, a tree or a part of one."""
        items = len(self._batch.items)
        fragment = cast("TreeFragment | None", fragments[item - items] if item >= items else None)
        source = self._batch.sources[item if fragment is None else fragment.tree]
        if isinstance(source, int):
            tokens, columns, routes = self._read(source, fetch)
            length, labels = len(tokens), int((columns[_LABELS] != IGNORE).sum())
            own = columns[WEIGHTS].sum()[None]
            return LabelledTokens(tokens, None, torch.arange(length), columns, own, self._mass(labels), routes)
        tree = source.tree
        here = np.arange(tree.num_tokens)
        trains = set(range(len(tree)))
        if fragment is not None:
            chosen = tree.token_places(fragment.segments)
            here = np.full(tree.num_tokens, -1)
            here[chosen] = np.arange(len(chosen))
            trains = {each for each, twice in zip(fragment.segments, fragment.repeated, strict=True) if not twice}
            tree = tree.part(fragment.segments)
        tokens = torch.full((tree.num_tokens,), -1)
        every, rows, parts, mass = None, [], [], 0.0
        sequences = torch.zeros(len(tree), dtype=torch.float64)
        for i, last in zip(source.trajectories, source.last_segments, strict=True):
            if last not in trains:
                continue  # a fragment has it that ends there
            own, columns, routes = self._read(i, fetch)
            places = torch.from_numpy(here[source.token_places(i)])
            known = tokens[places]
            if bool(((known >= 0) & (known != own)).any()):
                raise InvalidUsage(
                    f"sequence {i} has other tokens in the prefix that it shares with {list(source.trajectories)}; "
                    "give trees= of sequences that begin alike"
                )
            if routes is not None:  # a shared token takes those of the first sequence
                every = routes.new_zeros(tree.num_tokens, *routes.shape[1:]) if every is None else every
                every[places[known < 0]] = routes[known < 0]
            tokens[places] = own
            labelled = columns[_LABELS] != IGNORE
            rows.append(places[labelled])
            parts.append({name: column[labelled] for name, column in columns.items()})
            mass += self._mass(len(rows[-1]))
            sequences[last if fragment is None else fragment.segments.index(last)] += columns[WEIGHTS].sum()
        return LabelledTokens(
            tokens,
            tree,
            torch.cat(rows),
            {name: torch.cat([each[name] for each in parts]) for name in parts[0]},
            sequences,
            mass,
            every,
        )

    def _read(self, i: int, fetch: Fetch) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """(tokens, columns, routes) of a sequence, each ``[length]``; with its labels and their entries."""
        fetched, length = fetch(i), self._batch.lengths[i]
        tokens, labels = checked(fetched, i, length)
        columns = _columns(fetched, i, length, self._names) if self._needs_columns else {}
        routes = routes_of(fetched, i, length)
        names = sorted((*columns, *(["routes"] if routes is not None else [])))
        self._given = self._given or (i, names)
        if names != self._given[1]:
            raise InvalidUsage(
                f"fetch({i}) gave the columns {names}, and fetch({self._given[0]}) {self._given[1]}; give "
                "the same ones for all sequences"
            )
        columns |= {_LABELS: labels.cpu(), _ENTRIES: torch.arange(length) + self._batch.offsets[i]}
        labelled = (columns[_LABELS] != IGNORE).double()
        columns[WEIGHTS] = labelled * self._factor(int(labelled.sum()))
        return tokens.cpu(), columns, routes


@dataclass(frozen=True, slots=True)
class _Labels:
    """The labels of a shard.

    Attributes:
        labels, columns: on the model's device.
        entries: of each label in the global batch, on the CPU.
        factors: of each label's loss, fp64; 0 without a label.
    """

    labels: Tensor
    entries: Tensor
    factors: Tensor
    columns: Mapping[str, Tensor]


def token_terms(loss: TokenLoss, batch: Batch) -> LabelTerms:
    """Where the loss of a label needs nothing of others."""

    def make(labels: _Labels) -> LabelLoss:
        return LabelLoss(_OwnLoss(loss, labels), loss.temperature, loss.entropy)

    return LabelTerms(batch, make, columns=loss.columns, factor=loss.factor, mass=loss.mass, needs_columns=True)


def kept_terms(kept: KeptLogProbs, batch: Batch) -> LabelTerms:
    """Nothing is trained; log-probabilities are kept, and routes of plain sequences if they are asked for."""

    def make(labels: _Labels) -> LabelLoss:
        entries = labels.entries.to(kept.values.device)

        def keep(log_probs: Tensor, entropies: Tensor | None, part: slice) -> tuple[Tensor, Tensor, None]:
            kept.values[0, entries[part]] = log_probs
            if entropies is not None:
                kept.values[1, entries[part]] = entropies
            none = torch.zeros_like(log_probs)
            return none, none, None

        return LabelLoss(keep, kept.temperature, kept.entropy)

    return LabelTerms(batch, make, routes=kept.routes)


def given_terms(slopes: Tensor, temperature: float | None, batch: Batch) -> LabelTerms:
    """The derivative by each log-probability is known: ``slopes[0]``, by entry; ``slopes[1]``, if it is there, that by
    each entropy. The losses themselves count as 0."""
    entropy = len(slopes) > 1

    def make(labels: _Labels) -> LabelLoss:
        own = slopes[:, labels.entries].to(labels.labels.device)

        def sloped(log_probs: Tensor, _: Tensor | None, part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
            here = own[:, part].to(log_probs.dtype)
            return torch.zeros_like(log_probs), here[0], here[1] if entropy else None

        return LabelLoss(sloped, temperature, entropy)

    return LabelTerms(batch, make)


class _OwnLoss:
    """The loss of each label of a shard by the function of a :class:`TokenLoss`, and its derivatives."""

    def __init__(self, loss: TokenLoss, labels: _Labels) -> None:
        self._function, self._labelled, self._columns = loss.function, labels.labels != IGNORE, labels.columns
        self._factors = labels.factors

    def __call__(
        self, log_probs: Tensor, entropies: Tensor | None, part: slice
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        labelled, factors = self._labelled[part], self._factors[part].to(log_probs.dtype)
        columns = {name: _as(column[part], log_probs) for name, column in self._columns.items()}
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (log_probs, entropies) if x is not None]
            if entropies is not None:
                columns[COMPUTED[0]] = leaves[1]
            found = self._function(leaves[0], columns)
            _check_losses(found, self._function, labelled)
            losses = torch.where(labelled, found * factors, 0.0)
            slopes: list[Tensor | None] = [None] * len(leaves)
            if losses.requires_grad:
                slopes = list(torch.autograd.grad(losses.sum(), leaves, allow_unused=True))
        first, *others = (
            torch.zeros_like(log_probs)
            if slope is None
            else slope.masked_fill(~labelled.view(-1, *[1] * (slope.dim() - 1)), 0.0)
            for slope in slopes
        )
        return losses.detach().to(log_probs.dtype), first, others[0] if others else None


class KeptLogProbs:
    """Log-probabilities, and entropies, of the labels of a batch by entry; of those that this rank has seen, others
    0."""

    def __init__(
        self,
        batch: Batch,
        like: Tensor,
        *,
        entropy: bool,
        temperature: float | None,
        routed: nn.Module | None = None,
    ) -> None:
        """``routed``: the model, where the experts of tokens are kept, too. Raises InvalidUsage if it has none."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        size = batch.offsets[-1]
        self.values = torch.zeros(1 + entropy, size, dtype=dtype, device=like.device)
        self.routes = None if routed is None else KeptRoutes(size, routed, like.device)
        self.entropy, self.temperature = entropy, temperature

    def sum(self, mesh: Mesh, root: int | None = None) -> Tensor:
        """``[1 or 2, entries]`` of all ranks; with a root on that one. Collective over ``mesh.comm``."""
        values = self.values.cpu()
        if mesh.tensor_rank:  # the first one has the same
            values.zero_()
        return _summed(values, mesh.comm, root)

    def sum_routes(self, mesh: Mesh, root: int | None = None) -> Tensor:
        """``[entries, routed layers, top_k]`` of all ranks, each of which has seen others; as :meth:`sum`."""
        assert self.routes is not None
        return _summed(self.routes.values.cpu(), mesh.comm, root)


def _summed(values: Tensor, comm: Communicator, root: int | None) -> Tensor:
    if root is None:
        comm.all_reduce(values)
    else:
        comm.reduce(values, root)
    return values


def group_terms(
    loss: GroupLoss,
    log_probs: Tensor,
    batch: Batch,
    groups: Sequence[Hashable],
    fetch: Fetch,
    comm: Communicator,
) -> tuple[Tensor, Tensor]:
    """(the loss's derivative by each log-probability, fp64 ``[2]``: the losses and counts of the groups that this rank
    has worked on). Collective over ``comm``, which shares the groups.

    Args:
        log_probs: by entry, equal on all ranks.
        groups: of each sequence.
    """
    offsets = batch.offsets
    slopes, told = torch.zeros_like(log_probs), torch.zeros(2, dtype=torch.float64)
    for members in _own_groups(groups, batch.lengths, comm):
        leaves, columns, where = [], [], []
        for i in members:
            fetched = fetch(i)
            length = offsets[i + 1] - offsets[i]
            labelled = checked(fetched, i, length)[1] != IGNORE
            where.append((torch.arange(length) + offsets[i])[labelled])
            leaves.append(log_probs[where[-1]].requires_grad_())
            own = _columns(fetched, i, length, loss.columns)
            columns.append({name: _as(column[labelled], log_probs) for name, column in own.items()})
        with torch.enable_grad():
            found = loss.function(leaves, columns)
            value, count = found if isinstance(found, tuple) else (found, 1.0)
            _check_group_loss(value, count, members)
            if value.requires_grad:
                for entries, slope in zip(where, torch.autograd.grad(value, leaves, allow_unused=True), strict=True):
                    if slope is not None:
                        slopes[entries] = slope
        told += torch.tensor([float(value.detach()), float(count)], dtype=torch.float64)
    comm.all_reduce(slopes)
    return slopes, told


def _own_groups(groups: Sequence[Hashable], lengths: Sequence[int], comm: Communicator) -> list[list[int]]:
    """The groups that are this rank's, each a list of sequences: the longest first, to whom has least."""
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    tokens = {group: sum(lengths[i] for i in each) for group, each in members.items()}
    loads = [(0, rank) for rank in range(comm.size)]
    own = []
    for group in sorted(members, key=lambda group: -tokens[group]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + tokens[group], rank))
        if rank == comm.rank:
            own.append(members[group])
    return own


def checked_groups(groups: Sequence[Hashable] | None, sequences: int) -> list[Hashable]:
    """The group of each sequence. Raises InvalidUsage for another number of them, or what is no number or name."""
    if groups is None:
        return list(range(sequences))
    if len(groups) != sequences:
        raise InvalidUsage(f"groups has {len(groups)} elements for {sequences} sequences; give one for each")
    found = [group.item() if hasattr(group, "item") else group for group in groups]
    if wrong := [group for group in found if not isinstance(group, (int, str))]:
        raise InvalidUsage(f"groups has {wrong[0]!r}; expected the number or the name of each sequence's group")
    return found


def _columns(fetched: Any, i: int, length: int, needed: Sequence[str]) -> dict[str, Tensor]:
    """The columns of a sequence, each ``[length]``. Raises InvalidUsage."""
    given = fetched if isinstance(fetched, Mapping) else {}
    found = {}
    for name, value in given.items():
        if name in ("tokens", "labels", "routes", *MEDIA):
            continue
        column = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if (column.dim() and column.shape != (length,)) or column.dtype.is_complex or name in COMPUTED:
            raise InvalidUsage(
                f"fetch({i}) gave {name!r} of shape {tuple(column.shape)} and {column.dtype}; a column has a number "
                f"for each of the sequence's {length} tokens, or one for all, and another name than {list(COMPUTED)}"
            )
        found[name] = column.detach().cpu().expand(length)
    if missing := [name for name in needed if name not in found]:
        raise InvalidUsage(
            f"fetch({i}) gave {'the columns ' + str(sorted(found)) if found else 'no columns'}, and the loss needs "
            f'{missing}; let it give a dictionary: {{"tokens": ..., {missing[0]!r}: ...}}'
        )
    return found


def _as(column: Tensor, like: Tensor) -> Tensor:
    return column.to(like.dtype) if column.is_floating_point() else column


def _check_losses(found: Any, function: Any, labelled: Tensor) -> None:
    if isinstance(found, Tensor) and found.shape == labelled.shape:
        return
    told = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise InvalidUsage(
        f"the loss {function!r} gave {told} for {len(labelled)} labels; expected a loss for each of them (a loss "
        "that looks at several is a GroupLoss)"
    )


def _check_group_loss(value: Any, count: Any, members: Sequence[int]) -> None:
    if isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0 and float(count) >= 0:
        return
    told = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise InvalidUsage(
        f"the loss of the group of sequences {list(members)} is {told} with a count of {count!r}; expected a scalar "
        "tensor, or a tuple of one and a number that is not below 0"
    )
