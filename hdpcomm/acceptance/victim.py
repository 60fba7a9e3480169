"""A process of the job that loses a rank: ``python -m hdpcomm.acceptance.victim FOLDER``.

The last rank kills itself after the fourth step; the others train to the end and say how long that held them up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch

from hdpcomm.comm import Communicator, init
from hdpcomm.data.corpus import standard_library
from hdpcomm.models import LlamaConfig
from hdpcomm.run import RunConfig, RunResult, Saving, Watching, train
from hdpcomm.run.elastic import Elastic
from hdpcomm.run.peer_saves import KeptCheckpoint, PeerSaves
from hdpcomm.train import StepMetrics

_STEPS, _KILLED_AT = 8, 3


def _main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = LlamaConfig(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64)
    ends: list[tuple[int, float]] = []

    with init() as comm:
        last = comm.rank == comm.size - 1

        def on_step(policy: str, metrics: StepMetrics, costs: Mapping[str, float]) -> None:
            del policy, costs
            ends.append((metrics.step, time.perf_counter()))
            if last and metrics.step == _KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)

        def attempt(living: Communicator, resume: str | KeptCheckpoint | None, peers: PeerSaves) -> RunResult:
            corpus = standard_library(context=256)
            config = RunConfig(model=model, capacity=256, tokens_per_step=1024, steps=_STEPS)
            saving = Saving(folder / "checkpoints", resume=resume, peers=peers)
            return train(living, corpus, config, saving=saving, watching=Watching(on_step=on_step))

        Elastic(folder).run(comm, attempt)
    steps = [step for step, _ in ends]
    pauses = [after - before for (_, before), (_, after) in pairwise(ends)]
    print(json.dumps({"pause_s": max(pauses), "again": len(steps) - len(set(steps))}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
