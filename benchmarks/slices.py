"""Steps of a pipeline with a long and several short sequences, whole and in slices, measured beside the simulation.

Runs ``hdpcomm train --pipeline 2`` on two ranks in turns, with ``--slices off`` and ``auto``: the same data, weights
and batches, whose losses are compared. Documents are noise of a few letters: of ``--context`` tokens, and short ones
with a quarter of the tokens together. *measured* are the seconds of forward and backward passes of a step, medians over
the steps of all turns but each first step; *simulated* is what its plan had predicted by the costs that the run itself
had measured.

Usage: ``python benchmarks/slices.py [--turns 3] [--context 8192] [--steps 6] [--json FILE]``, two cores, about four
minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

KINDS = ("off", "auto")


def write_documents(path: Path, context: int, steps: int) -> None:
    rng = random.Random(0)
    lengths = [context] * (steps + 2) + [rng.randint(64, 512) for _ in range((steps + 2) * context // 4 // 288)]
    with path.open("w") as file:
        for length in lengths:
            file.write(json.dumps({"text": "".join(rng.choices("abcdef ", k=length - 1))}) + "\n")


def run(kind: str, data: Path, out: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of a run, as its metrics have them."""
    sizes = {"context": options.context, "capacity": options.context, "tokens-per-step": options.context * 5 // 4}
    sizes |= {"layers": 4, "hidden": 64, "heads": 4, "kv-heads": 2, "ffn": 192, "steps": options.steps}
    command = [sys.executable, "-m", "hdpcomm", "train", "--ranks", "2", "--pipeline", "2", "--slices", kind]
    command += ["--data", str(data), "--tokenizer", "bytes", "--out", str(out)]
    command += [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--context", type=int, default=8192, help="tokens of a long sequence")
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "documents.jsonl"
        write_documents(data, options.context, options.steps)
        for turn in range(options.turns):
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                rows = [row for row in run(kind, data, Path(folder) / f"{kind}-{turn}", options) if "measured_s" in row]
                found[kind] += rows[1:]
                print(f"turn {turn}, slices {kind}: {[round(row['measured_s'], 2) for row in rows]} s", flush=True)
    drift = max(abs(a["loss"] - b["loss"]) for a, b in zip(*found.values(), strict=True))
    median = {kind: statistics.median(row["measured_s"] for row in rows) for kind, rows in found.items()}
    ratios = [a["measured_s"] / b["measured_s"] for a, b in zip(*found.values(), strict=True)]
    rows = {}
    print("\n| slices | measured s | simulated s | simulated / measured |\n|---|---|---|---|")
    for kind, steps in found.items():
        predicted = statistics.median(row["predicted_s"] for row in steps)
        ratio = statistics.median(row["predicted_s"] / row["measured_s"] for row in steps)
        rows[kind] = {"measured_s": median[kind], "simulated_s": predicted, "ratio": ratio}
        print(f"| {kind} | {median[kind]:.3f} | {predicted:.3f} | {ratio:.2f} |")
    simulated = rows["off"]["simulated_s"] / rows["auto"]["simulated_s"]
    print(
        f"\nslices make the passes of a step {statistics.median(ratios):.2f}x as fast (simulated {simulated:.2f}x); "
        f"losses differ by at most {drift:.1e}"
    )
    if options.json:
        about = {"date": date.today().isoformat(), "machine": platform.processor() or platform.machine()}
        gain = {"gain": statistics.median(ratios), "simulated_gain": simulated, "largest_loss_difference": drift}
        options.json.write_text(json.dumps(about | gain | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
