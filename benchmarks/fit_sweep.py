"""``hdpcomm fit`` for published models at their sizes, on 64 to 1,024 H100s: memory, step, and what limits.

    python benchmarks/fit_sweep.py [--only REGEX] [--limit-s 900] [--json benchmarks/results/fit_sweep.json]

Each row writes the model's ``config.json``, without weights, into a folder and runs the command once. Rows that are not
run keep what the file has of them. ``cpu_s`` is the processor time of the command. A command that ends with a message
in place of a table has that message in its row.

Sizes are the defaults of transformers' configuration classes, which are those of DeepSeek-V3.2, Qwen3-Next-80B-A3B,
gpt-oss-120b and MiniMax-M2, and otherwise of the config.json of moonshotai/Kimi-K2-Instruct, Qwen/Qwen3-235B-A22B,
zai-org/GLM-4.5, MiniMaxAI/MiniMax-Text-01 and meta-llama/Llama-4-Maverick-17B-128E (its text model), and of table 1 of
Nemotron-H (arXiv 2504.03624).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import transformers

RESULT = Path(__file__).with_name("results") / "fit_sweep.json"
NEMOTRON = "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-"
NEMOTRON_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3.2": ("DeepseekV32Config", {}),
    "kimi-k2": (
        "DeepseekV3Config",
        {
            "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
            "num_nextn_predict_layers": 0,
        },
    ),
    "qwen3-235b": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536, "norm_topk_prob": True,
        },
    ),
    "qwen3-next-80b": ("Qwen3NextConfig", {}),
    "glm-4.5": (
        "Glm4MoeConfig",
        {
            "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "head_dim": 128,
            "moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True,
            "attention_bias": True, "routed_scaling_factor": 2.5,
        },
    ),
    "gpt-oss-120b": ("GptOssConfig", {}),
    "minimax-text-01": (
        "MiniMaxConfig",
        {
            "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
            "layer_types": 10 * [*7 * ["linear_attention"], "full_attention"],
        },
    ),
    "minimax-m2": ("MiniMaxM2Config", {}),
    "nemotron-h-56b": (
        "NemotronHConfig",
        {
            "hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 64, "mamba_num_heads": 256,
            "ssm_state_size": 256, "layers_block_type": [NEMOTRON_TYPES[each] for each in NEMOTRON],
        },
    ),
    "llama-4-maverick": ("Llama4TextConfig", {"num_local_experts": 128, "interleave_moe_layer_step": 2}),
}  # fmt: skip
"""By name, transformers' class and what differs from its defaults."""
ROWS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("deepseek-v3.2", 1024, {"pipeline": 16, "expert": 16}),
    ("kimi-k2", 1024, {"pipeline": 16, "expert": 16}),
    ("qwen3-235b", 256, {"pipeline": 8, "expert": 8}),
    ("qwen3-next-80b", 64, {"pipeline": 4, "expert": 8}),
    ("glm-4.5", 256, {"pipeline": 8, "expert": 16}),
    ("gpt-oss-120b", 64, {"pipeline": 4, "expert": 8}),
    ("minimax-text-01", 256, {"pipeline": 8, "expert": 8}),
    ("minimax-m2", 256, {"pipeline": 8, "expert": 8}),
    ("nemotron-h-56b", 64, {"pipeline": 8, "tensor": 2}),
    ("llama-4-maverick", 256, {"pipeline": 8, "expert": 16}),
)
"""Model, devices, and the mesh; layers are cut into stages of about equal work."""
COMMON = ["--device", "h100", "--context", "32K", "--tokens-per-step", "4M", "--zero", "1"]
PARTS = ("weights", "gradients", "optimizer", "activations")


def write_config(name: str, folder: Path) -> str | None:
    """Writes config.json; returns why not."""
    kind, sizes = MODELS[name]
    if not hasattr(transformers, kind):
        return f"transformers {transformers.__version__} has no {kind}"
    getattr(transformers, kind)(**sizes).save_pretrained(folder)
    return None


def run_row(name: str, ranks: int, mesh: dict[str, int], limit_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "ranks": ranks, "mesh": mesh}
    with tempfile.TemporaryDirectory() as folder:
        if (missing := write_config(name, Path(folder))) is not None:
            return row | {"message": missing}
        table = Path(folder) / "fit.json"
        sizes = [text for size, count in ({"tensor": 1} | mesh).items() for text in (f"--{size}", str(count))]
        command = [sys.executable, "-m", "hdpcomm", "fit", "--model", folder, "--ranks", str(ranks), *sizes, *COMMON]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                [*command, "--json", str(table)], capture_output=True, text=True, timeout=limit_s,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "1000"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return row | {"message": f"no answer within {limit_s:.0f} s"}
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        row["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if table.exists():
            (setting,) = json.loads(table.read_text())["settings"]
            return row | setting | {"limit": max(PARTS, key=lambda part: setting[part])}
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return row | {"message": lines[-1].removeprefix("hdpcomm: error: ") if lines else f"exit {done.returncode}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="models to run")
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="S", help="of a row (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.json is not None and options.json.exists():
        rows = {key_of(row): row for row in json.loads(options.json.read_text())["rows"]}
    for name, ranks, mesh in ROWS:
        if options.only.search(name):
            row = run_row(name, ranks, mesh, options.limit_s) | {"date": date.today().isoformat()}
            rows[key_of(row)] = row
            print(json.dumps(row), flush=True)
            if options.json is not None:
                order = [key_of({"model": name, "ranks": ranks}) for name, ranks, _ in ROWS]
                kept = [rows[key] for key in order if key in rows]
                options.json.write_text(json.dumps({"options": COMMON, "rows": kept}, indent=1) + "\n")
    return 0


def key_of(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['ranks']}"


if __name__ == "__main__":
    sys.exit(main())
