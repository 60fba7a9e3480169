"""hdpcomm's Trainer for transformers beside transformers.Trainer with packing and DDP over gloo, on the same documents.

    python benchmarks/huggingface.py --json benchmarks/results/huggingface.json     two ranks on two cores, some minutes
    python benchmarks/huggingface.py --equal 512 --json benchmarks/results/huggingface_equal.json

Documents are blocks of Python's standard library, a byte a token, drawn at random: hundreds of short ones and some long
ones. Both take the same documents in each step, on each rank as many, flattened to one row without padding
(``DataCollatorWithFlattening``), and train the same Llama from the same weights with AdamW. Losses a token of all steps
are compared. Both run in turns, each in fresh processes; the first steps, in which the planner's costs are measured and
memory is touched, are not counted. Compare the ratio: whatever else the machine does is in both.

With ``--equal`` all documents have so many tokens, of one text, and both get them as rows of a batch, where there is
nothing to plan and transformers' attention is fastest.
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
from statistics import median
from typing import Any

WARM_UP = 3  # steps
KINDS = ("hdpcomm", "transformers")


def documents(count: int, context: int, equal: int) -> list[dict[str, list[int]]]:
    import random
    from itertools import chain, islice

    from hdpcomm.data import standard_library

    corpus = standard_library(context=context)
    if equal:
        text = chain.from_iterable(corpus.read(place).tolist() for place in range(len(corpus.lengths)))
        return [{"input_ids": list(islice(text, equal))} for _ in range(count)]
    places = random.Random(1).sample([i for i, n in enumerate(corpus.lengths) if n > 1], count)
    return [{"input_ids": corpus.read(place).tolist()} for place in places]


def stacked(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """A batch of rows of one length."""
    import torch

    tokens = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


def run_rank(kind: str, out: Path, options: argparse.Namespace) -> None:
    """One rank of one run; rank 0 writes what it measured."""
    import torch
    import torch.distributed as dist
    import transformers

    import hdpcomm.torch_backend  # noqa: F401  (registers the backend)
    from hdpcomm.integrations.huggingface import Trainer

    torch.set_num_threads(1)
    dist.init_process_group("hdpcomm" if kind == "hdpcomm" else "gloo")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.context,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    rows = documents(options.documents, options.context, options.equal)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    args = transformers.TrainingArguments(
        str(out.parent / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=options.batch,
        num_train_epochs=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataloader_drop_last=True,
    )
    trainer = (Trainer if kind == "hdpcomm" else transformers.Trainer)(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=stacked if options.equal else transformers.DataCollatorWithFlattening(),
        callbacks=[clock],
    )
    trainer.train()
    size, rank = dist.get_world_size(), dist.get_rank()
    wide = options.batch * size
    tokens = [sum(len(row["input_ids"]) for row in rows[i * wide : (i + 1) * wide]) for i in range(len(clock.ends))]
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "tokens": sum(tokens[WARM_UP:]),
        "seconds": clock.ends[-1] - clock.ends[WARM_UP - 1],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if rank == 0:
        out.write_text(json.dumps(found))
    store = dist.distributed_c10d._get_default_store()
    store.add("ranks that have ended", 1)
    while store.add("ranks that have ended", 0) < size:
        time.sleep(0.05)
    # Ends here, with all objects: torch 2.13 hangs at times where DDP over gloo is let go of right after an operation,
    # since the thread that ends the operation wants the GIL, which the one that ends the group holds.
    os._exit(0)


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        words = ["--documents", "--context", "--batch", "--hidden", "--equal"]
        same = [word for name in words for word in (name, str(getattr(options, name[2:])))]
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        command = [sys.executable, *start, str(Path(__file__).resolve()), "--kind", kind, "--out", str(out), *same]
        top = str(Path(__file__).resolve().parents[1])
        done = subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": top, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--context", type=int, default=4096, help="longest document, in tokens")
    parser.add_argument("--batch", type=int, default=8, help="documents of a rank in a step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--equal", type=int, default=0, metavar="TOKENS", help="all documents have so many tokens")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.documents < (WARM_UP + 1) * options.batch * options.ranks:
        parser.error(f"{options.documents} documents are not {WARM_UP + 1} steps of {options.ranks} x {options.batch}")
    if options.kind:
        run_rank(options.kind, options.out, options)
        return
    turns = [{kind: run(kind, options) for kind in KINDS} for _ in range(options.turns)]
    import torch
    import transformers

    rows = []
    for kind in KINDS:
        speeds = [turn[kind]["tokens"] / turn[kind]["seconds"] for turn in turns]
        peak_mb = median(turn[kind]["peak_mb"] for turn in turns)
        rows.append({"name": kind, "tokens_per_s": median(speeds), "peak_mb": peak_mb, "turns": speeds})
        rows[-1]["losses"] = turns[0][kind]["losses"]
    pairs = [pair for turn in turns for pair in zip(*(turn[kind]["losses"] for kind in KINDS), strict=True)]
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(options, name) for name in ("ranks", "documents", "context", "batch", "hidden", "equal")},
        "tokens": turns[0]["hdpcomm"]["tokens"],
        "ratio": median(a / b for a, b in zip(rows[0]["turns"], rows[1]["turns"], strict=True)),
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "rows": rows,
    }
    for row in rows:
        losses = row["losses"]
        speed, peak = f"{row['tokens_per_s']:10,.0f} tokens/s", f"peak of rank 0 {row['peak_mb']:,.0f} MB"
        print(f"{row['name']:14}{speed}   {peak}   loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"ratio {report['ratio']:.2f}; losses of all steps within {report['largest_loss_difference']:.1e}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
