"""FSDP2: fully_shard of a Llama of transformers, layers of their own."""

from __future__ import annotations

from typing import Any

from common import Figures, batches, join, leave, main, tiny_llama


def work(backend: str) -> Figures:
    import torch
    from torch.distributed.fsdp import fully_shard

    rank, _ = join(backend)
    model: Any = tiny_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches(rank, 5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.full_tensor().item()]
    sums = [p.full_tensor().double().sum().item() for p in model.parameters()]
    leave(backend)
    return {"losses and gradient norms": losses, "weights": sums}


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch"])
