"""Simulated against measured step time on meshes: each by ``hdpcomm train``, then ``hdpcomm simulate --like``.

    python benchmarks/meshes.py --json benchmarks/results/meshes.json       about 4 minutes on two cores

All train the same model on the same batches, those of ``hdpcomm train`` without ``--data``. The simulator gets the
folder of the run: costs as measured before its first step, mesh, and lengths. Compared is forward and backward until
the last rank is done. Where there are more ranks than cores, costs were measured while all ranks worked, so ranks that
are idle in turns (pipelines) leave the others more of a core than the costs know.
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
    "TP 2": (2, ["--tensor", "2"]),
    "HDP 2, EP 2": (2, ["--experts", "4", "--top-k", "2", "--expert", "2"]),
    "HDP 2 x PP 2": (4, ["--pipeline", "2"]),
    "HDP 2 x TP 2": (4, ["--tensor", "2"]),
    "PP 2 x TP 2": (4, ["--pipeline", "2", "--tensor", "2"]),
    "HDP 4, EP 2": (4, ["--experts", "4", "--top-k", "2", "--expert", "2"]),
    "HDP 2 x PP 2 x TP 2": (8, ["--pipeline", "2", "--tensor", "2"]),
}


def hdpcomm(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hdpcomm.cli.main", *arguments], capture_output=True, text=True, timeout=900, check=False
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
    compared = found["like"]["balanced"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] in compared["steps"]]
    return {"ranks": ranks, **compared, "processor_s": [row["processor_s"] for row in rows]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps that are compared (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step (default %(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="longest sequence (default %(default)s)")
    parser.add_argument("--only", metavar="REGEX", default="", help="meshes whose name this matches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    cases: dict[str, Any] = {}
    print("| mesh | ranks | simulated s | measured s | simulated / measured |\n|---|---|---|---|---|")
    for name, (ranks, mesh) in MESHES.items():
        if not re.search(options.only, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = found = run_mesh(ranks, mesh, options, Path(folder))
        pairs = list(zip(found["simulated_s"], found["measured_s"], strict=True))
        simulated, measured = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(s / m for s, m in pairs)
        print(f"| {name} | {ranks} | {simulated:.3f} | {measured:.3f} | {ratio:.2f} |", flush=True)
    if options.json:
        about: dict[str, Any] = {"date": date.today().isoformat(), "machine": platform.platform()}
        about |= {"cores": os.cpu_count(), "tokens": options.tokens, "context": options.context, "model": MODEL}
        options.json.write_text(json.dumps(about | {"meshes": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
