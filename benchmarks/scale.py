"""Planning for 1,024 to 131,072 ranks: processor time, memory, gap to the lower bound, and the plan's files.

    python benchmarks/scale.py --json benchmarks/results/scale.json

Steps of 32,768 tokens a rank (4G tokens at 131,072 ranks), LLaMA-7B on H100 with nodes of 8 and a capacity of 8,192
tokens, context 2M. Each case is a process of its own: seconds are processor time of ``Planner.plan``, the lower bound
included, the best of ``--repeat``; memory is the most that the process held, less what it held before. "hash": the
processor time of ``StepPlan.hash``, which ranks compare in each step. Files: the size of each form, and the processor
time from ``StepPlan.load`` to the micro-batches of one rank, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdpcomm.plan import StepPlan

RANKS = (1024, 4096, 16384, 65536, 131072)
TOKENS = 32768  # a rank
CONTEXT = 2 << 20


def case(distribution: str, ranks: int, repeat: int) -> dict[str, float]:
    """Plans one step several times."""
    from hdpcomm.plan import MODELS, ClusterSpec, Planner
    from hdpcomm.plan.distributions import sample_lengths

    lengths = sample_lengths(distribution, tokens=ranks * TOKENS, context=CONTEXT, seed=0)
    cluster = ClusterSpec(ranks=ranks, capacity=8192, ranks_per_node=8)
    planner = Planner(MODELS["llama-7b"], cluster, context=CONTEXT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeat):
        started = time.process_time()
        plan = planner.plan(lengths)
        seconds.append(time.process_time() - started)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    started = time.process_time()
    plan.hash  # noqa: B018
    hash_s = time.process_time() - started
    return {
        "sequences": len(lengths),
        "micro_batches": len(plan.table),
        "seconds": min(seconds),
        "mbytes": held / 1024,
        "gap": plan.makespan_s / plan.lower_bound_s,
        "step_s": plan.makespan_s,
        "hash_s": hash_s,
    } | _files(plan, ranks // 2, repeat)


def _files(plan: StepPlan, rank: int, repeat: int) -> dict[str, float]:
    """Size of the plan's file, and the least processor time to read the part of a rank."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        command = [sys.executable, "-c", _READ, str(path), str(rank)]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(repeat)]
        found["json_mbytes"] = path.stat().st_size / 1e6
        found["json_read_s"] = min(float(run.stdout) for run in runs)
    return found


_READ = """
import sys, time
from hdpcomm.plan import StepPlan
started = time.process_time()
assert StepPlan.load(sys.argv[1]).for_rank(int(sys.argv[2]))
print(time.process_time() - started)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="plans of each case (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--case", nargs=2, metavar=("DISTRIBUTION", "RANKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case[0], int(options.case[1]), options.repeat)))
        return 0
    print(
        "| lengths | ranks | sequences | micro-batches | planned in s | MB | / bound | step s | hash ms | JSON MB | "
        "read s |"
    )
    print("|---" * 11 + "|")
    rows = []
    for distribution in ("byted", "github"):
        for ranks in RANKS:
            command = [sys.executable, __file__, "--repeat", str(options.repeat), "--case", distribution, str(ranks)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({"lengths": distribution, "ranks": ranks} | found)
            print(
                f"| {distribution} | {ranks:,} | {found['sequences']:,} | {found['micro_batches']:,} | "
                f"{found['seconds']:.3f} | {found['mbytes']:.0f} | {found['gap']:.4f} | {found['step_s']:.1f} | "
                f"{1e3 * found['hash_s']:.1f} | {found['json_mbytes']:.1f} | {found['json_read_s']:.3f} |",
                flush=True,
            )
    if options.json:
        about = {"date": date.today().isoformat(), "machine": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
