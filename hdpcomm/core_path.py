"""Where the compiled core is when this package is a clone's own folder, which lies before the installed one."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES

__all__ = ["add_core"]


def add_core(package: list[str], version: str) -> None:
    """Adds the folder of an installed hdpcomm of this version to the package's path where this one has no core. Local.

    Args:
        package: ``hdpcomm.__path__``.

    Raises: ImportError: no such core is installed.
    """
    own = package[0]
    if _has_core(own):
        return
    folders = [os.path.join(folder or os.getcwd(), "hdpcomm") for folder in sys.path]
    others = [folder for folder in folders if folder != own and _has_core(folder)]
    for folder in others:
        if _version(folder) == version:
            package.append(folder)
            return
    found = f"the installed one is {_version(others[0])}, this one {version}" if others else "none is installed"
    raise ImportError(
        f"hdpcomm is imported from {own}, whose core is not compiled, and {found}: run pip install . there again, or "
        "make build, or start Python in another folder"
    )


def _has_core(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, f"_core{suffix}")) for suffix in EXTENSION_SUFFIXES)


def _version(folder: str) -> str:
    try:
        with open(os.path.join(folder, "__init__.py"), encoding="utf-8") as file:
            found = re.search(r'^__version__ = "(.*)"', file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "of no version"
