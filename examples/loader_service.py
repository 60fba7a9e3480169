"""Training on documents that become tokens meanwhile: no index is made before the first step.

torchrun --nproc-per-node 4 examples/loader_service.py FOLDER        (text or JSONL; or alone: a world of one)
"""

import argparse
from pathlib import Path

import torch

import hdpcomm as hdp
from hdpcomm.data import LoaderService, open_stream

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", type=Path, nargs="+", help="files or folders")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--tokens", type=int, default=8192, help="of a step")
parser.add_argument("--context", type=int, default=2048)
options = parser.parse_args()
torch.set_num_threads(1)  # the ranks share this machine's cores
with hdp.init() as comm:
    stream = open_stream([str(path) for path in options.data], context=options.context, comm=comm)
    model = hdp.models.Llama(hdp.models.LlamaConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn=192))
    planner = hdp.Planner.measured(model, comm, capacity=-(-options.context // comm.size))
    trainer = hdp.Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), planner, comm)
    with LoaderService(stream, tokens=options.tokens, prefetch=2, comm=comm) as loader:
        for step in range(options.steps):
            batch = loader.batch(step)
            done = trainer.step(batch.lengths, loader.reader(step))  # reads the parts of this rank alone
            loader.done(step + 1)
            if comm.rank == 0:
                print(f"step {step}: loss {done.loss:.3f}, {len(batch.lengths)} sequences")
        state = loader.state(options.steps)  # for a checkpoint; LoaderService(..., state=state) goes on from here
    if comm.rank == 0:
        print(f"step {options.steps} would go on with {state}"[:100])
