"""Ranks with other numbers of rows, so of micro-batches: verl's FSDP2 engine hangs, ``strategy=hdpcomm`` does not.

verl 0.9.1 makes the micro-batches of its ranks as many where it cuts them by tokens (``use_dynamic_bsz``), not where by
rows. Figures are compared with those of FSDP2 with the same rows in equal numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from common import Figures, join, leave, main, tiny_llama
from verl_engine import asked, cpu_platform, worker_of

LENGTHS = (30, 7, 12, 3, 25, 9, 4, 18)
"""Tokens of each row."""
STEPS = 2
PATIENCE_S = 45.0
"""How long no rank may begin or end a step until it counts as hanging."""


def rows_of(rank: int, *, even: bool) -> Any:
    """A rank's rows: half of them, or all but two on rank 0."""
    import torch
    from verl.utils import tensordict_utils

    draw = torch.Generator().manual_seed(8)
    rows = [torch.randint(1, 64, (count,), generator=draw) for count in LENGTHS]
    first = len(rows) // 2 if even else len(rows) - 2
    own = rows[first:] if rank else rows[:first]
    masks = [(torch.arange(len(row)) > 0).long() for row in own]
    columns = {"input_ids": own, "position_ids": [torch.arange(len(row)) for row in own], "loss_mask": masks}
    return tensordict_utils.get_tensordict(
        {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in columns.items()}
    )


def work(backend: str) -> Figures:
    """Steps of verl's worker; ``"gloo"`` and ``"uneven"`` are FSDP2, the second with the rows that hdpcomm gets."""
    from functools import partial

    import torch.distributed as dist
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import sft_loss

    warnings.simplefilter("ignore")
    rank, _ = join("gloo")
    cpu_platform()
    strategy = "hdpcomm" if backend == "hdpcomm" else "fsdp2"
    if strategy == "fsdp2":
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # where its engine is registered
    if rank == 0:
        tiny_llama().save_pretrained("model")
    dist.barrier()
    worker = worker_of(strategy, "language_model", "model", partial(sft_loss, config=None), 1.0)
    data = rows_of(rank, even=backend == "gloo")
    more = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "update_lr_scheduler": True}
    found: Figures = {}
    for step in range(STEPS):
        Path(f"begins-{step}-{rank}").touch()
        metrics = tensordict_utils.get(worker.train_batch(asked(data, global_token_num=None, **more)), "metrics")
        Path(f"ends-{step}-{rank}").touch()
        found[f"{step}"] = [float(metrics[key]) for key in ("loss", "grad_norm", "lr")]
    for key, tensor in worker.engine.get_per_tensor_param()[0]:
        found[key] = tensor.flatten().tolist()
    leave("gloo")
    return found


def check_hang() -> None:
    """FSDP2 with the rows that hdpcomm has had: both ranks begin the first step, and neither ends it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).resolve()), "--backend", "uneven", "--out", "figures.json"]
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        with Path(name, "log").open("w") as log:
            job = subprocess.Popen(command, cwd=name, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                seen, since = -1, time.monotonic()
                while job.poll() is None and time.monotonic() - since < PATIENCE_S:
                    steps = len(list(Path(name).glob("*s-*-?")))
                    if steps != seen or steps < 2:  # until both ranks have begun there is nothing to wait for
                        seen, since = steps, time.monotonic()
                    time.sleep(0.5)
            finally:
                ended = job.poll()
                job.terminate()  # it ends the ranks
                job.wait()
        found = sorted(path.name for path in Path(name).glob("*s-*-?"))
        if ended is not None or found != ["begins-0-0", "begins-0-1"]:
            sys.exit(f"FSDP2 does not hang: code {ended}, {found}:\n{Path(name, 'log').read_text()[-4000:]}")


if __name__ == "__main__":
    if "--backend" not in sys.argv:
        check_hang()
    main(work, against="gloo", packages=["torch", "verl", "transformers"])
