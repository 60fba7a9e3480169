"""Messages of the library: records of the logger ``hdpcomm``. Commands show them on stderr; in other programs they go
where the logging of the program sends them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LOG", "shown", "shown_level"]

LOG = logging.getLogger("hdpcomm")


class _Stderr(logging.Handler):
    """Writes a record in one piece, as ranks share stderr, to the present ``sys.stderr``: progress bars replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        sys.stderr.write(f"hdpcomm: {kind}{self.format(record)}\n")
        sys.stderr.flush()


_HANDLER = _Stderr()


@contextmanager
def shown(level: int | None) -> Iterator[None]:
    """Shows messages of at least ``level`` on stderr while it is entered; ``None``: leaves logging as it is."""
    if level is None:
        yield
        return
    before = LOG.level
    LOG.addHandler(_HANDLER)
    LOG.setLevel(level)
    try:
        yield
    finally:
        LOG.setLevel(before)
        LOG.removeHandler(_HANDLER)


def shown_level() -> int | None:
    """The level of :func:`shown`, which processes that this one starts take over."""
    return LOG.level if _HANDLER in LOG.handlers else None
