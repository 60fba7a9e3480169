"""Simulated against measured step time on meshes: each by ``hdpcomm train``, then ``hdpcomm simulate --like``.

    python benchmarks/meshes.py --json benchmarks/results/meshes.json       about 4 minutes on two cores

All train the same model on the same batches, those of ``hdpcomm train`` without ``--data``. The simulator gets the
folder of the run: costs as measured before its first step, mesh, and lengths. Compared is forward and backward until
the last rank is done: seconds, and the processor time of all ranks together, which tells what holds where ranks are
more than cores, or where other programs run: costs are measured while all ranks work, and a rank that waits leaves its
core to others. A rank that waits for a message sleeps here at once (HDPCOMM_SPIN_US, HDPCOMM_YIELD_US), so waiting is
not in the processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

MODEL = ["--layers", "4", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--ffn", "192"]
MESHES = {
    "HDP 2": (2, []),
    "PP 2": (2, ["--pipeline", "2"]),
    "PP 2, split backward": (2, ["--pipeline", "2", "--split-backward"]),
    "TP 2": (2, ["--tensor", "2"]),
    "HDP 2, EP 2": (2, ["--experts", "4", "--top-k", "2", "--expert", "2"]),
    "HDP 2 x PP 2": (4, ["--pipeline", "2"]),
    "HDP 2 x PP 2, split backward": (4, ["--pipeline", "2", "--split-backward"]),
    "HDP 2 x TP 2": (4, ["--tensor", "2"]),
    "PP 2 x TP 2": (4, ["--pipeline", "2", "--tensor", "2"]),
    "HDP 4, EP 2": (4, ["--experts", "4", "--top-k", "2", "--expert", "2"]),
    "HDP 2 x PP 2 x TP 2": (8, ["--pipeline", "2", "--tensor", "2"]),
}
WAITS = {"HDPCOMM_SPIN_US": "0", "HDPCOMM_YIELD_US": "0"}


def hdpcomm(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hdpcomm.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | WAITS,
    )
    if done.returncode:
        sys.exit(f"hdpcomm {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def run_mesh(ranks: int, mesh: list[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run, file = folder / "run", folder / "simulated.json"
    limits = ["--context", str(options.context), "--tokens-per-step", str(options.tokens)]
    limits += ["--steps", str(options.steps + 1), "--trackers", "none"]
    hdpcomm("train", *MODEL, *limits, "--ranks", str(ranks), *mesh, "--out", str(run))
    hdpcomm("simulate", "--like", str(run), "--policy", "balanced", "--steps", str(options.steps), "--json", str(file))
    found = json.loads(file.read_text())
    return {"ranks": ranks, **found["like"]["balanced"]}


def ratio(simulated: list[float], measured: list[float]) -> float:
    return median(s / m for s, m in zip(simulated, measured, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps that are compared (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step (default %(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="longest sequence (default %(default)s)")
    parser.add_argument("--only", metavar="REGEX", default="", help="meshes whose name this matches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    cases: dict[str, Any] = {}
    print("| mesh | ranks | simulated s | measured s | ratio | processor s, simulated | measured | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (ranks, mesh) in MESHES.items():
        if not re.search(options.only, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = found = run_mesh(ranks, mesh, options, Path(folder))
        row = f"| {name} | {ranks} "
        for kind in ("", "processor_"):
            simulated, measured = found[f"simulated_{kind}s"], found[f"measured_{kind}s"]
            row += f"| {median(simulated):.3f} | {median(measured):.3f} | {ratio(simulated, measured):.2f} "
        print(f"{row}|", flush=True)
    if options.json:
        about: dict[str, Any] = {"date": date.today().isoformat(), "machine": platform.platform()}
        about |= {"cores": os.cpu_count(), "tokens": options.tokens, "context": options.context, "model": MODEL}
        options.json.write_text(json.dumps(about | {"meshes": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
