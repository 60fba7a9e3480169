"""``metrics.jsonl``: one JSON object a step, written as the step is done, never truncated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from hdpcomm.errors import Error
from hdpcomm.files import TEXT_BYTES, check_own, open_own, open_regular
from hdpcomm.train import StepMetrics

__all__ = ["MetricsLog", "read_lines", "read_metrics", "row_of"]


_MOST = 1 << 32  # bytes of a file of lines that is read


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends steps, or other JSON objects, to a file, a line each, at once; the first one makes the file. What a
    killed process left without its end is set apart. A run that was resumed goes on in the same file, so a step may
    stand there twice.

    own: it is of a run's folder, see :func:`hdpcomm.files.open_own`; else it may be a pipe as well. Raises: OSError.
    """

    def __init__(self, path: Path, *, own: bool = False) -> None:
        self.path, self._own = path, own
        if own:
            check_own(path)
        self._file: FileIO | None = None

    def write(self, policy: str, metrics: StepMetrics, costs: Mapping[str, float] | None = None) -> None:
        """Appends a step. Raises: Error if the file cannot be written."""
        self.append({"policy": policy, **asdict(metrics), **(costs or {})})

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a line. Raises: Error if the file cannot be written."""
        data = json.dumps(row).encode() + b"\n"
        try:
            if self._file is None:
                data = (b"\n" if self.path.is_file() and _is_cut(self.path) else b"") + data
                # Without a buffer: what could not be written must not be tried again when the file is closed.
                self._file = open_own(self.path) if self._own else self.path.open("ab", buffering=0)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise Error(f"{self.path}: cannot be written ({error.strerror}); make room or give another file") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_cut(path: Path) -> bool:
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if not size:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; lines that were cut or are something else are left out."""
    rows = []
    with open_regular(path, most=_MOST) as file:
        while line := file.readline(TEXT_BYTES):
            if (row := row_of(line)) is not None:
                rows.append(row)
    return rows


def row_of(line: bytes) -> dict[str, Any] | None:
    """Object of a line of a run's files; ``None`` for one that was cut or is something else."""
    try:
        row = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a run in order, policies as they took turns; of one that stands there twice, the later line counts.
    Cut lines are left out."""
    steps = {(str(row.get("policy")), row["step"]): row for row in read_lines(path)}
    return sorted(steps.values(), key=lambda row: int(row["step"]))
