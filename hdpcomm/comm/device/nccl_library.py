"""Where NCCL is: the library that ``HDPCOMM_NCCL`` names, a wheel's, torch's own, or the system's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hdpcomm import _core
from hdpcomm.errors import DeviceError

__all__ = ["describe", "library_candidates", "load"]


def library_candidates() -> list[str]:
    """Libraries to open, in order: paths of files that exist, then the name that the system's loader knows."""
    named = _core.settings().nccl
    if named:
        return [named]
    found = []
    for package, folder in (("nvidia", "nccl/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            path = Path(place) / folder / "libnccl.so.2"
            if path.exists():
                found.append(str(path))
    return [*found, "libnccl.so.2"]


def load() -> _core.transport.NcclLibrary:
    """Opens NCCL and checks its functions and its version.

    Raises: DeviceError, saying what was tried, what is missing, or that it is too old.
    """
    return _core.transport.load_nccl(library_candidates())


def describe() -> tuple[bool, str]:
    """Whether NCCL can be loaded, and its version and place or what is wrong, in one line."""
    try:
        library = load()
    except DeviceError as error:
        return False, " ".join(str(error).split())
    return True, f"{_core.transport.nccl_version_text(library.version)} at {library.path}"
