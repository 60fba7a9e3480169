"""Compares the figures of ByteScale (arXiv 2502.21231) with the planner and simulator; prints tables of docs/paper.md.

Inputs are the times of single layers and links; nothing is fitted to the results that are compared. The paper has two
sets of layer times, which differ by a factor of four: ``case`` is a rank of the case study (Fig. 18), ``fig6`` a rank
with the single-device times of Fig. 6a; the link is that of Fig. 18 for both.

Usage: ``python benchmarks/paper.py [--seeds 5] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from hdpcomm.data.distributions import sample_lengths
from hdpcomm.plan import DEVICES, MODELS, ClusterSpec, DeviceSpec, MicroBatch, Planner, SequenceInfo, StepPlan
from hdpcomm.sim import simulate_step

K, M = 2**10, 2**20
CAPACITY = 8 * K
TOKENS = 32 * M
# CP = 256 and 8 micro-batches of 2M tokens are 32M tokens on two groups: 512 ranks of two devices each.
RANKS, NODE_RANKS = 512, 4
MODEL = MODELS["llama-7b"]
MLP_FLOPS = 2 * 3 * MODEL.hidden * MODEL.ffn  # one token, one layer, forward
ATTENTION_FLOPS = 2 * MODEL.attention_width  # one token squared, one layer, causal, forward
KV_BYTES = 2 * MODEL.kv_width * MODEL.dtype_bytes


def _rank(name: str, attention_flops: float, linear_flops: float) -> DeviceSpec:
    return replace(
        DEVICES["a100"],
        name=name,
        attention_flops=attention_flops,
        linear_flops=linear_flops,
        inter_bandwidth=CAPACITY * KV_BYTES / 1.5e-3,  # Fig. 18: 1.4 to 1.6 ms pass 8K tokens' KV on
    )


DEVICE = {
    # Fig. 18: attention of 312K tokens on 39 ranks takes 110 ms, the MLP of 8K tokens 9 to 10 ms.
    "case": _rank("case", ATTENTION_FLOPS * (312 * K) ** 2 / 39 / 110e-3, MLP_FLOPS * CAPACITY / 9.5e-3),
    # Fig. 6a: 128K tokens on one device take 175.5 ms in attention and 28.2 ms in the MLP.
    "fig6": _rank("fig6", ATTENTION_FLOPS * (128 * K) ** 2 / 175.5e-3, MLP_FLOPS * 128 * K / 28.2e-3),
}
STAGES = (("static", False), ("naive", False), ("naive", True), ("balanced", True))
STAGE_NAMES = ("static DP x CP", "naive HDP", "+ offload", "+ balance")


def step_seconds(device: str, distribution: str, context: int, seeds: int) -> list[float]:
    """Mean simulated step of each stage of the ablation over the same batches, then the mean lower bound."""
    times: list[list[float]] = [[] for _ in (*STAGES, "bound")]
    for seed in range(seeds):
        lengths = sample_lengths(distribution, tokens=TOKENS, context=context, seed=seed)
        for found, (policy, offload) in zip(times, STAGES, strict=False):
            cluster = ClusterSpec(RANKS, CAPACITY, NODE_RANKS, offload=offload, device=DEVICE[device])
            report = simulate_step(Planner(MODEL, cluster, policy, context=context), lengths)
            found.append(report.step_s)
        times[-1].append(report.plan.lower_bound_s)
    return [statistics.mean(found) for found in times]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row) + " |")
    print(flush=True)


def ablation(seeds: int) -> dict[str, list[float]]:
    paper_speed, paper_seconds = (1.00, 1.59, 2.01, 3.69), (520, 272, None, 157)
    found = {device: step_seconds(device, "byted", 2 * M, seeds) for device in DEVICE}
    print("## Ablation and step times: 7B, 2M context, Byted, 32M tokens\n")
    rows = []
    for i, name in enumerate(STAGE_NAMES):
        row = [name, f"{paper_speed[i]:.2f}x"]
        row += [f"{found[device][0] / found[device][i]:.2f}x" for device in DEVICE]
        row += [f"{paper_seconds[i]} s" if paper_seconds[i] else "-"]
        row += [f"{found[device][i]:.0f} s" for device in DEVICE]
        rows.append(row)
    table(["", "paper", "case", "fig6", "paper step", "case step", "fig6 step"], rows)
    return found


def contexts(seeds: int) -> dict[str, dict[str, dict[int, list[float]]]]:
    sizes = (256 * K, 512 * K, 1 * M, 2 * M)
    found = {
        device: {
            name: {size: step_seconds(device, name, size, seeds) for size in sizes} for name in ("github", "byted")
        }
        for device in DEVICE
    }
    print("## Speed-up of balanced HDP by context (paper, 7B at 2M: GitHub 7.89x, Byted 4.26x)\n")
    rows = []
    for device, by_name in found.items():
        for name, by_size in by_name.items():
            rows.append([device, name, *(f"{by_size[size][0] / by_size[size][3]:.2f}x" for size in sizes)])
    table(["inputs", "lengths", "256K", "512K", "1M", "2M"], rows)
    print("## Throughput lost per doubling of the context, GitHub, 256K to 2M\n")
    rows = []
    for name, stage, paper in (
        ("static", 0, "2x"),
        ("naive HDP with offload", 2, "1.23x"),
        ("balanced", 3, "1.08x"),
        ("lower bound", 4, "-"),
    ):
        row = [name, paper]
        for device in DEVICE:
            by_size = found[device]["github"]
            row.append(f"{math.pow(by_size[2 * M][stage] / by_size[256 * K][stage], 1 / 3):.2f}x")
        rows.append(row)
    table(["", "paper", "case", "fig6"], rows)
    return found


def offload() -> list[dict[str, float]]:
    """One sequence of 64K on 8 ranks with a given ratio (Fig. 21)."""
    paper = {0.0: (59, 5.08), 0.5: (40, 5.08), 0.6: (37, 5.38), 0.8: (33, 5.93), 1.0: (27, 6.49)}
    cluster = ClusterSpec(8, CAPACITY, NODE_RANKS, offload=True, device=DEVICE["case"])
    planner = Planner(MODEL, cluster)
    rows, result = [], []
    base = None
    for ratio, (paper_bytes, paper_seconds) in paper.items():
        batch = MicroBatch(0, tuple(range(8)), (SequenceInfo(0, 64 * K),), ratio, 0.0)
        report = simulate_step(planner, StepPlan("naive", 8, (batch,), 0.0, 0.0, 0.0, 0.0))
        base = base or report
        assert report.peak_bytes is not None
        assert base.peak_bytes is not None
        saved, longer = (base.peak_bytes - report.peak_bytes) / 1e9, report.compute_s / base.compute_s - 1
        result.append({"ratio": ratio, "saved_gb": saved, "longer": longer})
        rows.append(
            [
                ratio,
                f"{59 - paper_bytes} GB",
                f"{saved:.0f} GB",
                f"{100 * (paper_seconds / 5.08 - 1):+.1f}%",
                f"{100 * longer:+.1f}%",
            ]
        )
    print("## Offload at 64K: memory saved and time added\n")
    table(["ratio", "paper saves", "ours", "paper adds", "ours"], rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    for device in DEVICE.values():
        print(
            f"{device.name}: attention {device.attention_flops / 1e12:.0f} TFLOP/s, "
            f"linear {device.linear_flops / 1e12:.0f} TFLOP/s a rank, link {device.inter_bandwidth / 1e9:.1f} GB/s"
        )
    print()
    result = {
        "date": date.today().isoformat(),
        "ablation_s": ablation(options.seeds),
        "contexts_s": contexts(options.seeds),
        "offload": offload(),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
