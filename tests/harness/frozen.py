"""What was imported stays, so no collection of garbage need look at it again.

A run collects garbage around each measurement of its model. With all that torch, transformers and the tests have made,
one collection takes 0.3 s of the processor: of each rank, be it a process or a thread, and several times a run.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["freeze"]

_MANY = 50
_seen = 0


def freeze() -> None:
    """Does nothing where few modules are new since the last time."""
    global _seen
    if len(sys.modules) >= _seen + _MANY:
        _seen = len(sys.modules)
        gc.collect()
        gc.freeze()


freeze()  # a fork server imports this last
