"""Code shared by the commands: types and checks of options, and writing ``--json`` files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import write_whole

MOST = 1 << 53

TRANSPORTS = ("auto", "shm", "tcp", "torch", "sim", "cuda", "nccl", "cuda+nccl")
"""Those of :func:`hdpcomm.init`, for parsers, which import no torch."""

__all__ = [
    "TRANSPORTS",
    "BadOption",
    "check_writable",
    "count",
    "num_bytes",
    "positive",
    "ranks_here",
    "refuse_others",
    "seed",
    "share",
    "write_json",
    "write_text",
]


class BadOption(argparse.ArgumentTypeError, ValueError):
    """A wrong value of an option: argparse shows the text of the one base, jsonargparse expects the other in files."""


def count(text: str) -> int:
    """argparse type: a whole number of at least 1, such as ``8192``, ``8,192``, ``8k`` (of 1024) or ``2M``."""
    units = {"k": 1024, "m": 1024**2, "g": 1024**3}
    digits = str(text).replace(",", "").strip().lower()[:400]
    unit = units.get(digits[-1:], 1)
    try:
        value = int(digits[:-1] if unit > 1 else digits) * unit
    except ValueError:
        raise BadOption(f"{text!r} is not a whole number (like 8192 or 8k)") from None
    if value < 1:
        raise BadOption(f"{text} is below 1; at least 1 was expected")
    if value > MOST:
        raise BadOption(f"{text} is above 2^53, the most that was expected")
    return value


def positive(text: str) -> float:
    """argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise BadOption(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise BadOption(f"{text} is not a finite number above 0")
    return value


def share(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        raise BadOption(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise BadOption(f"{text} is not a number from 0 to 1")
    return value


def seed(text: str) -> int:
    """argparse type: a whole number from 0 to 2^63 - 1."""
    try:
        value = int(str(text)[:40])
    except ValueError:
        raise BadOption(f"{text!r} is not a whole number") from None
    if not 0 <= value < 1 << 63:
        raise BadOption(f"seed is {text}; it must be from 0 to 2^63 - 1")
    return value


def num_bytes(text: str) -> int:
    """argparse type: bytes, such as ``512M``; see :func:`hdpcomm.perf.config.parse_size`."""
    from hdpcomm.perf.config import parse_size

    try:
        return parse_size(str(text))
    except InvalidUsage as error:
        raise BadOption(str(error)) from None


def ranks_here(asked: int | None, *, default: int) -> tuple[int | None, int]:
    """(rank of this process in a launcher's job, number of ranks); the rank is ``None`` without a launcher.

    asked: the value of ``--ranks``. Raises: InvalidUsage if a launcher has started another number of ranks.
    """
    from hdpcomm.comm.launchers import joined, rank_and_size

    if not joined():
        return None, asked or default
    rank, size = rank_and_size()
    if asked not in (None, size):
        raise InvalidUsage(
            f"--ranks {asked} was given, but the launcher started {size} ranks; leave --ranks out or make them equal"
        )
    return rank, size


def check_writable(path: Path | None) -> None:
    """Raises InvalidUsage if ``path`` cannot be written, so that a long run does not fail at its end."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidUsage(f"{path}: this is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise InvalidUsage(f"{path}: the folder {path.parent} does not exist; make it or give another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidUsage(f"{path}: may not be written by this user; give another file")


def refuse_others(options: argparse.Namespace, defaults: argparse.Namespace, used: Collection[str], why: str) -> None:
    """Raises InvalidUsage if an option that is not in ``used`` has another value than its default.

    ``why``: begins the message, and says why the option has no effect.
    """
    given = {name for name, value in vars(options).items() if value != getattr(defaults, name, None)}
    if wrong := sorted(given - {*used, "func"}):
        raise InvalidUsage(f"{why}: {', '.join(wrong)} have no effect here; leave them out")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes JSON so that a reader sees either the old file or the complete new one."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees either the old one or the complete new one."""
    write_whole(path, text.encode())
