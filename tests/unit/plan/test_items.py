"""Items of sequences and trees: the devices that encode them, beside all ways, and who sends which embeddings."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, Item, MemoryModel, MicroBatch, Planner, SequenceInfo, Tree
from hdpcomm.plan.items import ItemExchange, place_items
from hdpcomm.plan.tree import TrajectoryTree
from tests.harness.exhaustive import TooManyNodes, optimum

COST = CostModel(attention=1e-6, linear=1e-4, piece=1e-5, fixed=1e-5)


def seconds(patches):
    return 1e-5 * patches + 1e-8 * patches**2


def random_items(draw, lengths):
    """Items that leave some tokens to text, a frame as large as the others of its video."""
    found = []
    for length in lengths:
        own, start = [], draw.randint(0, 3)
        frame = draw.choice((0, draw.randint(1, 12)))
        while (tokens := frame or draw.randint(1, 30)) + start < length and draw.random() < 0.7:
            own.append(Item(start, tokens, 4 * tokens + draw.choice((0, 4, 40))))
            start += tokens + draw.choice((0, 0, 1, 5))
        found.append(own)
    return found


def test_steps_of_two_costs_are_near_the_best_of_all():
    """Bound <= optimum <= plan, for the step that encodes, then runs the plan; both optima by trying all ways."""
    draw, ratios, gaps = random.Random(5), [], []
    while len(ratios) < 150:
        ranks = draw.choice((2, 3))
        lengths = [draw.choice((draw.randint(4, 40), draw.randint(40, 120))) for _ in range(draw.randint(1, 4))]
        items = random_items(draw, lengths)
        work = [seconds(item.patches) for own in items for item in own]
        if len(work) > 8:
            continue
        memory = MemoryModel(-(-max(sum(lengths), 60) // ranks) + 20)
        cluster = ClusterSpec(ranks, memory.capacity)
        plan = Planner(None, cluster, cost_model=COST, memory=memory).plan(lengths)
        try:
            language = optimum(lengths, cluster, COST, memory)
        except TooManyNodes:
            continue
        placed = place_items(items, lengths, ranks, seconds)
        own = float(np.bincount(placed.device, work, minlength=ranks).max()) if work else 0.0
        best = min(
            max(sum(each for each, device in zip(work, devices, strict=True) if device == k) for k in range(ranks))
            for devices in product(range(ranks), repeat=len(work))
        )
        bound = max(sum(work) / ranks, max(work, default=0.0))
        assert bound <= best + 1e-12
        assert plan.lower_bound_s <= language + 1e-12
        assert best <= own + 1e-12
        ratios.append((own + plan.makespan_s) / (best + language))
        gaps.append(own / best if best else 1.0)
    assert min(ratios) >= 1 - 1e-9
    assert np.quantile(ratios, 0.95) <= 1.03
    assert np.quantile(gaps, 0.95) <= 1.1


@pytest.mark.parametrize("seed", range(20))
def test_each_embedding_is_sent_once_to_where_its_token_is(seed):
    draw = random.Random(seed)
    ranks, tensor = draw.randint(1, 4), draw.choice((1, 1, 2, 3))
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 8))]
    items = random_items(draw, lengths)
    placed = place_items(items, lengths, ranks * tensor, seconds, tensor=tensor)
    batches, order = [], list(range(len(lengths)))
    draw.shuffle(order)
    while order:
        own, order = order[:2], order[2:]
        group = tuple(draw.sample(range(ranks), draw.randint(1, ranks)))
        batches.append(MicroBatch(len(batches), group, tuple(SequenceInfo(i, lengths[i]) for i in own), 0.0, 1.0))

    def rows_of(batch, place):
        """Every so many tokens are of the next rank."""
        rows = np.concatenate([placed.rows_of(each.id, each.length) for each in batch.sequences])
        return rows[place :: len(batch.ranks)]

    exchanges = [ItemExchange.of(placed, batches, rows_of, device, ranks * tensor) for device in range(ranks * tensor)]
    counts = np.array([each.send_counts for each in exchanges])
    assert counts.sum() == placed.tokens.sum() == sum(item.tokens for own in items for item in own)
    assert (counts == np.array([each.receive_counts for each in exchanges]).T).all()
    # As if each embedding were the number of its row.
    made = [np.flatnonzero(np.repeat(placed.device, placed.tokens) == device) for device in range(ranks * tensor)]
    sent = [np.split(made[k][each.sent], np.cumsum(each.send_counts)[:-1]) for k, each in enumerate(exchanges)]
    for device, each in enumerate(exchanges):
        got = np.concatenate([sent[source][device] for source in range(ranks * tensor)])
        wanted = np.empty_like(got)
        wanted[each.order] = got
        for batch in batches:
            if device // tensor not in batch.ranks:
                assert batch.index not in each.wanted
                continue
            shard = rows_of(batch, batch.ranks.index(device // tensor))
            block = -(-len(shard) // tensor)
            shard = shard[device % tensor * block :][:block]
            first, rows = each.wanted.get(batch.index, (0, np.zeros(0, dtype=np.int64)))
            assert (np.flatnonzero(shard >= 0) == rows).all()
            assert (wanted[first : first + len(rows)] == shard[rows]).all()


def test_trajectories_share_images():
    tree = TrajectoryTree(Tree([-1, 0, 0], [10, 4, 6]), (1, 0), (1, 2))
    items = [[Item(2, 5, 20), Item(11, 3, 12)], [Item(2, 5, 20)], []]
    placed = place_items(items, [16, 14, 3], 2, seconds, sources=[tree, 2])
    assert placed.place.tolist() == [0, 0]
    assert placed.start.tolist() == [2, 15]  # the tree has the answer of sequence 1 before that of 0
    assert placed.tokens.tolist() == [5, 3]
    assert sorted(zip(placed.sequence.tolist(), placed.number.tolist(), strict=True)) == [(0, 1), (1, 0)]
    with pytest.raises(InvalidUsage, match="share images as a whole"):
        place_items([[Item(2, 5, 20), Item(8, 4, 16)], items[1], []], [16, 14, 3], 2, seconds, sources=[tree, 2])
    with pytest.raises(InvalidUsage, match="share images as a whole"):
        place_items([items[0], [Item(2, 4, 16)], []], [16, 14, 3], 2, seconds, sources=[tree, 2])


def test_items_inside_of_their_sequences():
    for own in ([Item(0, 4, 4), Item(3, 2, 4)], [Item(5, 4, 4)], [Item(0, 0, 4)], [Item(0, 1, 0)]):
        with pytest.raises(InvalidUsage, match="tokens of their own inside of the sequence"):
            place_items([own], [8], 2, seconds)
    with pytest.raises(InvalidUsage, match="items of 1 sequences were given for 2"):
        place_items([[]], [8, 3], 2, seconds)
    assert place_items([[]], [8], 2, seconds).first_row.tolist() == [0]
