"""The settings of the environment, by the core's table (``hdpcomm doctor`` prints it)."""

from __future__ import annotations

from hdpcomm import _core

__all__ = ["setting"]


def setting(name: str) -> str:
    """The value in force of an ``HDPCOMM_`` variable: as it is set now, or its default."""
    return next(row[1] for row in _core.environment() if row[0] == name)
