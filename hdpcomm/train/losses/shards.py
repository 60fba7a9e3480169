"""From the sequences or trees of a micro-batch to this rank's shard of their pack, with the losses of every branch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdpcomm.attention import BalancedPack, Pack, as_pack
from hdpcomm.attention.pack_context import routing
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import LabelLoss
from hdpcomm.kernels.transfers import to_device
from hdpcomm.models.media import TokensWithItems
from hdpcomm.models.moe import RouterWeights, path_sums
from hdpcomm.models.routes import ShardRoutes, TakenRoutes
from hdpcomm.plan import MicroBatch, SequenceFragment, TreeFragment
from hdpcomm.plan.tree import Tree, join_trees
from hdpcomm.train.losses.functions import IGNORE, next_token_labels, summed_loss
from hdpcomm.train.state.layout import Layout

__all__ = [
    "Fetch",
    "FetchParts",
    "LabelledTokens",
    "PackedShard",
    "checked",
    "declared",
    "empty_shard",
    "holds_trees",
    "labelled_shard",
    "micro_batch_loss",
    "no_tokens",
    "pack_of",
    "pack_shard",
    "routes_of",
    "sequences_shard",
    "tree_shard",
    "vocabulary_of",
    "WEIGHTS",
]

Fetch = Callable[[int], "Tensor | tuple[Tensor, Tensor] | Mapping[str, Any]"]
"""Gives the tokens ``[length]`` (int64) of a sequence of the global batch by its place in the lengths.

It may also give (tokens, labels); a dictionary of "tokens", "labels" if there are any, and columns for losses of
log-probabilities (:mod:`hdpcomm.train.losses`); or for a tree (tokens, weights): float32 ``[tokens]``, the factor of
each token's loss as what is to be predicted; by default, how many trajectories contain it. A dictionary may have
"routes" ``[tokens, layers, top_k]``, the experts that the tokens take (:mod:`hdpcomm.models.routes`), or those of all
tokens but the last, as vLLM gives them."""


@runtime_checkable
class FetchParts(Protocol):
    """A :data:`Fetch` that can also read a part of a sequence: then a rank reads no more than its shards."""

    def __call__(self, place: int, /) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of a whole sequence."""

    def part(self, place: int, start: int, stop: int, /) -> tuple[Tensor, Tensor]:
        """(tokens, labels) ``[stop - start]`` of a part of it; the label of the last token is still the next one."""


WEIGHTS = "routes"
"""Name of a column, which no column of a user has: how often the loss counts each label."""

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
        routes: what routers ask for the experts of its tokens; see :mod:`hdpcomm.models.routes`.
        ahead: int64 ``[depths, 2, local tokens]``, tokens and labels further ahead for multi-token prediction.
        router_weights: by how much losses of routers count; ``None``: once for each label of plain sequences.
        items: the tokens and the embeddings of images and videos among them; ``None``: there are none.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor | Tree | Pack
    label_rows: Tensor | None = None
    label_weights: Tensor | LabelLoss | None = None
    mass: Tensor | None = None
    routes: TakenRoutes | ShardRoutes | None = None
    ahead: Tensor | None = None
    router_weights: RouterWeights | None = None
    items: TokensWithItems | None = None

    def with_none_ahead(self, depths: int) -> PackedShard:
        """For a pass whose tokens, if there are any, have no labels ahead either."""
        if not depths:
            return self
        none = torch.stack((torch.zeros_like(self.tokens), torch.full_like(self.tokens, IGNORE)))
        return replace(self, ahead=none.expand(depths, *none.shape))

    def routing(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context of a forward pass of this shard through a model, or a stage of one. Raises InvalidUsage for routes
        that it cannot take."""
        return routing(None if self.routes is None else self.routes.of(model))

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


def pack_of(lengths: Iterable[int], size: int, limit: tuple[float, float]) -> Tensor | Pack:
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
    depths: int = 0,
) -> PackedShard:
    """Fetches a micro-batch's sequences, makes labels, packs them and takes this rank's shard. Local.

    Args:
        comm: the communicator over the micro-batch's ranks.
        limit: of the plan (:attr:`StepPlan.limit`).
        depths: of multi-token prediction.

    Raises:
        InvalidUsage: ``fetch`` gave something else than a sequence of the planned length.
    """
    lengths = {sequence.id: sequence.length for sequence in micro_batch.sequences}
    pack = pack_of(lengths.values(), comm.size, limit)
    return sequences_shard(pack, lengths, fetch, comm=comm, device=device, depths=depths)


def sequences_shard(
    cu_seqlens: Tensor | Pack,
    lengths: Mapping[int, int],
    fetch: Fetch,
    *,
    comm: Communicator,
    device: torch.device,
    depths: int = 0,
) -> PackedShard:
    """This rank's shard of plain sequences, or of a slice of one. Local.

    Args:
        lengths: of the whole sequences, by their places in the lengths of the step.
    """
    rank, size, routes = comm.rank, comm.size, None
    pack, places = as_pack(cu_seqlens), list(lengths)
    if isinstance(fetch, FetchParts) and (size > 1 or pack.keeps):  # no other token is read
        columns = [torch.zeros(2 + 2 * depths, 0, dtype=torch.int64)]
        for i, start, stop in pack.reads(rank, size):
            last = min(stop + depths, lengths[places[i]])
            part = checked(fetch.part(places[i], start, last), places[i], last - start)
            columns.append(_columns_ahead(*part, stop - start, depths))
        tokens, labels, *ahead = torch.cat(columns, 1)
    else:
        fetched = {place: fetch(place) for place in places}
        whole = [checked(fetched[place], place, length) for place, length in lengths.items()]
        mine = pack.places(rank, size)
        columns = [_columns_ahead(*each, len(each[0]), depths) for each in whole]
        tokens, labels, *ahead = torch.cat(columns, 1)[:, mine]
        routes = shard_routes(
            [routes_of(fetched[place], place, length) for place, length in lengths.items()], mine, device
        )
    positions = pack.positions(rank, size, device)
    further = to_device(torch.stack(ahead).view(depths, 2, -1), device) if depths else None
    return PackedShard(
        to_device(tokens, device), to_device(labels, device), positions, cu_seqlens, routes=routes, ahead=further
    )


def _columns_ahead(tokens: Tensor, labels: Tensor, count: int, depths: int) -> Tensor:
    """The first ``count`` tokens of a sequence and their labels, and those 1 to ``depths`` places later: int64 ``[2 +
    2 depths, count]``. Behind the end there are tokens 0, and no labels."""
    more = (0, count + depths - len(tokens))
    tokens, labels = F.pad(tokens, more), F.pad(labels, more, value=IGNORE)
    return torch.stack([x[place : place + count] for place in range(depths + 1) for x in (tokens, labels)])


def routes_of(fetched: Any, sequence: int, tokens: int) -> Tensor | None:
    """The routes ``[tokens, layers, top_k]`` that ``fetch`` gave with a sequence, or None. Raises InvalidUsage."""
    if not isinstance(fetched, Mapping) or (given := fetched.get("routes")) is None:
        return None
    routes = torch.as_tensor(given).detach().cpu()
    missing = tokens - len(routes) if routes.dim() == 3 else -1
    if missing not in (0, 1) or routes.is_floating_point() or routes.dtype == torch.bool:
        raise InvalidUsage(
            f"fetch({sequence}) gave routes of shape {tuple(routes.shape)} and {routes.dtype}; expected the numbers of "
            f"experts [{tokens}, layers, top_k], as integers, or without the last token"
        )
    routes = routes if routes.dtype.is_signed else routes.to(torch.int16)
    return torch.cat((routes, routes.new_full((missing, *routes.shape[1:]), -1)))


def shard_routes(given: Sequence[Tensor | None], mine: Tensor, device: torch.device) -> TakenRoutes | None:
    """Routes of the tokens ``mine`` of a pack. Raises InvalidUsage where some of its sequences have none."""
    parts = [each for each in given if each is not None]
    if not parts:
        return None
    if len(parts) < len(given) or len({each.shape[1:] for each in parts}) > 1:
        raise InvalidUsage(
            f"fetch() gave routes with {len(parts)} of {len(given)} sequences of a micro-batch, of the shapes "
            f"{sorted({tuple(each.shape[1:]) for each in parts})}; give all of them, for the same layers"
        )
    return TakenRoutes(torch.cat(parts)[mine], device)


def checked(
    fetched: Tensor | tuple[Tensor, Tensor] | Mapping[str, Any], sequence: int, length: int
) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of a sequence as ``fetch`` gave them. Raises InvalidUsage."""
    tokens, labels = _pair(fetched, sequence, length, "labels", torch.int64)
    if labels is None:
        return tokens, next_token_labels(tokens)
    _refuse_identity(sequence, tokens, labels)
    return tokens, labels


def _pair(fetched: Any, i: int, count: int, second: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The tokens, and what ``fetch`` gave beside them, maybe nothing. Raises InvalidUsage."""
    both: Any = (fetched.get("tokens"), fetched.get(second)) if isinstance(fetched, Mapping) else fetched
    tokens, other = both if isinstance(both, tuple) else (both, None)
    for name, given, kind in (("tokens", tokens, torch.int64), (second, other, dtype)):
        wanted = f"{str(kind).removeprefix('torch.')} [{count}]"
        if not isinstance(given, Tensor) and (name == "tokens" or given is not None):
            raise InvalidUsage(f"fetch({i}) gave {name} = {given!r}; expected a tensor of {wanted}")
        if given is not None and (given.shape != (count,) or given.dtype != kind):
            of_tree = f"a tree, whose {name} are " if second == "weights" else ""
            raise InvalidUsage(
                f"fetch({i}) gave {name} of shape {tuple(given.shape)} and {given.dtype}; the step was planned for "
                f"{of_tree}{wanted}"
            )
    return tokens, other


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


def micro_batch_loss(
    model: nn.Module,
    packed: PackedShard,
    comm: Communicator,
    loss: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The summed loss of this rank's shard of a micro-batch; the forward pass. Collective over ``comm``.

    A model with ``takes_labels = True`` gets the labels and returns the sum, unless ``loss(logits, labels)`` is given;
    with any other, the logits exist as a whole. The labels of a tree, and those with losses of their own, go only to a
    model with ``takes_label_rows = True``; ``loss(logits, labels, weights)`` gets the logits of each label's token and
    the label's factor.
    """
    places = {"positions": packed.positions, "cu_seqlens": packed.cu_seqlens, "comm": comm}
    rows, weights = packed.label_rows, packed.label_weights
    plain = rows is None and weights is None
    tokens = packed.tokens if packed.items is None else packed.items
    with packed.routing(model):
        if loss is None and getattr(model, "takes_labels" if plain else "takes_label_rows", False):
            more: dict[str, Any] = {} if plain else {"label_rows": rows, "label_weights": weights}
            more |= {} if packed.ahead is None else {"ahead": packed.ahead}
            if getattr(model, "has_added_losses", False) and packed.router_weights is not None:
                more["router_weights"] = packed.router_weights
            total: Tensor = model(tokens, **places, labels=packed.labels, **more)
            return total
        logits = model(tokens, **places)
    if plain:
        return (loss or summed_loss)(logits, packed.labels)
    return (loss or summed_loss)(logits if rows is None else logits[rows], packed.labels, weights)


def holds_trees(places: Iterable[int], items: Sequence[int | Tree]) -> bool:
    """Whether a sequence of a micro-batch is a tree, or a fragment of one."""
    return any(place >= len(items) or isinstance(items[place], Tree) for place in places)


@dataclass(frozen=True, slots=True)
class LabelledTokens:
    """The tokens of a sequence or tree, and all that is to be predicted.

    Attributes:
        tree: ``None``: a plain sequence.
        rows: for each label the token that it comes after.
        columns: by label.
        sequences: fp64 ``[segments]``, labels of the sequences that end with each segment, each as often as the loss
            counts it.
        mass: what its sequences add to the number by which a loss that asks for it is divided.
        routes: of its tokens.
    """

    tokens: Tensor
    tree: Tree | None
    rows: Tensor
    columns: Mapping[str, Tensor]
    sequences: Tensor
    mass: float = 0.0
    routes: Tensor | None = None


def labelled_shard(
    parts: Sequence[LabelledTokens],
    pack: Pack | None,
    limit: tuple[float, float],
    *,
    comm: Communicator,
    device: torch.device,
) -> tuple[PackedShard, dict[str, Tensor]]:
    """This rank's shard, whose labels are the column "labels", and the other columns of its labels, on the CPU; one is
    :data:`WEIGHTS`. Local.

    Plain sequences have a label for each token, in their order.

    Args:
        pack: the slice that it is, of the only one of ``parts``; it has the labels of its own tokens, wherever the
            tokens are that they come from.
    """
    tokens = torch.cat([part.tokens for part in parts])
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    trees, rank, size = any(part.tree is not None for part in parts), comm.rank, comm.size
    cu_seqlens: Tensor | Tree | Pack = pack or (
        join_trees([part.tree or len(part.tokens) for part in parts])
        if trees
        else pack_of((len(part.tokens) for part in parts), size, limit)
    )
    pack = as_pack(cu_seqlens)
    mine, rows = pack.places(rank, size), None
    here = mine
    if trees:
        firsts = itertools.accumulate((len(part.tokens) for part in parts), initial=0)
        row = torch.full((len(tokens),), -1, dtype=torch.int64)
        row[mine] = torch.arange(len(mine))
        rows = row[torch.cat([part.rows + first for part, first in zip(parts, firsts, strict=False)])]
        here = rows >= 0
        rows = to_device(rows[here], device)
    columns = {name: column[here] for name, column in columns.items()}
    own, sequences = to_device(columns[WEIGHTS].double(), device), None
    if rows is not None:
        own = torch.zeros(len(mine), dtype=own.dtype, device=device).index_add_(0, rows, own)
    if pack.branched:
        sequences = to_device(torch.cat([part.sequences for part in parts]) * (rank == 0 and pack.begins), device)
    labels, positions = to_device(columns.pop("labels"), device), pack.positions(rank, size, device)
    routes = shard_routes([part.routes for part in parts], mine, device)
    return PackedShard(
        to_device(tokens[mine], device), labels, positions, cu_seqlens, rows, routes=routes,
        router_weights=RouterWeights(own, sequences),
    ), columns  # fmt: skip


def tree_shard(
    places: Sequence[int],
    pack: Pack | None,
    items: Sequence[int | Tree],
    fragments: Sequence[TreeFragment | SequenceFragment],
    fetch: Fetch,
    *,
    comm: Communicator,
    device: torch.device,
) -> PackedShard:
    """This rank's shard of a micro-batch with trees, or of ``pack``, a slice of a tree. Local.

    The token after a branch is one of several, so a token has any number of labels: each of the shard's labels tells
    its row, and its weight: how many trajectories train on it.

    Args:
        places: of the micro-batch's sequences, as in its plan.
        items: what the step was planned for.
        fragments: of the step's plan.
    """
    parts = [_labelled(i, items, fragments, fetch) for i in places]
    shard, columns = labelled_shard(parts, pack, (0.0, 0.0), comm=comm, device=device)
    return replace(shard, label_weights=to_device(columns[WEIGHTS], device))


def _labelled(
    i: int, items: Sequence[int | Tree], fragments: Sequence[TreeFragment | SequenceFragment], fetch: Fetch
) -> LabelledTokens:
    fragment = cast("TreeFragment | None", fragments[i - len(items)] if i >= len(items) else None)
    item = items[i] if fragment is None else items[fragment.tree]
    if not isinstance(item, Tree):
        fetched = fetch(i)
        tokens, labels = checked(fetched, i, item)
        rows = (labels != IGNORE).nonzero()[:, 0]
        columns = {"labels": labels[rows], WEIGHTS: torch.ones(len(rows))}
        own = torch.tensor([len(rows)], dtype=torch.float64)
        return LabelledTokens(tokens, None, rows, columns, own, routes=routes_of(fetched, i, item))
    fetched = fetch(i if fragment is None else fragment.tree)
    tokens, weights = _checked_tree(fetched, i, item)
    tree, routes = item, routes_of(fetched, i, item.num_tokens)
    sequences = _leaf_weights(item, weights)
    if fragment is not None:
        tree = item.part(fragment.segments)
        chosen = torch.from_numpy(item.token_places(fragment.segments))
        repeated = torch.from_numpy(np.repeat(fragment.repeated, tree.lengths))
        tokens, weights = tokens[chosen], weights[chosen].masked_fill(repeated, 0.0)
        sequences = sequences[list(fragment.segments)]
        routes = None if routes is None else routes[chosen]
    previous = torch.from_numpy(tree.previous.copy())
    trained = ((previous >= 0) & (weights != 0)).nonzero()[:, 0]
    columns = {"labels": tokens[trained], WEIGHTS: weights[trained]}
    return LabelledTokens(tokens, tree, previous[trained], columns, sequences, routes=routes)


def _leaf_weights(tree: Tree, weights: Tensor) -> Tensor:
    """Weights of the labels of the trajectories that end with each segment, which are leaves: those with a token share
    its weight evenly. fp64 ``[segments]``."""
    segment = torch.from_numpy(np.repeat(np.arange(len(tree)), tree.lengths))
    sums = torch.zeros(len(tree), dtype=torch.float64)
    sums.index_add_(0, segment, weights.double().masked_fill(torch.from_numpy(tree.previous < 0), 0.0))
    shared = path_sums((sums / torch.from_numpy(tree.trajectories.copy()))[:, None], tree.ends)[:, 0]
    return shared.masked_fill(torch.from_numpy(tree.ends != np.arange(len(tree)) + 1), 0.0)


def _checked_tree(fetched: Any, i: int, tree: Tree) -> tuple[Tensor, Tensor]:
    tokens, weights = _pair(fetched, i, tree.num_tokens, "weights", torch.float32)
    if weights is None:
        weights = torch.from_numpy(np.repeat(tree.trajectories, tree.lengths)).float()
    return tokens, weights


class _Declared:
    def __init__(self, fetch: Any, comm: Communicator, vocabulary: int | None) -> None:
        self._fetch, self._comm, self._vocabulary = fetch, comm, vocabulary

    def __call__(self, place: int, /) -> Any:
        with self._comm.busy("reads data"):
            fetched = self._fetch(place)
        given = fetched.get("tokens") if isinstance(fetched, Mapping) else fetched
        self._check(given[0] if isinstance(given, tuple) and given else given, place)
        return fetched

    def _check(self, tokens: Any, place: int) -> None:
        if self._vocabulary is None or not isinstance(tokens, Tensor) or not tokens.numel() or tokens.is_cuda:
            return
        for token in map(int, tokens.aminmax()):
            if not 0 <= token < self._vocabulary:
                raise InvalidUsage(
                    f"fetch({place}) gave the token {token}; the model has embeddings of tokens 0 to "
                    f"{self._vocabulary - 1}: use its tokenizer, or a model with a larger vocabulary"
                )


class _DeclaredParts(_Declared):
    def part(self, place: int, start: int, stop: int, /) -> tuple[Tensor, Tensor]:
        with self._comm.busy("reads data"):
            parts: tuple[Tensor, Tensor] = self._fetch.part(place, start, stop)
        self._check(parts[0] if parts else None, place)
        return parts


def declared(fetch: Fetch, comm: Communicator, vocabulary: int | None) -> Fetch:
    """``fetch``, each call of which is an activity of this rank (:meth:`hdpcomm.comm.Communicator.busy`). It reads
    parts of sequences if ``fetch`` does. Local.

    Args:
        vocabulary: a token of at least that, or below 0, is an InvalidUsage; ``None``: nobody knows.
    """
    return (_DeclaredParts if isinstance(fetch, FetchParts) else _Declared)(fetch, comm, vocabulary)


def vocabulary_of(model: nn.Module, layout: Layout) -> int | None:
    """Rows of the whole model's embedding of tokens, where this rank has it under a name that is known. Local."""
    for module in model.modules():
        for name in ("embedding", "embed_tokens", "wte"):
            embedding = getattr(module, name, None)
            if isinstance(embedding, nn.Embedding):
                return layout.of(embedding.weight).shape[0]
    return None
