"""DDP, FSDP2 and DeviceMesh on the backend: the losses of a small model equal gloo's."""

from __future__ import annotations

import os
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hdpcomm.torch_backend import communicator
from tests.harness.torch_groups import data, torch_ranks
from tests.harness.warm_python import run_python

STEPS = 5


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24))
    return nn.Sequential(nn.Embedding(31, 24), block(), block(), nn.Linear(24, 31, bias=False))


def train(model: nn.Module, rank: int) -> list[float]:
    """Losses of this rank, on a batch of its own, the same in every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(STEPS):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 31), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_ddp(rank: int, _size: int) -> list[float]:
    plain = train(DistributedDataParallel(model_of()), rank)
    # small buckets: many all_reduces in flight
    model = DistributedDataParallel(model_of(), bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    return plain + train(model, rank)


class Uneven(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base, self.extra, self.rank = model_of(), nn.Linear(31, 31), rank

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.base(tokens)
        return self.extra(logits) if self.rank == 0 else logits


def with_ddp_unused_parameters(rank: int, _size: int) -> list[float]:
    return train(DistributedDataParallel(Uneven(rank), find_unused_parameters=True), rank)


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def with_fsdp2(rank: int, size: int) -> list[float]:
    return train(shard(model_of(), init_device_mesh("cpu", (size,))), rank)


def with_hsdp(rank: int, size: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(model_of(), mesh), rank)


def losses(run: Callable[[int, int], list[float]], backend: str, key: str) -> tuple[list[float], int]:
    with torch_ranks(backend, key=key) as (rank, size):
        result = run(rank, size)
        moved = communicator().stats()["bytes_sent"] if backend == "hdpcomm" else 0
        dist.barrier()
        return result, moved


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("run", [with_ddp, with_ddp_unused_parameters, with_fsdp2, with_hsdp])
def test_same_losses_as_gloo(ranks: Any, size: int, run: Callable[[int, int], list[float]]) -> None:
    ours = ranks(size, losses, run, "hdpcomm", uuid.uuid4().hex)
    gloo = ranks(size, losses, run, "gloo", uuid.uuid4().hex)
    for (mine, moved), (theirs, _) in zip(ours, gloo, strict=True):
        assert moved > 1000 * STEPS  # it was this backend that moved the gradients
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=1e-6)
        assert mine[STEPS - 1] < mine[0]


def meshes() -> None:
    with torch_ranks() as (rank, size):
        before = communicator().stats()
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        assert communicator().stats() == before  # groups cost no message
        rows, columns = mesh.get_group("dp"), mesh.get_group("tp")
        assert communicator(rows).ranks == tuple(mesh.mesh[:, mesh.get_local_rank("tp")].tolist())
        assert communicator(columns).ranks == tuple(mesh.mesh[mesh.get_local_rank("dp")].tolist())
        x = data(rank, 3)
        dist.all_reduce(x, group=rows)
        assert x.tolist() == sum(data(peer, 3) for peer in communicator(rows).ranks).tolist()
        # DTensor: distribute, multiply, gather
        line = init_device_mesh("cpu", (size,))
        a, b = data(90, 8, 8, dtype=torch.float64), data(91, 8, 8, dtype=torch.float64)
        left, right = distribute_tensor(a, line, [Shard(1)]), distribute_tensor(b, line, [Shard(0)])
        product = left @ right
        assert isinstance(product, DTensor)
        torch.testing.assert_close(product.redistribute(line, [Replicate()]).to_local(), a @ b, rtol=0, atol=0)
        torch.testing.assert_close(left.redistribute(line, [Shard(0)]).full_tensor(), a, rtol=0, atol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_device_mesh(ranks: Any, size: int) -> None:
    ranks(size, meshes)


def from_environment() -> None:
    both = "cpu:hdpcomm,cuda:hdpcomm"
    for backend, devices in {"hdpcomm": both, "cpu:hdpcomm": "cpu:hdpcomm", both: both}.items():
        dist.init_process_group(backend)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
        assert dist.get_backend_config() == devices
        dist.destroy_process_group()


def test_environment_of_spawn(ranks: Any) -> None:
    ranks(2, from_environment)


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist
            import hdpcomm.torch_backend
            dist.init_process_group("hdpcomm")
            x = torch.ones(3)
            work = dist.all_reduce(x, async_op=True)
            dist.send(x, 1 - dist.get_rank()) if dist.get_rank() else dist.recv(torch.empty(3), 1)
            work.get_future().wait()
            assert x.tolist() == [2.0] * 3
            posted = dist.irecv(x, 1 - dist.get_rank())  # never matched: the process still ends
        """)
    )
    root = Path(__file__).parents[3]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = run_python(command, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
