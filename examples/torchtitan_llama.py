"""torchtitan's Llama, trained by plans: documents of any lengths, each on as many ranks as it needs.

torchrun --nproc-per-node 4 examples/torchtitan_llama.py [STEPS [TOKENS]]     (pip install torchtitan triton)
"""

import sys

import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.attention import packed_attention
from hdpcomm.data import BatchSampler, standard_library


class PackedAttention(nn.Module):
    """In the place of torchtitan's inner attention: q, k, v are [1, local tokens, heads, head size]."""

    def forward(self, q, k, v, *, attention_masks=None, scale=None, is_causal=True, **_):
        if attention_masks is not None:
            raise hdp.InvalidUsage("attention_masks were given; a plan's packs say which tokens see which")
        return packed_attention(q, k, v, causal=is_causal, scale=scale)


class Planned(nn.Module):
    """A torchtitan decoder in the form that hdp.adapt() takes: the local tokens of a pack, and their positions."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder
        for layer in decoder.layers.values():
            layer.attention.inner_attention = PackedAttention()

    def forward(self, tokens, positions):
        return self.decoder(tokens[None], positions=positions[None])[0]


def debug_model(seed=0):
    """torchtitan's own smallest Llama, the same weights on every rank."""
    from torchtitan.models.llama3 import model_registry

    torch.manual_seed(seed)
    model = model_registry("debugmodel").model.build()
    model.init_states()
    return model


def train(steps, tokens):
    torch.set_num_threads(1)  # the ranks share this machine's cores
    with hdp.init() as comm:
        model = hdp.adapt(Planned(debug_model()))
        planner = hdp.Planner.measured(model, comm, capacity=1024 // comm.size, longest=512)
        trainer = hdp.Trainer(model, torch.optim.AdamW(model.parameters(), lr=8e-4), planner, comm)
        corpus = standard_library(context=1024)
        sampler = BatchSampler(corpus.lengths, tokens=tokens)
        for step in range(steps):
            batch = sampler.batch(step)
            done = trainer.step(batch.lengths, lambda place, ids=batch.ids: corpus.read(ids[place]))
            if comm.rank == 0:
                print(f"step {step}: loss {done.loss:.3f}, sequences on ranks {done.sequences_on_ranks}", flush=True)


if __name__ == "__main__":
    train(*([*map(int, sys.argv[1:]), *(5, 4096)[len(sys.argv) - 1 :]][:2]))
