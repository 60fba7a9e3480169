"""A failure is printed when it happens: a part of benchmarks/gpu.sh that runs out of its time is stopped."""

from __future__ import annotations

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and report.nodeid.startswith("tests/gpu/"):
        print(f"\n--- {report.nodeid} ({report.when})\n{report.longreprtext[-2500:]}", file=sys.__stderr__, flush=True)
