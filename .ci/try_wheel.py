"""Tries an installed hdpcomm[plot] as a user would: imports it, runs two ranks, plans, trains two steps, reports.

Run it outside the source tree.
"""

import subprocess
import sys
import tempfile
from pathlib import Path


def run(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    place = run(sys.executable, "-c", "import hdpcomm; print(hdpcomm.__file__); hdpcomm.init").strip()
    if Path.cwd() in Path(place).parents:
        sys.exit(f"hdpcomm comes from {place}: run this outside the source tree")
    # What torch loads by itself: the entry point in the group torch.backends.
    run(sys.executable, "-c", "import torch.distributed as dist; assert 'hdpcomm' in dist.Backend.backend_list")
    bin = Path(sys.executable).parent
    hdpcomm = str(bin / "hdpcomm")
    run(hdpcomm, "doctor")
    table = run(hdpcomm, "perf", "all_reduce", "--ranks", "2", "-b", "8", "-e", "1K", "-f", "2", "-n", "5")
    if "Out of bounds values : 0 OK" not in table:
        sys.exit(f"hdpcomm perf found wrong data:\n{table}")
    with tempfile.TemporaryDirectory() as folder:
        text, plan, out = Path(folder, "text.txt"), str(Path(folder, "plan.safetensors")), str(Path(folder, "run"))
        run(hdpcomm, "plan", "--ranks", "16", "--tokens", "1M", "--capacity", "64K", "--out", plan)
        run(hdpcomm, "simulate", "--plan", plan, "--capacity", "64K")
        text.write_text("Short and long sequences, planned together.\n" * 500)
        run(hdpcomm, "train", "--ranks", "2", "--steps", "2", "--data", str(text), "--out", out)
        run(hdpcomm, "report", out)
    print(f"{place}: imported, 2 ranks reduced, a step planned and simulated, 2 steps trained and reported")


if __name__ == "__main__":
    main()
