"""``hdpcomm top``: what it shows of a run's files, of its endpoint, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hdpcomm.cli.main import main
from hdpcomm.run.trackers import MetricsServer


def row(step: int, **more: Any) -> dict[str, Any]:
    figures = {"loss": 4.0 - step / 10, "tokens": 1000, "seconds": 0.5, "grad_norm": 1.5, "longest": 300}
    figures |= {"longest_ranks": 2, "ranks": 4, "measured_s": 0.4, "predicted_s": 0.5, "compute_s": 0.3, "idle_s": 0.1}
    return {"policy": "balanced", "step": step, **figures, "slowest_rank": 3, "slowest_speed": 0.5, **more}


def write(path: Path, *rows: dict[str, Any], cut: str = "") -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in rows) + cut)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "metrics.jsonl", *map(row, range(5)), row(3, loss=9.0), cut='{"policy": "bal')
    write(tmp_path / "evaluations.jsonl", {"policy": "balanced", "step": 4, "loss": 2.5})
    told = {"time": 0.0, "event": "slow", "step": 3, "told": "step 4 took 2 s: rank 1 waited 1 s for its data"}
    write(tmp_path / "events.jsonl", {"time": 0.0, "event": "start", "step": 0, "ranks": 4}, told)
    (tmp_path / "config.yaml").write_text("steps: 100\n")
    return tmp_path


def test_the_newest_figures_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "balanced: step 4 of 100, 48 s left", "9 (held out 2.5)", "2,000", "300 on 2 of 4 ranks", "0.80",
        "3 at 50% of the others", "compute 75%", "idle 25%", "rank 1 waited 1 s for its data", "step 0, ranks 4",
    ):  # fmt: skip
        assert text in shown, text
    assert "▁▁▁█" in shown  # the loss of step 4, which was run again, and the three before


def test_a_folder_without_a_step_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path)]) == 0
    assert "no step was done yet" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "none")]) == 6
    assert "no such folder; give that of hdpcomm train --out" in capsys.readouterr().err


def test_an_endpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HDPCOMM_METRICS_TOKEN", "secret")
    server = MetricsServer("127.0.0.1:0")
    try:
        figures = {name: value for name, value in row(6).items() if name not in ("step", "policy")}
        server.write(6, {f"balanced/{name}": value for name, value in figures.items()})
        assert main(["top", server.url]) == 0
        shown = capsys.readouterr().out
        assert "balanced: step 7" in shown
        assert "3.4" in shown
        monkeypatch.setenv("HDPCOMM_METRICS_TOKEN", "other")
        assert main(["top", server.url]) == 6
        assert "401" in capsys.readouterr().err
    finally:
        server.close()
    assert main(["top", server.url]) == 0
    assert "no answer" in capsys.readouterr().out


def test_a_terminal_shows_it_as_it_goes_on(run: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hdpcomm", "top", str(run), "--every", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
    )  # fmt: skip
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 60
    while b"step 4 of 100" not in shown:
        assert time.monotonic() < deadline
        shown += os.read(ours, 1 << 16)
    write(run / "metrics.jsonl", cut='anced"}\n')
    write(run / "metrics.jsonl", row(4))
    while b"step 5 of 100" not in shown:
        assert time.monotonic() < deadline
        shown += os.read(ours, 1 << 16)
    process.send_signal(signal.SIGINT)
    while True:  # what is not read keeps it from ending
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:
            break
    assert process.wait(30) == 0
    os.close(ours)
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode(errors="replace")
    assert "Traceback" not in plain


def test_lines_of_something_else_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics", "evaluations", "events"):
        with (run / f"{name}.jsonl").open("a") as file:
            file.write('\n{"step": 9}\n[1]\n{"step": "x"}\n')
    assert main(["top", str(run)]) == 0
    assert "balanced: step 4 of 100" in capsys.readouterr().out
