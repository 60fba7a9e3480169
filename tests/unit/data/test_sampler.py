"""Global batches: every sequence once per epoch, within the budget, equal for equal arguments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.data import BatchSampler
from hdpcomm.errors import InvalidUsage


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), extra=st.integers(0, 100), seed=st.integers(0, 9))
def test_an_epoch_is_a_partition_within_the_budget(lengths, extra, seed):
    budget = max(lengths) + extra
    batches = list(itertools.takewhile(lambda batch: batch.epoch == 0, BatchSampler(lengths, tokens=budget, seed=seed)))
    assert sorted(i for batch in batches for i in batch.ids) == list(range(len(lengths)))
    for place, batch in enumerate(batches):
        assert batch.lengths == tuple(lengths[i] for i in batch.ids)
        assert 0 < batch.tokens <= budget
        left = [length for later in batches[place + 1 :] for length in later.lengths]
        assert not left or batch.tokens + min(left) > budget  # nothing that is left would have fitted in


def test_batches_of_a_long_tail_are_nearly_full():
    lengths = [1000] * 400 + [100] * 1500 + [7] * 3000
    batches = itertools.takewhile(lambda batch: batch.epoch == 0, BatchSampler(lengths, tokens=1500))
    shares = [batch.tokens / 1500 for batch in batches]
    assert sum(shares[:300]) / 300 > 0.98


def test_equal_arguments_give_equal_batches_in_any_order_of_asking():
    lengths = [7, 3, 9, 1, 5, 5, 2]
    first, second = (BatchSampler(lengths, tokens=10, seed=3) for _ in range(2))
    forward = [first.batch(step) for step in range(40)]
    assert forward[-1].epoch > 2
    assert [batch.step for batch in forward] == list(range(40))
    assert [second.batch(step) for step in reversed(range(40))] == forward[::-1]


def test_seed_and_epoch_change_the_order():
    lengths = list(range(1, 30))
    orders = {
        BatchSampler(lengths, tokens=sum(lengths), seed=seed).batch(step).ids for seed in (0, 1) for step in (0, 1)
    }
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [], "tokens": 4}, "a list of at least one length was expected"),
        ({"lengths": [3, 0], "tokens": 4}, "a sequence of 0 tokens was given"),
        (
            {"lengths": [3, 5000], "tokens": 4096},
            "raise --tokens-per-step to at least 5,000 or lower --context to 4,096",
        ),
        ({"lengths": [3], "tokens": 4, "seed": -1}, "seed is -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InvalidUsage, match=message):
        BatchSampler(**arguments)


def test_negative_step():
    with pytest.raises(InvalidUsage, match=r"step is -1, .* of at least 0"):
        BatchSampler([1], tokens=1).batch(-1)


def mixture(weights, *, tokens=400, seed=3):
    """Three sources: many short, some long, three middle ones."""
    drawn = np.random.Generator(np.random.PCG64(5))
    counts, most = (300, 20, 3), (20, 400, 60)
    lengths = np.concatenate([drawn.integers(1, top + 1, count) for count, top in zip(counts, most, strict=True)])
    sources = np.repeat(np.arange(3), counts)
    return lengths, sources, BatchSampler(lengths, tokens=tokens, seed=seed, sources=sources, weights=weights)


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 1, 1), (0.01, 5, 3)])
def test_a_mixture_has_the_shares_of_its_weights(weights):
    """At any time, but for what waits: at most the look-ahead, and a sequence of each source."""
    lengths, sources, sampler = mixture(weights)
    shares = np.array(weights) / sum(weights)
    drawn = np.zeros(3)
    for step in range(300):
        batch = sampler.batch(step)
        assert batch.tokens <= 400
        assert batch.lengths == tuple(lengths[list(batch.ids)])
        np.add.at(drawn, sources[list(batch.ids)], batch.lengths)
    assert np.abs(drawn - shares * drawn.sum()).max() < 400 * 3 + BatchSampler.LOOKAHEAD * 400 * 0.2
    assert np.abs(drawn / drawn.sum() - shares).max() < 0.02
    assert sampler.batch(299).epoch > 3  # of the small sources


def test_each_pass_through_a_source_has_each_sequence_once():
    _, sources, sampler = mixture((0.2, 0.4, 0.4), tokens=1000)
    seen = [sequence for step in range(60) for sequence in sampler.batch(step).ids if sources[sequence] == 2]
    counts = np.bincount(np.array(seen), minlength=323)[320:]
    assert counts.sum() > 50
    assert counts.max() - counts.min() <= 2  # those that wait for room come later


def test_a_mixture_follows_from_its_arguments():
    _, _, first = mixture((0.5, 0.3, 0.2))
    _, _, second = mixture((5, 3, 2))
    late = second.batch(40)
    assert [first.batch(step) for step in range(40)] == [second.batch(step) for step in range(40)]
    assert late == first.batch(40)
    assert mixture((0.5, 0.3, 0.2), seed=4)[2].batch(0) != first.batch(0)


PHASES = {0: (0.7, 0.2, 0.1), 40: (0, 1, 1), 60: (3, 1, 0), 61: (1, 1, 1)}


def drawn_of(source: int, ids: np.ndarray, count: int, seed: int) -> list[int]:
    """The first sequences of a source, epoch by epoch, as the shuffles are defined."""
    orders = [
        np.random.Generator(np.random.PCG64([seed, epoch, source + 1])).permutation(ids)
        for epoch in range(-(-count // len(ids)))
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *orders])[:count].tolist()


def test_weights_that_change_give_each_its_share_and_lose_nothing():
    lengths, sources, sampler = mixture(PHASES, tokens=2000)
    batches = [sampler.batch(step) for step in range(90)]
    for first, last in ((0, 40), (40, 60), (61, 90)):
        ids = [sequence for batch in batches[first:last] for sequence in batch.ids]
        tokens = np.bincount(sources[ids], lengths[ids], minlength=3)
        np.testing.assert_allclose(tokens / tokens.sum(), np.array(PHASES[first]) / sum(PHASES[first]), atol=0.03)
    assert not (sources[[sequence for batch in batches[40:60] for sequence in batch.ids]] == 0).any()
    assert not (sources[list(batches[60].ids)] == 2).any()
    taken = np.array([*(sequence for batch in batches for sequence in batch.ids), *sampler._window])
    for source in range(3):
        own = taken[sources[taken] == source].tolist()
        assert sorted(own) == sorted(drawn_of(source, np.flatnonzero(sources == source), len(own), 3))


def test_weights_that_change_follow_from_the_arguments():
    _, _, first = mixture(PHASES)
    _, _, second = mixture(PHASES)
    forward = [first.batch(step) for step in range(80)]
    assert [second.batch(step) for step in (79, 60, 59, 40, 3)] == [forward[step] for step in (79, 60, 59, 40, 3)]
    assert [mixture(PHASES[0])[2].batch(step) for step in range(40)] == forward[:40]
    assert mixture({0: PHASES[0], 40: (1, 1, 1)})[2].batch(40) != forward[40]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({5: (1, 1)}, "the weights from step 5 on are .*, and those from step 0 on, too"),
        ({0: (1, 1), 5: (1,)}, "the weights from step 5 on are .*; give one for each source"),
        ({0: (1, 1), 5: (0, 0)}, "the weights from step 5 on are .*, not all 0"),
        ({0: (1, 0), 5: (2, 0)}, "source 1 of the mixture has the weight 0 at all steps"),
        ({0: (1, -1), 5: (2, 1)}, "weights is -1, expected a finite number of at least 0"),
        ({0: (1, 1), 5: (float("nan"), 1)}, "weights is nan"),
        ({0: (1, 1), -5: (1, 1)}, "a step of weights is -5"),
        ({0: (1, 1), 2.5: (1, 1)}, "a step of weights is 2.5"),
    ],
)
def test_bad_changes_of_weights(weights, message):
    with pytest.raises(InvalidUsage, match=message):
        BatchSampler([1, 2], tokens=4, sources=np.array([0, 1]), weights=weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": (1, 0), "sources": np.array([0, 1])}, "weights is 0, expected a finite number above 0"),
        ({"weights": (1, 1, 1), "sources": np.array([0, 1])}, "source 2 of the mixture has no sequences"),
        ({"weights": (1, 1)}, r"sources has the shape \(0,\)"),
    ],
)
def test_bad_mixtures(arguments, message):
    with pytest.raises(InvalidUsage, match=message):
        BatchSampler([1, 2], tokens=5, **arguments)


def test_a_ramp_rises_to_the_whole_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 5000)
    sampler = BatchSampler(lengths, tokens=1000, seed=3, ramp=(200, 10))
    tokens = [sampler.batch(step).tokens for step in range(20)]
    budgets = [200 + min(800, 80 * step) for step in range(20)]
    assert all(budget - 40 < found <= budget for found, budget in zip(tokens, budgets, strict=True))
    assert sampler.batch(4) == BatchSampler(lengths, tokens=1000, seed=3, ramp=(200, 10)).batch(4)
    least = BatchSampler(lengths, tokens=1000, seed=3, ramp=(1, 10)).batch(0)
    assert 0 < least.tokens <= 39  # the longest sequence fits the first step
    ids = [number for step in range(200) for number in sampler.batch(step).ids if sampler.batch(step).epoch == 0]
    assert len(ids) == len(set(ids))  # each once an epoch
