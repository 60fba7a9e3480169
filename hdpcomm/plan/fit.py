"""Fits of a few coefficients that are not negative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

__all__ = ["descend", "fit_coefficients"]


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
