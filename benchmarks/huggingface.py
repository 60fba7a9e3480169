"""hdpcomm's Trainer for transformers beside transformers.Trainer with packing and DDP over gloo, on the same documents.

    python benchmarks/huggingface.py --json benchmarks/results/huggingface.json     two ranks on two cores, some minutes
    python benchmarks/huggingface.py --equal 512 --json benchmarks/results/huggingface_equal.json

Documents are blocks of Python's standard library, a byte a token, drawn at random: hundreds of short ones and some long
ones. Both take the same documents in each step, on each rank as many, flattened to one row without padding
(``DataCollatorWithFlattening``), and train the same Llama from the same weights with AdamW. Losses a token of all steps
are compared. The first steps, in which the planner's costs are measured and memory is touched, are not counted.

Both run at the same time and take turns: one trains some steps while the other sleeps, so that what else the machine
does in the meantime is in both. The ratio is the median of those of all pairs of turns, in which both train the same
documents.

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

WARM_UP = 2  # turns
TURN = 2  # steps
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


class Turns:
    """Who trains: of two runs the one whose name is in a file, which rank 0 of that run passes on."""

    def __init__(self, kind: str, rank: int, file: Path) -> None:
        self.kind, self.rank, self.file = kind, rank, file
        self.seconds: list[float] = []
        self.steps = 0
        self.wait()

    def wait(self) -> None:
        while self.file.read_text() not in (self.kind, "both"):
            time.sleep(0.01)
        self._began = time.perf_counter()

    def end_step(self) -> None:
        self.steps += 1
        if self.steps % TURN:
            return
        self.seconds.append(time.perf_counter() - self._began)
        if self.rank == 0:
            self.pass_on(KINDS[1 - KINDS.index(self.kind)])
        self.wait()

    def pass_on(self, kind: str) -> None:
        if self.file.read_text() == "both":  # the other run has ended
            return
        new = self.file.with_name(f"{self.kind}.turn")
        new.write_text(kind)
        new.replace(self.file)


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

    turns = Turns(kind, dist.get_rank(), options.turn)

    class EndOfStep(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end_step()

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
        callbacks=[EndOfStep()],
    )
    trainer.train()
    size, rank = dist.get_world_size(), dist.get_rank()
    wide = TURN * options.batch * size
    tokens = [sum(len(row["input_ids"]) for row in rows[i * wide : (i + 1) * wide]) for i in range(len(turns.seconds))]
    measured = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "speeds": [count / seconds for count, seconds in zip(tokens, turns.seconds, strict=True)][WARM_UP:],
        "tokens": sum(tokens[WARM_UP:]),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if rank == 0:
        turns.pass_on("both")
        out.write_text(json.dumps(measured))
    store = dist.distributed_c10d._get_default_store()
    store.add("ranks that have ended", 1)
    while store.add("ranks that have ended", 0) < size:
        time.sleep(0.05)
    # Ends here, with all objects: torch 2.13 hangs at times where DDP over gloo is let go of right after an operation,
    # since the thread that ends the operation wants the GIL, which the one that ends the group holds.
    os._exit(0)


def start(kind: str, folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    words = ["--documents", "--context", "--batch", "--hidden", "--equal"]
    same = [word for name in words for word in (name, str(getattr(options, name[2:])))]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    files = ["--out", str(folder / kind), "--turn", str(folder / "turn")]
    top = str(Path(__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, *launch, str(Path(__file__).resolve()), "--kind", kind, *files, *same],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": top, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"{kind}.err").open("w"),
        text=True,
    )


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measurements of rank 0 of both runs, by their kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "turn").write_text(KINDS[0])
        running = {kind: start(kind, folder, options) for kind in KINDS}
        while True:
            ends = {kind: process.poll() for kind, process in running.items()}
            failed = [kind for kind in KINDS if ends[kind]]
            if failed:
                for process in running.values():
                    process.terminate()
                sys.exit(f"{failed[0]} ended with {ends[failed[0]]}:\n{(folder / f'{failed[0]}.err').read_text()}")
            if None not in ends.values():
                break
            time.sleep(0.2)
        return {kind: json.loads((folder / kind).read_text()) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--context", type=int, default=4096, help="longest document, in tokens")
    parser.add_argument("--batch", type=int, default=8, help="documents of a rank in a step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--equal", type=int, default=0, metavar="TOKENS", help="all documents have so many tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    fewest = (WARM_UP + 1) * TURN
    if options.documents < fewest * options.batch * options.ranks:
        parser.error(f"{options.documents} documents are not {fewest} steps of {options.ranks} x {options.batch}")
    if options.kind:
        run_rank(options.kind, options.out, options)
        return
    runs = run(options)
    import torch
    import transformers

    rows = []
    for kind in KINDS:
        speeds, peak_mb = runs[kind]["speeds"], runs[kind]["peak_mb"]
        rows.append({"name": kind, "tokens_per_s": median(speeds), "peak_mb": peak_mb, "turns": speeds})
        rows[-1]["losses"] = runs[kind]["losses"]
    pairs = list(zip(*(runs[kind]["losses"] for kind in KINDS), strict=True))
    ratios = sorted(a / b for a, b in zip(rows[0]["turns"], rows[1]["turns"], strict=True))
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(options, name) for name in ("ranks", "documents", "context", "batch", "hidden", "equal")},
        "tokens": runs["hdpcomm"]["tokens"],
        "ratio": median(ratios),
        "half_of_the_ratios": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "rows": rows,
    }
    for row in rows:
        losses = row["losses"]
        speed, peak = f"{row['tokens_per_s']:10,.0f} tokens/s", f"peak of rank 0 {row['peak_mb']:,.0f} MB"
        print(f"{row['name']:14}{speed}   {peak}   loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(
        f"ratio {report['ratio']:.3f} (half of {len(ratios)} pairs of turns: {report['half_of_the_ratios'][0]:.3f} to "
        f"{report['half_of_the_ratios'][1]:.3f}); losses of all steps within {report['largest_loss_difference']:.1e}"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
