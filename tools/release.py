"""A release that checks itself: `make release`, or `python tools/release.py [--no-packages] [--no-tag]`.

In a clean clone with the version to be released in hdpcomm/__init__.py. Checks the tree, the version, CHANGELOG.md,
CITATION.cff and tools/public_names.json; builds the source distribution and the wheels and trains with each in a fresh
environment (.ci/packages); builds the site of this version beside those of earlier ones, as a commit on the branch
`site` (mike), and checks them all; and makes the tag. Nothing leaves this machine: the last lines say what to push.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

TOP = Path(__file__).resolve().parents[1]
MOST_NEWS = 30


class Refused(Exception):
    """A check failed; the text says what to do."""


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=TOP, check=True, capture_output=True, text=True).stdout.strip()


def version_of(text: str) -> str:
    """The version in the text of hdpcomm/__init__.py."""
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    if found is None:
        raise Refused("hdpcomm/__init__.py has no __version__ of three numbers")
    return found[1]


def parts_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def tagged() -> list[str]:
    """The released versions, in their order; other tags are left alone."""
    tags = re.findall(r"^v(\d+\.\d+\.\d+)$", git("tag", "--list", "v*"), re.MULTILINE)
    return sorted(tags, key=parts_of)


def check_tree(version: str) -> None:
    if left := git("status", "--porcelain"):
        raise Refused(f"the tree has changes that no commit has; commit or remove them:\n{left}")
    known = tagged()
    if version in known:
        raise Refused(f"v{version} is tagged already; give hdpcomm/__init__.py the next version")
    if later := [each for each in known if parts_of(each) > parts_of(version)]:
        raise Refused(f"{later[-1]} is later than {version} and tagged; a release has to be the newest one")


def check_changelog(version: str, text: str) -> None:
    """The first section is that of the version, dated, with its news in a few lines."""
    title = re.search(r"^## (.*)$", text, re.MULTILINE)
    wanted = f"{version} ({datetime.date.today().isoformat()})"
    if title is None or title[1] != wanted:
        raise Refused(f"CHANGELOG.md begins with {title and title[1]!r}; its first section has to be '## {wanted}'")
    news = re.search(r"^### What is new\n(.*?)^##", text[title.end() :], re.MULTILINE | re.DOTALL)
    lines = [] if news is None else [line for line in news[1].splitlines() if line.strip()]
    if not 0 < len(lines) <= MOST_NEWS:
        raise Refused(
            f"'### What is new' of {version} in CHANGELOG.md has {len(lines)} lines; say in 1 to {MOST_NEWS} what "
            "changes for users, before all other changes"
        )


def check_citation(version: str, text: str) -> None:
    for name, value in (("version", version), ("date-released", datetime.date.today().isoformat())):
        if not re.search(rf'^{name}: "?{re.escape(value)}"?$', text, re.MULTILINE):
            raise Refused(f"CITATION.cff has another {name} than {value}")


def check_names(version: str) -> None:
    sys.path.insert(0, str(TOP / "tools"))
    public_names = importlib.import_module("public_names")
    written = json.loads(public_names.FILE.read_text())
    if written != public_names.present():
        raise Refused(
            f"tools/public_names.json has the names of {written['version']}; write those of {version} by "
            "python tools/public_names.py --write, and commit them"
        )


def build_packages(_version: str) -> None:
    subprocess.run([str(TOP / ".ci/packages"), "build/wheels"], cwd=TOP, check=True)


def build_site(version: str) -> None:
    """As a commit on the branch `site`, beside the sites of earlier versions; `latest` leads to this one."""
    bin = Path(sys.executable).parent
    own = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(TOP), "PATH": f"{bin}:{os.environ['PATH']}"}
    for words in (["deploy", "--update-aliases", version, "latest"], ["set-default", "latest"]):
        subprocess.run([str(bin / "mike"), *words, "--branch", "site"], cwd=TOP, check=True, env=own)
    with tempfile.TemporaryDirectory() as folder:
        git("archive", "--output", f"{folder}/site.tar", "site")
        shutil.unpack_archive(f"{folder}/site.tar", f"{folder}/site")
        check_site(version, Path(folder, "site"), tagged())


def check_site(version: str, site: Path, known: list[str]) -> None:
    """`latest` and the front page lead to this version, known ones are there, pages offer them and have no dead links.

    mike does what it is told: also on a branch that nobody fetched, and with pages whose links lead nowhere.
    """
    listed = {each["version"]: each["aliases"] for each in json.loads((site / "versions.json").read_text())}
    if missing := [each for each in known if each not in listed]:
        raise Refused(f"the branch site lacks {', '.join(missing)}: fetch it, or run mike deploy at each one's tag")
    if [each for each in listed if "latest" in listed[each]] != [version]:
        raise Refused(f"'latest' is not the alias of {version} alone: {listed}")
    if (site / "latest").resolve() != (site / version).resolve() or "latest/" not in (site / "index.html").read_text():
        raise Refused(f"the front page of the site does not lead to {version} by 'latest'")
    for each in listed:
        if not (site / each / "index.html").exists():
            raise Refused(f"the site of {each} has no index.html")
        for page in sorted((site / each).rglob("*.html")):
            if fault := fault_of(page):
                raise Refused(f"{page.relative_to(site)} {fault}")


def fault_of(page: Path) -> str | None:
    """A fault of a page that has other versions beside it."""
    text = page.read_text()
    if '"version": {"provider": "mike"}' not in text:
        return "offers no other versions: mkdocs.yml names mike in extra.version"
    absolute = page.name == "404.html"  # shown at addresses of any depth
    links = [] if absolute else re.findall(r'\s(?:href|src)="?([^"\s>#?]+)', text)
    for link in links:
        file = page.parent / unquote(link)
        if ":" not in link and not (file / "index.html" if file.is_dir() else file).exists():
            return f"has a link to {link}, where nothing is"
    return None


def make_tag(version: str) -> None:
    git("tag", "--annotate", f"v{version}", "--message", f"hdpcomm {version}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-packages", action="store_true", help="build no distributions (they take some minutes)")
    parser.add_argument("--no-tag", action="store_true", help="make no tag, nor the site: checks and packages only")
    given = parser.parse_args()
    steps: list[tuple[str, Callable[[str], None]]] = [
        ("tree and tags", check_tree),
        ("changelog", lambda version: check_changelog(version, (TOP / "CHANGELOG.md").read_text())),
        ("citation", lambda version: check_citation(version, (TOP / "CITATION.cff").read_text())),
        ("public names", check_names),
    ]
    if not given.no_packages:
        steps.append(("packages", build_packages))
    if not given.no_tag:
        steps += [("site", build_site), ("tag", make_tag)]
    try:
        version = version_of((TOP / "hdpcomm/__init__.py").read_text())
        for name, step in steps:
            started = time.monotonic()
            step(version)
            print(f"{version}: {name}: done in {time.monotonic() - started:.0f} s", flush=True)
    except Refused as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"no release: {' '.join(error.cmd)} failed: {error.stderr or 'see above'}", file=sys.stderr)
        return 1
    if not given.no_tag:
        upload = "" if given.no_packages else ", and upload build/wheels/dist/*"
        print(f"now: git push origin v{version} site{upload}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
