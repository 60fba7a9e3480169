"""``metrics.jsonl``: one JSON object a step, written as the step is done, never truncated."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from hdpcomm.errors import Error
from hdpcomm.train import StepMetrics

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog:
    """Appends to a file; a run that was resumed goes on in the same one, so a step may stand there twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # What a killed process left without its end must not swallow the next line.
        cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", buffering=1)
        if cut:
            self._file.write("\n")

    def write(self, policy: str, metrics: StepMetrics) -> None:
        """Appends a step. Raises: Error if the file cannot be written."""
        try:
            self._file.write(json.dumps({"policy": policy, **asdict(metrics)}) + "\n")
        except OSError as error:
            raise Error(f"{self.path}: cannot be written ({error.strerror}); make room or give another file") from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The steps of a run in order; of one that stands there twice, the later line counts. Cut lines are left out."""
    steps: dict[tuple[object, object], dict[str, object]] = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            steps[row.get("policy"), row["step"]] = row
    return sorted(steps.values(), key=lambda row: (int(str(row["step"])), str(row.get("policy"))))
