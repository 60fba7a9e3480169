"""Memory and time of saving a sharded run: each rank its own part, or the whole gathered on every rank.

    python benchmarks/checkpoint.py          four ranks, 21M parameters in bf16 with master weights, about half a minute

The memory is the most that the process held while it saved above what it held before (VmHWM of /proc/self/status, which
/proc/self/clear_refs sets back); freed memory that the process kept for itself is not in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

import torch

import hdpcomm as hdp
from hdpcomm.comm.launch import run_ranks
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.run import CheckpointFolder
from hdpcomm.train import Trainer

MODEL = LlamaConfig(vocabulary=8192, layers=6, hidden=512, heads=8, kv_heads=8, ffn=1536)


def kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def saved(folder: str, parts: bool) -> dict[str, float]:
    """Saves twice, of which the second one counts; on every rank."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        model = Llama(MODEL)
        optimizer = torch.optim.AdamW(model.parameters())
        planner = Planner(None, ClusterSpec(comm.size, 64), "balanced", CostModel(1e-6, 1e-5))
        trainer = Trainer(model, optimizer, planner, comm, zero=1, dtype=torch.bfloat16)
        trainer.step([64] * comm.size, lambda _: torch.arange(64))
        writers = comm.size if parts else 1
        writing = comm.rank < writers
        path = Path(folder)
        for step in (1, 2):
            comm.barrier()
            files = CheckpointFolder(path, keep=1, rank=comm.rank, writers=writers, session="s") if writing else None
            gc.collect()
            comm.barrier()
            Path("/proc/self/clear_refs").write_text("5")
            before, started = kib("VmRSS"), time.perf_counter()
            state = trainer.checkpoint_state() if parts else trainer.state_dict()
            if files is not None:
                files.save(step, {"policies": {"balanced": state}}, {})
            stopped = time.perf_counter() - started
            del state
            if files is not None:
                files.wait()
            comm.barrier()
            found = {"peak_mib": (kib("VmHWM") - before) / 1024, "stopped_s": stopped}
            found["seconds"] = time.perf_counter() - started
        found["parameters"] = sum(p.numel() for p in model.parameters())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = {}
    for name, parts in (("each rank its part", True), ("the whole gathered", False)):
        with tempfile.TemporaryDirectory() as folder:
            rows = run_ranks(saved, options.ranks, folder, parts, timeout=300)
        record[name] = rows
        peaks = ", ".join(f"{row['peak_mib']:.0f}" for row in rows)
        print(
            f"{name}: {rows[0]['parameters'] / 1e6:.1f}M parameters, peak of each rank {peaks} MiB, training stopped "
            f"for {rows[0]['stopped_s']:.2f} s, on the disk after {rows[0]['seconds']:.2f} s"
        )
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
