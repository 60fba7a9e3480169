"""Tiles and routes without ranks: every pair once, both ends of a message agree, and nothing superfluous moves."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.attention import as_pack
from hdpcomm.attention.ring import ring_plan
from hdpcomm.attention.tiles import Band, Span, band_of, tiles_of

LIMIT = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
    keys = draw(
        st.one_of(st.just(lengths), st.just([max(0, n + d) for n, d in zip(lengths, (7, -5, 0), strict=False)]))
    )
    low, high = draw(LIMIT), draw(LIMIT)
    return lengths, keys, Band(None if low is None else -low, high), draw(st.integers(1, 6))


def _layouts(lengths, keys, size):
    return (as_pack(np.cumsum([0, *n])).layout(size) for n in (lengths, keys))


def _seen(lengths, keys, band):
    """For each sequence, the (query, key) pairs that the mask allows; dense, directly from the definition."""
    masks = []
    for n, m in zip(lengths, keys, strict=True):
        gap = np.arange(m)[None, :] - np.arange(n)[:, None] - (m - n)
        low = -(10**9) if band.low is None else band.low
        high = 10**9 if band.high is None else band.high
        masks.append((gap >= low) & (gap <= high))
    return masks


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=2), st.lists(st.integers(0, 12), min_size=3, max_size=3),
    st.integers(-9, 9), LIMIT, LIMIT,
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_tiles_cover_each_visible_pair_once(q_cuts, k_cuts, shift, low, high):
    band = Band(None if low is None else -low, high)

    def spans(cuts, first_row):
        edges = np.cumsum([first_row, *cuts]).tolist()  # rows without gaps, positions with a gap of 3 between spans
        return [Span(e + 3 * i, e + 3 * i + n, e) for i, (e, n) in enumerate(zip(edges, cuts, strict=False))]

    q, k = spans(q_cuts, 0), spans(k_cuts, 5)
    count = Counter()
    for tile in tiles_of(q, k, shift, band):
        for a in range(tile.num_q):
            keys = [
                b for b in range(tile.num_k)
                if (tile.low is None or b - a >= tile.low) and (tile.high is None or b - a <= tile.high)
            ]  # fmt: skip
            assert keys, "a query of a tile must see a key"
            count.update((tile.q_start + a, tile.k_start + b) for b in keys)
        assert tile.pairs <= tile.num_q * tile.num_k
    want = {
        (qs.row + i, ks.row + j)
        for qs in q for ks in k for i in range(qs.rows) for j in range(ks.rows)
        if (low is None or (ks.start + j) - (qs.start + i + shift) >= -low)
        and (high is None or (ks.start + j) - (qs.start + i + shift) <= high)
    }  # fmt: skip
    assert set(count) == want
    assert set(count.values()) <= {1}


def rows_sent(plans):
    """KV rows that all ranks send in forward."""
    return sum(message.rows.total for plan in plans for step in plan.steps for message in step.kv_sends)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_work_covers_the_mask_once(problem):
    lengths, keys, band, size = problem
    q_layout, kv_layout = _layouts(lengths, keys, size)
    pairs = sum(
        tile.pairs for rank in range(size) for step in ring_plan(q_layout, kv_layout, band, rank=rank).steps
        for tile in step.tiles
    )  # fmt: skip
    assert pairs == sum(int(mask.sum()) for mask in _seen(lengths, keys, band))


@given(problems())
@settings(max_examples=100, deadline=None)
def test_rows_sent_are_the_minimum(problem):
    """Each key reaches every other rank with a query that sees it exactly once, and nothing else is sent. The same
    number of gradient rows is sent back."""
    lengths, keys, band, size = problem
    q_layout, kv_layout = _layouts(lengths, keys, size)
    minimum = 0
    for s, mask in enumerate(_seen(lengths, keys, band)):
        needed = np.zeros((size, mask.shape[1]), dtype=bool)
        for rank in range(size):
            held = np.zeros(mask.shape[0], dtype=bool)
            for start, stop in [span[:2] for span in q_layout.own_spans(rank).get(s, [])]:
                held[start:stop] = True
            # at a window's edge, all keys between the first and the last visible one count: a band has no holes
            needed[rank] = mask[held].any(axis=0)
            for start, stop in [span[:2] for span in kv_layout.own_spans(rank).get(s, [])]:
                needed[rank, start:stop] = False
        minimum += int(needed.sum())
    plans = [ring_plan(q_layout, kv_layout, band, rank=rank) for rank in range(size)]
    assert rows_sent(plans) == minimum
    gradients = [message for plan in plans for step in plan.steps for message in step.grad_sends]
    assert sum(message.rows.total for message in gradients) == minimum


@given(problems())
@settings(max_examples=100, deadline=None)
def test_both_ends_of_every_message_agree(problem):
    lengths, keys, band, size = problem
    q_layout, kv_layout = _layouts(lengths, keys, size)
    plans = [ring_plan(q_layout, kv_layout, band, rank=rank) for rank in range(size)]
    for t in range(size + 1):
        for kind in ("kv", "grad"):
            sent = {(rank, peer): [] for rank in range(size) for peer in range(size)}
            got = {pair: [] for pair in sent}
            for rank, plan in enumerate(plans):
                for message in getattr(plan.steps[t], f"{kind}_sends"):
                    source = (rank + message.step) % size
                    assert message.step < t
                    assert source != message.peer or kind == "grad"
                    sent[rank, message.peer].append((source, message.rows.total))
                for message in getattr(plan.steps[t], f"{kind}_recvs"):
                    source = (rank + message.step) % size
                    got[message.peer, rank].append((source, message.rows.total))
            assert sent == got


def test_a_causal_ring_saves_a_quarter():
    size, length = 4, 64
    (layout, _) = _layouts([length], [length], size)
    plans = [ring_plan(layout, layout, band_of(True, None), rank=rank) for rank in range(size)]
    plain_ring = (size - 1) * length
    assert rows_sent(plans) == 0.75 * plain_ring
    assert {message.peer for message in plans[1].steps[1].kv_sends} == {0}
    assert [len(step.tiles) for step in plans[1].steps] == [1, 1, 1, 1, 0]


def test_a_window_leaves_most_steps_silent():
    size, length = 8, 1024
    (layout, _) = _layouts([length], [length], size)
    plans = [ring_plan(layout, layout, band_of(True, 32), rank=rank) for rank in range(size)]
    assert rows_sent(plans) == 31 * (2 * size - 2)  # every inner cut but the one inside rank N-1
    assert all(sum(bool(step.kv_recvs) for step in plan.steps) <= 2 for plan in plans)
