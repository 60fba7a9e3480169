"""Settings under which small messages take the paths of large ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

__all__ = ["small_slots"]


@contextmanager
def small_slots(slots: int = 4, lanes: int = 2, small: int = 256) -> Iterator[None]:
    """Slots of one page, so that 4 KB are a message of several pieces; for ranks that are threads. ``small``: bytes up
    to which a message is a part of one kernel."""
    settings = {
        "HDPCOMM_DEVICE_SLOT_BYTES": "4096",
        "HDPCOMM_DEVICE_SLOTS": str(slots),
        "HDPCOMM_DEVICE_LANES": str(lanes),
        "HDPCOMM_DEVICE_LANDING_BYTES": str(1 << 20),
        "HDPCOMM_DEVICE_WINDOW_BYTES": "8192",
        "HDPCOMM_DEVICE_SMALL_BYTES": str(small),
    }
    with mock.patch.dict(os.environ, settings):
        yield
