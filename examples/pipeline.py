"""Hybrid data parallel training whose ranks are pipelines of two stages.

torchrun --nproc-per-node 4 examples/pipeline.py            (two HDP ranks; with 2 processes: one)
"""

import sys

import torch

import hdpcomm as hdp
from hdpcomm.data import BatchSampler, standard_library
from hdpcomm.parallel import split_model

steps, tokens = (int(word) for word in (*sys.argv[1:], "10", "8192")[:2])
torch.set_num_threads(1)  # the ranks share this machine's cores
with hdp.init() as comm:
    corpus = standard_library(context=2048)
    mesh = hdp.Mesh(comm, pipeline=2)
    model = hdp.models.Llama(hdp.models.LlamaConfig(layers=4, hidden=64, heads=4, kv_heads=2, ffn=192))
    stage = split_model(model, mesh.pipeline)[mesh.stage]
    cost = hdp.plan.CostModel(attention=1e-9, linear=1e-5, fixed=1e-3)  # seconds, of one stage
    planner = hdp.Planner(None, mesh.cluster(capacity=2048), cost_model=cost)
    trainer = hdp.Trainer(stage, torch.optim.AdamW(stage.parameters(), lr=3e-3), planner, mesh)
    sampler = BatchSampler(corpus.lengths, tokens=tokens)
    for step in range(steps):
        batch = sampler.batch(step)
        done = trainer.step(batch.lengths, lambda place, ids=batch.ids: corpus.read(ids[place]))
        if comm.rank == 0:
            print(f"step {step}: loss {done.loss:.3f}, {done.micro_batches} micro-batches on {mesh.hdp} pipelines")
