"""docs/architecture.md tells the truth: the walks name functions that exist, in the files that the page gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
PAGE = (TOP / "docs/architecture.md").read_text()
WALKS = PAGE[PAGE.index("## Walk 1") : PAGE.index("## Where the design was changed")]
FILE = re.compile(r"(?:csrc|hdpcomm)/[\w/]+(?:\.\w+)?/?")


def hops() -> list[tuple[str, str]]:
    """(name, file) of each hop: of the drawing, of the text below it, and of the table."""
    found = []
    table = re.findall(r"^\| [^|]+ \| `([\w.:]+)` \| (\S+) \|$", WALKS, re.MULTILINE)
    text = re.findall(r"`([\w.:]+)`\s+\(([\w/.]+)\)", WALKS)
    for name, file in (*table, *text):
        found.append((name, file))
    drawing = WALKS.split("```")[1]
    names: list[str] = []
    for line in drawing.splitlines():
        names += re.findall(r"\b(?:[A-Z]\w+(?:\.|::)\w+|makeSchedule)\b", line)
        if file_match := FILE.search(line):
            found += [(name, file_match[0]) for name in names]
            names = []
    return found


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= 1050


def test_the_walks_have_their_hops() -> None:
    found = hops()
    assert len(found) >= 17
    assert {"Communicator.all_reduce", "Communicator::collective", "World::run", "CollectiveWork::advance"} <= {
        name for name, _ in found
    }


@pytest.mark.parametrize(("name", "file"), hops(), ids=lambda value: value)
def test_each_hop_is_where_the_page_says(name: str, file: str) -> None:
    path = TOP / file
    assert path.exists(), f"docs/architecture.md names {file}, which is not there"
    paths = [path] if path.is_file() else sorted(path.iterdir())
    source = "\n".join(each.read_text() for each in paths if each.is_file())
    owner, _, member = name.replace("::", ".").rpartition(".")
    if file.startswith("csrc"):
        pattern = rf"\b{owner}::{member}\(" if owner else rf"\b{member}\("
        assert re.search(pattern, source), f"{file} defines no {name}"
        return
    if owner:
        assert re.search(rf"^class {owner}\b", source, re.MULTILINE), f"{file} has no class {owner}"
        assert re.search(rf"^    def {member}\(", source, re.MULTILINE), f"{file} has no {name}"
    else:
        assert re.search(rf"^(?:class|def) {member}\b", source, re.MULTILINE), f"{file} has no {name}"


@pytest.mark.parametrize("file", sorted(set(FILE.findall(PAGE))))
def test_each_file_exists(file: str) -> None:
    assert (TOP / file).exists(), f"docs/architecture.md names {file}, which is not there"


def test_every_room_is_described() -> None:
    for top in ("csrc", "hdpcomm"):
        rooms = [path.name for path in (TOP / top).iterdir() if path.is_dir() and not path.name.startswith(("_", "."))]
        missing = [room for room in rooms if not re.search(rf"`{room}/", PAGE)]
        assert not missing, f"docs/architecture.md says nothing of {top}/{missing}"
