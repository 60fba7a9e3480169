"""Rows that each rank was given by another trainer, computed under plans of all ranks together.

Where a trainer of others deals its rows to ranks and computes its loss rank by rank, all ranks' rows become one global
batch: forward passes under one plan give each rank the log-probabilities of its own rows, the trainer's code makes a
loss of them, and its derivative by each of them goes into the model by another run of the plan. Rows that begin with
the same prompt, whichever ranks have them, are a tree, in which it is computed once, where the plan is shorter so.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_type, check_whole
from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.data import fold
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure import measured_planner
from hdpcomm.models.media import MediaEncoder, is_pixels
from hdpcomm.offload import ActivationOffload, rank_pool
from hdpcomm.offload.activations import SMALLEST_OFFLOAD
from hdpcomm.plan import CostModel, Item, ModelSpec, PlannedStep, Planner, TrajectoryTree, Tree, trees_of_prompts
from hdpcomm.plan.items import PlacedItems
from hdpcomm.plan.planner import LONGEST_MEASURED, MOST_SLICES
from hdpcomm.train.losses.functions import IGNORE
from hdpcomm.train.losses.label_terms import (
    Batch,
    KeptLogProbs,
    LabelTerms,
    given_terms,
    kept_terms,
    shares_prefixes,
    shorter_plan,
)
from hdpcomm.train.step.items import with_items
from hdpcomm.train.step.passes import StepInputs
from hdpcomm.train.step.runner import Runner

__all__ = ["PlanSettings", "RowMedia", "RowPasses", "ScoredRows", "Sequences", "gather_sequences"]


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


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences one after the other.

    Attributes:
        lengths: tokens of each.
        tokens: int64 ``[sum(lengths)]``.
        labels: int64, the same shape: what each token is to predict, -100 for nothing.
        targets: floating point ``[sequences, outputs]`` of losses of outputs, which ``fetch`` gives as the columns "0",
            "1", ...; ``None``: there are none.
        routes: int16 ``[sum(lengths), layers, top_k]``, the experts that tokens take; ``None``: as routers choose.
        media: images and videos of each; ``None``: a model of text.
        offsets: where each begins, and the last one ends.
    """

    lengths: list[int]
    tokens: Tensor
    labels: Tensor
    targets: Tensor | None = None
    routes: Tensor | None = None
    media: RowMedia | Sequence[Mapping[str, Tensor]] | None = None
    offsets: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", [0, *accumulate(self.lengths)])

    def each(self) -> list[Tensor]:
        """The tokens of each sequence."""
        return [self.tokens[a:b] for a, b in pairwise(self.offsets)]

    @property
    def num_labels(self) -> Tensor:
        """Scalar: the tokens that have a label."""
        return (self.labels != IGNORE).sum()

    def prompts(self, images: Sequence[str] = ()) -> list[tuple[Hashable, int]]:
        """For each sequence the name and the tokens of its prompt: what comes before its first label, where that is
        more than one token; equal ones, of the same routes, have one name.

        Args:
            images: of each sequence, equal for the same ones.
        """
        found: list[tuple[Hashable, int]] = []
        for i in range(len(self.lengths)):
            place = slice(*self.offsets[i : i + 2])
            tokens, labels = self.tokens[place], self.labels[place]
            labelled = (labels != IGNORE).nonzero()
            count = int(labelled[0]) + 1 if len(labelled) else 1
            parts = [tokens[:count], *([] if self.routes is None else [self.routes[place][:count]])]
            name = b"".join(each.numpy().tobytes() for each in parts)
            found.append(((name, *images[i : i + 1]) if count > 1 else i, count))
        return found

    def fetch(self, place: int) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """(tokens, labels) of one sequence, or a dictionary of them, its targets and its routes."""
        part = slice(*self.offsets[place : place + 2])
        tokens, labels = self.tokens[part], self.labels[part]
        if self.targets is None and self.routes is None and self.media is None:
            return tokens, labels
        targets: Iterable[Tensor] = () if self.targets is None else self.targets[place]
        more = {} if self.routes is None else {"routes": self.routes[part]}
        more |= self.media.given[place] if isinstance(self.media, RowMedia) else {}
        return {"tokens": tokens, "labels": labels} | {str(k): each for k, each in enumerate(targets)} | more


def gather_sequences(own: Sequences, comm: Communicator) -> tuple[Sequences, int]:
    """The sequences of all ranks, in their order, and the number of tokens before this rank's. Collective over
    ``comm``: three all-gathers, 16 bytes a token, and one each of targets, routes and sizes of images if there are
    any."""
    media = None if own.media is None else RowMedia(cast("Sequence[Mapping[str, Tensor]]", own.media), comm)
    if comm.size == 1:
        return replace(own, media=media), 0
    sizes = torch.empty(2 * comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([len(own.lengths), len(own.tokens)]))
    counts, tokens = sizes.view(-1, 2).unbind(1)
    most = int(counts.max()), int(tokens.max())
    lengths = _gather(torch.tensor(own.lengths)[None], counts.tolist(), most[0], comm)[0]
    both = _gather(torch.stack([own.tokens, own.labels]), tokens.tolist(), most[1], comm)
    targets = own.targets
    if targets is not None:
        targets = _gather(targets.double().T, counts.tolist(), most[0], comm).T
    routes = own.routes
    if routes is not None:
        every = _gather(routes.flatten(1).T.contiguous(), tokens.tolist(), most[1], comm)
        routes = every.T.reshape(-1, *routes.shape[1:])
    return Sequences(lengths.tolist(), both[0], both[1], targets, routes, media), int(tokens[: comm.rank].sum())


def _gather(rows: Tensor, counts: list[int], most: int, comm: Communicator) -> Tensor:
    """``[n, sum(counts)]``: the ``rows`` [n, counts[rank]] of all ranks, side by side."""
    mine = rows.new_zeros(rows.shape[0], most)
    mine[:, : rows.shape[1]] = rows
    everyone = rows.new_empty(comm.size, rows.shape[0], most)
    comm.all_gather(everyone, mine)
    return torch.cat([part[:, :count] for part, count in zip(everyone, counts, strict=True)], dim=1)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How rows are planned.

    Attributes:
        capacity: most tokens of a rank in a micro-batch; ``None``: the even share of each batch.
        cost_model: what plans go by; ``None``: measured with the first batch.
        queue, slices: of :class:`hdpcomm.plan.Planner`; slices, in which sequences run that do not fit the ranks
            otherwise, need a capacity.
        offload: bytes of pinned host memory that a rank takes for activations, beyond a capacity that says what fits
            without; what it is worth is measured with the first batch.

    Raises: InvalidUsage: slices or offload without a capacity, or a value out of range.
    """

    capacity: int | None = None
    cost_model: CostModel | None = None
    queue: bool = False
    slices: int = 1
    offload: int = 0

    def __post_init__(self) -> None:
        check_type("plans", "queue", self.queue, bool)
        check_whole("plans", "slices", self.slices, least=1, most=MOST_SLICES)
        check_whole("plans", "offload", self.offload, least=0)
        if self.capacity is not None:
            check_whole("plans", "capacity", self.capacity, least=1)
        elif self.offload or self.slices > 1:
            given = f"offload={self.offload}" if self.offload else f"slices={self.slices}"
            raise InvalidUsage(f"{given} is for sequences that do not fit the ranks: give capacity=, what a rank holds")


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The rows of all ranks in one run of forward passes, and the results for this rank's.

    Attributes:
        batch, planned: of all ranks; ``labels``: the entries of the batch.
        entries: where in the batch the results of this rank's labels are.
        values: ``[1 or 2, labels of this rank]``: log-probabilities, and entropies; a leaf of the loss's graph, if
            there is to be one.
        temperature: divides the logits; ``None``: the results are outputs of the last layer.
        routes: ``[tokens of this rank, layers with routers, top_k]``, where they were asked for.
    """

    batch: Sequences
    planned: PlannedStep
    labels: Batch
    entries: Tensor
    values: Tensor
    temperature: float | None
    routes: Tensor | None = None

    def terms(self, slopes: Tensor | None, comm: Communicator) -> LabelTerms:
        """The losses of the labels that have these derivatives, of the shape of ``values``, on this rank, and others'
        on theirs; ``None``: 0. Collective over ``comm``."""
        everyone = torch.zeros(len(self.values), self.labels.offsets[-1], dtype=self.values.dtype)
        if slopes is not None:
            everyone[:, self.entries] = slopes.cpu()
        comm.all_reduce(everyone)
        return given_terms(everyone, self.temperature, self.labels)


class RowPasses:
    """Plans for the rows of all ranks, and runs passes of them; called by all ranks alike.

    Args:
        model: in the form of :func:`hdpcomm.models.adapt`, with equal values on all ranks.
        runner: of passes of the model.
        settings: gives what ranks must have alike to update alike (:func:`hdpcomm.train.step.replicas.settings_of`).
        around: around the forward pass of each micro-batch.
        spec: says what share of a token's memory slices keep for later ones; slices need it.

    Raises: InvalidUsage: slices without a ``spec``, or offload of more than host memory has.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        runner: Runner,
        settings: Callable[[], str],
        *,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        plans: PlanSettings = PlanSettings(),
        spec: ModelSpec | None = None,
    ) -> None:
        self.comm, self.capacity, self.mesh = mesh.comm, plans.capacity, mesh
        self._plans, self._spec = plans, spec
        self.media: MediaEncoder | None = getattr(model, "media", None)
        self._model, self._runner, self._settings, self._around = model, runner, settings, around
        self._like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        self._shares = shares_prefixes([model])
        self._planner: Planner | None = None
        self._offload: ActivationOffload | None = None
        if plans.slices > 1 and spec is None:
            raise InvalidUsage(
                f"slices={plans.slices}: it is not known how much slices of this kind of model keep for later ones; "
                "give slices=1, and more ranks, a larger capacity or offload="
            )
        if pool := rank_pool(mesh.comm, plans.offload, self._like.device):
            self._offload = ActivationOffload(pool, model, min_bytes=SMALLEST_OFFLOAD)

    @property
    def cost_model(self) -> CostModel | None:
        """Costs that plans go by; ``None``: no batch has come whose costs are measured."""
        return self._plans.cost_model if self._planner is None else self._planner.cost_model

    def plan(self, batch: Sequences) -> PlannedStep:
        """A plan for the rows of all ranks, on which they have agreed; pixels are where they are encoded then.
        Collective.

        Raises: Mismatch: of :func:`hdpcomm.train.step.replicas.check_same_plan`.
        """
        return self._agreed(self._planned(batch.lengths, batch.lengths), batch)

    def _agreed(self, planned: PlannedStep, batch: Sequences, labels: Batch | None = None) -> PlannedStep:
        media, settings = batch.media, self._settings()
        if isinstance(media, RowMedia) and any(items := media.items(cast(MediaEncoder, self.media), batch.each())):
            assert self._planner is not None
            planned = with_items(planned, items, self._model, self._planner, self.mesh, labels)
            assert planned.items is not None
            settings += planned.items.digest()
        self._runner.agree(planned.plan, settings)
        if planned.items is not None:
            cast(RowMedia, media).send_pixels(planned.items, self.mesh, self._like)
        return planned

    def _planned(self, items: Sequence[int | Tree], lengths: list[int]) -> PlannedStep:
        """A plan for rows, or trees of rows, of these lengths. Collective where costs are to be measured."""
        ranks, capacity = self.mesh.hdp, self.capacity
        if capacity is None:
            capacity = max(-(-sum(lengths) // ranks), max(-(-length // ranks) for length in lengths))
        if self._planner is None:
            self._planner = self._measured(capacity, max(lengths))
        if self._planner.cluster.capacity != capacity:
            self._planner = self._planner.with_capacity(capacity)
        return PlannedStep(tuple(items), self._planner.plan(items), 0.0)

    def _measured(self, capacity: int, longest: int) -> Planner:
        """The planner, by what passes cost, and what offload is worth, where nobody has said it. Collective."""
        plans = self._plans
        with self._runner.trial() if plans.cost_model is None or self._offload else contextlib.nullcontext():
            return measured_planner(
                self._model, self.mesh, capacity=capacity, longest=max(2, min(LONGEST_MEASURED, longest)),
                queue=plans.queue, slices=plans.slices, spec=self._spec, offload=self._offload,
                cost_model=plans.cost_model,
            )  # fmt: skip

    def score(self, own: Sequences, *, temperature: float | None, entropy: bool, routes: bool = False) -> ScoredRows:
        """Forward passes over all ranks' rows; the log-probabilities of the labels of this rank's, or with no
        temperature the outputs there, of a model with one; with ``routes`` also the experts of its tokens. Collective.

        The values are a leaf with gradients where autograd is on.
        """
        batch, first = gather_sequences(own, self.comm)
        lengths = batch.lengths
        images = batch.media.digests() if isinstance(batch.media, RowMedia) else ()
        if any(images) and (routes or temperature is None):
            trees: Sequence[TrajectoryTree] = ()
        elif temperature is None:  # labels do not tell where prompts end
            folded = fold(batch.each())
            trees = [tree for tree in folded if len(tree.trajectories) > 1]
        else:
            trees = () if routes else trees_of_prompts(lengths, batch.prompts(images))
        planned, labels = shorter_plan(lambda items: self._planned(items, lengths), lengths, trees, shares=self._shares)
        planned = self._agreed(planned, batch, labels)
        routed = self._model if routes else None
        kept = KeptLogProbs(labels, self._like, entropy=entropy, temperature=temperature, routed=routed)
        self._runner.forward(self._inputs(planned, batch, terms=kept_terms(kept, labels)))
        entries = first + (own.labels != IGNORE).nonzero()[:, 0]
        values = kept.sum(self.mesh)[:, entries].requires_grad_(torch.is_grad_enabled())
        every = kept.sum_routes(self.mesh)[first : first + len(own.tokens)] if routes else None
        return ScoredRows(batch, planned, labels, entries, values, temperature, every)

    def train(
        self,
        planned: PlannedStep,
        batch: Sequences,
        *,
        scale: float = 1.0,
        terms: LabelTerms | None = None,
        ends: bool = True,
    ) -> Tensor:
        """Forward and backward passes of a batch, whose gradients are added to those that there are; its loss, times
        ``scale``. With ``ends``, the gradients of the step are reduced, to their sum over the ranks. Collective."""
        runner = self._runner
        total, _ = runner.train(
            self._inputs(planned, batch, scale=scale, gradients=runner.gradients, ends=ends, terms=terms)
        )
        if ends:
            runner.reduce()
        return torch.tensor(total * scale)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that this rank has copied to host memory so far."""
        return 0 if self._offload is None else self._offload.stats().stored_bytes

    def _inputs(self, planned: PlannedStep, batch: Sequences, **more: object) -> StepInputs:
        return StepInputs(
            planned, batch.fetch, offload_context=self._forward_pass, offload=self._offload,
            on_pass=lambda _: self.comm.tick(), **more,  # type: ignore[arg-type]
        )  # fmt: skip

    @contextlib.contextmanager
    def _forward_pass(self, ratio: float, tokens: int, *_: int) -> Iterator[None]:
        """Around the forward pass of a micro-batch."""
        offload = self._offload if torch.is_grad_enabled() else None
        with self._around(), contextlib.nullcontext() if offload is None else offload.micro_batch(ratio, tokens=tokens):
            yield
