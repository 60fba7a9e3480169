"""Files that are there whole or not at all, and reading what somebody else may have put into a folder."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from hdpcomm.errors import Error, InvalidUsage

__all__ = ["NOT_WRITABLE", "NO_ROOM", "file_error", "open_regular", "write_whole"]

#: Numbers of system errors that tell what a file lies on, not what is wrong with it.
NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
NOT_WRITABLE = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))


def file_error(error: OSError, what: str = "a file") -> Error:
    """The error of the system as one of ours, with the file's name, or ``what``, and what to do: InvalidUsage unless
    there is no room left."""
    told = f"{error.filename or what}: {error.strerror or error}"
    if error.errno in NO_ROOM:
        return Error(f"{told}; make room there or give another place")
    return InvalidUsage(f"{told}; give a place that this user may use" if error.errno in NOT_WRITABLE else told)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, without waiting. Raises: OSError, also for a named pipe, a device or a socket, which
    could wait for ever or never end (a link to one of these is followed and refused, too)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a folder, pipe, socket or device where a file was expected", str(path))
    return os.fdopen(descriptor, "rb")


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file so that a reader sees either the old one or the complete new one. Raises: OSError that names it."""
    try:
        _write_whole(path, parts)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def _write_whole(path: Path, parts: tuple[bytes | memoryview, ...]) -> None:
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
