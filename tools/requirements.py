"""Prints what pyproject.toml requires, one requirement a line, for ``pip install -r``.

usage: requirements.py [EXTRA ...]     the package with these extras
       requirements.py --build         its build

pip itself installs what a package requires only after it has built the package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

PROJECT: dict[str, Any] = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())


def of_extra(extra: str) -> list[str]:
    """The requirements of an extra; those of other extras of this package (``hdpcomm[data,plot]``) in their place."""
    project = PROJECT["project"]
    found = []
    for requirement in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
        found += [each for name in own[1].split(",") for each in of_extra(name.strip())] if own else [requirement]
    return found


def main(arguments: list[str]) -> None:
    if arguments == ["--build"]:
        required = PROJECT["build-system"]["requires"]
    else:
        required = PROJECT["project"]["dependencies"] + [each for extra in arguments for each in of_extra(extra)]
    print("\n".join(dict.fromkeys(required)))


if __name__ == "__main__":
    main(sys.argv[1:])
