"""torchtitan's Llama in hdpcomm's Trainer, as examples/torchtitan_llama.py has it, on documents of 1 to 200 tokens.

The truth: the same model with torchtitan's own attention in one process, document by document.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common import Figures, figures_of, main

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
STEPS = 3
LENGTHS = (200, 1, 17, 64, 3, 130)


def work(backend: str) -> Figures:
    import torch
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan_llama import Planned, debug_model

    import hdpcomm as hdp

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(5)
    documents = [[torch.randint(2048, (n,), generator=draw) for n in LENGTHS] for _ in range(STEPS)]
    decoder = debug_model()
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    losses = []
    if backend == "hdpcomm":
        with hdp.init() as comm:
            costs = hdp.plan.CostModel(attention=1e-6, linear=1e-4)
            planner = hdp.Planner(None, hdp.ClusterSpec(comm.size, capacity=110), cost_model=costs)
            trainer = hdp.Trainer(hdp.adapt(Planned(decoder)), optimizer, planner, comm)
            for own in documents:
                done = trainer.step(LENGTHS, own.__getitem__)
                assert done.longest_ranks == 2
                losses.append(done.loss)
    else:
        for layer in decoder.layers.values():
            layer.attention.inner_attention = ScaledDotProductAttention(ScaledDotProductAttention.Config())
        for own in documents:
            total = sum(
                torch.nn.functional.cross_entropy(
                    decoder(one[None], positions=torch.arange(len(one))[None])[0, :-1].float(), one[1:], reduction="sum"
                )
                for one in own
            ) / sum(len(one) - 1 for one in own)
            optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            losses.append(float(total))
    return {"losses": losses, "weights": figures_of(decoder)}


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "torchtitan"], atol=1e-5)
