"""What outliving a rank costs: copies in other ranks' memory beside each step, and the time from a death to a step.

    python benchmarks/elastic.py [--rounds 3] [--steps 12] [--json FILE]

Runs of ``hdpcomm train`` with 4 ranks and ZeRO-1, so each rank has optimizer state that no other one has. The rounds
alternate: without ``--elastic``; with it; with it, and one rank killed after half of the steps; with it and a
checkpoint after each step, and two ranks killed that had parts nobody else had, so that the others read the disk. Time
is that between two lines of metrics. Figures are medians of the rounds, the overhead of the ratios of each round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import psutil
import torch

RANKS = 4
SIZE = ["--layers", "4", "--hidden", "384", "--heads", "6", "--kv-heads", "6", "--ffn", "1024"]
BATCH = ["--context", "1024", "--tokens-per-step", "4096"]
LIMIT_S = 600.0


def lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks of the command, by their number."""
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if len(ranks := each.children()) == RANKS:
                return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))
    raise SystemExit("elastic.py: the command has no ranks")


def run(data: Path, options: list[str], steps: int, kills: int) -> tuple[float, float]:
    """Seconds of a step (median), and from the kill to the next step."""
    out = Path(tempfile.mkdtemp(prefix="elastic-"))
    command = [sys.executable, "-m", "hdpcomm.cli.main", "train", "--data", str(data), *SIZE, *BATCH, "--zero", "1"]
    command += ["--ranks", str(RANKS), "--out", str(out / "run"), "--trackers", "none", "--steps", str(steps), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    came: list[float] = []
    killed = 0.0
    limit = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < limit:
            now = time.monotonic()
            came += [now] * (lines(out / "run") - len(came))
            if kills and not killed and len(came) >= steps // 2:
                victims = ranks_of(process)[1 : 1 + kills]
                for each in victims:
                    each.suspend()
                for each in victims:
                    each.kill()
                killed = time.monotonic()
            time.sleep(0.002)
        came += [time.monotonic()] * (lines(out / "run") - len(came))
        errors = process.communicate(timeout=60)[1]
        if process.returncode:
            raise SystemExit(f"elastic.py: the run ended with {process.returncode}: {errors}")
        place = "in the ranks' memory" if kills == 1 else "/step-"
        if kills and not any("going on" in line and place in line for line in errors.splitlines()):
            raise SystemExit(f"elastic.py: the run did not go on from where it should: {errors}")
    finally:
        process.kill()
        shutil.rmtree(out)
    before = [b - a for a, b in itertools.pairwise(came) if not killed or b < killed]
    back = next((at - killed for at in came if at > killed), 0.0) if killed else 0.0
    return statistics.median(before), back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="elastic-data-"))
    for i in range(40):
        (data / f"{i}.txt").write_text(f"the {i}th text; " * (4 * i + 1))
    cases = {
        "plain": ([], 0),
        "elastic": (["--elastic"], 0),
        "from memory": (["--elastic"], 1),
        "from disk": (["--elastic", "--save-every", "1"], 2),
    }
    try:
        rounds = [
            {name: run(data, given, options.steps, kills) for name, (given, kills) in cases.items()}
            for _ in range(options.rounds)
        ]
    finally:
        shutil.rmtree(data)
    step = statistics.median(each["plain"][0] for each in rounds)
    result = {
        "step_s": step,
        "overhead": statistics.median(each["elastic"][0] / each["plain"][0] for each in rounds) - 1,
        "from_memory_s": statistics.median(each["from memory"][1] for each in rounds),
        "from_disk_s": statistics.median(each["from disk"][1] for each in rounds),
        "ranks": RANKS,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "date": str(date.today()),
    }
    print(f"a step: {step:.2f} s; copies in other ranks' memory: {100 * result['overhead']:+.1f}%")
    print(f"from a death to the next step: {result['from_memory_s']:.2f} s from memory, "
          f"{result['from_disk_s']:.2f} s from disk")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
