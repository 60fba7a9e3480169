"""A model sharded by FSDP2 (fully_shard), trained on micro-batches that differ from rank to rank.

torchrun --nproc-per-node 4 examples/fsdp2.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdpcomm as hdp
from hdpcomm.data import BatchSampler, standard_library

steps, tokens = (int(word) for word in (*sys.argv[1:], "10", "8192")[:2])
torch.set_num_threads(1)
dist.init_process_group("gloo")  # FSDP2 gathers and scatters over it, once a step
with hdp.init() as comm:
    model = hdp.models.Llama(hdp.models.LlamaConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn=192))
    planner = hdp.Planner.measured(model, comm, capacity=2048 // comm.size)  # before it is sharded
    mesh = init_device_mesh("cpu", (comm.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainer = hdp.Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), planner, comm)
    corpus = standard_library(context=2048)
    sampler = BatchSampler(corpus.lengths, tokens=tokens)
    for step in range(steps):
        batch = sampler.batch(step)
        done = trainer.step(batch.lengths, lambda place, ids=batch.ids: corpus.read(ids[place]))
        if comm.rank == 0:
            print(f"step {step}: loss {done.loss:.3f}, {done.micro_batches} micro-batches")
dist.destroy_process_group()
