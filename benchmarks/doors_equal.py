"""Losses and weights of models that others' trainers train with plans, beside those trainers in one process, in fp32.

    python benchmarks/doors_equal.py [--doors transformers sft grpo] [--zero 0 3] [--json FILE] [--folder FOLDER]
    python benchmarks/doors_equal.py --doors verl --zero 2 3 [--json FILE] [--folder FOLDER]

The model and the doors are those of ``benchmarks/doors.py``, in fp32 throughout. The other base trains in one process
(verl's FSDP2 engine over gloo for ``verl``). The door takes the same global batches on several ranks, saves a
checkpoint before the last step, and makes that step on one rank fewer, from the checkpoint: losses and norms of
gradients are compared step by step. Then the model that these ranks save is loaded by ``transformers``, compared with
their own weights bit by bit, and with those of the one process: the largest difference, and the whole difference over
the whole way from the first weights. Answers of GRPO follow from prompts and places, so that all have the same. Norms
differ by more than losses: torch sums squares in fp32 (one thread, 4 million elements: 1e-4 too little), the ranks in
fp64.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from doors import CAPACITY, COST, DOORS, RANKS, trainer_of, verl_client, verl_rows, verl_step
from large_model import write_model

import hdpcomm as hdp
from hdpcomm.testing import spawn

BATCH = 24
"""Sequences of a step, for 4, 3, 2 and 1 ranks."""
ENTRIES = ("loss", "grad_norm")


def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers of a GRPO trainer's prompts, each of which comes twice in succession."""
    tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    found = [[2 + (sum(each) + 7 * (place % 2) + i) % 48 for i in range(3 + sum(each) % 3 + 2 * (place % 2))]
             for place, each in enumerate(tokens)]  # fmt: skip
    return {"prompt_ids": tokens, "completion_ids": found, "logprobs": [[-4.0] * len(each) for each in found]}


def same_as_loaded(trainer: Any, folder: str) -> bool:
    """Whether transformers loads the weights that the ranks have together. Collective."""
    loaded = load(folder) if trainer.comm.rank == 0 else {}
    names = set()
    for tied, tensor in trainer._made[1].whole_weights(trainer.model.state_dict(keep_vars=True)):
        names |= {name for name in tied if name in loaded and torch.equal(loaded[name], tensor)}
    return names == loaded.keys()


def load(folder: str | Path) -> dict[str, torch.Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: each.detach() for name, each in model.state_dict().items()}


def run_rank(door: str, folder: str, zero: int | None, steps: int, resume: bool) -> dict[str, Any]:
    """A rank of the door; ``zero=None``: the one process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with hdp.init() as comm:
        if zero is not None:
            store = f"file://{folder}/store-{door}-{zero}-{resume}"
            dist.init_process_group("hdpcomm", store, rank=comm.rank, world_size=comm.size)
        settings = {
            "max_steps": steps, "per_device_train_batch_size": BATCH // comm.size, "lr_scheduler_type": "constant",
        }  # fmt: skip
        plans = None if zero is None else {"capacity": CAPACITY, "cost_model": COST, "zero": zero}
        more = {"rollout_func": answers} if door == "grpo" else {}
        trainer = trainer_of(door, Path(folder), settings, plans, **more)()
        trainer.train(resume_from_checkpoint=f"{folder}/out/checkpoint-{steps - 1}" if resume else None)
        same = None
        if zero is None:
            trainer.save_model(f"{folder}/one")
        elif resume:
            trainer.save_model(f"{folder}/ranks")
            same = same_as_loaded(trainer, f"{folder}/ranks")
        else:
            trainer._save_checkpoint(trainer.model, trial=None)
        if zero is not None:
            dist.destroy_process_group()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {"same": same, **{name: [float(row[name]) for row in logs] for name in ENTRIES}}


def verl_rank(folder: str, zero: int | None, steps: int, resume: bool) -> dict[str, Any]:
    """As :func:`run_rank`, of verl's workers."""
    strategy = "fsdp2" if zero is None else "hdpcomm"
    client = verl_client(strategy)
    from verl.workers.utils.losses import sft_loss

    with hdp.init() as comm:
        dist.init_process_group("gloo", f"file://{folder}/store-{zero}-{resume}", rank=comm.rank, world_size=comm.size)
        data, loss = verl_rows(client, comm.rank, comm.size), partial(sft_loss, config=None)
        settings = {"optimizer": "AdamW", "reshard_after_forward": zero != 2}
        worker = client.worker_of(strategy, "language_model", f"{folder}/model", loss, 1e-4, **settings)
        if resume:
            worker.load_checkpoint(f"{folder}/out")
        metrics = [verl_step(client, worker, data) for _ in range(1 if resume else steps)]
        same, save = None, partial(torch.save, f=f"{folder}/one.pt")
        if zero is None:
            save(dict(worker.engine.get_per_tensor_param()[0]))
        elif resume:
            worker.engine.checkpoint_config.save_contents.append("hf_model")
            worker.save_checkpoint(f"{folder}/ranks")
            loaded = load(f"{folder}/ranks/huggingface")
            whole = worker.engine.get_per_tensor_param()[0]
            same = all(torch.equal(loaded[name], tensor) for name, tensor in whole)
        else:
            worker.save_checkpoint(f"{folder}/out")
        dist.destroy_process_group()
    return {"same": same, **{name: [float(each[name]) for each in metrics] for name in ENTRIES}}


def compare(options: argparse.Namespace, where: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of each door."""
    parameters = write_model(options, where / "model")
    steps = options.steps
    for door in options.doors:
        run, own = (verl_rank, [str(where)]) if door == "verl" else (run_rank, [door, str(where)])
        (one,) = spawn(run, 1, *own, None, steps, False, timeout=3600.0)
        for zero in options.zero:
            ranks, started = (RANKS[zero], RANKS[zero] - 1), time.perf_counter()
            first = spawn(run, ranks[0], *own, zero, steps - 1, False, timeout=3600.0)
            then = spawn(run, ranks[1], *own, zero, steps, True, timeout=3600.0)
            row: dict[str, Any] = {"parameters": parameters, "ranks": ranks, "seconds": time.perf_counter() - started}
            for name in ENTRIES:
                found = [*first[0][name], then[0][name][-1]]
                pairs = list(zip(one[name], found, strict=True))
                row[name] = {"one process": one[name], "ranks": found}
                row[name]["largest difference"] = max(abs(a - b) / abs(a) for a, b in pairs)
            row["loaded by transformers are the ranks' weights"] = all(each["same"] for each in then)
            row["weights"] = differences(where, verl=door == "verl")
            shutil.rmtree(where / "ranks")
            shutil.rmtree(where / "out")
            yield f"{door}, zero {zero}", row


def differences(where: Path, *, verl: bool) -> dict[str, float]:
    """How far the weights of the ranks are from those of the one process."""
    one = torch.load(where / "one.pt") if verl else load(where / "one")
    ranks, before = load(where / "ranks/huggingface" if verl else where / "ranks"), load(where / "model")
    apart = [(ranks[name] - one[name]).abs() for name in one]
    moved = [one[name] - before[name] for name in one]
    whole, way = (math.sqrt(sum(float(each.double().square().sum()) for each in some)) for some in (apart, moved))
    return {"largest difference": max(float(each.max()) for each in apart), "over the way": whole / way}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 20), ("hidden", 1024), ("vocabulary", 32000), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS[:3])
    parser.add_argument("--zero", nargs="+", type=int, choices=tuple(RANKS), default=(0, 3))
    parser.add_argument("--folder", type=Path, help="where everything is written (a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures, too, beside those that it has")
    options = parser.parse_args()
    if "verl" in options.doors and 0 in options.zero:
        parser.error("verl's engine has no stage 0 of ZeRO; give --zero 2 3")
    options.ranks = 1  # key and value heads of the model need not be cut
    packages = ("torch", "transformers", "verl" if "verl" in options.doors else "trl")
    here = {
        "date": date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: importlib.metadata.version(name) for name in packages},
    }  # fmt: skip
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, row in compare(options, Path(folder)):
            found[name] = here | row
            print(name, json.dumps({key: value for key, value in row.items() if key not in here}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
