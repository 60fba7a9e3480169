"""Checks of plain arguments: what is no number, no whole number or out of range is refused by name and value. Sizes as
users and messages write them."""

from __future__ import annotations

import math
import operator
from typing import Any

from hdpcomm.errors import InvalidUsage

__all__ = [
    "MOST_TOKENS",
    "check_has",
    "check_number",
    "check_seconds",
    "check_type",
    "check_whole",
    "parse_size",
    "ranks_text",
    "size_text",
]

MOST_TOKENS = 1 << 53
"""The largest whole number that a float holds exactly: counts above are refused."""
_INT64 = 1 << 63
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def check_whole(owner: str, name: str, value: Any, *, least: int = -_INT64, most: int = _INT64 - 1) -> int:
    """``value`` as an int, of Python, numpy or a tensor. Raises InvalidUsage for all else, also for a bool."""
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        whole = None
    if whole is not None and least <= whole <= most:
        return whole
    if least == -_INT64:
        wanted = "a whole number of at most 64 bits"
    elif most >= MOST_TOKENS and (whole is None or whole < least):
        wanted = f"a whole number of at least {least}"
    else:
        wanted = f"a whole number from {least} to {most}"
    raise InvalidUsage(f"{owner}: {name} is {value!r}, expected {wanted}")


def check_number(
    owner: str, name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> float:
    """``value`` as a float within the limits. Raises InvalidUsage for all else: NaN, infinity, a bool, a text."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if math.isfinite(number) and least <= number <= most and number > above:
        return number
    limits = [f"above {above:g}"] * (above > -math.inf) + [f"of at least {least:g}"] * (least > -math.inf)
    limits += [f"of at most {most:g}"] * (most < math.inf)
    raise InvalidUsage(f"{owner}: {name} is {value!r}, expected a finite number {' and '.join(limits)}".rstrip())


def check_seconds(owner: str, timeout: Any) -> float:
    """A timeout as a float, or infinity. Raises InvalidUsage for anything but a number above 0."""
    try:
        return math.inf if timeout == math.inf else check_number(owner, "timeout", timeout, above=0)
    except InvalidUsage:
        raise InvalidUsage(f"{owner}() got timeout={timeout!r}; give seconds, a number above 0, or None") from None


def check_type(owner: str, name: str, value: Any, kind: type[Any] | tuple[type[Any], ...]) -> None:
    """Raises InvalidUsage if ``value`` is of another type."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise InvalidUsage(f"{owner}: {name} is {value!r}, expected {' or '.join(each.__name__ for each in kinds)}")


def check_has(owner: str, name: str, value: Any, attribute: str, wanted: str) -> None:
    """Raises InvalidUsage if ``value`` lacks an attribute that all objects have which are meant."""
    if isinstance(value, type) or not hasattr(value, attribute):
        raise InvalidUsage(f"{owner}: {name} is {value!r}, expected {wanted}")


def size_text(count: float) -> str:
    """Bytes as text, in units of 1000: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parse_size(text: str) -> int:
    """Bytes of ``8``, ``64K``, ``1.5M``, ``1GiB`` (binary units, either case). Raises InvalidUsage for other text."""
    short = text[:-2] if text[-2:].lower() == "ib" else text
    unit = _UNITS.get(short[-1:].lower(), 1)
    digits = short[:-1] if unit > 1 else text
    try:
        if not digits or not digits.replace(".", "", 1).isascii() or not digits.replace(".", "", 1).isdigit():
            raise ValueError
        value = float(digits) * unit if "." in digits else int(digits) * unit
    except ValueError:
        raise InvalidUsage(f"{text!r} is no size; give bytes like 8, 64K, 1.5M or 1G (binary units)") from None
    if value != int(value):
        raise InvalidUsage(f"{text!r} is {value} bytes; give a whole number of bytes")
    return int(value)


def ranks_text(ranks: int) -> str:
    """A number of ranks, as in a sentence."""
    return f"{ranks:,} rank{'' if ranks == 1 else 's'}"
