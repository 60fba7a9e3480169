"""DeepSpeed on CPUs: ZeRO-1 and ZeRO-3."""

from __future__ import annotations

import os

from common import Figures, batches, join, leave, main, tiny_llama


def work(backend: str) -> Figures:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch

    rank, _ = join(backend)
    deepspeed.init_distributed(dist_backend=backend)  # finds the group that is there
    found: Figures = {}
    for stage in (1, 3):
        model = tiny_llama()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        losses = []
        for tokens in batches(rank, 5):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            sums = [p.detach().double().square().sum().item() for p in model.parameters()]
        found |= {f"ZeRO-{stage} losses": losses, f"ZeRO-{stage} weights": sums}
    leave(backend)
    return found


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch", "deepspeed"])
