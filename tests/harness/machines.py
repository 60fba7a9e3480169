"""Ranks that join on another machine than this one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hdpcomm.comm import machine
from hdpcomm.comm.machine import Machine

__all__ = ["joining_on"]


@contextlib.contextmanager
def joining_on(other: Machine) -> Iterator[None]:
    """Worlds that this thread joins inside ask another machine."""
    token = machine._machine.set(other)
    try:
        yield
    finally:
        machine._machine.reset(token)
