"""tools/release.py refuses what is not ready, and public names that went are in CHANGELOG.md."""

from __future__ import annotations

import datetime
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

TOP = Path(__file__).resolve().parents[2]
TODAY = datetime.date.today().isoformat()


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(TOP / "tools"))
    try:
        yield {name: importlib.import_module(name) for name in ("release", "public_names")}
    finally:
        sys.path.remove(str(TOP / "tools"))


@pytest.fixture(scope="module")
def names(tools: dict[str, ModuleType]) -> dict[str, Any]:
    return tools["public_names"].present()  # type: ignore[no-any-return]


def test_what_went_since_the_last_release_is_in_the_changelog(
    tools: dict[str, ModuleType], names: dict[str, Any]
) -> None:
    before = json.loads(tools["public_names"].FILE.read_text())
    text = (TOP / "CHANGELOG.md").read_text()
    news = text.partition(f"\n## {before['version']} ")[0]
    went = [re.findall(r"-*[\w-]+", name)[-1] for name in tools["public_names"].gone(before, names)]
    assert not [name for name in went if name not in news], "say in CHANGELOG.md what takes the place of each"


def test_names_are_those_that_a_program_sees(names: dict[str, Any]) -> None:
    assert "capacity" in names["names"]["hdpcomm.ClusterSpec"]
    assert "async_op" in names["names"]["hdpcomm.Communicator.all_reduce"]
    assert "--compare" in names["commands"]["plan"]


def test_gone_names_parameters_and_options_are_found(tools: dict[str, ModuleType]) -> None:
    before = {
        "names": {"a.f": ["x", "y"], "a.g": []},
        "commands": {"plan": ["--ranks", "--old"], "fly": ["--high"]},
    }
    now = {"names": {"a.f": ["x", "z"], "a.h": []}, "commands": {"plan": ["--ranks", "--new"]}}
    assert tools["public_names"].gone(before, now) == ["a.f(y=)", "a.g", "plan --old", "fly"]
    assert tools["public_names"].gone(before, before) == []


GOOD = f"# Changes\n\n## 1.2.3 ({TODAY})\n\n### What is new\n\n- This.\n\n### All changes\n\n- That.\n"


def test_a_changelog_with_a_dated_section_and_news_passes(tools: dict[str, ModuleType]) -> None:
    tools["release"].check_changelog("1.2.3", GOOD)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("1.2.3", "Unreleased"), "first section has to be '## 1.2.3"),
        (GOOD.replace(TODAY, "2020-01-01"), "first section has to be"),
        (GOOD.replace("### What is new", "### News"), "has 0 lines"),
        (GOOD.replace("- This.\n", "- This.\n" * 31), "has 31 lines"),
        ("# Changes\n", "begins with None"),
    ],
)
def test_a_changelog_that_is_not_ready_is_refused(tools: dict[str, ModuleType], text: str, words: str) -> None:
    with pytest.raises(tools["release"].Refused, match=re.escape(words)):
        tools["release"].check_changelog("1.2.3", text)


def test_a_citation_of_another_version_is_refused(tools: dict[str, ModuleType]) -> None:
    text = (TOP / "CITATION.cff").read_text()
    facts = yaml.safe_load(text)
    tools["release"].check_citation(facts["version"], text.replace(str(facts["date-released"]), TODAY))
    with pytest.raises(tools["release"].Refused, match="another version"):
        tools["release"].check_citation("99.0.0", text)


def test_a_tree_with_changes_or_a_tag_is_refused(
    tools: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tools["release"]
    monkeypatch.setattr(release, "TOP", tmp_path)
    for words in (["init", "-q"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m", "--allow-empty"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    release.check_tree("1.2.3")
    for tag in ("v1.10.0", "v1.9.0", "v-old"):
        subprocess.run(["git", "tag", tag], cwd=tmp_path, check=True)
    with pytest.raises(release.Refused, match=r"1\.10\.0 is later than 1\.2\.3"):
        release.check_tree("1.2.3")
    with pytest.raises(release.Refused, match=r"v1\.10\.0 is tagged already"):
        release.check_tree("1.10.0")
    (tmp_path / "file").touch()
    with pytest.raises(release.Refused, match=r"\?\? file"):
        release.check_tree("1.11.0")


PAGE = '<script>{"version": {"provider": "mike"}}</script> <a href="LINK">a page</a>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site with two versions, as mike lays them out."""
    for version in ("1.2.3", "1.10.0"):
        (tmp_path / version / "how-to").mkdir(parents=True)
        (tmp_path / version / "index.html").write_text(PAGE.replace("LINK", "how-to/a%20b.html?q#part"))
        (tmp_path / version / "how-to/a b.html").write_text(PAGE.replace("LINK", ".."))
        (tmp_path / version / "404.html").write_text(PAGE.replace("LINK", "/how-to/none.html"))
    listed = [{"version": "1.10.0", "aliases": ["latest"]}, {"version": "1.2.3", "aliases": []}]
    (tmp_path / "versions.json").write_text(json.dumps(listed))
    (tmp_path / "index.html").write_text('<a href="latest/">latest/</a>')
    (tmp_path / "latest").symlink_to("1.10.0")
    return tmp_path


def test_a_site_of_two_versions_passes(tools: dict[str, ModuleType], site: Path) -> None:
    tools["release"].check_site("1.10.0", site, ["1.2.3"])
    with pytest.raises(tools["release"].Refused, match=r"lacks 1\.0\.0, 1\.1\.0: fetch"):
        tools["release"].check_site("1.10.0", site, ["1.0.0", "1.1.0", "1.2.3"])
    with pytest.raises(tools["release"].Refused, match=r"'latest' is not the alias of 1\.2\.3 alone"):
        tools["release"].check_site("1.2.3", site, [])


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("index.html", "1.2.3/", "front page of the site does not lead to 1.10.0"),
        ("1.2.3/index.html", None, "the site of 1.2.3 has no index.html"),
        ("1.2.3/how-to/a b.html", "<p>words", "1.2.3/how-to/a b.html offers no other versions"),
        ("1.2.3/how-to/a b.html", PAGE.replace("LINK", "a.html"), "a b.html has a link to a.html, where nothing is"),
        ("1.10.0/index.html", PAGE.replace("LINK", "how-to/"), "1.10.0/index.html has a link to how-to/"),
    ],
)
def test_a_site_that_leads_nowhere_is_refused(
    tools: dict[str, ModuleType], site: Path, file: str, text: str | None, words: str
) -> None:
    (site / file).unlink()
    if text is not None:
        (site / file).write_text(text)
    with pytest.raises(tools["release"].Refused, match=re.escape(words)):
        tools["release"].check_site("1.10.0", site, [])


def test_latest_has_to_lead_to_the_version(tools: dict[str, ModuleType], site: Path) -> None:
    (site / "latest").unlink()
    (site / "latest").symlink_to("1.2.3")
    with pytest.raises(tools["release"].Refused, match=r"does not lead to 1\.10\.0"):
        tools["release"].check_site("1.10.0", site, [])


def test_version_is_read_from_the_package(tools: dict[str, ModuleType]) -> None:
    assert tools["release"].version_of((TOP / "hdpcomm/__init__.py").read_text()).count(".") == 2
    with pytest.raises(tools["release"].Refused, match="three numbers"):
        tools["release"].version_of('__version__ = "1.2rc1"\n')


def test_forms_for_issues_and_the_citation_can_be_read() -> None:
    for form in (TOP / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        facts = yaml.safe_load(form.read_text())
        if form.name != "config.yml":
            assert facts["name"]
            assert all(part["attributes"]["label"] for part in facts["body"])
    assert {"title", "authors", "version", "date-released", "license"} <= yaml.safe_load(
        (TOP / "CITATION.cff").read_text()
    ).keys()
