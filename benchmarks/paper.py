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
from typing import Any

from hdpcomm.plan import (
    DEVICES,
    MODELS,
    ClusterSpec,
    CostModel,
    DeviceSpec,
    MicroBatch,
    ModelSpec,
    Planner,
    SequenceInfo,
    StepPlan,
)
from hdpcomm.plan.distributions import sample_lengths
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
CONTEXTS = (256 * K, 512 * K, 1 * M, 2 * M)


def cost_model(model: ModelSpec, cluster: ClusterSpec, gradient_bytes: int = 4) -> CostModel:
    """The analytic model; KV travels on with its gradient in the backward pass, in fp32 or, with 2 bytes, in bf16."""
    cost, once = CostModel.analytic(model, cluster), model.dtype_bytes
    share = (2 * once + gradient_bytes) / (2 * once + 4)
    forward = once / (2 * once + gradient_bytes)
    return replace(cost, kv_intra=share * cost.kv_intra, kv_inter=share * cost.kv_inter, forward_transfer=forward)


def step_seconds(
    device: str, distribution: str, context: int, seeds: int, gradient_bytes: int = 4
) -> dict[str, list[float]]:
    """Mean simulated step of each stage of the ablation over the same batches, the lower bound last, and the first and
    the ninth decile of its speed-up by batch."""
    times: list[list[float]] = [[] for _ in (*STAGES, "bound")]
    for seed in range(seeds):
        lengths = sample_lengths(distribution, tokens=TOKENS, context=context, seed=seed)
        for found, (policy, offload) in zip(times, STAGES, strict=False):
            cluster = ClusterSpec(RANKS, CAPACITY, NODE_RANKS, offload=offload, device=DEVICE[device])
            cost = cost_model(MODEL, cluster, gradient_bytes)
            report = simulate_step(Planner(MODEL, cluster, policy, cost, context=context), lengths)
            found.append(report.step_s)
        times[-1].append(report.plan.lower_bound_s)
    spread = [deciles([a / b for a, b in zip(times[0], found, strict=True)]) for found in times]
    return {
        "mean_s": [statistics.mean(found) for found in times],
        "low": [low for low, _ in spread],
        "high": [high for _, high in spread],
    }


def deciles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the ninth one."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(value) for value in row) + " |" for row in rows)])


def speedup(found: dict[str, list[float]], stage: int) -> str:
    """How much faster the mean step of a stage is than that of the first, with the deciles over the batches."""
    ratio = found["mean_s"][0] / found["mean_s"][stage]
    if stage == 0:
        return f"{ratio:.2f}x"
    return f"{ratio:.2f}x ({found['low'][stage]:.2f} to {found['high'][stage]:.2f})"


def ablation_table(result: dict[str, Any]) -> str:
    paper_speed, paper_seconds = (1.00, 1.59, 2.01, 3.69), (520, 272, None, 157)
    found = result["ablation"]
    rows = []
    for i, name in enumerate(STAGE_NAMES):
        row = [name, f"{paper_speed[i]:.2f}x"]
        row += [speedup(found[device], i) for device in DEVICE]
        row += [f"{paper_seconds[i]} s" if paper_seconds[i] else "-"]
        row += [f"{found[device]['mean_s'][i]:.0f} s" for device in DEVICE]
        rows.append(row)
    return table(["", "paper", "case", "fig6", "paper step", "case step", "fig6 step"], rows)


def contexts_table(result: dict[str, Any]) -> str:
    rows = []
    for device, by_name in result["contexts"].items():
        for name, by_size in by_name.items():
            half = result["bf16_gradients"][device][name]
            rows.append([device, name, *(speedup(by_size[str(size)], 3) for size in CONTEXTS), speedup(half, 3)])
    return table(["inputs", "lengths", "256K", "512K", "1M", "2M", "2M, KV gradients in bf16"], rows)


def doubling_table(result: dict[str, Any]) -> str:
    rows = []
    for name, stage, paper in (
        ("static", 0, "2x"),
        ("naive HDP with offload", 2, "1.23x"),
        ("balanced", 3, "1.08x"),
        ("lower bound", 4, "-"),
    ):
        row = [name, paper]
        for device in DEVICE:
            by_size = result["contexts"][device]["github"]
            lost = by_size[str(2 * M)]["mean_s"][stage] / by_size[str(256 * K)]["mean_s"][stage]
            row.append(f"{math.pow(lost, 1 / 3):.2f}x")
        rows.append(row)
    return table(["", "paper", "case", "fig6"], rows)


PAPER_OFFLOAD = {0.0: (59, 5.08), 0.5: (40, 5.08), 0.6: (37, 5.38), 0.8: (33, 5.93), 1.0: (27, 6.49)}


def offload() -> list[dict[str, float]]:
    """One sequence of 64K on 8 ranks with a given ratio (Fig. 21)."""
    cluster = ClusterSpec(8, CAPACITY, NODE_RANKS, offload=True, device=DEVICE["case"])
    planner = Planner(MODEL, cluster)
    result = []
    base = None
    for ratio in PAPER_OFFLOAD:
        batch = MicroBatch(0, tuple(range(8)), (SequenceInfo(0, 64 * K),), ratio, 0.0)
        report = simulate_step(planner, StepPlan("naive", 8, (batch,), 0.0, 0.0, 0.0, 0.0))
        base = base or report
        assert report.peak_bytes is not None
        assert base.peak_bytes is not None
        saved, longer = (base.peak_bytes - report.peak_bytes) / 1e9, report.compute_s / base.compute_s - 1
        result.append({"ratio": ratio, "saved_gb": saved, "longer": longer})
    return result


def offload_table(result: dict[str, Any]) -> str:
    rows = []
    for found in result["offload"]:
        paper_bytes, paper_seconds = PAPER_OFFLOAD[found["ratio"]]
        row = [found["ratio"], f"{59 - paper_bytes} GB", f"{found['saved_gb']:.0f} GB"]
        rows.append([*row, f"{100 * (paper_seconds / 5.08 - 1):+.1f}%", f"{100 * found['longer']:+.1f}%"])
    return table(["ratio", "paper saves", "ours", "paper adds", "ours"], rows)


SECTIONS = {
    "Ablation and step times: 7B, 2M context, Byted, 32M tokens": ablation_table,
    "Speed-up of balanced HDP by context (paper, 7B at 2M: GitHub 7.89x, Byted 4.26x)": contexts_table,
    "Throughput lost per doubling of the context, GitHub, 256K to 2M": doubling_table,
    "Offload at 64K: memory saved and time added": offload_table,
}


def measure(seeds: int) -> dict[str, Any]:
    contexts = {
        device: {
            name: {str(size): step_seconds(device, name, size, seeds) for size in CONTEXTS}
            for name in ("github", "byted")
        }
        for device in DEVICE
    }
    return {
        "date": date.today().isoformat(),
        "command": f"python benchmarks/paper.py --seeds {seeds}",
        "ablation": {device: contexts[device]["byted"][str(2 * M)] for device in DEVICE},
        "contexts": contexts,
        "bf16_gradients": {
            device: {name: step_seconds(device, name, 2 * M, seeds, gradient_bytes=2) for name in ("github", "byted")}
            for device in DEVICE
        },
        "offload": offload(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    for device in DEVICE.values():
        print(
            f"{device.name}: attention {device.attention_flops / 1e12:.0f} TFLOP/s, "
            f"linear {device.linear_flops / 1e12:.0f} TFLOP/s a rank, link {device.inter_bandwidth / 1e9:.1f} GB/s"
        )
    result = measure(options.seeds)
    for title, make in SECTIONS.items():
        print(f"\n## {title}\n\n{make(result)}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
