"""Random lengths of training sequences with the distributions of real corpora.

``byted`` and ``github`` follow what ByteScale (arXiv 2502.21231, sections 3.1 and 8.2) publishes about its data sets.
Between the published quantiles each bin holds a truncated power law whose mean gives the bin its share of the tokens.

============  =================================================================================================
``byted``     published, met: 80% of the sequences <= 4K tokens; 1% >= 128K with 44.3% of the tokens; 37% of the
              tokens in sequences > 256K; 0.05% of the sequences of 2M with 12.1% of the tokens.
              assumed: sequences below 4K average 1,200 tokens; 0.35% of the sequences in 128K..256K.
``github``    published, met: 16.2% of the tokens in sequences > 128K, 9.8% in those > 256K.
              assumed: 26% of the tokens in sequences <= 4K of 1,100 tokens on average, 21% in 4K..16K, 36.8% in
              16K..128K, and within the bins above 4K densities that fall as length^-1.5.
``lognormal`` exp(N(6.5, 1.6)), as ``lognormal:MU:SIGMA`` with other values.
``file:PATH`` lengths from a text file, separated by white space, drawn with replacement.
============  =================================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text

__all__ = ["DISTRIBUTIONS", "read_lengths", "sample_lengths"]

DISTRIBUTIONS = ("byted", "github", "lognormal", "file:PATH")

_K = 1024
_M = 1024 * 1024
_SHORTEST = 32


@dataclass(frozen=True, slots=True)
class _Bin:
    """A range of lengths with its share of the sequences; inside it the density falls as length^-(index)."""

    low: int
    high: int
    share: float
    index: float

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.low == self.high:
            return np.full(len(uniform), float(self.low))
        if abs(self.index - 1) < 1e-9:
            return self.low * (self.high / self.low) ** uniform
        power = 1 - self.index
        return np.asarray((self.low**power + uniform * (self.high**power - self.low**power)) ** (1 / power))


def _mean(low: float, high: float, index: float) -> float:
    def integral(power: float) -> float:
        return float(np.log(high / low)) if abs(power) < 1e-9 else (high**power - low**power) / power

    return integral(2 - index) / integral(1 - index)


def _index_for(low: float, high: float, mean: float) -> float:
    """The index of the power law on [low, high] that has this mean (bisection; the mean falls with the index)."""
    steep, flat = 20.0, -20.0
    for _ in range(100):
        middle = 0.5 * (steep + flat)
        if _mean(low, high, middle) < mean:
            steep = middle
        else:
            flat = middle
    return 0.5 * (steep + flat)


def _byted() -> list[_Bin]:
    mean = 2 * _M * 0.0005 / 0.121  # of all sequences
    short, middle, long_share = 1200.0, 0.0035, 0.01 - 0.0005 - 0.0035

    def part(low: int, high: int, share: float, tokens: float) -> _Bin:
        return _Bin(low, high, share, _index_for(low, high, tokens / share))

    return [
        part(_SHORTEST, 4 * _K, 0.8, 0.8 * short),
        part(4 * _K, 128 * _K, 0.19, (1 - 0.443) * mean - 0.8 * short),
        part(128 * _K, 256 * _K, middle, (0.443 - 0.37) * mean),
        part(256 * _K, 2 * _M, long_share, (0.37 - 0.121) * mean),
        _Bin(2 * _M, 2 * _M, 0.0005, 1.0),
    ]


def _github() -> list[_Bin]:
    parts = [
        (_SHORTEST, 4 * _K, 0.26, _index_for(_SHORTEST, 4 * _K, 1100.0)),
        (4 * _K, 16 * _K, 0.21, 1.5),
        (16 * _K, 128 * _K, 0.368, 1.5),
        (128 * _K, 256 * _K, 0.162 - 0.098, 1.5),
        (256 * _K, 2 * _M, 0.098, 1.5),
    ]
    counts = [tokens / _mean(low, high, index) for low, high, tokens, index in parts]
    total = sum(counts)
    return [_Bin(low, high, count / total, index) for (low, high, _, index), count in zip(parts, counts, strict=True)]


def read_lengths(path: str | Path) -> list[int]:
    """Lengths from a text file, separated by white space.

    Raises:
        InvalidUsage: no such file, nothing in it, or something that is not a positive integer.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise InvalidUsage(f"{path} is no file, expected one with numbers of tokens separated by white space")
    try:
        words = read_text(Path(path), most=1 << 30).split()
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"cannot read lengths from {path}: {error}") from error
    lengths = []
    for position, word in enumerate(words):
        if not word.isdecimal() or len(word) > 15 or int(word) < 1:
            raise InvalidUsage(
                f"{path}: entry {position + 1} is {word[:40]!r}, expected a number of tokens from 1 to 10^15"
            )
        lengths.append(int(word))
    if not lengths:
        raise InvalidUsage(f"{path} holds no lengths, expected numbers of tokens separated by white space")
    return lengths


def _draw(name: str, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    kind, _, rest = name.partition(":")
    if kind == "file" and rest:
        return rng.choice(np.asarray(read_lengths(rest), dtype=np.float64), size=count)
    if kind == "lognormal":
        try:
            mu, sigma = (float(value) for value in rest.split(":")) if rest else (6.5, 1.6)
        except ValueError:
            mu = sigma = math.nan
        if not (math.isfinite(mu) and math.isfinite(sigma) and sigma >= 0):
            raise InvalidUsage(
                f"distribution is {name!r}, expected lognormal:MU:SIGMA with two numbers, SIGMA not negative"
            )
        return rng.lognormal(mu, sigma, size=count)
    if name not in ("byted", "github"):
        raise InvalidUsage(f"distribution is {name!r}, expected one of {', '.join(DISTRIBUTIONS)}")
    bins = _byted() if name == "byted" else _github()
    chosen = rng.choice(len(bins), size=count, p=[part.share for part in bins])
    uniform = rng.random(count)
    lengths = np.empty(count)
    for position, part in enumerate(bins):
        members = chosen == position
        lengths[members] = part.draw(uniform[members])
    return lengths


def sample_lengths(
    distribution: str, *, context: int, seed: int, tokens: int | None = None, count: int | None = None
) -> list[int]:
    """Draws the lengths of one step: ``count`` sequences, or as many as make exactly ``tokens`` tokens.

    Lengths above ``context`` are cut to it; with ``tokens``, the last sequence is cut to fit.

    Raises:
        InvalidUsage: an unknown distribution, or not exactly one of ``tokens`` and ``count``.
    """
    if (tokens is None) == (count is None) or context < 1 or (tokens or count or 0) < 0:
        raise InvalidUsage(
            f"context is {context}, tokens {tokens} and count {count}: give a context of at least 1 and either "
            "tokens or count, not negative"
        )
    rng = np.random.default_rng(seed)
    if count is not None:
        return [int(length) for length in np.clip(_draw(distribution, rng, count), 1, context)]
    assert tokens is not None
    lengths: list[int] = []
    left = tokens
    while left > 0:
        for length in np.clip(_draw(distribution, rng, 4096), 1, context).astype(np.int64).tolist():
            lengths.append(min(length, left))
            left -= lengths[-1]
            if left == 0:
                break
    return lengths
