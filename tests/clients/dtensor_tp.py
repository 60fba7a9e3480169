"""DTensor tensor parallelism: column, row and sequence parallel layers of two blocks, against one process."""

from __future__ import annotations

from common import Figures, join, leave, main


def work(backend: str) -> Figures:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block())
    if backend != "one process":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        _, size = join(backend)
        mesh = init_device_mesh("cpu", (size,))
        for block in model:
            parallelize_module(
                block,
                mesh,
                {
                    "norm": SequenceParallel(),
                    "up": ColwiseParallel(input_layouts=Shard(1)),
                    "down": RowwiseParallel(output_layouts=Shard(1)),
                },
            )
        parallelize_module(
            model,
            mesh,
            {
                "0": PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
                ),
                "1": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
            },
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(4):
        x = torch.randn(3, 8, 16, generator=draw)
        loss = (model(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    full = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
    sums = [float(full(p).detach().double().square().sum()) for p in model.parameters()]
    if backend != "one process":
        leave(backend)
    return {"losses": losses, "weights": sums}


if __name__ == "__main__":
    main(work, against="one process", packages=["torch"])
