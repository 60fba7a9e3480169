"""Costs of micro-batches: :class:`CostModel`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from typing import Any

import numpy as np

from hdpcomm._core import planner as core
from hdpcomm.arguments import check_number, check_type, check_whole
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.memory import MemoryModel
from hdpcomm.plan.specs import ClusterSpec, ModelSpec
from hdpcomm.plan.tree import Tree

__all__ = ["CostModel", "CostSample", "core_cost", "fit_coefficients", "limit_of"]


def fit_coefficients(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients x >= 0 with the least sum of squares of ``(row @ x - seconds) / seconds``.

    The optimum is the unconstrained optimum over the columns whose coefficients are not zero, so all subsets of the few
    columns are tried. Columns are scaled first, since they differ by many orders of magnitude.
    """
    target = np.asarray(seconds, dtype=np.float64)
    matrix = np.asarray(rows, dtype=np.float64) / target[:, None]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    matrix /= scale
    columns = matrix.shape[1]
    best = np.zeros(columns)
    best_error = float(len(target))  # the error if all coefficients are zero
    for size in range(1, columns + 1):
        for subset in combinations(range(columns), size):
            chosen = list(subset)
            solution, _, rank, _ = np.linalg.lstsq(matrix[:, chosen], np.ones(len(target)), rcond=1e-10)
            if rank < size or (solution < 0).any():
                continue
            error = float(((matrix[:, chosen] @ solution - 1) ** 2).sum())
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = np.zeros(columns)
                best[chosen] = solution
    return [float(value) for value in best / scale]


def descend(misfit: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """A local minimum of ``misfit`` near ``start`` by pattern search, for functions with kinks.

    Each value is multiplied and divided by a factor in turn; the factor shrinks where that does not help. A value of 0
    stays 0, others may become 0.
    """
    best, least = list(start), misfit(start)
    factor = 2.0
    while factor > 1.0005:
        improved = False
        for place in range(len(best)):
            for scale in (factor, 1 / factor, 0.0):
                trial = [*best[:place], best[place] * scale, *best[place + 1 :]]
                if (value := misfit(trial)) < least * (1 - 1e-9):
                    best, least, improved = trial, value, True
        if not improved:
            factor = factor**0.5
    return best


# Work of forward and backward pass, in forward passes. The backward pass of linear layers has two matrix products for
# each one of the forward pass; that of flash attention has five for two, since it recomputes the scores.
_LINEAR_PASSES = 3.0
_ATTENTION_PASSES = 3.5
# Messages of a ring step: KV in the forward pass, KV and its gradient in the backward pass.
_KV_MESSAGES = 3
# States go along a zigzag there and back, forward and backward.
_STATE_MESSAGES = 4
# K and V are made of the latent in the forward pass and again in the backward pass, which has two products more.
_EXPANSION_PASSES = 4.0


_MOST_RANKS = 1 << 31
_MOST_TOKENS = 1 << 40  # of a sequence
_LEAST_SECONDS, _MOST_SECONDS = 1e-12, 1e9  # of a measurement


@dataclass(frozen=True, slots=True)
class CostSample:
    """One measurement: both passes of a micro-batch of ``lengths`` (tokens) took ``seconds`` on ``ranks`` ranks.

    ``one_node``: whether all of them are on one node; ``one_domain``: else, whether on nodes of one domain
    (``ClusterSpec.ranks_per_domain``). ``processor_s``: what each of these ranks took of its processors,
    0 where nobody measured it; less than ``seconds`` where ranks wait, or share processors. ``expert``: above 1, of so
    many ranks that share experts one had tokens, and the others ran their passes without any. ``weights_s``: of
    ``seconds``, those of weight gradients that split backward passes left for later. ``key_limit``, ``limited``: of the
    model (:class:`CostModel`), by its sizes.
    """

    ranks: int
    lengths: tuple[int, ...]
    seconds: float
    one_node: bool = True
    processor_s: float = 0.0
    expert: int = 1
    weights_s: float = 0.0
    one_domain: bool = False
    key_limit: float = 0.0
    limited: float = 0.0


def _sample(given: CostSample | tuple[int, Sequence[int], float]) -> CostSample:
    check_type("fit()", "a sample", given, (CostSample, tuple, list))
    try:
        sample = given if isinstance(given, CostSample) else CostSample(given[0], tuple(given[1]), given[2])
        for length in sample.lengths:
            check_whole("a sample", "a length", length)
    except (TypeError, IndexError) as error:
        raise InvalidUsage(f"{given!r} is no sample ({error}): expected (ranks, lengths, seconds)") from error
    check_whole("a sample", "ranks", sample.ranks)
    check_type("a sample", "seconds", sample.seconds, (int, float))
    return sample


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the seconds of a micro-batch's forward and backward pass on its d ranks.

    For lengths s_i with the sum S, ``step = attention * sum(s_i^2) / d^2 + piece * S / d`` is the compute of one ring
    step and ``transfer = kv * S / d + latency`` the message that overlaps it, each over both passes. The time is
    ``d * step + linear * S / d + fixed`` plus, for each of the d - 1 ring steps after the first, ``ring_step`` and the
    time by which the forward and the backward part of ``transfer`` exceed their parts of ``step``. On one rank that is
    ``a s^2 + b s + c`` with a = attention, b = piece + linear, c = fixed. ``*_inter`` is used if the ranks are not all
    on one node; ``*_domain`` if these nodes are of one domain. Where layers choose their keys, what :meth:`squares`
    gives is in the place of ``s_i^2``.

    Attributes:
        attention: seconds per token squared, of sequences with at most ``key_limit`` tokens if there is a limit.
        linear: seconds per token.
        fixed: seconds per micro-batch.
        piece: seconds per token and ring step, lost because short pieces make the attention kernel less efficient.
        ring_step: seconds per ring step that are never hidden.
        kv_intra, kv_inter: seconds to pass one token's KV on, inside a node and between nodes.
        latency_intra, latency_inter: seconds per message, hidden behind compute like the bytes.
        kv_domain, latency_domain: between nodes of a domain (``ClusterSpec.ranks_per_domain``), where ``*_inter`` are
            between domains; ``None``: as ``*_inter``.
        forward, forward_transfer: the forward pass's share of the compute and of the transfers.
        experts: of ``linear``, the seconds per token that go to layers with experts, dispatch included: work that the
            ranks of an expert group do together (``ClusterSpec.expert``). ``linear`` has all of it, as where all ranks
            of a group have as many tokens.
        weights: share of ``linear`` without ``experts`` that goes to the gradients of weights, which split backward
            passes leave for later (``ClusterSpec.split_backward``): at most one of three matrix products, less where a
            stage has more than linear layers. :func:`hdpcomm.measure.costs.weights_share` measures it.
        key_limit: keys that a query sees at most in layers that choose them (``top_k`` of an indexer); 0: none do.
        limited: of ``attention``, the share of these layers without the indexers' scores, which are of all keys.
    """

    attention: float
    linear: float
    fixed: float = 0.0
    piece: float = 0.0
    ring_step: float = 0.0
    kv_intra: float = 0.0
    kv_inter: float = 0.0
    latency_intra: float = 0.0
    latency_inter: float = 0.0
    forward: float = 1 / 3
    forward_transfer: float = 1 / 4
    experts: float = 0.0
    weights: float = 1 / 3
    kv_domain: float | None = None
    latency_domain: float | None = None
    key_limit: float = 0.0
    limited: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            share = field.name.startswith("forward") or field.name in ("weights", "limited")
            most = 1.0 if share else math.inf
            value = getattr(self, field.name)
            if value is not None or not field.name.endswith("_domain"):
                check_number("CostModel", field.name, value, least=0, most=most)
        if self.limited and self.key_limit < 1:
            raise InvalidUsage(
                f"CostModel: limited is {self.limited} and key_limit {self.key_limit}, expected >= 1 key"
            )

    @property
    def limit(self) -> tuple[float, float]:
        """``key_limit`` and ``limited``, which shards over several ranks follow; (0, 0): none."""
        return (float(self.key_limit), float(self.limited)) if self.limited else (0.0, 0.0)

    def squares(self, stop: Any, start: Any = 0.0) -> Any:
        """Attention costs of the queries at ``start`` to ``stop`` of a sequence, in squared tokens; numbers or
        arrays. ``stop^2 - start^2``, less where layers choose their keys."""
        if not self.limited:
            return stop * stop - start * start
        far, near = np.maximum(stop - self.key_limit, 0.0), np.maximum(start - self.key_limit, 0.0)
        return stop * stop - start * start - self.limited * (far * far - near * near)

    def item_squares(self, item: int | Tree, first: int = 0, end: int | None = None) -> float:
        """:meth:`squares` of a sequence of so many tokens, or of a tree; of its tokens [first, end), depth-first."""
        if isinstance(item, Tree):
            if not self.limited and first == 0 and end is None:
                return item.squares
            _, starts, lengths = item.span(first, item.num_tokens if end is None else end)
            return float(self.squares(1.0 * starts + lengths, 1.0 * starts).sum())
        return float(self.squares(float(item if end is None else end), float(first)))

    def seconds(
        self, lengths: Sequence[int], ranks: int = 1, *, one_node: bool = True, one_domain: bool = False
    ) -> float:
        """Predicted seconds of a micro-batch of ``lengths`` on ``ranks`` ranks; ``one_domain``: those of several nodes
        are in one domain."""
        for length in lengths:
            check_number("seconds()", "a length", length, least=0)
        squares = sum(float(self.squares(float(s))) for s in lengths)
        return self.load_seconds(squares, sum(lengths), ranks, one_node=one_node, one_domain=one_domain)

    def links(self, *, one_node: bool, one_domain: bool = False) -> tuple[float, float]:
        """Seconds a token's KV and seconds a message between ranks of one node, of one domain, or of several."""
        if one_node:
            return self.kv_intra, self.latency_intra
        kv, latency = (self.kv_domain, self.latency_domain) if one_domain else (None, None)
        return self.kv_inter if kv is None else kv, self.latency_inter if latency is None else latency

    def load_seconds(
        self, squares: float, tokens: float, ranks: int = 1, *, one_node: bool = True, one_domain: bool = False
    ) -> float:
        """:meth:`seconds` of so many tokens, by the sum of their :meth:`item_squares`."""
        check_whole("CostModel", "ranks", ranks, least=1)
        step = self.attention * squares / ranks**2 + self.piece * tokens / ranks
        total = ranks * step + self.linear * tokens / ranks + self.fixed
        if ranks > 1:
            kv, latency = self.links(one_node=one_node, one_domain=one_domain)
            transfer = kv * tokens / ranks + latency
            wait = max(0.0, self.forward_transfer * transfer - self.forward * step)
            wait += max(0.0, (1 - self.forward_transfer) * transfer - (1 - self.forward) * step)
            total += (ranks - 1) * (wait + self.ring_step)
        return total

    @classmethod
    def analytic(cls, model: ModelSpec, cluster: ClusterSpec) -> CostModel:
        """Derives the coefficients from the model's FLOPs and bytes and the device's rates, per pipeline stage."""
        device = cluster.hardware
        domain, domain_latency = device.domain_link if cluster.ranks_per_domain else device.inter_link
        intra = max(device.intra_bandwidth, domain)
        share = 1.0 / (cluster.tensor * cluster.pipeline)
        layers = model.layers / cluster.pipeline
        squares = _ATTENTION_PASSES * model.attention_flops_per_token_squared + model.index_flops_per_token_squared
        attention = squares * share / device.attention_flops
        expansion, mixing = model.expansion_flops_per_token, model.mixing_flops_per_token
        chosen_keys, chosen_flops = model.chosen_flops
        attention += _ATTENTION_PASSES * chosen_flops * share / device.attention_flops
        key_limit, limited = limit_of(model)
        linear = _LINEAR_PASSES * (model.linear_flops_per_token - mixing - expansion) * share / device.linear_flops
        mixing -= 2 * chosen_flops * chosen_keys  # of a long sequence; here they are squares up to the limit
        linear += _ATTENTION_PASSES * mixing * share / device.attention_flops
        experts = _LINEAR_PASSES * model.expert_flops_per_token * share / device.linear_flops
        # Norms, rotary embedding and residuals are bound by memory: three passes that read and write the activations.
        linear += 3 * 2 * model.layers * model.moved_bytes * share / device.hbm_bandwidth
        if cluster.tensor > 1:  # two all-reduces per layer and pass over the fast link
            volume = 2 * (cluster.tensor - 1) / cluster.tensor * model.hidden * model.dtype_bytes
            linear += 4 * layers * volume / device.intra_bandwidth
        if cluster.expert > 1:
            widths = ((cluster.node_ranks, intra), (cluster.domain_ranks, domain), (0, device.inter_bandwidth))
            bandwidth = next(rate for ranks, rate in widths if ranks % cluster.expert == 0)
            dispatch = model.dispatch_bytes_per_token(cluster.expert) * share / bandwidth
            linear, experts = linear + dispatch, experts + dispatch
        else:
            experts = 0.0
        sent = _Sent.of(model, cluster)
        kv_bytes = sent.tokens * (2 * model.dtype_bytes + 4)  # KV, then KV again and its gradient in fp32
        state_bytes = _STATE_MESSAGES * sent.states * 4
        messages = _KV_MESSAGES * sent.rings + _STATE_MESSAGES * sent.recurrences
        return cls(
            attention=attention,
            linear=linear,
            fixed=_LINEAR_PASSES * layers * device.step_overhead_s,
            piece=attention * (1 - limited) * device.short_piece
            + _EXPANSION_PASSES * expansion * share / device.linear_flops,
            ring_step=2 * (sent.rings + sent.recurrences) * device.step_overhead_s,
            kv_intra=kv_bytes / intra,
            kv_inter=kv_bytes / device.inter_bandwidth,
            latency_intra=messages * min(device.intra_latency_s, domain_latency) + state_bytes / intra,
            latency_inter=messages * device.inter_latency_s + state_bytes / device.inter_bandwidth,
            forward_transfer=1 / (2 + 4 / model.dtype_bytes),
            experts=experts,
            kv_domain=kv_bytes / domain if cluster.ranks_per_domain else None,
            latency_domain=messages * domain_latency + state_bytes / domain if cluster.ranks_per_domain else None,
            key_limit=key_limit,
            limited=limited,
        )

    def at_work(self, linear: float, attention: float, layers: float) -> CostModel:
        """Costs of a stage with so many times the work (``ClusterSpec.stage_work``)."""
        names = ["attention", "piece", "ring_step", "kv_intra", "kv_inter", "latency_intra", "latency_inter"]
        names += [name for name in ("kv_domain", "latency_domain") if getattr(self, name) is not None]
        times = dict.fromkeys(names, attention) | {"linear": linear, "fixed": layers, "experts": layers}
        weights = min(1.0, self.weights * layers / linear)
        return replace(self, weights=weights, **{name: getattr(self, name) * each for name, each in times.items()})

    def with_recompute(self, share: float, outside: float = 0.0) -> CostModel:
        """Where ``share`` of the layers run forward again in the backward pass, messages of their rings included.

        outside: of ``linear``, the share that is outside of layers and runs once: embedding and head.
        """
        again, transfer = 1 + share * self.forward, 1 + share * self.forward_transfer
        scores, linear = 1 + share / _ATTENTION_PASSES, 1 + share * self.forward * (1 - outside)
        times = {"attention": scores, "piece": scores, "fixed": again, "ring_step": 1 + share / 2, "experts": again}
        times |= dict.fromkeys(("kv_intra", "kv_inter", "latency_intra", "latency_inter"), transfer)
        times |= {name: transfer for name in ("kv_domain", "latency_domain") if getattr(self, name) is not None}
        return replace(
            self,
            linear=self.linear * linear,
            forward=self.forward / again,
            forward_transfer=self.forward_transfer / transfer,
            weights=self.weights / linear,
            **{name: getattr(self, name) * factor for name, factor in times.items()},
        )

    @classmethod
    def fit(cls, samples: Iterable[CostSample | tuple[int, Sequence[int], float]]) -> CostModel:
        """Fits the coefficients to measured micro-batches: least squares of relative errors, none negative.

        Args:
            samples: ``(ranks, lengths, seconds)``; at least three on one node, of different lengths. The cost of ring
                steps can be fitted only to samples on several ranks, and that of links between nodes
                (``kv_inter``, ``latency_inter``) only to samples with ``one_node=False``; those of links between nodes
                of a domain to samples with ``one_domain=True`` as well. ``experts`` needs a sample
                with ``expert`` beside one of the same lengths without. Where layers choose their keys, samples of more
                than twice ``key_limit`` tokens tell what these cost; else ``limited`` of the samples does.

        Raises:
            InvalidUsage: fewer than three samples on one node, or one that is not positive.
        """

        if not isinstance(samples, Iterable):
            raise InvalidUsage(f"samples is {samples!r}, expected a list of (ranks, lengths, seconds)")
        measured = [_sample(each) for each in samples]
        if len(measured) < 3:
            raise InvalidUsage(
                f"{len(measured)} samples given, expected at least 3 of different lengths: profile more micro-batches"
            )
        for sample in measured:
            if sample.ranks < 1 or not sample.lengths or min(sample.lengths) < 1 or not 0 < sample.seconds < math.inf:
                raise InvalidUsage(f"{sample} is no measurement: ranks, lengths and seconds have to be positive")
            if not _LEAST_SECONDS <= sample.seconds <= _MOST_SECONDS:
                raise InvalidUsage(
                    f"a sample took {sample.seconds:g} s, expected {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}: give "
                    "seconds"
                )
            if sample.ranks > _MOST_RANKS or max(sample.lengths) > _MOST_TOKENS:
                raise InvalidUsage(
                    f"a sample has more than {_MOST_RANKS} ranks or a length above {_MOST_TOKENS} tokens"
                )
        beside = [sample for sample in measured if sample.expert > 1]
        measured = [sample for sample in measured if sample.expert == 1]
        inside = [sample for sample in measured if sample.one_node]
        domains = [sample for sample in measured if not sample.one_node and sample.one_domain]
        across = [sample for sample in measured if not (sample.one_node or sample.one_domain)]
        if len(inside) < 3:
            raise InvalidUsage(
                f"{len(inside)} samples of ranks on one node given, expected at least 3 of different lengths: those "
                "between nodes tell what links cost, not what compute does"
            )
        given = inside[0]
        key_limit, limited = (given.key_limit, given.limited) if given.limited else (0.0, 0.0)
        longest = max(max(sample.lengths) for sample in inside)
        # The squares of the layers that see all keys and of those that see few, or of both as the sizes tell.
        kinds = (0.0, 1.0) if limited and longest > 2 * key_limit else (limited,)
        forms = [cls(attention=0.0, linear=0.0, key_limit=key_limit, limited=share) for share in kinds]
        rows = []
        for sample in inside:
            tokens, ranks = sum(sample.lengths), sample.ranks
            squares = [sum(form.item_squares(length) for length in sample.lengths) / ranks for form in forms]
            rows.append([*squares, tokens / ranks, 1.0, tokens, ranks - 1.0])
        if all(sample.ranks == 1 for sample in inside):  # piece and ring_step cannot be told from the others
            rows = [row[:-2] for row in rows]
        found = fit_coefficients(rows, [sample.seconds for sample in inside])
        attention, rest = sum(found[: len(forms)]), found[len(forms) :]
        if len(forms) > 1:
            limited = found[1] / attention if attention else 0.0
        linear, fixed, piece, ring_step = (*rest, 0.0, 0.0)[:4]
        experts = min(linear, _shared_seconds(measured, beside))
        model = cls(
            attention=attention, linear=linear, fixed=fixed, piece=piece, ring_step=ring_step, experts=experts,
            key_limit=key_limit, limited=limited,
        )  # fmt: skip
        if domains:  # in one domain, or links between domains cannot be faster than those
            near = model._with_links(domains)
            kv, latency = near.links(one_node=False)
            far = near._with_links(across) if across else near
            return replace(
                far,
                kv_domain=kv,
                latency_domain=latency,
                kv_inter=max(far.kv_inter, kv),
                latency_inter=max(far.latency_inter, latency),
            )
        return model._with_links(across) if across else model

    def _with_links(self, across: Sequence[CostSample]) -> CostModel:
        """The cost of messages between nodes, by samples on several; compute costs what it costs inside a node."""
        if any(sample.ranks < 2 for sample in across):
            raise InvalidUsage("a sample on 1 rank is said to be between nodes; give one_node=True for it")

        def misfit(values: Sequence[float]) -> float:
            trial = replace(self, kv_inter=values[0], latency_inter=values[1])
            predicted = (trial.seconds(s.lengths, s.ranks, one_node=False) for s in across)
            return math.fsum((guess / s.seconds - 1) ** 2 for guess, s in zip(predicted, across, strict=True))

        rows, exposed = [], []
        for sample in across:  # as if no message were hidden
            tokens, rings = sum(sample.lengths) / sample.ranks, sample.ranks - 1
            compute = self.seconds(sample.lengths, sample.ranks)
            hidden = (compute - self.linear * tokens - self.fixed - rings * self.ring_step) * rings / sample.ranks
            if sample.seconds - compute + hidden > 0:
                rows.append([rings * tokens, float(rings)])
                exposed.append(sample.seconds - compute + hidden)
        start = fit_coefficients(rows, exposed) if rows else [0.0, 0.0]
        kv, latency = descend(misfit, start)
        return replace(self, kv_inter=kv, latency_inter=latency)

    def to_json(self) -> str:
        """One JSON object with the coefficients."""
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """From its coefficients by name. Files of earlier releases have one more, ``noise``, which is left out."""
        return cls(**{name: value for name, value in values.items() if name != "noise"})

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Reads :meth:`to_json` back. Raises InvalidUsage for anything else."""
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise TypeError(f"a {type(values).__name__} was given")
            if wrong := sorted(set(values) - {field.name for field in fields(cls)} - {"noise"}):
                raise TypeError(f"it has no coefficient {wrong[0]!r}")
            if missing := {"attention", "linear"} - set(values):
                raise TypeError(f"{sorted(missing)[0]!r} is missing")
            return cls.from_dict({n: float(value) if type(value) is int else value for n, value in values.items()})
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise InvalidUsage(f"no cost model ({error}): expected a JSON object with numbers for {names}") from error


def limit_of(model: ModelSpec) -> tuple[float, float]:
    """:attr:`CostModel.limit` by a model's sizes, where FLOPs of attention and of indexers take alike."""
    key_limit, chosen = model.chosen_flops
    all_keys = _ATTENTION_PASSES * model.attention_flops_per_token_squared + model.index_flops_per_token_squared
    chosen *= _ATTENTION_PASSES
    return (float(key_limit), chosen / (all_keys + chosen)) if chosen else (0.0, 0.0)


def _shared_seconds(measured: Sequence[CostSample], beside: Sequence[CostSample]) -> float:
    """Seconds per token of the work that expert ranks do together: what a micro-batch takes less where the other ranks
    of its group have no tokens, and do their part of it.

    By processor time where it is known, which does not depend on who shares processors.
    """
    found = []
    for part in beside:
        for whole in measured:
            if (whole.ranks, whole.lengths) != (part.ranks, part.lengths):
                continue
            timed = whole.processor_s > 0 and part.processor_s > 0
            before, after = (whole.processor_s, part.processor_s) if timed else (whole.seconds, part.seconds)
            saved = max(0.0, 1 - after / before) * whole.seconds
            found.append(saved * part.expert / (part.expert - 1) * whole.ranks / sum(whole.lengths))
    return sum(found) / len(found) if found else 0.0


@dataclass(frozen=True, slots=True)
class _Sent:
    """Messages of the layers of one device: numbers a token, numbers of states, and the layers that do so in every ring
    step. Attention in windows sends to the neighbours of a cut alone, which is left out."""

    tokens: float
    states: float
    rings: float
    recurrences: float

    @classmethod
    def of(cls, model: ModelSpec, cluster: ClusterSpec) -> _Sent:
        found = [0.0] * 4
        for each in model.token_mixing:
            layers = each.layers / cluster.pipeline
            if each.state:
                found[1] += layers * each.state / cluster.tensor
                found[3] += layers
            elif each.window is None:
                found[0] += layers * each.sent / (1 if each.expansion else cluster.tensor)  # all heads share the latent
                found[2] += layers
        return cls(*found)


def core_cost(cost: CostModel, memory: MemoryModel, cluster: ClusterSpec, slices: int = 1) -> core.CostModel:
    """Both models in the form that the C++ solver takes; ``slices``: of :class:`hdpcomm.plan.Planner`."""
    values = asdict(cost)
    experts = values.pop("experts")
    put_off = values.pop("weights") * max(0.0, values["linear"] - experts)
    values["linear"] += experts * (cluster.expert_imbalance - 1)
    values["kv_domain"], values["latency_domain"] = cost.links(one_node=False, one_domain=True)
    domain = cluster.ranks_per_domain or 0 if cluster.node_ranks < cluster.ranks else 0  # else all are on one node
    values |= {
        "capacity": memory.capacity,
        "offloadable": memory.offloadable,
        "host_tokens": memory.host_tokens,
        "copy": memory.copy_s,
        "kept_copy": memory.kept_copy_s,
        "kept_back": memory.kept_back_s,
        "kept": memory.kept,
        "kept_offloaded": memory.kept_offloaded,
        "ranks": cluster.ranks,
        "ranks_per_node": cluster.node_ranks,
        "pipeline": cluster.pipeline,
        "chunks": cluster.chunks,
        "speeds": cluster.speeds or (),
        "ranks_per_domain": domain,
        "nics": cluster.nics or 0,
        "put_off": put_off,
        "split": cluster.split_backward,
        "slices": slices,
    }
    if cluster.stage_work is not None:
        values["stage_work"] = cluster.stage_work
    return core.CostModel(values)
