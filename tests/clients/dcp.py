"""torch.distributed.checkpoint: saved from 2 ranks with FSDP2, loaded by 2 ranks cut otherwise, and by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Figures, batches, figures_of, join, leave, main, tiny_llama


def work(backend: str) -> Figures:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    rank, _ = join(backend)

    def sharded(layers: bool) -> tuple[Any, Any]:
        model = tiny_llama()
        for layer in model.model.layers if layers else []:
            fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: Any, optimizer: Any, steps: list[Any]) -> list[float]:
        losses = []
        for tokens in steps:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    folder = Path(f"checkpoint-{backend}")
    steps = batches(rank, 6)
    model, optimizer = sharded(True)
    train(model, optimizer, steps[:3])
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    expected = train(model, optimizer, steps[3:])
    again, its_optimizer = sharded(False)
    weights, state = get_state_dict(again, its_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(again, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    loaded = [t.full_tensor().double().sum().item() for t in get_model_state_dict(again).values()]
    resumed = train(again, its_optimizer, steps[3:])
    assert max(abs(a - b) for a, b in zip(resumed, expected, strict=True)) < 1e-5
    whole: list[float] = []
    if rank == 0:
        dcp_to_torch_save(folder, "whole.pt")
        plain = tiny_llama()
        plain.load_state_dict(torch.load("whole.pt", weights_only=False)["model"])
        whole = figures_of(plain)
    dist.barrier()
    leave(backend)
    return {"loaded": loaded, "losses": resumed, "in one process": whole}


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch"])
