"""How much host memory can be locked, and the error when that is too little."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hdpcomm.errors import InvalidUsage

__all__ = ["HostMemory", "bytes_text", "check_fits", "host_memory"]

_KEEP_FREE = 0.05
"""Share of the free memory that is never locked, since locked pages cannot be swapped out."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of this process, in bytes.

    Attributes:
        available: free on the whole host without swapping (``MemAvailable``).
        limit_left: what the cgroup of this process (a container, a job) may still allocate; ``None``: no limit.
    """

    available: int
    limit_left: int | None

    @property
    def lockable(self) -> int:
        """Bytes that may be locked: the smaller of both, less a twentieth."""
        room = self.available if self.limit_left is None else min(self.available, self.limit_left)
        return max(0, int(room * (1 - _KEEP_FREE)))


def host_memory(root: str = "/") -> HostMemory:
    """Host memory as the kernel reports it now. ``root``: folder of proc and sys (tests give another one)."""
    base = Path(root)
    available = 0
    for line in _read(base / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            available = int(rest.split()[0]) * 1024
    return HostMemory(available, _limit_left(base))


def check_fits(bytes: int, *, sharers: int = 1, memory: HostMemory | None = None) -> None:
    """Raises InvalidUsage, which says what fits, when host memory is too small for ``sharers`` pools of ``bytes``."""
    memory = memory or host_memory()
    if bytes * sharers <= memory.lockable:
        return
    limit = "no cgroup limit"
    if memory.limit_left is not None:
        limit = f"{bytes_text(memory.limit_left)} left under the cgroup's limit"
    shared = f" for each of {sharers} ranks on this host" if sharers > 1 else ""
    raise InvalidUsage(
        f"a pinned pool of {bytes_text(bytes)}{shared} does not fit: {bytes_text(memory.available)} of host memory "
        f"are available, {limit}, and a twentieth stays free. What fits: {bytes_text(memory.lockable // sharers)} "
        f"a rank ({memory.lockable // sharers} bytes)"
    )


def bytes_text(count: float) -> str:
    """Bytes as text, in binary units: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _limit_left(base: Path) -> int | None:
    """The smallest rest that a cgroup of this process leaves (v2, then v1); inactive page cache counts as free."""
    left: list[int] = []
    for line in _read(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = base / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = base / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            found = _left_of(folder.joinpath(*parts[:depth]), *names)
            if found is not None:
                left.append(found)
    return min(left, default=None)


def _left_of(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= 1 << 60:  # no limit: "max", or v1's large number
        return None
    cache = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_name:
            cache = int(value)
    return max(0, int(limit) - int(usage) + cache)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
