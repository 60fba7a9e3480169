"""Robust non-negative regression whose result is the same, bit for bit, on every machine.

Ranks fit the same measurements and have to get the same plans from them. LAPACK and numpy's sums take another order on
another processor, so sums are folded here by elementwise operations, which IEEE 754 defines exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["fit_robust", "folded_sum", "weighted_median"]

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
