"""Sizes, checks of flags, computed columns, the environment, the regression gate: all without ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.measure import timing as links
from hdpcomm.perf.config import REDOPS, PerfConfig, parse_size
from hdpcomm.perf.data import ALL, contribution, element_type, reduced, values
from hdpcomm.perf.ops import OPERATIONS, operation, parts
from hdpcomm.perf.results import IterationStats
from hdpcomm.perf.runner import check, points
from hdpcomm.perf.table import fixed, recorded


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("1m", 1 << 20), ("1.5M", 3 << 19), ("2G", 2 << 30), ("0", 0)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "8x", "-8", "1.3", "1e3", "8KB", " 8", "½", "0x8", "1.2.3"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InvalidUsage, match="give"):
        parse_size(text)


def test_sweep_multiplies_or_adds() -> None:
    assert list(PerfConfig("all_reduce", min_bytes=8, max_bytes=100, step_factor=3).sizes()) == [8, 24, 72]
    assert list(PerfConfig("all_reduce", min_bytes=8, max_bytes=20, step_bytes=6).sizes()) == [8, 14, 20]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_bytes": 9, "max_bytes": 8}, "-b 9 is above -e 8"),
        ({"step_factor": 0}, "at least 2 for -f"),
        ({"step_bytes": 0}, "at least 1 for -i"),
        ({"min_bytes": 0, "step_factor": 2}, "stays 0"),
    ],
)
def test_flags_that_contradict(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        PerfConfig("all_reduce", **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PerfConfig("all_reduce", algorithm="pigeon"), "all_reduce has: auto, "),
        (PerfConfig("sendrecv", algorithm="ring"), "no algorithms"),
        (PerfConfig("all_reduce", subsets=((0, 4),)), r"distinct ranks in 0\.\.3"),
        (PerfConfig("all_reduce", subsets=((1, 1),)), "distinct"),
        (PerfConfig("broadcast", roots=(4,)), r"give 0\.\.3"),
        (PerfConfig("broadcast", roots=(2,), subsets=((0, 1),)), "there are 2 ranks"),
        (PerfConfig("all_reduce", dtypes=("int32",), redops=("avg",)), "floating type"),
        (PerfConfig("all_reduce", dtypes=("quad",)), "unknown element type"),
        (PerfConfig("nothing"), "give one of: all_gather"),
    ],
)
def test_what_cannot_be_measured(config: PerfConfig, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        check(config, 4)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("alltoall", 3 / 4),
        ("alltoallv", 3 / 4),
        ("all_reduce", 6 / 4),
        ("broadcast", 1),
        ("reduce", 1),
        ("gather", 1),
        ("scatter", 1),
        ("sendrecv", 1),
        ("ring", 1),
    ],
)
def test_bus_factors_of_four_ranks(op: str, factor: float) -> None:
    assert operation(op).bus_factor(4) == factor
    assert set(OPERATIONS) >= {op}


@given(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 10_000), st.integers(1, 9))
def test_shapes(op: str, elements: int, ranks: int) -> None:
    shape = operation(op).shape(elements, ranks)
    assert (shape.total == 0) == (elements == 0)
    assert shape.total <= max(elements, ranks, 2)
    if op in ("all_gather", "gather"):
        assert (shape.count, shape.recv, shape.total) == (shape.send, shape.send * ranks, shape.recv)
    elif op in ("reduce_scatter", "scatter"):
        assert (shape.count, shape.send, shape.total) == (shape.recv, shape.recv * ranks, shape.send)
    elif op == "alltoallv":
        # What a rank sends to the others is what it receives from them, and no more than size(B) asked for.
        sizes = parts(shape.count, ranks)
        assert shape.send == shape.recv == shape.total == sum(sizes)
        assert sizes == sorted(sizes)
        assert ranks == 1 or sizes[0] == 0
    elif op == "alltoall":
        assert shape.send == shape.recv == shape.total == shape.count * ranks


def test_sizes_with_equal_elements_are_measured_once() -> None:
    config = PerfConfig("all_gather", min_bytes=1, max_bytes=64, step_factor=2)
    assert [point.size for point in points(config, 4)] == [16, 32, 64]


def test_points_are_all_combinations() -> None:
    config = PerfConfig(
        "reduce", min_bytes=8, max_bytes=8, dtypes=("float", "int32"), redops=("sum", "avg"), roots=None
    )
    rows = [(p.kind.name, p.redop, p.root) for p in points(config, 2)]
    assert rows == [("float", o, r) for o in ("sum", "avg") for r in (0, 1)] + [("int32", "sum", r) for r in (0, 1)]


@given(
    st.sampled_from(ALL),
    st.sampled_from(REDOPS),
    st.integers(1, 40),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_reductions_of_the_data_are_exact_in_any_order(
    name: str, redop: str, ranks: int, count: int, random: Any
) -> None:
    kind = element_type(name)
    if redop == "avg" and not kind.floating:
        return
    parts = [contribution(kind, redop, rank, ranks, count) for rank in range(ranks)]
    random.shuffle(parts)
    signed = {"uint32": torch.int64, "uint64": torch.int64}.get(name, kind.dtype)
    total = parts[0].to(signed)
    for part in parts[1:]:  # rounds after each step, as a 16-bit sum does
        other = part.to(signed)
        if redop in ("sum", "avg"):
            total = total + other
        else:
            total = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[redop](total, other)
    if redop == "avg":
        total = total / ranks
    assert torch.equal(total.to(torch.float64), reduced(kind, redop, ranks, count).to(torch.float64))


def test_streams_differ_by_rank_and_place() -> None:
    kind = element_type("int8")
    whole = values(kind, 3, 9000)
    assert torch.equal(values(kind, 3, 100, first=5000), whole[5000:5100])
    assert (whole[:4000] != values(kind, 4, 4000)).float().mean() > 0.9
    assert (whole[:4000] != whole[1:4001]).float().mean() > 0.9


def test_statistics_take_the_slowest_rank_of_each_iteration() -> None:
    stats = IterationStats.of([[1.0, 5.0, 3.0, 4.0], [2.0, 1.0, 1.0, 1.0]])
    assert stats.times_us == (2.0, 5.0, 3.0, 4.0)
    assert (stats.min_us, stats.max_us, stats.avg_us, stats.p50_us, stats.p99_us) == (2.0, 5.0, 3.5, 4.0, 5.0)
    assert stats.stdev_us == pytest.approx(math.sqrt(1.25))
    assert stats.cv_pct == pytest.approx(100 * math.sqrt(1.25) / 3.5)
    hundred = IterationStats.of([[float(k) for k in range(1, 101)]])
    assert (hundred.p95_us, hundred.p99_us) == (95.0, 99.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "   0.00"), (12.345, "  12.35"), (9999.4, "9999.40"), (99999.4, "99999.4"), (1234567.0, "1234567")],
)
def test_numbers_keep_their_width(value: float, text: str) -> None:
    assert fixed(value, 7) == text


def test_numbers_too_wide_get_an_exponent() -> None:
    assert fixed(123456789.0, 7) == "  1e+08"


# --- environment ------------------------------------------------------------------------------------------------------


def test_only_listed_variables_are_recorded() -> None:
    given_ = {"HDPCOMM_TIMEOUT": "3", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin", "A_TOKEN": "x"}
    assert recorded(given_) == ["CUDA_VISIBLE_DEVICES=0", "HDPCOMM_TIMEOUT=3", "NCCL_DEBUG=INFO"]


def test_costs_are_recovered_from_exact_times() -> None:
    costs = {"alpha_s": 5e-6, "message_s": 1e-6, "beta_s_per_byte": 2e-10, "gamma_s_per_byte": 1e-10}
    sizes = (8, 4096, 1 << 20)
    steps = [6e-6 + size * 2e-10 for size in sizes]
    assert links.fit(sizes, steps, 13e-6 + 64 * 2e-10, 1e-10) == pytest.approx(costs)
    assert min(links.fit(sizes, [1e-6] * 3, 0.5e-6, 0.0).values()) > 0  # noise does not make a cost 0
