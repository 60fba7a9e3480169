"""Files that are there whole or not at all, and reading what somebody else may have put into a folder."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular", "write_whole"]


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, without waiting. Raises: OSError, also for a named pipe, a device or a socket, which
    could wait for ever or never end (a link to one of these is followed and refused, too)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a folder, pipe, socket or device where a file was expected", str(path))
    return os.fdopen(descriptor, "rb")


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file so that a reader sees either the old one or the complete new one. Raises: OSError."""
    if path.exists() and not path.is_file():  # a pipe or /dev/stdout cannot be replaced
        with path.open("wb") as file:
            file.writelines(parts)
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
