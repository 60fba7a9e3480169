"""Files that are there whole or not at all, and reading what somebody else may have put into a folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from hdpcomm.errors import Error, InvalidUsage

__all__ = [
    "NOT_WRITABLE",
    "NO_ROOM",
    "TEXT_BYTES",
    "check_own",
    "file_error",
    "fingerprint",
    "json_checksum",
    "open_own",
    "open_regular",
    "read_text",
    "sync_folder",
    "user_folder",
    "write_own",
    "write_synced",
    "write_whole",
]

#: The most that is read of a file which describes something: its users write far less.
TEXT_BYTES = 1 << 26

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


def open_regular(path: Path, *, most: int | None = None) -> BinaryIO:
    """Opens a file for reading, without waiting. Raises: OSError, also for a named pipe, a device or a socket, which
    could wait for ever or never end (a link to one of these is followed and refused, too), and for a file of more than
    ``most`` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status, wrong = os.fstat(descriptor), ""
    if not stat.S_ISREG(status.st_mode):
        wrong = _NO_FILE
    elif most is not None and status.st_size > most:
        wrong = f"has {status.st_size:,} bytes, and at most {most:,} were expected"
    if wrong:
        os.close(descriptor)
        raise OSError(errno.EINVAL, wrong, str(path))
    return os.fdopen(descriptor, "rb")


_NO_FILE = "a folder, pipe, socket or device where a file was expected"


def read_text(path: Path, *, most: int = TEXT_BYTES, errors: str = "strict") -> str:
    """The text of a file that :func:`open_regular` takes. Raises: OSError, UnicodeDecodeError."""
    with open_regular(path, most=most) as file:
        return file.read(most).decode(errors=errors)


def json_checksum(facts: Mapping[str, Any]) -> str:
    """SHA-256 of what a JSON file says, however it is spaced."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def fingerprint(path: Path, known: Any = None) -> list[int]:
    """Bytes of a file, and their CRC-32; 0 in its place, and nothing read, where ``known``, what it was before, has
    another size. Raises: OSError, as :func:`open_regular`."""
    found = checksum = 0
    with open_regular(path) as file:
        there = os.fstat(file.fileno()).st_size
        if known is not None and not (isinstance(known, list) and known[:1] == [there]):
            return [there, 0]
        while chunk := file.read(1 << 20):
            found += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [found, checksum]


def open_own(path: Path) -> FileIO:
    """Opens a file that a run keeps in its folder, for appending and reading, and makes it if need be; without a
    buffer and without waiting. Raises: OSError, also for what would be written elsewhere: links, files with a second
    name, pipes, devices."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    check_own(path)
    descriptor = os.open(path, flags, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NOT_OWN, str(path))
    file: FileIO = os.fdopen(descriptor, "a+b", buffering=0)
    return file


_NOT_OWN = "a link, pipe or device where a file of the run belongs; remove it"


def check_own(path: Path) -> None:
    """Whether a file that a run keeps may be written: OSError where it would be elsewhere, see :func:`open_own`."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise OSError(errno.EINVAL, _NOT_OWN, str(path))


def user_folder(variable: str, *below_home: str) -> Path:
    """hdpcomm's folder in the one that ``variable`` (as ``XDG_CACHE_HOME``) names, or below the user's home; where no
    home can be written, as in containers, or it is another user's, as under sudo, this user's in the temporary folder
    of the host. Local.

    Raises: InvalidUsage if that one is another user's.
    """
    if Path(named := os.environ.get(variable, "")).is_absolute():
        return Path(named, "hdpcomm")
    with contextlib.suppress(RuntimeError, OSError):  # no HOME and no such user; a home that is closed to this user
        home = Path.home()
        folder = home.joinpath(*below_home, "hdpcomm")
        nearest = next(each for each in (folder, *folder.parents) if each == home or each.exists())
        if nearest.stat().st_uid == os.geteuid() and (nearest == folder or os.access(nearest, os.W_OK)):
            return folder
    folder = Path(tempfile.gettempdir(), f"hdpcomm-{os.geteuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.geteuid()):
        raise InvalidUsage(f"{folder} is another user's, and there is no home to write to; set {variable}")
    return folder


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file so that a reader sees either the old one or the complete new one. A pipe or device is written into.
    Raises: OSError that names it."""
    try:
        _write_whole(path, parts)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_synced(path: Path, text: str) -> None:
    """Writes a text that is on the disk then. Raises: OSError."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Until the names in a folder are on the disk. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_own(path: Path, text: str) -> None:
    """As :func:`write_whole`, of a file that a run keeps in its folder. Raises: Error, InvalidUsage: :func:`file_error`
    of the system's, and what :func:`open_own` refuses."""
    try:
        check_own(path)
        write_whole(path, text.encode())
    except OSError as error:
        raise file_error(error, str(path)) from error


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
