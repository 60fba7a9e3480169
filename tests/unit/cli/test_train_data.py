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
    assert (data.paths, data.weights) == ((path,), {} if weight is None else {0: (weight,)})


def test_a_name_with_an_equals_sign_and_what_is_no_weight(tmp_path: Path) -> None:
    (tmp_path / "day=1").touch()
    assert train_data(TrainOptions(), (f"{tmp_path}/day=1",)).weights == {}
    with pytest.raises(InvalidUsage, match=r"a=b: .*; PATH=WEIGHT was expected"):
        train_data(TrainOptions(), ("a=b",))


def test_weights_that_change() -> None:
    options = TrainOptions(data=("a=1", "b=0"), mixture_at=("1k=0.5,0.5", "9=0,2"), eval_data=("c",))
    assert train_data(options, options.data).weights == {0: (1.0, 0.0), 1024: (0.5, 0.5), 9: (0.0, 2.0)}
    assert train_data(options, options.eval_data).weights == {}


@pytest.mark.parametrize("given", ["0=1,1", "5=1;1", "5", "=1,1", "5=", "x=1,1"])
def test_bad_changes(given: str) -> None:
    options = TrainOptions(data=("a=1", "b=1"), mixture_at=(given,))
    with pytest.raises(InvalidUsage, match=r"--mixture-at .*: STEP=WEIGHT,WEIGHT... was expected"):
        train_data(options, options.data)


def test_changes_of_no_mixture_and_of_one_step() -> None:
    options = TrainOptions(data=("a", "b"), mixture_at=("5=1,1",))
    with pytest.raises(InvalidUsage, match="the data has no weights; give PATH=WEIGHT for each"):
        train_data(options, options.data)
    options = TrainOptions(data=("a=1", "b=1"), mixture_at=("5=1,1", "5=2,1"))
    with pytest.raises(InvalidUsage, match="a step is there twice"):
        train_data(options, options.data)
