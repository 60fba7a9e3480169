"""torch.distributed.pipelining: 1F1B and interleaved 1F1B over 2 ranks, against one process."""

from __future__ import annotations

from common import Figures, join, leave, main


def work(backend: str) -> Figures:
    import torch
    from torch import nn

    def layers() -> list[nn.Module]:
        torch.manual_seed(2)
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    target = x.flip(0)
    loss_of = lambda y, t: (y - t).square().mean()
    if backend == "one process":
        model = nn.Sequential(*layers())
        losses = [loss_of(model(part), t) for part, t in zip(x.chunk(4), target.chunk(4), strict=True)]
        (sum(losses) / 4).backward()
        grads = [float(p.grad.double().square().sum()) for p in model.parameters()]
        return {f"{kind} {what}": list(values) for kind in ("1F1B", "interleaved") for what, values in
                (("losses", [float(each) for each in losses]), ("gradients", grads))}  # fmt: skip
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    rank, size = join(backend)
    found: Figures = {}
    for kind, cut in (("1F1B", 2), ("interleaved", 4)):
        parts = layers()
        wide = 4 // cut
        own = {i: nn.Sequential(*parts[i * wide : (i + 1) * wide]) for i in range(rank, cut, size)}
        stages = [PipelineStage(module, i, cut, torch.device("cpu")) for i, module in own.items()]
        schedule = (
            Schedule1F1B(stages[0], n_microbatches=4, loss_fn=loss_of)
            if len(stages) == 1
            else ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_of)
        )
        losses: list[torch.Tensor] = []
        schedule.step(*([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank == size - 1 else {}))
        everyone: list[dict[str, list[float]]] = [{} for _ in range(size)]
        grads = {f"{i}": [float(p.grad.double().square().sum()) for p in m.parameters()] for i, m in own.items()}
        dist.all_gather_object(everyone, {"losses": [float(each) for each in losses], **grads})
        found[f"{kind} losses"] = everyone[size - 1]["losses"]
        joined = {name: values for each in everyone for name, values in each.items() if name != "losses"}
        found[f"{kind} gradients"] = [value for i in range(cut) for value in joined[f"{i}"]]
    leave(backend)
    return found


if __name__ == "__main__":
    main(work, against="one process", packages=["torch"])
