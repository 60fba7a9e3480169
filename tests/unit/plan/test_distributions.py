"""Random lengths compared with the published quantiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.distributions import read_lengths, sample_lengths

K = 1024
M = 1024 * 1024


def draw(name: str) -> np.ndarray:
    return np.array(sample_lengths(name, count=1_000_000, context=2 * M, seed=5), dtype=np.float64)


def test_byted_has_the_published_quantiles() -> None:
    lengths = draw("byted")
    tokens = lengths.sum()
    assert np.mean(lengths <= 4 * K) == pytest.approx(0.80, abs=0.005)
    assert np.mean(lengths >= 128 * K) == pytest.approx(0.01, rel=0.03)
    assert lengths[lengths >= 128 * K].sum() / tokens == pytest.approx(0.443, rel=0.03)
    assert lengths[lengths > 256 * K].sum() / tokens == pytest.approx(0.37, rel=0.03)
    assert np.mean(lengths >= 2 * M) == pytest.approx(0.0005, rel=0.15)
    assert lengths[lengths >= 2 * M].sum() / tokens == pytest.approx(0.121, rel=0.15)


def test_github_has_the_published_quantiles() -> None:
    lengths = draw("github")
    tokens = lengths.sum()
    assert lengths[lengths > 128 * K].sum() / tokens == pytest.approx(0.162, rel=0.1)
    assert lengths[lengths > 256 * K].sum() / tokens == pytest.approx(0.098, rel=0.15)


def test_tokens_context_and_seed() -> None:
    lengths = sample_lengths("byted", tokens=M, context=10_000, seed=3)
    assert sum(lengths) == M
    assert max(lengths) <= 10_000
    assert min(lengths) >= 1
    assert lengths == sample_lengths("byted", tokens=M, context=10_000, seed=3)
    assert lengths != sample_lengths("byted", tokens=M, context=10_000, seed=4)
    assert np.median(sample_lengths("lognormal:5:0.1", count=1000, context=M, seed=0)) == pytest.approx(148, rel=0.02)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("10 20\n30\n")
    assert read_lengths(path) == [10, 20, 30]
    assert set(sample_lengths(f"file:{path}", count=50, context=M, seed=0)) == {10, 20, 30}
    path.write_text("10 x")
    with pytest.raises(InvalidUsage, match="entry 2 is 'x'"):
        read_lengths(path)
    path.write_text(" ")
    with pytest.raises(InvalidUsage, match="holds no lengths"):
        read_lengths(path)
    with pytest.raises(InvalidUsage, match="cannot read lengths"):
        read_lengths(tmp_path / "none")


@pytest.mark.parametrize("name", ["zipf", "lognormal:a:b", "lognormal:1", "file:"])
def test_unknown_distributions(name: str) -> None:
    with pytest.raises(InvalidUsage, match="distribution is"):
        sample_lengths(name, count=1, context=10, seed=0)


def test_tokens_or_count() -> None:
    with pytest.raises(InvalidUsage, match="either tokens or count"):
        sample_lengths("byted", context=10, seed=0)
