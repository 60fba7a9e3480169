"""`.ci/spills` on handwritten reports: which pass, which fail, and the exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
ENTRY = """ptxas info    : Compiling entry function '_Z3addv' for '{arch}'
ptxas info    : Function properties for _Z3addv
    {stack} bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def run(build, *arguments):
    command = [sys.executable, str(TOP / ".ci/spills"), "--build", str(build), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def reports(tmp_path):
    def write(stack=0, stores=0, architectures=("sm_80", "sm_90")):
        for source in (TOP / "csrc").rglob("*.cu"):
            report = tmp_path / f"objects/{source.relative_to(TOP)}.o.ptxas"
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text("".join(ENTRY.format(arch=arch, stack=stack, stores=stores) for arch in architectures))
        return tmp_path

    return write


def test_no_spill_passes_and_the_table_is_kept(reports, tmp_path):
    done = run(reports(), "--write", tmp_path / "table.txt")
    assert done.returncode == 0, done.stderr
    assert "0 with stack or spills, at most 40 registers" in done.stdout
    assert "merge.cu" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize("memory", [{"stack": 8}, {"stores": 4}])
def test_a_spill_or_stack_fails(reports, memory):
    done = run(reports(**memory))
    assert done.returncode == 1
    assert "merge.cu" in done.stdout


def test_missing_reports_are_no_success(reports, tmp_path):
    done = run(tmp_path / "nowhere")
    assert done.returncode == 2
    assert "build first" in done.stderr
    done = run(reports(architectures=("sm_80",)))
    assert done.returncode == 2
    assert "nothing for sm_90" in done.stderr
