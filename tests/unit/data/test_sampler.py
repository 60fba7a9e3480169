"""Global batches: every sequence once per epoch, within the budget, equal for equal arguments."""

from __future__ import annotations

import itertools

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
