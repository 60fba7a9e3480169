"""docs/clients.md names each script of tests/clients, and the versions that `make clients` installs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
FOLDER = TOP / "tests/clients"


def rows() -> dict[str, tuple[str, str]]:
    """(version, what was shown) of each script in the table of docs/clients.md."""
    text = (TOP / "docs/clients.md").read_text()
    found = re.findall(r"^\| [^|]+ \| ([^|]+) \| `(\w+)\.py` \| ([^|]+) \|$", text, re.MULTILINE)
    assert len({script for _, script, _ in found}) == len(found)
    return {script: (version, shown) for version, script, shown in found}


def test_each_script_has_a_row_and_an_environment() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"common", "run"}
    clients = runpy.run_path(str(FOLDER / "run.py"))["CLIENTS"]
    assert set(rows()) == scripts == set(clients)
    assert len(scripts) >= 11


def test_versions_are_those_that_are_installed() -> None:
    clients = runpy.run_path(str(FOLDER / "run.py"))["CLIENTS"]
    pinned = (TOP / "constraints.txt").read_text().split()
    for script, (version, _) in rows().items():
        packages = (re.sub(" @ git.*@", "==", package) for package in clients[script])  # of a branch
        installed = {*pinned, *(re.split(";| --no-deps", package)[0] for package in packages)}
        for each in version.split(", "):
            assert "==".join(each.split()) in installed, f"{script}: {each} is not what make clients installs"


def test_what_is_shown_is_what_the_script_compares_with() -> None:
    for script, (_, shown) in rows().items():
        code = (FOLDER / f"{script}.py").read_text()
        against = re.search(r'against="([^"]+)"', code)
        if against is None:  # it compares and tells by itself
            assert 'print(f"ok: ' in code
        elif "one process" in shown and "gloo" not in shown:
            assert against[1] == "one process"
        elif "gloo" in shown:
            assert against[1] == "gloo"
