"""Every schedule is proved by symbolic execution, and the prover itself is tested with wrong schedules."""

from __future__ import annotations

import math
import random

import pytest

import hdpcomm as hdp
from hdpcomm._core import comm
from tests.harness.native import _testing

GROUP_SIZES = (*range(1, 34), 64, 96, 128)
CASES = [(op, algorithm) for op in comm.OPS if op != "send/recv" for algorithm in comm.algorithms_of(comm.OPS[op])]
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
IN_PLACE = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter")


def counts(op: str, size: int) -> tuple[int, ...]:
    if op in ("all_reduce", "broadcast", "reduce"):  # cut among the ranks: fewer, as many, and unevenly more elements
        return (0, 1, size, 2 * size + 1) if size <= 33 else (size + 3,)
    return (0, 1, 3) if size <= 33 else (1,)


@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_every_schedule_is_right(op: str, algorithm: str) -> None:
    for size in GROUP_SIZES:
        ranks = list(range(size))
        for count in counts(op, size):
            for root in sorted({0, size // 3, size - 1}) if op in ROOTED else (-1,):
                for in_place in (False, True) if op in IN_PLACE else (False,):
                    average = op in REDUCING and count == 1
                    operation = (comm.OPS[op], comm.ALGORITHMS[algorithm], count, root, average, in_place, ranks, [])
                    wrong = _testing.check(size, [operation], seed=size + count)
                    assert wrong == "", (size, count, root, in_place, wrong)


@pytest.mark.parametrize("seed", range(20))
def test_random_mixes_of_overlapping_subsets(seed: int) -> None:
    generator = random.Random(seed)
    num_ranks = generator.randint(2, 12)
    operations = []
    for _ in range(40):
        ranks = generator.sample(range(num_ranks), generator.randint(1, num_ranks))
        op, algorithm = generator.choice(CASES)
        root = generator.randrange(len(ranks)) if op in ROOTED else -1
        in_place = op in IN_PLACE and generator.random() < 0.5
        operations.append(
            (comm.OPS[op], comm.ALGORITHMS[algorithm], generator.randint(0, 9), root, False, in_place, ranks, [])
        )
    assert _testing.check(num_ranks, operations, seed) == ""


FAULTS = ("drop a send", "drop a receive", "copy instead of reduce", "shift a receive", "blocking sends", "swap steps")


@pytest.mark.parametrize("fault", range(1, len(FAULTS) + 1), ids=FAULTS)
def test_the_checker_finds_planted_faults(fault: int) -> None:
    places = 0
    for op, algorithm in CASES:
        for size in (3, 5, 8):
            root = 0 if op in ROOTED else -1
            operation = (comm.OPS[op], comm.ALGORITHMS[algorithm], size + 1, root, False, False, list(range(size)), [])
            try:
                wrong = _testing.check(size, [operation], seed=1, fault=fault)
            except ValueError as error:
                assert "no place for the fault" in str(error)  # noqa: PT017
                continue
            places += 1
            # Two steps may be interchangeable: all blocks at once, or two messages to different peers.
            assert wrong or FAULTS[fault - 1] == "swap steps", (op, algorithm, size)
    assert places >= 3


def test_an_unknown_algorithm_of_an_operation_is_refused() -> None:
    with pytest.raises(hdp.InvalidUsage, match="it has: ring"):
        _testing.check(2, [(comm.OPS["all_gather"], comm.ALGORITHMS["chain"], 4, -1, False, False, [0, 1], [])])


def steps_of(
    op: str, algorithm: str, size: int, rank: int, count: int, root: int = -1
) -> list[dict[str, list[object]]]:
    made = _testing.schedule(comm.OPS[op], comm.ALGORITHMS[algorithm], size, rank, count, root=root)
    assert made["algorithm"] == algorithm
    return made["steps"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 16, 31, 64])
def test_numbers_of_steps_and_bytes(size: int) -> None:
    """The textbook costs: ring p - 1 steps, logarithmic ones ceil(log2 p); no more bytes than must be received."""
    logarithm = math.ceil(math.log2(size))
    block = 10

    def received(steps: list[dict[str, list[object]]]) -> int:
        return sum(span[2] for step in steps for _, span, _ in step["recvs"])  # type: ignore[misc,index]

    for rank in {0, size // 2, size - 1}:
        for algorithm, expected in (("ring", size - 1), ("direct", 1), ("bruck", logarithm)):
            steps = steps_of("all_gather", algorithm, size, rank, block)
            assert len(steps) == expected
            assert received(steps) == (size - 1) * block
        assert received(steps_of("reduce_scatter", "ring", size, rank, block)) == (size - 1) * block
        assert received(steps_of("all_reduce", "ring", size, rank, size * block)) == 2 * (size - 1) * block
        if size & (size - 1) == 0:
            assert received(steps_of("all_reduce", "rabenseifner", size, rank, size * block)) == 2 * (size - 1) * block
        assert len(steps_of("barrier", "dissemination", size, rank, 0)) == logarithm
