"""Hierarchical schedules: proved by the checker on nodes of any shape, minimal between nodes, chosen where faster."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm._core import comm
from tests.harness.native import _testing

OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
ROOTED = ("broadcast", "reduce")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
HIERARCHICAL = comm.ALGORITHMS["hierarchical"]
SHM = (0.6e-6, 0.15e-6, 1.2e-10, 0.8e-10)
NETWORK = (20e-6, 5e-6, 1e-9, 0.8e-10)

# The node of each rank: equal and unequal nodes, ranks of a node side by side and scattered, single ranks.
SHAPES = (
    [0],
    [0, 0],
    [0, 1],
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [0, 1, 1, 1],
    [0, 0, 0, 0, 1],
    [0, 1, 2, 0, 0, 2],
    [0, 1, 2, 3, 4],
    [i // 8 for i in range(32)],
    [i % 5 for i in range(33)],
    [0] * 7 + [1] * 2 + [2] * 5 + [3],
)


def numbered(nodes: list[int]) -> list[int]:
    """Node numbers by first appearance, as the core expects them."""
    seen: dict[int, int] = {}
    return [seen.setdefault(node, len(seen)) for node in nodes]


def operation(
    op: str, nodes: list[int], count: int, root: int, in_place: bool, ranks: list[int] | None = None
) -> tuple[int, int, int, int, bool, bool, list[int], list[int]]:
    average = op in REDUCING and count % 2 == 1
    members = list(range(len(nodes))) if ranks is None else ranks
    return comm.OPS[op], HIERARCHICAL, count, root if op in ROOTED else -1, average, in_place, members, nodes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("nodes", SHAPES, ids=lambda nodes: "".join(map(str, nodes)))
def test_every_schedule_is_right(op: str, nodes: list[int]) -> None:
    p = len(nodes)
    for count in (0, 1, 3) if op in ("all_gather", "reduce_scatter") else (0, 1, p, 2 * p + 1):
        for root in {0, p // 2, p - 1} if op in ROOTED else (-1,):
            for in_place in (False, True):
                wrong = _testing.check(p, [operation(op, nodes, count, root, in_place)], seed=count)
                assert wrong == "", (count, root, in_place, wrong)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=24).map(numbered),
    st.sampled_from(OPS),
    st.integers(0, 40),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_nodes(nodes: list[int], op: str, count: int, seed: int, in_place: bool) -> None:
    assert _testing.check(len(nodes), [operation(op, nodes, count, seed % len(nodes), in_place)], seed=seed) == ""


@pytest.mark.parametrize("seed", range(10))
def test_random_mixes_of_overlapping_subsets(seed: int) -> None:
    generator = random.Random(seed)
    num_ranks = generator.randint(2, 12)
    host = [generator.randrange(4) for _ in range(num_ranks)]
    operations = []
    for _ in range(40):
        ranks = generator.sample(range(num_ranks), generator.randint(1, num_ranks))
        nodes = numbered([host[rank] for rank in ranks])
        operations.append(
            operation(
                generator.choice(OPS), nodes, generator.randint(0, 9), generator.randrange(len(ranks)), False, ranks
            )
        )
    assert _testing.check(num_ranks, operations, seed) == ""


@pytest.mark.parametrize("fault", [1, 2, 3])  # a missing send, a missing receive, a copy instead of a reduction
@pytest.mark.parametrize("op", OPS)
def test_planted_faults_are_found(op: str, fault: int) -> None:
    try:
        wrong = _testing.check(6, [operation(op, [0, 0, 1, 1, 2, 2], 12, 0, False)], seed=1, fault=fault)
    except ValueError as error:
        assert "no place" in str(error)  # noqa: PT017
    else:
        assert wrong


@pytest.mark.parametrize("nodes", SHAPES, ids=lambda nodes: "".join(map(str, nodes)))
def test_what_crosses_is_the_minimum(nodes: list[int]) -> None:
    p, num_nodes, block = len(nodes), len(set(nodes)), 12

    def crossing(op: str, count: int, root: int = -1) -> int:
        return sum(_testing.crossing_bytes(comm.OPS[op], HIERARCHICAL, count, 4, root, nodes))

    # Every node needs every block of the others once; a reduction the other way round.
    assert crossing("all_gather", block) == p * block * 4 * (num_nodes - 1)
    assert crossing("reduce_scatter", block) == p * block * 4 * (num_nodes - 1)
    assert crossing("all_reduce", p * block) == 2 * p * block * 4 * (num_nodes - 1)
    assert crossing("broadcast", block, root=p - 1) == block * 4 * (num_nodes - 1)
    assert crossing("reduce", block, root=p - 1) == block * 4 * (num_nodes - 1)
    for algorithm in ("ring", "direct"):
        flat = sum(_testing.crossing_bytes(comm.OPS["all_gather"], comm.ALGORITHMS[algorithm], block, 4, -1, nodes))
        assert flat >= crossing("all_gather", block)


def test_all_members_of_a_node_share_its_link() -> None:
    nodes = [i // 4 for i in range(16)]
    for op, count in (("all_gather", 10), ("reduce_scatter", 10), ("all_reduce", 160)):
        assert len(set(_testing.crossing_bytes(comm.OPS[op], HIERARCHICAL, count, 4, -1, nodes))) == 1


def test_it_is_chosen_where_it_pays() -> None:
    nodes = [i // 4 for i in range(8)]
    for op in OPS:
        for count in (1, 1000, 1 << 22):
            seconds = {
                name: _testing.estimate_across_nodes_s(
                    comm.OPS[op], comm.ALGORITHMS[name], count, 4, nodes, SHM, NETWORK
                )
                for name in comm.algorithms_of(comm.OPS[op])
            }
            chosen = _testing.choose_across_nodes(comm.OPS[op], count, 4, nodes, SHM, NETWORK)
            assert seconds[chosen] == min(seconds.values())
        if op not in ROOTED:  # a pipelined chain crosses once, too, and overlaps with the steps inside a node
            assert _testing.choose_across_nodes(comm.OPS[op], 1 << 22, 4, nodes, SHM, NETWORK) == "hierarchical"
    # One rank a node: nothing to gain inside, and the wire is the same.
    lonely = {
        name: _testing.estimate_across_nodes_s(
            comm.OPS["all_gather"], comm.ALGORITHMS[name], 1 << 22, 4, list(range(8)), SHM, NETWORK
        )
        for name in ("ring", "hierarchical")
    }
    assert lonely["ring"] < 1.2 * lonely["hierarchical"]


def test_without_nodes_it_is_one_node() -> None:
    operations = [(comm.OPS[op], HIERARCHICAL, 9, 1 if op in ROOTED else -1, False, False, [0, 1, 2], []) for op in OPS]
    assert _testing.check(3, operations) == ""
