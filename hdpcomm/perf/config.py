"""``PerfConfig``: the parsed and checked flags of ``hdpcomm perf``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hdpcomm.arguments import parse_size
from hdpcomm.errors import InvalidUsage

__all__ = ["REDOPS", "PerfConfig", "parse_size"]

REDOPS = ("sum", "prod", "max", "min", "avg")


@dataclass(frozen=True, slots=True)
class PerfConfig:
    """The settings of one run. Defaults are those of nccl-tests; sizes are bytes, as in column ``size(B)``."""

    op: str
    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    step_bytes: int = 1 << 20
    step_factor: int = 1
    iters: int = 20
    warmup: int = 1
    cycles: int = 1
    check: int = 1
    dtypes: tuple[str, ...] = ("float",)
    redops: tuple[str, ...] = ("sum",)
    roots: tuple[int, ...] | None = (0,)  # None: every rank in turn
    timeout: float | None = None
    unalign: int = 0
    register: bool = False
    per_iter: bool = False
    subsets: tuple[tuple[int, ...], ...] = ()
    algorithm: str = "auto"
    transport: str = "auto"
    args: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.min_bytes > self.max_bytes:
            raise InvalidUsage(f"-b {self.min_bytes} is above -e {self.max_bytes}; give -b <= -e")
        if self.step_factor < 1 or self.step_bytes < 1:
            raise InvalidUsage(
                f"-f {self.step_factor} or -i {self.step_bytes} never reaches the next size; give at least 2 for -f, "
                "at least 1 for -i"
            )
        if self.step_factor > 1 and self.min_bytes == 0 < self.max_bytes:
            raise InvalidUsage(f"-b 0 times -f {self.step_factor} stays 0; give -b above 0, or -i")

    def sizes(self) -> Iterator[int]:
        """The sizes of the sweep in bytes, in order."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = size * self.step_factor if self.step_factor > 1 else size + self.step_bytes
