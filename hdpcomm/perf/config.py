"""``PerfConfig``: the parsed and checked flags of ``hdpcomm perf``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hdpcomm.arguments import parse_size
from hdpcomm.errors import InvalidUsage

__all__ = ["AVERAGES", "REDOPS", "PerfConfig", "parse_size"]

REDOPS = ("sum", "prod", "max", "min", "avg")
AVERAGES = ("rank 0", "mean of the ranks", "fastest rank", "slowest rank")  # by the number of -a


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
    agg: int = 1
    cycles: int = 1
    check: int = 1
    dtypes: tuple[str, ...] = ("float",)
    redops: tuple[str, ...] = ("sum",)
    roots: tuple[int, ...] | None = (0,)  # None: every rank in turn
    blocking: int = 0
    timeout: float | None = None
    cpu_time: bool = False
    average: int = 1
    memory: bool = False
    unalign: int = 0
    register: bool = False
    per_iter: bool = False
    per_iter_skip: int = 0
    timestamps: bool = False
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
        for flag, value, least in (
            ("-n", self.iters, 1),
            ("-w", self.warmup, 0),
            ("-m", self.agg, 1),
            ("-N", self.cycles, 0),
            ("-c", self.check, 0),
            ("-u", self.unalign, 0),
        ):
            if value < least:
                raise InvalidUsage(f"{flag} {value}; give at least {least}")
        if not 0 <= self.per_iter_skip < self.iters:
            raise InvalidUsage(f"-K {self.per_iter_skip}; give 0 to {self.iters - 1}, which is less than -n")
        if self.per_iter_skip and not self.per_iter:
            raise InvalidUsage(f"-K {self.per_iter_skip} leaves iterations out of the statistics of -I; give -I, too")
        if not 0 <= self.blocking <= 3:
            raise InvalidUsage(f"-z {self.blocking}; give 0 to 3")
        if not 0 <= self.average < len(AVERAGES):
            raise InvalidUsage(f"-a {self.average}; give 0 to 3 ({', '.join(AVERAGES)})")
        if self.cpu_time and (self.agg > 1 or self.blocking):
            raise InvalidUsage("-C times the call that starts one operation; leave out -m and -z")
        if self.agg > 1 and self.blocking:
            raise InvalidUsage("-m starts several operations together, -z waits after each; leave one out")

    def sizes(self) -> Iterator[int]:
        """The sizes of the sweep in bytes, in order."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = size * self.step_factor if self.step_factor > 1 else size + self.step_bytes
