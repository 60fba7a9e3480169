"""DistributedDataParallel: buckets, an accumulation step without communication, a buffer that is broadcast."""

from __future__ import annotations

from common import Figures, batches, figures_of, join, leave, main


def work(backend: str) -> Figures:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, _ = join(backend)
    torch.manual_seed(rank)  # DDP takes rank 0's weights
    model = nn.Sequential(nn.Embedding(64, 24), nn.Linear(24, 50), nn.BatchNorm1d(50), nn.GELU(), nn.Linear(50, 64))
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for step, tokens in enumerate(batches(rank, 6)):
        x = tokens.flatten()
        with parallel.no_sync() if step % 2 == 0 else torch.enable_grad():
            loss = nn.functional.cross_entropy(parallel(x[:-1]), x[1:])
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    leave(backend)
    return {
        "losses": losses,
        "weights": figures_of(model),
        "buffers": [b.double().sum().item() for b in model.buffers()],
    }


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch"])
