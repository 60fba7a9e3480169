"""Files behind URLs, in any file system of fsspec: listed once, read in ranges, and asked again where a read fails."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from hdpcomm.errors import Error, InvalidUsage, first_line

__all__ = ["RemoteFile", "first_bytes", "is_url", "local_path", "remote_files", "shown"]

T = TypeVar("T")
PATIENCE_S = 120.0
"""For so long a read that fails is tried again; one try may take a quarter of it."""
_BLOCK_BYTES = 8 << 20  # of one request
_TAIL_BYTES = 1 << 16  # of one for the end of a unit's last line
_AT_ONCE = 16
_URL = re.compile(r"(?!file://)[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_PASSWORD, _QUERY = re.compile(r"(?<=://)[^/\s@]+@"), re.compile(r"(https?://[^\s?]*\?)[^\s'\"]+")
_VERSIONS = re.compile(r"etag|modif|mtime|updated|created|checksum|md5|crc|digest|generation|version|sha|oid", re.I)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind a URL, with those methods of a path that readers of records need.

    Attributes:
        url: what the user named: this file, or a folder that it is in.
        place: its path in that file system.
        size: in bytes; -1: the server does not tell.
        version: what the file system tells of its content, as an ETag or a time; empty: nothing.
        ranged: whether parts of it can be read; else it is held in memory while it is read.
        stopped: ends waiting for it.
    """

    url: str
    place: str
    size: int
    version: str
    ranged: bool
    stopped: threading.Event | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return shown(_file_system(self.url)[0].unstrip_protocol(self.place))

    @property
    def name(self) -> str:
        """The last part of its path."""
        web = self.place.startswith(("http://", "https://"))
        return PurePosixPath(urlsplit(self.place).path if web else self.place).name

    @property
    def identity(self) -> str:
        """Changes with the content, and not with the signature of a URL where the file system tells a version."""
        return f"{self if self.version else self.place}\0{self.size}\0{self.version}"

    def open(self, stop: int | None = None, ahead: int = _BLOCK_BYTES) -> BinaryIO:
        """The content, seekable; ``ahead`` bytes are read at once, but not beyond byte ``stop``. Local.

        Raises, when it is read: InvalidUsage: it is not there any more, has changed, or may not be read. Error: the
        server gave no answer for :data:`PATIENCE_S`.
        """
        if not self.ranged:
            return io.BytesIO(self._fetch(None, None))
        raw = _Ranges(self, self.size if stop is None else min(stop, self.size))
        return cast("BinaryIO", io.BufferedReader(raw, ahead))

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        fs, what = _file_system(self.url)[0], "" if stop is None else f", bytes {start:,} to {stop:,}"

        def read() -> bytes:
            data = cast("bytes", _call(fs, "cat_file", self.place, start=start, end=stop))
            if start is not None and stop is not None and len(data) != stop - start:
                raise InvalidUsage(f"{self}{what}: {len(data):,} came; it changed since it was listed, start again")
            return data

        return _retried(read, f"{self}{what}", self.stopped)


class _Ranges(io.RawIOBase):
    def __init__(self, file: RemoteFile, stop: int) -> None:
        self._file, self._stop, self._at = file, stop, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        ahead, size = self._at < self._stop, min(len(buffer), _BLOCK_BYTES)
        end = min(self._at + size, self._stop) if ahead else min(self._at + min(size, _TAIL_BYTES), self._file.size)
        if end <= self._at:
            return 0
        data = self._file._fetch(self._at, end)
        buffer[: len(data)] = data
        self._at = end
        return len(data)


def is_url(path: object) -> bool:
    """Whether a path is a URL as fsspec takes it, also a chain of several (``filecache::s3://...``)."""
    return isinstance(path, str) and _URL.match(path) is not None


def local_path(path: str | Path) -> Path | None:
    """The path itself, or that of a ``file://`` URL; ``None`` for one in another file system."""
    return None if is_url(path) else Path(str(path).removeprefix("file://"))


def shown(text: object) -> str:
    """A URL, or a text with some, without passwords and without what stands behind ``?``, which may be a signature."""
    return _QUERY.sub(r"\1", _PASSWORD.sub("", str(text)))


def remote_files(url: str) -> tuple[list[RemoteFile], bool]:
    """(the file behind a URL, or those of a folder that are neither hidden nor empty, by name; whether it is a folder).
    Local.

    Raises: InvalidUsage: nothing is there, or it may not be read. Error: the server does not answer.
    """
    fs, place = _file_system(url)

    def look() -> tuple[dict[str, Any], bool]:
        fs.invalidate_cache()
        info = {} if url.endswith("/") else _call(fs, "info", place)
        if info.get("type") == "file":
            return {place: info}, False
        infos = {name: each for name, each in _call(fs, "find", place, detail=True).items() if each["type"] == "file"}
        if not infos:
            raise FileNotFoundError("no file has a name that begins like this")
        return infos, True

    infos, is_folder = _retried(look, shown(url))
    inside = {name: name.removeprefix(place).lstrip("/") for name in sorted(infos)}
    names = [name for name in inside if not re.search(r"(^|/)\.|^\?", inside[name])]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        files = list(pool.map(lambda name: _described(fs, url, name, infos[name]), names))
    return [file for file in files if file.size or not is_folder], is_folder


def first_bytes(files: Sequence[RemoteFile], count: int) -> list[bytes]:
    """The first bytes of each file. Local; raises as :meth:`RemoteFile.open`."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda file: file.open(count).read(count), files))


def _described(fs: Any, url: str, name: str, info: dict[str, Any]) -> RemoteFile:
    if info.get("size") is None:  # web pages that list files do not tell
        info = _retried(lambda: _call(fs, "info", name), shown(name))
    size = -1 if info.get("size") is None else int(info["size"])
    version = "\0".join(f"{key}={info[key]}" for key in sorted(info) if _VERSIONS.search(key) and info[key])
    ranged = size >= 0
    if size > 1 and name.startswith(("http://", "https://")):
        ranged = _retried(lambda: _gives_ranges(fs, name), shown(name))
    return RemoteFile(url, name, size, version, ranged)


def _gives_ranges(fs: Any, name: str) -> bool:
    try:
        with fs.open(name, cache_type="none") as file:
            file.seek(1)
            return len(file.read(1)) == 1
    except ValueError:  # as fsspec tells it
        return False


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        return cast("tuple[Any, str]", url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise InvalidUsage(
            f"{shown(url)}: {first_line(error)}; install fsspec's package for it (s3fs for s3://, gcsfs for gs://, "
            "adlfs for az://, aiohttp for https://), or give a path"
        ) from None


def _call(fs: Any, method: str, *args: Any, **options: Any) -> Any:
    if not fs.async_impl:
        return getattr(fs, method)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=PATIENCE_S / 4, **options)


def _retried(call: Callable[[], T], what: str, stopped: threading.Event | None = None) -> T:
    """``call()``, until it succeeds, fails for good, or has failed for :data:`PATIENCE_S`."""
    stopped, deadline_s, pause_s = stopped or threading.Event(), time.monotonic() + PATIENCE_S, 0.1
    while True:
        try:
            return call()
        except InvalidUsage:
            raise
        except Exception as failure:  # file systems and the libraries below have many
            error, cause = failure, failure.__cause__
            if isinstance(failure, FileNotFoundError) and type(cause).__module__.startswith("aiohttp"):
                error = cast("Exception", cause)  # https:// says of every failure that nothing is there
        if advice := _advice(error):
            raise InvalidUsage(f"{what}: {type(error).__name__}: {shown(first_line(error))}; {advice}") from None
        if time.monotonic() + pause_s > deadline_s or stopped.wait(pause_s):
            raise Error(
                f"{what}: no answer in {PATIENCE_S:g} s ({type(error).__name__}: {shown(first_line(error))}); nothing "
                "was kept; see that the server can be reached, and start again"
            ) from None
        pause_s = min(2 * pause_s, 5.0)


def _advice(error: Exception) -> str:
    """Remedy of a failure that will not pass; empty for those that may."""
    status = getattr(error, "status", 0)
    if isinstance(error, PermissionError) or status in (401, 403) or "redential" in type(error).__name__:
        return "give the credentials that its package reads (as AWS_PROFILE, or ~/.config/fsspec)"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or status in (404, 410):
        return "nothing is there; check the URL"
    lasting = isinstance(error, (ImportError, NotImplementedError, TypeError, ValueError, AttributeError))
    lasting |= 400 <= status < 500 and status not in (408, 425, 429)
    return "check the URL, and the versions of fsspec and its package" * lasting
