"""Shared fixtures. Ranks are kept between tests: starting them costs far more than a test."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from hdpcomm.testing import RankPool
from tests.harness.frozen import freeze
from tests.harness.order import PARTS, longest_first, write_times
from tests.harness.patience import PATIENCE, be_patient
from tests.harness.warm_python import PRELOAD

torch.set_num_threads(1)

TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=PARTS, default="all", help="first: what `make test` runs; rest: what it leaves out"
    )
    parser.addoption("--write-times", action="store_true", help="write tests/times.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    longest_first(config, items)


_times: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _times[report.nodeid.split("::")[0].removeprefix("tests/")] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("write_times") and "PYTEST_XDIST_WORKER" not in os.environ:
        write_times(_times)


def pytest_runtest_setup() -> None:
    freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from tests.harness.scheduling import OneWaits

    return OneWaits(config, log) if config.getvalue("dist") == "loadfile" else None


# What tests, torch and multiprocessing leave is in one folder, which is removed when the first process ends; those of
# pytest-xdist end without Python's own clean-up. PYTEST_DEBUG_TEMPROOT=FOLDER keeps the folders of tests.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TMPDIR"], tempfile.tempdir = tempfile.mkdtemp(prefix="hdp-tests-"), None

    @atexit.register
    def _remove_folder() -> None:
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # they want their folders
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


# Tokens that a test makes, and its secret, are not those of the user of this machine.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cache-")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")


@pytest.hookimpl(trylast=True)  # after pytest's own handler of faults
def pytest_configure() -> None:
    """The first launch of a process decides what its fork server has imported, and may be one of no training: each
    training rank of that process would import the rest for itself, 2 s of CPU."""
    be_patient()
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # who runs a few files may start none
        faulthandler.enable(_crash_file(worker).open("w"))
        multiprocessing.set_forkserver_preload(["hdpcomm.comm.launch", *PRELOAD])
        multiprocessing.forkserver.ensure_running()


def _crash_file(worker: str) -> Path:
    """Where a worker that crashes leaves its stacks: on stderr they would be far above the summary."""
    return Path(os.environ["TMPDIR"], f"crash-{worker}.txt")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker that a signal or _exit() has ended leaves no stacks; its exit code tells which."""
    if error and (code := node.gateway._io.wait()) is not None:
        with _crash_file(node.gateway.id).open("a") as file:
            file.write(f"\nexit code {code}: {error}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path in sorted(Path(os.environ["TMPDIR"]).glob("crash-*.txt")):
        if text := path.read_text():
            terminalreporter.section(f"{path.stem}: where its threads were")
            terminalreporter.write_line(text[:6000])


# Ranks of tests outnumber the cores, and who yields beside other tests waits for their time slices: beside two busy
# processes the collectives of tests/ranks/nccl/test_paths.py take ten times as long as alone, sleeping four times.
os.environ.setdefault("HDPCOMM_YIELD_US", "0")

# What the user of this machine has calibrated chooses no algorithm of a test.
os.environ["HDPCOMM_COSTS"] = str(TESTS / "no_costs.json")

# Machines may be busy, and no test asserts a time. All runs try the same cases, and other ones with
# HYPOTHESIS_PROFILE=random.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("hdpcomm", settings.get_profile("random"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "hdpcomm"))


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


def _leaves_no_group() -> None:
    """The processes are shared: the next test would find the default group of torch.distributed there."""
    assert not torch.distributed.is_initialized()
    freeze()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Iterator[Callable[..., list[Any]]]:
    """``ranks(n, fn, *args, timeout=60)``: runs a module-level function on n processes that are shared by all tests."""
    used: dict[int, RankPool] = {}

    def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        pool = _pools.get(world_size)
        if pool is None or not pool.healthy:
            pool = _pools[world_size] = RankPool(world_size, preload=PRELOAD)
        used[world_size] = pool
        return pool.run(fn, *args, timeout=timeout * PATIENCE)

    yield run
    for pool in used.values():
        if pool.healthy:
            pool.run(_leaves_no_group, timeout=60 * PATIENCE)


@pytest.fixture
def nothing_left_in_shm() -> Iterator[None]:
    """Checks that the test leaves nothing in /dev/shm; files of a test beside it go when that one ends.

    Semaphores of multiprocessing are not ours: progress bars in the shared ranks of other tests keep theirs.
    """
    before = set(os.listdir("/dev/shm"))
    yield
    limit = time.monotonic() + 60 * PATIENCE
    while left := {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} - before:
        assert time.monotonic() < limit, f"left in /dev/shm: {left}"
        time.sleep(0.1)
