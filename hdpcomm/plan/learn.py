"""The closed loop: what steps took, in place of what was thought before (:class:`CostLearner`).

The regression is robust, does not go below 0, and has the same result, bit for bit, on every machine. Ranks fit the
same measurements and have to get the same plans from them. LAPACK and numpy's sums take another order on another
processor, so sums are folded here by elementwise operations, which IEEE 754 defines exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.cost import CostModel
from hdpcomm.plan.specs import ClusterSpec
from hdpcomm.plan.step import MicroBatch, StepPlan

__all__ = ["CostLearner", "RankTimes", "fit_robust", "folded_sum", "weighted_median"]


Vector = NDArray[np.float64]

_ROUNDS = 6  # of reweighting
_HUBER = 1.345  # residuals above this many standard deviations count less: 95% efficient on normal errors
_LEAST_DEVIATION = 2e-3  # relative; what clocks and rounding do to the best fit


def folded_sum(values: Vector) -> float:
    """The sum, by halves that are added element by element."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        upper = values[half:]
        values = values[:half].copy()
        values[: len(upper)] += upper
    return float(values[0]) if len(values) else 0.0


def weighted_median(values: Vector, weights: Vector) -> float:
    """The least value that has half of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    counted, total = 0.0, folded_sum(weights)
    for place in order.tolist():
        counted += float(weights[place])
        if counted >= 0.5 * total:
            return float(values[place])
    return float(values[order[-1]])


def fit_robust(
    rows: Vector, seconds: Vector, weights: Vector, before: list[float], spread: list[float]
) -> tuple[list[float], float]:
    """Coefficients x >= 0 for which ``rows @ x`` is near ``seconds`` in relative error, and near what they were before
    as far as the samples say nothing about them; and the standard deviation of the relative errors.

    A maximum a posteriori estimate: errors are normal but for outliers (Huber's M-estimator), and so is the prior.

    Args:
        rows: ``[samples, columns]``, not negative.
        seconds: ``[samples]``, positive.
        weights: ``[samples]``, positive: how many measurements each one stands for.
        before: the coefficients so far.
        spread: how far each may be off: a standard deviation, positive.
    """
    columns = [rows[:, k] / seconds for k in range(rows.shape[1])]
    found = list(before)
    deviation = _LEAST_DEVIATION
    for _ in range(_ROUNDS):
        residuals = np.abs(_predicted(columns, found) - 1.0)
        deviation = max(_LEAST_DEVIATION, 1.4826 * weighted_median(residuals, weights))
        influence = np.minimum(1.0, _HUBER * deviation / np.maximum(residuals, 1e-300))
        found = _solve_weighted(columns, weights * influence / deviation**2, before, spread)
    return found, deviation


def _predicted(columns: list[Vector], coefficients: list[float]) -> Vector:
    total = np.zeros_like(columns[0])
    for column, coefficient in zip(columns, coefficients, strict=True):
        total += column * coefficient
    return total


def _solve_weighted(columns: list[Vector], weights: Vector, before: list[float], spread: list[float]) -> list[float]:
    count = len(columns)
    normal = [[folded_sum(weights * columns[i] * columns[j]) for j in range(count)] for i in range(count)]
    right = [folded_sum(weights * column) for column in columns]
    for k in range(count):
        normal[k][k] += spread[k] ** -2
        right[k] += spread[k] ** -2 * before[k]
    free = list(range(count))
    while free:
        solution = _eliminate([[normal[i][j] for j in free] for i in free], [right[i] for i in free])
        least = min(range(len(free)), key=lambda i: solution[i] * normal[free[i]][free[i]] ** 0.5)
        if solution[least] >= 0:
            values = dict(zip(free, solution, strict=True))
            return [values.get(k, 0.0) for k in range(count)]
        del free[least]
    return [0.0] * count


def _eliminate(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a positive definite system, scaled to a diagonal of ones."""
    count = len(right)
    scale = [matrix[i][i] ** 0.5 for i in range(count)]
    rows = [[matrix[i][j] / (scale[i] * scale[j]) for j in range(count)] + [right[i] / scale[i]] for i in range(count)]
    for pivot in range(count):
        for below in range(pivot + 1, count):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, count + 1):
                rows[below][column] -= factor * rows[pivot][column]
    solution = [0.0] * count
    for i in reversed(range(count)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, count))
        solution[i] = (rows[i][count] - known) / rows[i][i]
    return [value / by for value, by in zip(solution, scale, strict=True)]


_WINDOW = 12  # steps that are remembered
_FORGET = 0.75  # weight of a step relative to the one after it
_MOST_SAMPLES = 512  # micro-batches of a step that are looked at: the ones that take longest
_MOST_RINGS = 32  # of a step, for the links
_LINKS_CHANGE = 0.05  # of a micro-batch's time, that makes up for links 2.6 times as fast or slow as was thought
_TURNS = 6  # coefficients and speeds take turns
_MAY_BE_OFF = 0.3  # of a coefficient, from one step to the next
_SMALL_SHARE = 0.005  # of the time, for coefficients that are 0
_UNEXPLAINED = 0.1  # relative deviation that is more than noise
_SAME_SPEED = 0.05  # ranks that differ less from the median are all alike
_SIGNIFICANT = 5.0  # standard deviations by which a speed has to differ; a median has 1.25 times those of a mean
_SPEED_STEP = 1 / 64
_LEAST_SPEED = 1 / 64
_COEFFICIENTS = ("attention", "linear", "fixed", "piece", "ring_step")


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Measurements of one rank in a step, a figure for each of its micro-batches in the order of
    :meth:`StepPlan.for_rank`.

    Attributes:
        compute_s: seconds of forward and backward pass without those of waiting.
        wait_s: seconds in which it waited for messages of its ring.
    """

    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """The micro-batches of a step that are looked at, N of them, and every (rank, micro-batch) pair among these, M."""

    rows: Vector  # [N, coefficients]
    sizes: Vector  # [N]
    tokens: Vector  # [N]
    squares: Vector  # [N]
    links: NDArray[np.int64]  # [N]: see CostLearner._links_of
    pair_batch: NDArray[np.int64]  # [M]
    pair_rank: NDArray[np.int64]  # [M]
    pair_s: Vector  # [M]: of compute
    pair_span_s: Vector  # [M]: with the waiting
    pair_weight: Vector  # [M]: the planned time, shared out among the ranks


@dataclass(frozen=True, slots=True)
class _Samples:
    """(rank, micro-batch) pairs of all steps that are remembered."""

    rows: Vector  # [M, coefficients]
    seconds: Vector  # [M]
    ranks: NDArray[np.int64]  # [M]
    weights: Vector  # [M]: how many measurements each one stands for
    steps: NDArray[np.int64]  # [M]: 0 for the first one that is remembered


class CostLearner:
    """Refines a cost model, and finds the speed of each rank, from the steps that ran. Local: ranks that are given the
    same measurements find the same, bit for bit, whatever their processors are.

    Compute: a regression of relative errors over the last steps, robust (Huber) and with forgetting, whose coefficients
    stay where they are as far as the steps say nothing about them; in turns with the speeds, medians of what a rank
    should have taken over what it took, 1 where noise explains the rest: that of each micro-batch, and that which all
    micro-batches of a rank have in common in a step and not in the next one. Links: the bandwidth with the least sum of
    absolute errors of the waiting that no compute hid: the ranks of a group also wait for the last one to come and for
    the slowest one to compute, so what the shortest stay of a rank has beyond the longest compute is what counts.
    The idea of telling slow ranks from slow work by comparing each with what it would ideally take is that of the
    what-if analysis of stragglers, arXiv 2505.05713.

    Args:
        cost_model: what is thought so far.
        cluster: the ranks. Those that share processors (``cores``) get no speeds: they take time from each other.

    Examples:
        >>> from hdpcomm.plan import Planner
        >>> cluster = ClusterSpec(ranks=2, capacity=100)
        >>> learner = CostLearner(CostModel(1e-6, 1e-3), cluster)
        >>> plan = Planner(None, cluster, cost_model=learner.cost_model).plan([100, 100, 50, 20])
        >>> took = [[2 * batch.predicted_s for batch in plan.for_rank(rank)] for rank in range(2)]
        >>> for _ in range(5):
        ...     learner.add(plan, [RankTimes(tuple(each), (0.0,) * len(each)) for each in took])
        >>> round(learner.cost_model.seconds([100]) / CostModel(1e-6, 1e-3).seconds([100]), 2)
        2.0
    """

    def __init__(self, cost_model: CostModel, cluster: ClusterSpec) -> None:
        self.cost_model = cost_model
        self.cluster = cluster
        self._speeds = np.array(cluster.speeds or (1.0,) * cluster.ranks)
        self._steps: deque[_Step] = deque(maxlen=_WINDOW)

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """By rank, relative to the fastest one; ``None``: all are alike."""
        return self.cluster.speeds

    def add(self, plan: StepPlan, times: Sequence[RankTimes], *, squares: Mapping[int, float] | None = None) -> None:
        """Takes in a step that ran: :attr:`cost_model` and :attr:`cluster` are those to plan the next one with.

        Args:
            plan: the step's.
            times: of every rank, in order.
            squares: by id, of trees and fragments (:meth:`CostModel.item_squares`); others cost what their length does.

        Raises:
            InvalidUsage: not one figure for each micro-batch of each rank.
        """
        step = self._step(plan, times, squares or {})
        if len(step.rows) == 0:
            return
        self._steps.append(step)
        self._learn_compute()
        self._learn_links()

    def _step(self, plan: StepPlan, times: Sequence[RankTimes], squares: Mapping[int, float]) -> _Step:
        if len(times) != self.cluster.ranks or plan.num_ranks != self.cluster.ranks:
            raise InvalidUsage(
                f"times of {len(times)} ranks and a plan for {plan.num_ranks}, expected {self.cluster.ranks}: give "
                "the times of every rank of the plan"
            )
        known = [each for each in plan.micro_batches if each.index not in plan.slices]  # which cost what others do not
        chosen = sorted(known, key=lambda batch: -batch.predicted_s * len(batch.ranks))[:_MOST_SAMPLES]
        place = {batch.index: k for k, batch in enumerate(chosen)}
        pairs: list[tuple[int, int, float, float]] = []
        for rank, measured in enumerate(times):
            batches = plan.for_rank(rank)
            if not len(batches) == len(measured.compute_s) == len(measured.wait_s):
                raise InvalidUsage(
                    f"rank {rank} has {len(batches)} micro-batches and {len(measured.compute_s)} times of compute, "
                    f"{len(measured.wait_s)} of waiting: give one for each"
                )
            for batch, compute_s, wait_s in zip(batches, measured.compute_s, measured.wait_s, strict=True):
                k = place.get(batch.index)
                if k is None or not (1e-9 < compute_s < 1e9 and 0 <= wait_s < 1e9):
                    continue  # a clock that was set, or a micro-batch that nobody timed
                pairs.append((k, rank, compute_s, compute_s + wait_s))
        loads = [self._load(batch, squares) for batch in chosen]
        batch_of, rank_of, seconds, spans = zip(*pairs, strict=True) if pairs else ((), (), (), ())
        sizes = np.array([len(batch.ranks) for batch in chosen], dtype=np.float64)
        tokens = np.array([load[0] for load in loads])
        of_squares = np.array([load[1] for load in loads])
        # The device of a pipeline that computed longest has about the largest share of each kind of work.
        linear, attention, fixed = map(max, zip(*(self.cluster.stage_work or ((1.0, 1.0, 1.0),)), strict=True))
        rows = [attention * of_squares / sizes, linear * tokens / sizes, fixed * np.ones_like(sizes)]
        rows += [attention * tokens, attention * (sizes - 1)]
        return _Step(
            rows=np.stack(rows, axis=1),
            sizes=sizes,
            tokens=tokens,
            squares=of_squares,
            links=np.array([self._links_of(batch) for batch in chosen]),
            pair_batch=np.array(batch_of, dtype=np.int64),
            pair_rank=np.array(rank_of, dtype=np.int64),
            pair_s=np.array(seconds, dtype=np.float64),
            pair_span_s=np.array(spans, dtype=np.float64),
            pair_weight=np.array([chosen[k].predicted_s / len(chosen[k].ranks) for k in batch_of], dtype=np.float64),
        )

    def _load(self, batch: MicroBatch, squares: Mapping[int, float]) -> tuple[float, float]:
        """Tokens and squares."""
        cost = self.cost_model
        found = (squares.get(each.id) or cost.item_squares(each.length) for each in batch.sequences)
        return float(batch.tokens), sum(found)

    def _learn_compute(self) -> None:
        samples = self._samples()
        if len(samples.seconds) == 0:
            return
        before = [getattr(self.cost_model, name) for name in _COEFFICIENTS]
        found, speeds, deviation = self._fit(samples, before, least_differences=1.0)
        if self.cluster.cores is None and deviation > _UNEXPLAINED:  # maybe half of the ranks are slow
            others = self._fit(samples, before, least_differences=0.0)
            if others[2] < 0.5 * deviation:
                found, speeds, deviation = others
        self._speeds = speeds
        fastest, own = _distinct(speeds)
        names = dict(zip(_COEFFICIENTS, (value / fastest for value in found), strict=True))
        self.cost_model = replace(self.cost_model, **names)
        self.cluster = replace(self.cluster, speeds=own)

    def _fit(
        self, samples: _Samples, before: list[float], *, least_differences: float
    ) -> tuple[list[float], Vector, float]:
        """Coefficients, speeds relative to the median rank, and the deviation that is left.

        Args:
            least_differences: share of what noise explains, by which a speed has to differ while the two are sought.
        """
        found, speeds, spread = before, self._speeds, _spread(samples, before)
        deviation = 0.0
        for turn in range(_TURNS + 1):
            at_speed = samples.seconds * speeds[samples.ranks]
            found, deviation = fit_robust(samples.rows, at_speed, samples.weights, found, spread)
            if self.cluster.cores is None and turn < _TURNS:
                least = least_differences if turn < _TURNS - 1 else 1.0
                speeds = self._found_speeds(samples, _times(samples.rows, found) / samples.seconds, deviation, least)
        return found, speeds, deviation

    def _samples(self) -> _Samples:
        ages = [_FORGET ** (len(self._steps) - 1 - i) for i in range(len(self._steps))]
        aged = list(zip(ages, self._steps, strict=True))
        # A micro-batch counts as much as the time that was planned for it; one of the mean length counts once.
        batches = np.concatenate([age * np.bincount(step.pair_batch, step.pair_weight) for age, step in aged])
        counted, squared = folded_sum(batches), folded_sum(batches * batches)
        pairs = np.concatenate([age * step.pair_weight for age, step in aged])
        return _Samples(
            rows=np.concatenate([step.rows[step.pair_batch] for step in self._steps]),
            seconds=np.concatenate([step.pair_s for step in self._steps]),
            ranks=np.concatenate([step.pair_rank for step in self._steps]),
            weights=pairs * (counted / squared) if squared > 0 else pairs,
            steps=np.concatenate([np.full(len(step.pair_s), k) for k, step in enumerate(self._steps)]),
        )

    def _found_speeds(self, samples: _Samples, ratios: Vector, deviation: float, least: float) -> Vector:
        """Speed of each rank relative to the median rank; 1 where noise would explain it, or where nothing is known.

        ``least``: share of what noise explains that counts.
        """
        count = self.cluster.ranks
        speeds, unsure, unknown = np.ones(count), np.zeros(count), np.ones(count, dtype=np.bool_)
        order = np.argsort(samples.ranks, kind="stable")
        borders = np.searchsorted(samples.ranks[order], np.arange(count + 1))
        for rank in range(count):
            own = order[borders[rank] : borders[rank + 1]]
            if len(own):
                weights = samples.weights[own]
                unknown[rank] = False
                speeds[rank] = weighted_median(ratios[own], weights)
                unsure[rank] = deviation * (folded_sum(weights * weights) ** 0.5 / folded_sum(weights))
        known = np.sort(speeds[~unknown])
        speeds /= float(known[len(known) // 2])
        unsure = least * np.maximum(unsure, self._unsteady(samples, ratios))
        alike = (np.abs(speeds - 1) < np.maximum(_SAME_SPEED, _SIGNIFICANT * unsure)) | unknown
        return np.where(alike, 1.0, np.maximum(speeds, _LEAST_SPEED))

    def _links_of(self, batch: MicroBatch) -> int:
        """The slowest links of its ring: 0 inside a node, 1 inside a domain, 2 beyond."""
        first, last = min(batch.ranks), max(batch.ranks)
        node, domain = self.cluster.node_ranks, self.cluster.domain_ranks
        return 0 if first // node == last // node else 1 if first // domain == last // domain else 2

    def _unsteady(self, samples: _Samples, ratios: Vector) -> Vector:
        """By rank, the deviation of its speed by noise that all of its micro-batches of a step have in common, as
        where ranks take turns on processors: what ratios do from one step to the next. After a single step, how far the
        ranks differ, since nothing tells a slow rank from one that was unlucky."""
        count, steps = self.cluster.ranks, len(self._steps)
        cells = samples.steps * count + samples.ranks
        weights = np.bincount(cells, samples.weights, minlength=steps * count).reshape(steps, count)
        sums = np.bincount(cells, samples.weights * ratios, minlength=steps * count).reshape(steps, count)
        seen = weights > 0
        means = np.where(seen, sums / np.where(seen, weights, 1.0), np.nan)
        for k in range(steps):  # a step that was slow for all ranks tells nothing of one
            means[k] /= np.sort(means[k][seen[k]])[int(seen[k].sum()) // 2] if seen[k].any() else 1.0
        both = seen[1:] & seen[:-1]
        if both.any():
            changes = np.abs(means[1:] - means[:-1])[both] * 0.5**0.5
        else:
            changes = np.abs(means[seen] - 1)
        deviation = 1.4826 * weighted_median(changes, np.ones(len(changes)))
        total, squares = np.zeros(count), np.zeros(count)
        for of_step in weights:
            total += of_step
            squares += of_step * of_step
        unsure: Vector = deviation * np.sqrt(squares) / np.where(total > 0, total, 1.0)
        return unsure

    def _learn_links(self) -> None:
        model = self.cost_model
        intra = self._bandwidth(0)
        domain = max(self._bandwidth(1), intra)  # the solver counts on that
        inter = max(self._bandwidth(2), domain if self.cluster.ranks_per_domain else intra)
        latency = model.latency_intra
        if self.cluster.ranks_per_domain:
            latency = max(model.links(one_node=False, one_domain=True)[1], latency)
            model = replace(model, kv_domain=domain, latency_domain=latency)
        self.cost_model = replace(
            model, kv_intra=intra, kv_inter=inter, latency_inter=max(model.latency_inter, latency)
        )

    def _exposed(self, step: _Step) -> Vector:
        """By micro-batch, the waiting at full speed that is left when the last rank has come and the slowest is done;
        not finite where one of its ranks did not measure it."""
        count = len(step.sizes)
        span, compute, speed = np.full(count, np.inf), np.zeros(count), np.ones(count)
        np.minimum.at(span, step.pair_batch, step.pair_span_s)
        np.maximum.at(compute, step.pair_batch, step.pair_s)
        np.minimum.at(speed, step.pair_batch, self._speeds[step.pair_rank] / self._speeds.max())
        everyone: NDArray[np.bool_] = np.bincount(step.pair_batch, minlength=count) == step.sizes
        exposed: Vector = np.where(everyone, np.maximum(0.0, span - compute) * speed, np.inf)
        return exposed

    def _bandwidth(self, links: int) -> float:
        """Seconds a token of KV between ranks, by the waiting of the rings with these links (:meth:`_links_of`)."""
        model = self.cost_model
        now, latency = model.links(one_node=links == 0, one_domain=links == 1)
        kept, weights = [], []
        for age, step in enumerate(reversed(self._steps)):
            waited = self._exposed(step)
            rings = (step.sizes > 1) & (step.links == links) & np.isfinite(waited)
            places = np.flatnonzero(rings)[:_MOST_RINGS]
            kept.append(
                np.stack([step.sizes[places], step.tokens[places], step.squares[places], waited[places]], axis=1)
            )
            weights.append(np.full(len(places), _FORGET**age))
        sizes, tokens, squares, exposed = np.concatenate(kept).T
        if len(sizes) == 0:
            return now
        step_s = model.attention * squares / sizes**2 + model.piece * tokens / sizes
        whole = sizes * step_s + model.linear * tokens / sizes + model.fixed
        share = np.concatenate(weights) / np.maximum(whole, 1e-300)

        def waits(kv: Vector | float) -> Vector:
            transfer = kv * tokens / sizes + latency
            forward = np.maximum(0.0, model.forward_transfer * transfer - model.forward * step_s)
            backward = np.maximum(0.0, (1 - model.forward_transfer) * transfer - (1 - model.forward) * step_s)
            total: Vector = (sizes - 1) * (forward + backward)
            return total

        low = np.zeros_like(sizes)
        high = 2 * (step_s + exposed) * sizes / tokens  # one of the passes has at least half of the transfers
        for _ in range(50):  # the bandwidth with which each ring would have waited as long as it did
            middle = 0.5 * (low + high)
            longer = waits(middle) > exposed
            high, low = np.where(longer, middle, high), np.where(longer, low, middle)
        best, best_error = now, folded_sum(share * np.abs(waits(now) - exposed)) * (1 - 1e-3)
        for candidate in sorted(set(low.tolist())):
            apart = max(candidate / now, 1e-3) if now > 0 else 1.0
            change = (apart - 1) ** 2 / apart  # no logarithm: its last bit differs between libraries
            error = folded_sum(share * np.abs(waits(candidate) - exposed)) + _LINKS_CHANGE * change
            if error < best_error:
                best, best_error = candidate, error
        return float(best)


def _times(rows: Vector, coefficients: Sequence[float]) -> Vector:
    total = np.zeros(len(rows))
    for k, coefficient in enumerate(coefficients):
        total += rows[:, k] * coefficient
    return total


def _spread(samples: _Samples, coefficients: Sequence[float]) -> list[float]:
    """How far off each coefficient may be: a share of itself, or one that makes a small share of the time."""
    total = folded_sum(samples.weights)
    found = []
    for k, coefficient in enumerate(coefficients):
        share = folded_sum(samples.weights * samples.rows[:, k] / samples.seconds) / total
        found.append(max(_MAY_BE_OFF * coefficient, _SMALL_SHARE / share if share > 0 else 0.0, 1e-100))
    return found


def _distinct(speeds: Vector) -> tuple[float, tuple[float, ...] | None]:
    """The fastest speed, and all of them relative to it."""
    fastest = float(speeds.max())
    steps = np.round(speeds / fastest / _SPEED_STEP) * _SPEED_STEP
    own = np.clip(steps, _LEAST_SPEED, 1.0)
    return fastest, None if bool((own == 1).all()) else tuple(own.tolist())
