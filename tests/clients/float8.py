"""Linear layers in FP8 by torchao's emulation on a CPU: 200 steps beside bf16, and the errors of each kind of layer.

Prints a table, and fails where the mean loss of the last 20 steps is not near that of bf16.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig, use_float8
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.train import Trainer

STEPS, SMOOTHED = 200, 20
MOST = {"rowwise": 0.01, "tensorwise": 0.02}
"""Largest relative difference of the loss."""
CONFIG = LlamaConfig(layers=2, hidden=64, ffn=128)
LENGTHS = [200, 33, 150, 7]
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step: int) -> list[Tensor]:
    """Bytes of a Python module."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - max(LENGTHS), (len(LENGTHS),), generator=draw).tolist()
    return [TEXT[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def trained(recipe: str | None, dtype: torch.dtype | None = torch.bfloat16) -> list[float]:
    with hdp.init() as comm:
        model = Llama(CONFIG)
        if recipe is not None:
            use_float8(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        planner = Planner(None, ClusterSpec(1, 512), cost_model=CostModel(1e-9, 1e-7))
        trainer = Trainer(model, optimizer, planner, comm, dtype=dtype)
        return [trainer.step(LENGTHS, batch(step).__getitem__).loss for step in range(STEPS)]


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().double().norm() / other.detach().double().norm())


def errors(layer: Any, x: Tensor, upstream: Tensor) -> list[float]:
    """Relative errors of output, gradient of the input and gradient of the weight, beside fp64."""
    results = []
    for each, dtype in ((layer, x.dtype), (nn.Linear(*layer.weight.shape[::-1], bias=False).double(), torch.float64)):
        with torch.no_grad():
            if dtype == torch.float64:
                each.weight.copy_(layer.weight)
        leaf = x.detach().to(dtype).requires_grad_()
        out = each(leaf)
        results.append([out, *torch.autograd.grad(out, [leaf, each.weight], upstream.to(dtype))])
    return [relative(*pair) for pair in zip(*results, strict=True)]


def table() -> None:
    """Errors of the layers of the first block on what reaches them in a step."""
    model = Llama(CONFIG).bfloat16()
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.blocks[0].named_modules():
        if type(module) is nn.Linear:
            module.register_full_backward_hook(
                lambda _, __, upstream, name=name: seen.update({name: (seen[name][0], upstream[0])})
            )
            module.register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: (inputs[0], out)}))
    tokens, ends = torch.cat(batch(0)), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    model(tokens, positions=places, cu_seqlens=ends, comm=None, labels=tokens.roll(-1)).backward()
    wide = dict(model.blocks[0].named_modules())
    print("relative error of output, gradient of input, gradient of weight, beside fp64")
    print(f"{'layer':16}{'bf16':>24}{'rowwise':>24}{'tensorwise':>24}")
    narrow = {}
    for recipe in ("rowwise", "tensorwise"):
        changed = Llama(CONFIG).bfloat16()
        use_float8(changed, recipe)
        narrow[recipe] = dict(changed.blocks[0].named_modules())
    for name, (x, upstream) in seen.items():
        cells = [errors(copy.deepcopy(each[name]), x, upstream) for each in (wide, *narrow.values())]
        print(f"{name:16}" + "".join("   ".join(f"{100 * value:.2f}%" for value in cell).rjust(24) for cell in cells))


def main() -> None:
    torch.set_num_threads(1)
    table()
    wide = trained(None)
    mean = sum(wide[-SMOOTHED:]) / SMOOTHED
    print(f"bf16: loss {wide[0]:.4f} -> {mean:.4f} (mean of the last {SMOOTHED} of {STEPS} steps)")
    differences = {}
    for kind in ("fp32", *MOST):  # the first shows how far rounding alone leads apart
        losses = trained(None, None) if kind == "fp32" else trained(kind)
        differences[kind] = sum(losses[-SMOOTHED:]) / SMOOTHED / mean - 1
        furthest = max(abs(one / other - 1) for one, other in zip(losses, wide, strict=True))
        print(f"{kind}: loss {100 * differences[kind]:+.2f}% beside bf16; of one step at most {100 * furthest:.2f}%")
    for recipe, most in MOST.items():
        if abs(differences[recipe]) > most:
            sys.exit(f"{recipe}: the loss differs by more than {100 * most:.0f}%")
    version = importlib.metadata.version("torchao")
    told = ", ".join(f"{recipe} {100 * differences[recipe]:+.2f}%" for recipe in MOST)
    print(f"ok: torchao {version}: {STEPS} steps in FP8, loss beside bf16: {told}")


if __name__ == "__main__":
    main()
