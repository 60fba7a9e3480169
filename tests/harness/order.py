"""The order of the test files, which of them run side by side, and which `make test` runs.

tests/times.txt has the seconds of each file, as `pytest tests --write-times` measured them. Files come longest first: a
long one at the end would leave the other processes of pytest-xdist without work. Files that mostly wait for deadlines
and for the deaths of ranks are run by one process at a time, beside two that compute: three of them together would
leave the cores idle, and three that compute make each other wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["FIRST_SHARE", "PARTS", "first_files", "longest_first", "read_times", "waits", "write_times"]

PARTS = ("first", "rest", "all")
FIRST_SHARE = 0.15
"""Share of the time of all files that the first part may take."""

_TESTS = Path(__file__).parents[1]
_TIMES = _TESTS / "times.txt"


def read_times() -> dict[str, float]:
    """Seconds by file, as ``unit/test_suite.py``."""
    rows = (line.split() for line in _TIMES.read_text().splitlines() if not line.startswith("#"))
    return {name: float(seconds) for seconds, name in rows}


def write_times(times: dict[str, float]) -> None:
    rows = sorted(((seconds, name) for name, seconds in times.items()), reverse=True)
    lines = ["# Seconds of each test file; written by: make times", *(f"{s:.1f} {name}" for s, name in rows)]
    _TIMES.write_text("\n".join(lines) + "\n")


def first_files(times: dict[str, float]) -> set[str]:
    """The quickest file of each folder, and the quickest of all, as long as they take a small share of the time."""
    ascending = sorted(times, key=lambda name: (times[name], name))
    by_folder = {Path(name).parent: name for name in reversed(ascending)}
    first, left = set(by_folder.values()), FIRST_SHARE * sum(times.values())
    left -= sum(times[name] for name in first)
    for name in ascending:
        if name not in first and (left := left - times[name]) >= 0:
            first.add(name)
    return first


def longest_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests by their files, and leaves out those that are not of the wanted part. A file that was not
    measured is of the first part."""
    times, part = read_times(), config.getoption("part")
    names = {item.path: item.path.relative_to(_TESTS).as_posix() for item in items if _TESTS in item.path.parents}
    if part != "all":
        rest = times.keys() - first_files(times)
        left_out = [item for item in items if (names.get(item.path) in rest) == (part == "first")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if (names.get(item.path) in rest) == (part == "rest")]
    items.sort(key=lambda item: -times.get(names.get(item.path, ""), 0.0))


def waits(file: str) -> bool:
    """Whether a file's tests wait most of their time: those of faults do, and one that starts commands for a GPU."""
    return "faults/" in file or file.endswith("unit/test_gpu_command.py")
