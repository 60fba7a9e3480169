"""One sequence that fits no rank: ring attention over all ranks, recomputation and offload as the memory model says.

torchrun --nproc-per-node 4 examples/long_context.py --length 65536 --memory 0.25
"""

import argparse
from functools import partial

import torch

import hdpcomm as hdp
from hdpcomm.measure import profile_memory
from hdpcomm.offload import ActivationOffload, PinnedPool

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--length", type=int, default=16384, help="tokens of the sequence")
parser.add_argument("--memory", type=float, default=0.1, help="GiB that a rank's step may take")
parser.add_argument("--pool", type=float, default=0.25, help="GiB of pinned host memory of a rank, for activations")
parser.add_argument("--steps", type=int, default=2)
options = parser.parse_args()

torch.set_num_threads(1)
make_optimizer = partial(torch.optim.AdamW, lr=1e-3)
with hdp.init() as comm:
    model = hdp.models.Llama(hdp.models.LlamaConfig(layers=6, hidden=64, heads=4, kv_heads=2, ffn=192)).to(comm.device)
    memory = profile_memory(model, comm, make_optimizer, tokens=256)
    tokens, limit = -(-options.length // comm.size), options.memory * 2**30
    recompute = memory.fewest_recomputed(limit, tokens, ratio=1.0)  # with all that offload can take in host memory
    hdp.models.set_recompute(model, recompute)
    resident = min(tokens, memory.capacity(limit, recompute))
    pool = PinnedPool(int(options.pool * 2**30), device=comm.device)
    offload = ActivationOffload(pool, model, min_bytes=4096)
    planner = hdp.Planner.measured(model, comm, capacity=resident, offload=offload)
    trainer = hdp.Trainer(model, make_optimizer(model.parameters()), planner, comm, offload=offload)
    for step in range(options.steps):
        done = trainer.step([options.length], lambda _: torch.arange(options.length) % 200)
        if comm.rank == 0:
            print(
                f"step {step}: loss {done.loss:.3f}, {options.length:,} tokens on {done.longest_ranks} ranks, "
                f"{recompute} of {memory.layers} layers recomputed, {done.offload_ratio:.2f} of the tokens offloaded, "
                f"{(memory.states + done.memory_bytes) / 2**20:.0f} of {options.memory * 1024:.0f} MiB"
            )
