"""Our tensor parallel layers beside torch's own: parallelize_module and DTensors on the torch backend."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hdpcomm.attention import packing
from hdpcomm.comm import Mesh
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.parallel import tensor_parallel
from hdpcomm.torch_backend import device_mesh

CONFIG = LlamaConfig(vocabulary=16, layers=1, hidden=16, heads=2, kv_heads=2, ffn=24)
TOKENS = 9


def both():
    """(outputs, gradients) of a rank's MLP cut by us, and by torch, which takes blocks of equal size only."""
    import hdpcomm.torch_backend as torch_backend

    dist.init_process_group(torch_backend.BACKEND)
    try:
        mesh = Mesh(torch_backend.communicator(), tensor=2)
        return of_ours(mesh), of_torch(mesh)
    finally:
        dist.destroy_process_group()


def model():
    return Llama(CONFIG, seed=1, dtype=torch.float64)


def block(mesh):
    """This rank's part of the tokens, filled up with zeros."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, CONFIG.hidden, generator=generator, dtype=torch.float64)
    x = nn.functional.pad(x, (0, 0, 0, TOKENS % 2))
    return x.chunk(2)[mesh.tensor_rank].clone().requires_grad_()


def passed(ffn, x, weights):
    out = ffn(x)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    return [out.detach(), x.grad, *weights()]


def of_ours(mesh):
    ffn = tensor_parallel(model(), mesh).blocks[0].ffn
    with packing(None, [0, TOKENS + TOKENS % 2]):  # those that torch counts
        return passed(ffn, block(mesh), lambda: [layer.weight.grad for layer in (ffn.gate, ffn.up, ffn.out)])


def of_torch(mesh):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    ffn = model().blocks[0].ffn
    whole_input = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    plan = {"": whole_input, "gate": ColwiseParallel(), "up": ColwiseParallel()}
    plan["out"] = RowwiseParallel(output_layouts=Shard(0))
    # Our SwiGLU is one operation, which knows no DTensors; between the layers torch's plan gives plain ones.
    parallelize_module(ffn, device_mesh(mesh)["tp"], plan)
    return passed(ffn, block(mesh), lambda: [layer.weight.grad.to_local() for layer in (ffn.gate, ffn.up, ffn.out)])


def test_the_numbers_are_those_of_dtensors(ranks):
    for ours, torchs in ranks(2, both):
        for found, wanted in zip(ours, torchs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_parts_are_those_that_ranks_hold():
    from hdpcomm.models.tensor_group import Block, TensorShard

    whole = torch.arange(12.0).view(4, 3)
    assert TensorShard(0, (Block(2, 2),), 1, 2).take(whole).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert TensorShard(1, (Block(3, 1),), 2, 3).take(whole).tolist() == [[2], [5], [8], [11]]
    assert TensorShard(0, (Block(1, 4),), 0, 2).take(whole).data_ptr() != whole.data_ptr()
