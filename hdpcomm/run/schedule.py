"""Learning rates by step: a rise, and then one of four ways on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdpcomm.errors import InvalidUsage

__all__ = ["SCHEDULES", "Schedule"]

SCHEDULES = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of each step, as a share of the highest one.

    Attributes:
        kind: after the rise: ``constant``; ``cosine`` or ``linear`` down to ``floor`` at the last step; ``wsd``
            (warm-up - stable - decay; MiniCPM, arXiv 2404.06395, section 4): constant, and linear down over the last
            share ``decay`` of the steps.
        warmup: steps over which the rate rises; ``None``: a tenth of all, at least one.
        floor: share of the highest rate at the end, 0 to 1.
    """

    kind: str = "cosine"
    warmup: int | None = None
    floor: float = 0.1
    decay: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise InvalidUsage(f"schedule is {self.kind!r}; choose from {', '.join(SCHEDULES)}")
        if self.warmup is not None and self.warmup < 0:
            raise InvalidUsage(f"warmup is {self.warmup}; give a number of steps, or 0 for none")
        if not (0 <= self.floor <= 1 and 0 <= self.decay <= 1):
            raise InvalidUsage(f"floor is {self.floor} and decay {self.decay}; give shares from 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        """The share of the highest rate at ``step`` (from 0) of ``steps``."""
        rise = max(1, steps // 10) if self.warmup is None else self.warmup
        if step < rise:
            return (step + 1) / rise
        if self.kind == "constant":
            return 1.0
        first = steps - round(self.decay * steps) if self.kind == "wsd" else rise
        done = min(1.0, max(0.0, (step - max(first, rise)) / max(1, steps - max(first, rise))))
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * falling
