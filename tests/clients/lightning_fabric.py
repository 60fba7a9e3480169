"""Lightning Fabric: DDPStrategy(process_group_backend="hdpcomm"), its gathers and checkpoints."""

from __future__ import annotations

from common import Figures, batches, figures_of, leave, main, tiny_llama


def work(backend: str) -> Figures:
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
    fabric.launch()
    torch.set_num_threads(1)
    plain = tiny_llama()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    losses = []
    for tokens in batches(fabric.global_rank, 5):
        loss = model(input_ids=tokens, labels=tokens).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += fabric.all_gather(loss.detach()).tolist()
    fabric.save(f"{backend}.ckpt", {"model": model})
    fabric.barrier()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    fabric.load(f"{backend}.ckpt", {"model": model})
    weights = figures_of(plain)
    leave(backend)
    return {"losses": losses, "loaded weights": weights}


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch", "lightning"])
