"""benchmarks/nccl.py on the fake NCCL at small size: its rows and its table; never its times."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hdpcomm as hdp
from tests.harness.fakes import run_threads

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_nccl", FOLDER / "nccl.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_comparison_and_table(benchmark: ModuleType) -> None:
    class Other(benchmark.Hdpcomm):  # type: ignore[misc, name-defined]
        """In place of the communicators of torch, which need GPUs."""

        name = "other"

        def group(self, ranks: Sequence[int]) -> object:
            self.world.barrier()  # as a split, all take part
            return super().group(ranks)

    def ranks() -> object:
        with hdp.init() as world:
            machine = benchmark.Machine(torch.device("cpu"), world.synchronize, lambda: 1 << 20)
            sides = [benchmark.Hdpcomm(world), Other(world)]
            taken = {"hdpcomm": 100 + world.rank, "other": 7}
            return benchmark.compare(world, sides, machine, sizes=(16, 4096), repeats=2, init_bytes=taken)

    report = run_threads(ranks, 4, transport="nccl")[0]
    subsets = benchmark.subsets_of(4)
    assert {(0, 1, 2, 3), (0, 1), (1, 2), (2, 3), (0, 2), (1, 3)} == set(subsets)
    assert len(report.rows) == len(subsets) * 3 * 2
    for row in report.rows:
        assert set(row.us) == {"hdpcomm", "other"}
        assert all(us > 0 for us in row.us.values())
    assert report.init_bytes == {"hdpcomm": 103, "other": 7}  # of the rank that took most
    assert report.device_bytes == report.init_bytes  # the subsets took nothing here
    text = benchmark.table(report, ["hdpcomm", "other"])
    assert text.count("\n") == 1 + len(report.rows) + 4
    assert text.startswith("| operation | ranks | bytes | hdpcomm us | other us |")
    assert "| making one, ms | 6 subsets | |" in text
    assert "| device memory of all, bytes | 6 subsets | | 103 | 7 |" in text


def test_without_two_gpus_the_script_says_so(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are GPUs here")
    done = subprocess.run(
        [str(FOLDER / "nccl.sh"), str(tmp_path / "out")],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "needs 2 GPUs or more" in done.stderr
