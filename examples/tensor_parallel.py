"""Hybrid data parallel training whose ranks are pairs that share every layer; with --pipeline, pipelines of such pairs.

torchrun --nproc-per-node 4 examples/tensor_parallel.py            (two HDP ranks; with 2 processes: one)
torchrun --nproc-per-node 8 examples/tensor_parallel.py --pipeline (two HDP ranks of 2 stages x 2 tensor ranks)
"""

import argparse

import torch

import hdpcomm as hdp
from hdpcomm.data import BatchSampler, standard_library
from hdpcomm.parallel import split_model, tensor_parallel

parser = argparse.ArgumentParser()
parser.add_argument("--pipeline", action="store_true")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--tokens", type=int, default=8192, help="of a step")
options = parser.parse_args()
torch.set_num_threads(1)  # the ranks share this machine's cores
with hdp.init() as comm:
    corpus = standard_library(context=2048)
    mesh = hdp.Mesh(comm, tensor=2, pipeline=2 if options.pipeline else 1)
    model = hdp.models.Llama(hdp.models.LlamaConfig(layers=4, hidden=64, heads=4, kv_heads=2, ffn=192))
    part = split_model(model, mesh.pipeline)[mesh.stage] if options.pipeline else model
    tensor_parallel(part, mesh)
    cost = hdp.plan.CostModel(attention=1e-9, linear=1e-5, fixed=1e-3)  # seconds, of one stage
    planner = hdp.Planner(None, mesh.cluster(capacity=2048), cost_model=cost)
    trainer = hdp.Trainer(part, torch.optim.AdamW(part.parameters(), lr=3e-3), planner, mesh)
    sampler = BatchSampler(corpus.lengths, tokens=options.tokens)
    for step in range(options.steps):
        batch = sampler.batch(step)
        done = trainer.step(batch.lengths, lambda place, ids=batch.ids: corpus.read(ids[place]))
        if comm.rank == 0:
            print(f"step {step}: loss {done.loss:.3f}, {done.micro_batches} micro-batches on {mesh.hdp} HDP ranks")
