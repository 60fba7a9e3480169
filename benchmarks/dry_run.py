"""Step times that ``hdpcomm train --dry-run`` predicts beside those of the run: recomputation, types and meshes.

    python benchmarks/dry_run.py [--only REGEX] [--rounds 5] [--json FILE]

Each round measures and predicts by the dry run's own code and then trains the same steps in the same processes, so what
else the machine does falls on both. Told are medians over rounds and of the ratio in each. A rank that waits sleeps at
once, as ranks may be more than cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.comm.launch import run_ranks
from hdpcomm.data import standard_library
from hdpcomm.models import LlamaConfig
from hdpcomm.run import RunConfig, dry_run, train

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, {}),
    "fp32, recomputed": (1, {"recompute": "full"}),
    "bf16": (1, {"dtype": "bf16"}),
    "bf16, recomputed": (1, {"dtype": "bf16", "recompute": "full"}),
    "HDP 2": (2, {}),
    "HDP 2, recomputed": (2, {"recompute": "full"}),
    "HDP 2, ZeRO 1": (2, {"zero": 1}),
    "HDP 2, ZeRO 3": (2, {"zero": 3}),
    "TP 2": (2, {"tensor": 2}),
    "PP 2": (2, {"pipeline": 2}),
    "PP 2, recomputed": (2, {"pipeline": 2, "recompute": "full"}),
    "EP 2": (2, {"expert": 2}),
    "HDP 2 x PP 2": (4, {"pipeline": 2}),
    "HDP 2 x TP 2": (4, {"tensor": 2}),
}
SIZES = {"vocabulary": 256, "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384}
EXPERTS = {"experts": 4, "top_k": 2}
STEPS = 4


def rounds_of(options: dict[str, Any], rounds: int, tokens: int) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of a step in each round; on every rank."""
    torch.set_num_threads(1)
    sizes = SIZES | (EXPERTS if "expert" in options else {})
    found = []
    with hdp.init() as comm:
        corpus = standard_library(context=tokens // 8, whole_every=8)
        config = RunConfig(
            model=LlamaConfig(**sizes), policies=("balanced",), capacity=tokens // 4, tokens_per_step=tokens,
            steps=STEPS + 1, **options,
        )  # fmt: skip
        for _ in range(rounds):
            predicted = [report.step_s for report in dry_run(comm, corpus, config).reports["balanced"]]
            steps = train(comm, corpus, config).steps["balanced"][:STEPS]
            measured = [step.seconds - step.plan_wait_s for step in steps]
            pairs = list(zip(predicted, measured, strict=True))[1:]  # the first step warms up
            found.append((sum(p for p, _ in pairs) / len(pairs), sum(m for _, m in pairs) / len(pairs)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose name this matches")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    os.environ.update(HDPCOMM_SPIN_US="0", HDPCOMM_YIELD_US="0")
    cases = {}
    print("| case | ranks | predicted s | measured s | ratio | of each round |\n|---|---|---|---|---|---|")
    for name, (ranks, more) in CASES.items():
        if not re.search(options.only, name):
            continue
        cases[name] = found = run_ranks(rounds_of, ranks, more, options.rounds, options.tokens)[0]
        ratios = [predicted / measured for predicted, measured in found]
        both = " | ".join(f"{median(column):.3f}" for column in zip(*found, strict=True))
        each = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        print(f"| {name} | {ranks} | {both} | {median(ratios):.2f} | {each} |", flush=True)
    if options.json:
        about = {"date": date.today().isoformat(), "machine": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps(about | {"tokens": options.tokens, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
