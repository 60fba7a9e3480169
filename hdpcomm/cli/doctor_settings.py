"""The part of ``hdpcomm doctor`` about environment variables: what is set, what is refused, what nobody reads."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["environment", "settings_lines", "unknown_variables"]

_PREFIX = "HDPCOMM_"
_OF_THE_BUILD = ("HDPCOMM_BUILD_TYPE",)  # setup.py reads it


def environment() -> list[dict[str, Any]]:
    """Every variable that hdpcomm reads; nothing where the core cannot be loaded.

    ``value`` is the text in force; ``error`` says why it is refused, else it is ``None``.
    """
    try:
        from hdpcomm import _core
    except ImportError:
        return []
    return [
        {
            "name": row.variable,
            "value": "(hidden)" if row.hidden and row.value else row.value,
            "default": row.default,
            "range": row.range,
            "meaning": row.meaning,
            "error": row.error,
        }
        for row in _core.settings_table()
    ]


def unknown_variables(given: Mapping[str, str] = os.environ) -> list[dict[str, str | None]]:
    """The variables with hdpcomm's prefix that it does not read; ``suggestion``: the name that is most like it."""
    known = [row["name"] for row in environment()]
    if not known:
        return []
    names = [name for name in sorted(given) if name.startswith(_PREFIX) and name not in (*known, *_OF_THE_BUILD)]
    return [{"name": name, "value": given[name], "suggestion": _nearest(name, known)} for name in names]


def _nearest(name: str, known: list[str]) -> str | None:
    # Without the prefix, which alone makes any two names alike.
    found = difflib.get_close_matches(name.removeprefix(_PREFIX), [each.removeprefix(_PREFIX) for each in known], 1)
    return _PREFIX + found[0] if found else None


def settings_lines(
    variables: list[dict[str, Any]], unknown: list[dict[str, str | None]], *, everything: bool
) -> list[str]:
    """Lines of the report: settings that differ from their defaults, or ``everything``; and what is unknown."""
    lines = []
    shown = [row for row in variables if everything or row["value"] != row["default"]]
    for row in shown:
        state = "bad " if row["error"] else ""
        lines.append(f"  {state}{row['name']}={row['value']} (default {row['default']})")
        lines.append(f"      {row['error'] or row['meaning'] + '; ' + row['range']}")
    for stranger in unknown:
        hint = f"did you mean {stranger['suggestion']}?" if stranger["suggestion"] else "--all shows the known ones"
        lines.append(f"  {stranger['name']}={stranger['value']} is unknown, nothing reads it; {hint}")
    if variables and len(shown) < len(variables):
        rest = "all" if not shown else "the others"
        lines.append(f"  {rest} at their defaults ({len(variables) - len(shown)}; --all shows them)")
    return lines
