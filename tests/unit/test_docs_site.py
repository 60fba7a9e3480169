"""The documentation site: it builds without a warning, fetches nothing when viewed, and its examples run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from hdpcomm.testing import spawn

TOP = Path(__file__).resolve().parents[2]
DOCS = TOP / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a link or an anchor that leads nowhere, a page that the navigation lacks, a name without an entry."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install hdpcomm[docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=TOP,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_nothing_is_fetched_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert re.findall(r'(?:src|srcset)="(?:https?:)?//[^"]*"', text) == [], page
        assert re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//[^"]*"', text) == [], page


def test_every_public_name_has_an_entry(site: Path) -> None:
    sys.path.insert(0, str(TOP / "tools"))
    try:
        rooms = importlib.import_module("docs_pages").ROOMS
    finally:
        sys.path.remove(str(TOP / "tools"))
    package = importlib.import_module("hdpcomm")
    lazily = {name for name in package.__all__ if importlib.util.find_spec(f"hdpcomm.{name}")}
    assert lazily <= set(rooms)
    for room in rooms:
        page = (site / f"reference/{room}.html").read_text()
        for name in importlib.import_module(f"hdpcomm.{room}").__all__:
            assert f'id="{name.lower()}"' in page, f"{room}.{name}"


def test_every_command_is_there(site: Path) -> None:
    page = (site / "reference/commands.html").read_text()
    for command in ("hdpcomm train", "hdpcomm perf", "hdpcomm plan", "hdpcomm simulate", "hdpcomm doctor"):
        assert f">{command}<" in page
    for option in ("hdpcomm-train--out", "hdpcomm-plan--lengths", "hdpcomm-data-build--tokenizer"):
        assert page.count(f'id="{option}"') == 1


EXAMPLES = [
    (path.relative_to(DOCS).as_posix(), index, block)
    for path in (
        DOCS / "index.md",
        DOCS / "api.md",
        DOCS / "how-to/own-loop.md",
        DOCS / "how-to/hugging-face.md",
        DOCS / "how-to/policies-and-preferences.md",
    )
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


def run_as_printed(code: str) -> None:
    exec(compile(code, "docs", "exec"), {})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{each[0]}-{each[1]}")
def test_examples_run(example: tuple[str, int, str]) -> None:
    spawn(run_as_printed, 2, example[2])


# What planning prints follows from the command alone: what docs show of it is compared.
SHOWN = r"^\$ hdpcomm ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$|```)[^\n]*\n)+)"
TRANSCRIPTS = [
    (page.relative_to(DOCS).as_posix(), command.replace("\\\n", " "), shown)
    for page in sorted(DOCS.rglob("*.md"))
    for command, shown in re.findall(SHOWN, page.read_text(), re.M)
    if command.startswith("plan ") and "..." not in command and "costs.json" not in command
]


@pytest.mark.parametrize(("page", "command", "shown"), TRANSCRIPTS, ids=[each[0] for each in TRANSCRIPTS])
def test_transcripts_are_what_commands_print(
    page: str, command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(shlex.split(command))
    told = capsys.readouterr()
    printed = " ".join((told.out + told.err).split())
    for part in shown.split("...\n"):  # what is left out
        assert " ".join(part.split()) in printed, page


@pytest.mark.parametrize("name", sorted(path.name for path in (DOCS / "pictures").iterdir()))
def test_pictures_are_used(name: str) -> None:
    assert any(f"pictures/{name}" in page.read_text() for page in DOCS.rglob("*.md"))


def test_every_extra_is_on_the_install_page() -> None:
    table = (TOP / "docs/install.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    project = (TOP / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", project, re.M)) - {"test", "docs", "lint"}
    assert {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])} == extras


# Pages of a task or a guide: as long as somebody reads to the end.
MOST_WORDS = {
    "planner.md": 1200,
    "runs.md": 900,
    "parallel.md": 900,
    "pipelines.md": 900,
    "how-to/choosing.md": 1200,
    "how-to/policies-and-preferences.md": 1000,
}


@pytest.mark.parametrize("page", MOST_WORDS)
def test_pages_stay_short(page: str) -> None:
    assert len((DOCS / page).read_text().split()) <= MOST_WORDS[page]


@pytest.mark.parametrize("page", sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")))
def test_lines_fit(page: str) -> None:
    """Prose into 120 columns, code into its box on the site; not tables, pictures and drawings of architecture.md."""
    if page == "architecture.md":
        pytest.skip("its drawings are wider")
    code = False
    for number, line in enumerate((DOCS / page).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not line.lstrip().startswith(("|", "![")):
            assert len(line) <= (96 if code else 120), f"line {number}: {line}"
