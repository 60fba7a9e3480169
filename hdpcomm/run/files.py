"""The files of a run: ``metrics.jsonl``, ``evaluations.jsonl``, ``timeline.jsonl``, and what trackers write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from hdpcomm.data import Corpus
from hdpcomm.errors import InvalidUsage, first_line
from hdpcomm.files import open_own, open_regular, write_own
from hdpcomm.plan import Calibration
from hdpcomm.run.evaluation import Evaluation
from hdpcomm.run.metrics_log import MetricsLog
from hdpcomm.run.trackers import MetricsServer, Tracker, open_trackers, tracker_names
from hdpcomm.train import StepMetrics

__all__ = ["RunFiles", "is_running", "locked_folder"]


@contextmanager
def locked_folder(out: Path) -> Iterator[None]:
    """Makes the folder of a run if need be, and keeps other runs out of it: by a lock on ``RUN/.lock``, which the
    system frees when this process ends, however it does. A new folder in which nothing was written goes at the end.
    Local; one process of a run calls it.

    Raises: InvalidUsage if another run has it, whose process, host and start are told, or if it cannot be written.
    """
    path, new = out / ".lock", not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        while True:
            file = open_own(path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read(1000).decode(errors="replace").strip() or "a process that has just begun"
                file.close()
                raise InvalidUsage(
                    f"--out {out} is in use by another run ({holder}); wait for its end, or give another folder"
                ) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
            file.close()  # a run that ended meanwhile has removed it
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%F %T}\n".encode())
    except OSError as error:
        told = f"{path.name}: {error.strerror}" if error.errno == errno.EINVAL else error.strerror or error
        raise InvalidUsage(f"--out {out} cannot be written ({told}); give a folder that can") from error
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if new:
                with suppress(OSError):  # it holds something
                    out.rmdir()


def is_running(out: Path) -> bool:
    """Whether a run has its folder locked now; one that was killed has not. Local."""
    try:
        with open_regular(out / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


class RunFiles(AbstractContextManager["RunFiles"]):
    """Writes what a run tells, as it is told; one process opens it. Nothing is ever truncated.

    Args:
        out: the folder of the run, locked meanwhile (:func:`locked_folder`). ``None``: nothing is written.
        trackers: ``auto``, ``none``, ``tensorboard`` or ``wandb``, see :func:`hdpcomm.run.trackers.open_trackers`.
        config: what the run was told, for trackers.
        metrics: where to serve the figures, see :class:`hdpcomm.run.trackers.MetricsServer`; ``None``: nowhere.
    """

    def __init__(
        self, out: Path | None, *, trackers: str = "none", config: Mapping[str, Any] | None = None,
        metrics: str | None = None,
    ) -> None:  # fmt: skip
        self._out, self._newest = out, -1
        self._servers: list[Tracker] = []
        self._lines: dict[str, MetricsLog] = {}
        self._open_trackers: Callable[[], list[Tracker]] = list
        with ExitStack() as stack:  # nothing is left open or behind where something is refused
            if out is not None:
                tracker_names(trackers)  # before anything is made
                stack.enter_context(locked_folder(out))
                for name in ("metrics", "evaluations", "timeline", "events"):
                    self._lines[name] = stack.enter_context(MetricsLog(out / f"{name}.jsonl", own=True))
                self._open_trackers = partial(open_trackers, trackers, out, dict(config or {}))
            if metrics is not None:
                self._servers.append(server := MetricsServer(metrics))
                stack.callback(server.close)
            self._stack = stack.pop_all()

    @cached_property
    def _trackers(self) -> list[Tracker]:
        """Opened by the first that is told to them: a run that is refused writes nothing."""
        trackers = self._open_trackers()
        for tracker in trackers:
            self._stack.callback(tracker.close)
        return trackers + self._servers

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Appends a line for collectors of logs to ``events.jsonl``. Raises: Error if it cannot be written."""
        self._newest = max(self._newest, facts["step"])
        if self._lines:
            self._lines["events"].append({"time": time.time(), "event": kind, **facts})

    def started(self, corpus: Corpus) -> None:
        """Notes the lengths of the corpus in ``lengths.json``: by octave, how many sequences and tokens."""
        if self._out is None:
            return
        octaves = np.floor(np.log2(corpus.lengths)).astype(np.int64)
        rows = [
            {"from": int(2**octave), "sequences": int((octaves == octave).sum()), "tokens": int(total)}
            for octave in np.unique(octaves)
            for total in [corpus.lengths[octaves == octave].sum()]
        ]
        content = {**asdict(corpus.summary()), "octaves": rows}
        write_own(self._out / "lengths.json", json.dumps(content, indent=1) + "\n")

    def costs(self, found: Calibration) -> None:
        """Notes in ``calibration.json`` what the run plans with, for ``simulate --calibration``."""
        if self._out is not None:
            write_own(self._out / "calibration.json", found.to_json())

    def step(self, policy: str, metrics: StepMetrics, costs: Mapping[str, float]) -> None:
        """Appends a step. Raises: Error if a file cannot be written."""
        if self._lines:
            self._lines["metrics"].write(policy, metrics, costs)
        names = ("loss", "grad_norm", "tokens", "seconds", "predicted_s", "planning_s")
        self.event("step", {"step": metrics.step, "policy": policy} | {each: getattr(metrics, each) for each in names})
        told = {**asdict(metrics), **costs}
        values = {name: value for name, value in told.items() if name != "step" and isinstance(value, (int, float))}
        values["tokens_per_s"] = metrics.tokens / metrics.seconds if metrics.seconds else 0.0
        for tracker in self._trackers:
            tracker.write(metrics.step, {f"{policy}/{name}": value for name, value in values.items()})

    def evaluation(self, policy: str, found: Evaluation) -> None:
        """Appends an evaluation."""
        if self._lines:
            self._lines["evaluations"].append({"policy": policy, **asdict(found)})
        self.event("evaluation", {"step": found.step, "policy": policy, "loss": found.loss})
        losses = {f"{policy}/held_out_loss": found.loss}
        losses |= {f"{policy}/held_out_loss/{Path(name).name}": loss for name, loss in found.by_source.items()}
        for tracker in self._trackers:
            tracker.write(found.step - 1, losses)

    def timeline(self, row: Mapping[str, Any]) -> None:
        """Appends a step as planned and as measured."""
        if self._lines:
            self._lines["timeline"].append(row)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._stack:
            if error is not None and self._newest >= 0:
                self.event("end", {"step": self._newest, "error": first_line(error)})
