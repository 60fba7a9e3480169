"""The settings of the test suite itself."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.order import FIRST_SHARE, first_files, read_times, waits

ROOT = Path(__file__).parents[2]


def test_the_files_that_were_measured_are_there() -> None:
    """A file that is gone would be counted; `make times` measures anew."""
    assert [name for name in read_times() if not (ROOT / "tests" / name).is_file()] == []


def test_the_first_part_has_files_of_every_folder() -> None:
    times = read_times()
    first = first_files(times)
    assert {Path(name).parent for name in first} == {Path(name).parent for name in times}
    assert sum(times[name] for name in first) <= FIRST_SHARE * sum(times.values())


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tools"])
def test_what_scripts_import_is_there(folder: str) -> None:
    """No test runs most of the benchmarks: a name that has moved is found here."""
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hdpcomm":
                module = importlib.import_module(str(node.module))
                there = [each.name for each in node.names if hasattr(module, each.name)]
                named = [each.name for each in node.names if each.name not in there]
                missing += [
                    f"{path.relative_to(ROOT)}: {node.module}.{name}"
                    for name in named
                    if importlib.util.find_spec(f"{node.module}.{name}") is None
                ]
    assert missing == []


class Node:
    """A process of pytest-xdist: what it was sent and has not done yet."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("seed", range(5))
def test_one_process_at_a_time_waits(seed: int) -> None:
    scheduling = pytest.importorskip("tests.harness.scheduling", reason="needs pytest-xdist")
    draw = random.Random(seed)
    waiting = [f"faults/test_{name}.py" for name in "abcdef" for _ in range(draw.randint(1, 5))]
    computing = [f"unit/test_{number}.py" for number in range(20) for _ in range(draw.randint(1, 5))]
    items = [f"tests/{name}::test_{place}" for place, name in enumerate([*computing, *waiting])]
    config: Any = SimpleNamespace(getvalue=lambda _: ["popen"] * 3, option=SimpleNamespace(loadscopereorder=False))
    dealt = scheduling.OneWaits(config)
    nodes = [Node(name) for name in "abc"]
    for node in nodes:
        dealt.add_node(node)
        dealt.add_node_collection(node, items)
    dealt.schedule()
    done: list[int] = []
    while busy := [node for node in nodes if node.sent]:
        running = [waits(items[node.sent[0]].split("::")[0]) for node in busy]
        left = {waits(file) for file in dealt.workqueue}
        if left == {True, False}:
            assert sum(running) == 1
        elif left == {False}:
            assert sum(running) <= 1
        node = draw.choice(busy)
        done.append(node.sent.pop(0))
        dealt.mark_test_complete(node, done[-1])
    assert sorted(done) == list(range(len(items)))


def test_a_process_that_dies_fails_one_test() -> None:
    scheduling = pytest.importorskip("tests.harness.scheduling", reason="needs pytest-xdist")
    items = [f"tests/test_{file}.py::test_{test}" for file in range(4) for test in range(5)]
    config: Any = SimpleNamespace(getvalue=lambda _: ["popen"] * 2, option=SimpleNamespace(loadscopereorder=False))
    dealt = scheduling.OneWaits(config)
    one, two, three = (Node(name) for name in ("one", "two", "three"))

    def joins(node: Node) -> None:
        dealt.add_node_collection(node, items)
        dealt.schedule()

    for node in (one, two):
        dealt.add_node(node)
        dealt.add_node_collection(node, items)
    dealt.schedule()
    dealt.mark_test_complete(one, one.sent.pop(0))
    crashed = items[one.sent[0]]
    again = {items[index] for index in one.sent[1:]}  # what it was sent and has not begun
    assert dealt.remove_node(one) == crashed
    dealt.add_node(three)  # it takes the place of the first, and collects while the second works on
    ran = []
    while two.sent:
        ran.append(items[two.sent.pop(0)])
        dealt.mark_test_complete(two, items.index(ran[-1]))
        if len(ran) == 4:
            joins(three)
    while three.sent:
        ran.append(items[three.sent.pop(0)])
        dealt.mark_test_complete(three, items.index(ran[-1]))
    assert again <= {*ran}
    assert sorted([*ran, crashed, items[0]]) == sorted(items)
    assert dealt.tests_finished


def test_nothing_is_left_in_the_temporary_folder() -> None:
    """A run of tests that makes files, a cache, and ranks leaves the folder empty."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1"]
    command += [
        "tests/unit/run/test_checkpoints.py::test_at_least_one_is_kept",
        "tests/ranks/comm/test_subsets.py::test_order_and_nesting",
    ]
    with tempfile.TemporaryDirectory(prefix="hdp-", dir="/tmp") as folder:  # sockets have short names only
        environment |= {"TMPDIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert " passed" in done.stdout, done.stdout + done.stderr
        assert os.listdir(folder) == []
