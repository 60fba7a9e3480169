"""A clone's own folder in place of the installed package, as in its root after ``pip install .``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hdpcomm

HERE = Path(hdpcomm.__file__).parent
IMPORT = "import sys; sys.path[:0] = sys.argv[1:]; import hdpcomm; from hdpcomm import _core; print(hdpcomm.__file__)"


def folder(top: Path, core: bool, version: str = hdpcomm.__version__) -> Path:
    """A package of the files that an import of the core needs."""
    package = top / "hdpcomm"
    (package / "_core").mkdir(parents=True)
    for name in ("__init__.py", "core_path.py", "errors.py"):
        (package / name).write_text((HERE / name).read_text().replace(f'"{hdpcomm.__version__}"', f'"{version}"'))
    if core:
        for path in HERE.glob("_core.*"):
            shutil.copy(path, package)
    return top


def imported(*places: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-c", IMPORT, *map(str, places)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_installed_core_serves_a_clone(tmp_path: Path) -> None:
    clone, installed = folder(tmp_path / "clone", core=False), folder(tmp_path / "installed", core=True)
    result = imported(clone, installed)
    assert result.stdout.strip() == str(clone / "hdpcomm" / "__init__.py"), result.stderr


@pytest.mark.parametrize(
    ("version", "told"),
    [("0.0.9", "the installed one is 0.0.9, this one"), (None, "none is installed")],
)
def test_a_clone_without_a_core_says_so(version: str | None, told: str, tmp_path: Path) -> None:
    places = [folder(tmp_path / "clone", core=False)]
    if version is not None:
        places.append(folder(tmp_path / "installed", core=True, version=version))
    result = imported(*places)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: hdpcomm is imported from {places[0] / 'hdpcomm'}, whose core is not compiled")
    assert told in last
    assert "pip install . there again" in last
