"""Finds text files, and tells them from binary ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from hdpcomm.errors import InvalidUsage

__all__ = ["block_starts", "check_text", "looks_like_text", "text_files"]

SNIFF_BYTES = 8192
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\b\x1b")) + b"\x7f"


def looks_like_text(head: bytes) -> bool:
    """Whether the first bytes of a file look like text.

    No NUL byte (what git asks), and either valid UTF-8 with few control characters or another 8-bit encoding of which
    at most 30% is not printable ASCII.
    """
    if b"\0" in head:
        return False
    controls = len(head) - len(head.translate(None, _CONTROL))
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and error.start >= len(head) - 3:  # cut inside a character
            return controls * 10 <= len(head)
        odd = sum(byte >= 128 for byte in head) + controls
        return odd * 10 <= len(head) * 3
    return controls * 10 <= len(head)


def check_text(path: Path) -> int:
    """Size in bytes of a text file that the user named. Raises InvalidUsage if it is empty, binary or unreadable."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(SNIFF_BYTES)
    except OSError as error:
        raise InvalidUsage(
            f"{path}: cannot be read ({error.strerror}); give a text or JSONL file that this user may read"
        ) from error
    if size == 0:
        raise InvalidUsage(f"{path}: the file is empty; give a file with text in it")
    if not looks_like_text(head):
        raise InvalidUsage(
            f"{path}: this is a binary file (its first {len(head)} bytes are not text); give plain text or JSONL, "
            "uncompressed"
        )
    return size


def text_files(
    folder: Path, *, suffix: str = "", without: Collection[str] = (), also: Collection[str] = ()
) -> Iterator[Path]:
    """The non-empty text files below ``folder`` in a fixed order.

    Hidden files and folders, links to folders, links that lead out of ``folder``, and binary files are left out.
    ``suffix`` is what a file's name must end with, ``without`` the names of folders to leave out, ``also`` the endings
    of files that are taken though they are no text.
    """
    root = folder.resolve()
    for directory, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in without)
        for name in sorted(files):
            path = Path(directory, name)
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                continue
            if path.suffix in also:
                yield path
                continue
            try:
                with path.open("rb") as file:
                    head = file.read(SNIFF_BYTES)
            except OSError:
                continue
            if head and looks_like_text(head):
                yield path


def block_starts(source: bytes) -> list[int]:
    """Where the blocks of a program's text begin: a blank line or a smaller indentation ends one.

    Example:
        >>> block_starts(b"def f(x):\\n    y = x\\n    if y:\\n        g()\\n    return y\\n\\nf(1)\\n")
        [0, 42, 56]
    """
    starts, place, depth, blank = [0], 0, 0, False
    for line in source.splitlines(keepends=True):
        text = line.lstrip(b" \t")
        if text.strip():
            if (blank or len(line) - len(text) < depth) and place:
                starts.append(place)
            depth, blank = len(line) - len(text), False
        else:
            blank = True
        place += len(line)
    return starts
