"""What a wheel contains: the package and the core, and nothing that only tests need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hdpcomm import _core
from tests.harness.native import _testing

TOP = Path(__file__).resolve().parents[2]
CORE, TESTING = Path(_core.__file__), Path(_testing.__file__)


def asked(tree: Path, question: str, *, cmake_args: str = "") -> list[str]:
    """The answer of setup.py's own commands, in JSON."""
    code = f"import setuptools\nimport distutils.core, json, subprocess\n{question}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=os.environ | {"CMAKE_ARGS": cmake_args},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of a developer, with both modules built in place."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, folder)
    for name in ("hdpcomm", "tests"):
        shutil.copytree(TOP / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert (folder / "hdpcomm/testing" / TESTING.name).exists()
    return folder


def test_files(tree: Path) -> None:
    files = asked(
        tree,
        "dist = distutils.core.run_setup('setup.py', ['build_py', '--build-lib', 'lib'], stop_after='commandline')\n"
        "command = dist.get_command_obj('build_py')\n"
        "command.ensure_finalized()\n"
        "modules = [each.name for each in dist.ext_modules]\n"
        "print(json.dumps([*modules, *command.get_outputs(include_bytecode=False)]))",
    )
    assert files[0] == "hdpcomm._core"
    assert {"lib/hdpcomm/__init__.py", "lib/hdpcomm/py.typed", "lib/hdpcomm/_core/transport.pyi"} <= set(files)
    assert all(name.startswith("lib/hdpcomm/") for name in files[1:])
    wrong = re.compile(r"\b_native\.(pyi|.*so)|/tests?/|fake|\.cpp|\.so$|conftest|/test_")
    assert [name for name in files if wrong.search(name)] == []


@pytest.mark.parametrize(("editable", "expected"), [(False, "OFF"), (True, "ON")])
def test_only_a_tree_for_development_gets_the_module_of_the_tests(tree: Path, editable: bool, expected: str) -> None:
    """Also where CMAKE_ARGS, which a developer's make sets, ask for it."""
    arguments = asked(
        tree,
        "dist = distutils.core.run_setup('setup.py', ['build_ext', '--build-lib', 'lib'], stop_after='commandline')\n"
        "command = dist.get_command_obj('build_ext')\n"
        f"command.editable_mode = {editable}\n"
        "command.ensure_finalized()\n"
        "calls = []\n"
        "subprocess.call = calls.append\n"
        "command.run()\n"
        "print(json.dumps(calls[0]))",
        cmake_args="-DHDPCOMM_TESTING=ON",
    )
    assert [each for each in arguments if "HDPCOMM_TESTING" in each][-1] == f"-DHDPCOMM_TESTING={expected}"
    # Beside the package's sources, where both modules are imported from; setuptools would copy _core only.
    (output,) = (each.partition("=")[2] for each in arguments if "CMAKE_LIBRARY_OUTPUT_DIRECTORY" in each)
    assert output == str(tree / "hdpcomm" if editable else tree / "lib/hdpcomm")


def test_the_source_distribution_has_all_that_building_takes(tmp_path: Path) -> None:
    """.ci/packages builds and installs it, which takes minutes."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    names = [
        name for name in tracked.stdout.split("\0") if name and not name.startswith(("benchmarks/", "tests/", "docs/"))
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (TOP / name).exists():  # else deleted, and not committed yet
            shutil.copy(TOP / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    needed = {name for name in names if name.startswith(("csrc/", "hdpcomm/"))}
    needed |= {
        "tools/hdpcomm_build.py",
        "CMakeLists.txt",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        ".ci/keep-ptxas-report",
    }
    assert needed - packed == {"hdpcomm/testing/_native.pyi"}
    assert [name for name in packed if name.startswith(("tests/", "benchmarks/"))] == []


def test_the_core_has_no_fake() -> None:
    names = [b"FakeNccl", b"checkOperations", b"the fake NCCL", b"TestDevice", b"7hdpcomm7testing"]
    content = CORE.read_bytes()
    assert [name for name in names if name in content] == []
    content = TESTING.read_bytes()
    assert [name for name in names if name not in content] == []


def test_no_variable_of_the_core_is_there_twice() -> None:
    """Two tables of simulated memory, say, would know each other's blocks no more."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not here")

    def variables(module: Path) -> set[str]:
        done = subprocess.run(
            ["nm", "--defined-only", str(module)], capture_output=True, text=True, timeout=60, check=True
        )
        lines = (line.split() for line in done.stdout.splitlines())
        # Data that may be written, but for tables of virtual functions and of types, and pybind11's own.
        return {
            name
            for _, kind, name in lines
            if kind in "bBdDuV" and "7hdpcomm" in name and not name.startswith("_ZT") and "8pybind11" not in name
        }

    core, testing = variables(CORE), variables(TESTING)
    assert any("openWorlds" in name for name in core)
    assert any("current_fake" in name for name in testing)
    assert core & testing == set()


@pytest.mark.parametrize(
    ("given", "told"),
    [("", "there is no c++, g++ or clang++ here"), ("/no/g++ -O2", "CXX is /no/g++, which is not there")],
)
def test_a_missing_compiler_is_told_in_a_line(given: str, told: str, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path), "CXX": given}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"hdpcomm: error: {told}" in done.stderr
    assert "install g++ 11 or newer" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
