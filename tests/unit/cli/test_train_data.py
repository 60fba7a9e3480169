"""Paths and weights of ``--data``."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdpcomm.cli.train_data import train_data
from hdpcomm.cli.train_options import TrainOptions
from hdpcomm.errors import InvalidUsage

PARTS: dict[str, tuple[str, float | None]] = {
    "a": ("a", None),
    "a=0.5": ("a", 0.5),
    "s3://b/a=2": ("s3://b/a", 2.0),
    "s3://b/day=monday": ("s3://b/day=monday", None),
    "https://h/a?key=5": ("https://h/a?key=5", None),
    "https://h/a?key=5=0.7": ("https://h/a?key=5", 0.7),
    "https://h/a?b=1&key=x": ("https://h/a?b=1&key=x", None),
    "https://h/a?b=1&key=x=3": ("https://h/a?b=1&key=x", 3.0),
    "https://h/a?sig=x%3D": ("https://h/a?sig=x%3D", None),
}


@pytest.mark.parametrize("given", PARTS)
def test_weights(given: str) -> None:
    path, weight = PARTS[given]
    data = train_data(TrainOptions(tokenizer="bytes"), (given,))
    assert (data.paths, data.weights) == ((path,), () if weight is None else (weight,))


def test_a_name_with_an_equals_sign_and_what_is_no_weight(tmp_path: Path) -> None:
    (tmp_path / "day=1").touch()
    assert train_data(TrainOptions(), (f"{tmp_path}/day=1",)).weights == ()
    with pytest.raises(InvalidUsage, match=r"a=b: .*; PATH=WEIGHT was expected"):
        train_data(TrainOptions(), ("a=b",))
