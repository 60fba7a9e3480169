"""Weights of mixtures, as programs give them: checked, told, and part of what a run compares when it goes on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from hdpcomm.data import Corpus, open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.run.resuming import data_facts


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 5)
    return [tmp_path / "a", tmp_path / "b"]


def opened(paths: list[Path], weights: Any) -> Corpus:
    return open_corpus(paths, context=100, weights=weights)


def test_weights_that_change(paths: list[Path]) -> None:
    corpus = opened(paths, {0: [1, 0], 4: [1, 3]})
    text = "a mixture of 100%, 0% of the tokens, after step 4 25%, 75%"
    assert text in corpus.describe()
    for each in (corpus, pickle.loads(pickle.dumps(corpus))):
        sampler = each.sampler(tokens=200, seed=1)
        batches = [sampler.batch(step) for step in range(9)]
        sources = [{int(each.documents[each.sequences[place, 0], 0]) for place in batch.ids} for batch in batches]
        assert sources[:4] == [{0}] * 4
        assert set().union(*sources[4:]) == {0, 1}


def test_a_run_that_goes_on_must_have_the_same(paths: list[Path]) -> None:
    given: list[Any] = [(), [1, 1], [1, 2], {0: [1, 2], 4: [1, 1]}, {0: [1, 2], 5: [1, 1]}, {0: [1, 2], 4: [1, 3]}]
    facts = [str(data_facts(opened(paths, weights))) for weights in given]
    assert len(set(facts)) == len(given)
    assert facts[2] == str(data_facts(opened(paths, {0: [1, 2]})))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], "1 weights were given for 2 paths"),
        ({0: [1, 1, 1], 3: [1, 1, 1]}, "3 weights were given for 2 paths"),
        ([1, 0], "weights is 0, expected a finite number above 0"),
        ({0: [1, 1], 3: [1]}, "the weights from step 3 on are"),
        ({0: 0.5, 3: 1}, "the weights from step 0 on are 0.5"),
        ({3: [1, 1]}, "the weights from step 3 on are .* those from step 0 on, too"),
    ],
)
def test_bad_weights(paths: list[Path], weights: Any, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        opened(paths, weights)
