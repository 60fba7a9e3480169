"""Short sequences go, longest first, to the rank that is free first: compared with a heap of the ranks."""

from __future__ import annotations

import heapq
import random

import pytest

from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner


@pytest.mark.parametrize("ranks", [1, 7, 300, 1000])
@pytest.mark.parametrize("kind", ["random", "equal", "few lengths", "falling steeply"])
def test_short_sequences_go_to_the_rank_that_is_free_first(ranks: int, kind: str) -> None:
    rng = random.Random(ranks)
    count = 40 * ranks
    lengths = {
        "random": [rng.randint(1, 900) for _ in range(count)],
        "equal": [100] * count,
        "few lengths": [rng.choice([3, 50, 51, 800]) for _ in range(count)],
        "falling steeply": [max(1, int(900 * 0.999**i)) for i in range(count)],
    }[kind]
    # Exact in binary: the order of the sums does not matter.
    cost = CostModel(attention=0.0, linear=2.0**-10, fixed=0.0)
    cluster = ClusterSpec(ranks=ranks, ranks_per_node=ranks, capacity=1 << 20)
    planner = Planner(None, cluster, cost_model=cost, memory=MemoryModel(1 << 20))
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)

    ready = [0.0] * ranks
    heapq.heapify(ready)
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(ready, ready[0] + length * 2.0**-10)
    assert plan.makespan_s == max(ready)
    if max(ready) > plan.lower_bound_s * 1.002:  # else another target was not tried
        return
    ends = sorted(sum(batch.predicted_s for batch in plan.for_rank(rank)) for rank in range(ranks))
    assert ends == sorted(ready)
