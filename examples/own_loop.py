"""Hybrid data parallel training in a loop of one's own.

torchrun --nproc-per-node 4 examples/own_loop.py [STEPS [TOKENS]]            (or alone: a world of one)
"""

import sys

import torch

import hdpcomm as hdp
from hdpcomm.data import BatchSampler, standard_library

given = [int(word) for word in sys.argv[1:]]
steps, tokens = (given + [10, 8192][len(given) :])[:2]
torch.set_num_threads(1)  # the ranks share this machine's cores
with hdp.init() as comm:
    corpus = standard_library(context=2048)
    model = hdp.models.Llama(hdp.models.LlamaConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn=192))
    planner = hdp.Planner.measured(model, comm, capacity=2048 // comm.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = hdp.Trainer(model, optimizer, planner, comm, zero=1)
    sampler = BatchSampler(corpus.lengths, tokens=tokens)
    for step in range(steps):
        batch = sampler.batch(step)
        done = trainer.step(batch.lengths, lambda place, ids=batch.ids: corpus.read(ids[place]))
        if comm.rank == 0:
            print(f"step {step}: loss {done.loss:.3f}, {len(batch.ids)} sequences, on ranks {done.sequences_on_ranks}")
