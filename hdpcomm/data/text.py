"""Finds documents in text files. Tokens are bytes, so the length of a document is its size."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from hdpcomm.errors import InvalidUsage

__all__ = ["check_text", "json_text", "jsonl_documents", "looks_like_text", "text_files"]

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


def text_files(folder: Path, *, suffix: str = "", without: Collection[str] = ()) -> Iterator[Path]:
    """The non-empty text files below ``folder`` in a fixed order.

    Hidden files and folders, links to folders and binary files are left out. ``suffix`` is what a file's name must end
    with, ``without`` the names of folders to leave out.
    """
    for directory, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in without)
        for name in sorted(files):
            path = Path(directory, name)
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            try:
                with path.open("rb") as file:
                    head = file.read(SNIFF_BYTES)
            except OSError:
                continue
            if head and looks_like_text(head):
                yield path


def json_text(line: bytes, *, where: str, field: str) -> bytes:
    """The UTF-8 bytes of ``field`` in one line of JSONL; ``where`` (``file:line``) goes into the messages."""
    try:
        record = json.loads(line)
    except ValueError as error:  # also UnicodeDecodeError
        raise InvalidUsage(f"{where}: this line is not JSON ({error}); JSONL holds one JSON object a line") from error
    if not isinstance(record, dict):
        raise InvalidUsage(
            f"{where}: this line holds a JSON {type(record).__name__}, an object with the field {field!r} was expected"
        )
    if field not in record:
        names = ", ".join(repr(name) for name in list(record)[:8]) or "none"
        raise InvalidUsage(f"{where}: there is no field {field!r} (fields: {names}); choose one with --text-field")
    text = record[field]
    if not isinstance(text, str):
        raise InvalidUsage(
            f"{where}: the field {field!r} holds a {type(text).__name__}, text was expected; choose one with "
            "--text-field"
        )
    return text.encode("utf-8", "surrogatepass")


def jsonl_documents(path: Path, *, field: str) -> Iterator[tuple[int, int, int]]:
    """For every line with text: its byte offset, its size in the file, and the number of bytes of its text.

    Raises InvalidUsage with ``file:line`` for a line that is no JSON object or lacks the field.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                length = len(json_text(line, where=f"{path}:{number}", field=field))
                if length:
                    yield offset, len(line), length
            offset += len(line)
