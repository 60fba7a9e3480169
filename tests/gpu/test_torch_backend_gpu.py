"""``backend="hdpcomm"`` with CUDA tensors: two ranks that share a GPU, against what each can compute by itself."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdpcomm.torch_backend  # noqa: F401  (registers the backend)
from hdpcomm.testing import spawn
from hdpcomm.torch_backend.work import StreamWork
from tests.harness.torch_groups import torch_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NAMES = ["hdpcomm", "cuda:hdpcomm", "cpu:hdpcomm,cuda:hdpcomm"]


def on_cuda(backend: str) -> None:
    os.environ["HDPCOMM_TRANSPORT"] = "cuda"
    with torch_ranks(backend) as (rank, size):
        host = torch.ones(3)
        dist.all_reduce(host)
        assert host.tolist() == [size] * 3
        x = torch.full((100_003,), rank + 1.0, device="cuda")
        work = dist.all_reduce(x, async_op=True)
        assert isinstance(work, StreamWork)
        work.wait()
        assert (x == size * (size + 1) / 2).all()
        side = torch.cuda.Stream()
        work = dist.all_reduce(x, async_op=True)
        with torch.cuda.stream(side):
            work.wait()
            total = x.sum()
        side.synchronize()
        assert total.item() == 100_003 * size * size * (size + 1) / 2
        work.wait()
        (result,) = dist.all_reduce(x, async_op=True).get_future().then(lambda done: [done.value()[0] / size]).wait()
        assert (result == size * size * (size + 1) / 2).all()
        outs = [torch.empty(5, 2, device="cuda")[:, :1] for _ in range(size)]
        dist.all_gather(outs, torch.full((5, 1), float(rank), device="cuda"))
        assert [out.mean().item() for out in outs] == list(range(size))
        y = torch.empty(70_001, 2, device="cuda")[:, 0]
        mine = torch.full((70_001,), float(rank), device="cuda")
        ops = [dist.P2POp(dist.irecv, y, rank ^ 1), dist.P2POp(dist.isend, mine, rank ^ 1)]
        for each in dist.batch_isend_irecv(ops):
            each.wait()
        assert (y == rank ^ 1).all()
        torch.cuda.synchronize()
        dist.barrier()


@pytest.mark.parametrize("backend", NAMES)
def test_operations(backend: str) -> None:
    spawn(on_cuda, 2, backend)


def goes_on() -> None:
    """Operations are enqueued behind a kernel that runs long; memory that is freed meanwhile is not used again."""
    os.environ["HDPCOMM_TRANSPORT"] = "cuda"
    with torch_ranks() as (rank, size):
        for _ in range(20):
            torch.cuda._sleep(20_000_000)
            futures = []
            for i in range(4):
                x = torch.full((1 << 20,), float(rank + i), device="cuda")
                futures.append(dist.all_reduce(x, async_op=True).get_future())
                del x
            for i, future in enumerate(futures):
                assert (future.wait()[0] == size * (size - 1) / 2 + i * size).all()
        torch.cuda.synchronize()
        dist.barrier()


def test_the_host_goes_on() -> None:
    spawn(goes_on, 2)


def with_ddp() -> list[float]:
    os.environ["HDPCOMM_TRANSPORT"] = "cuda"
    with torch_ranks() as (rank, size):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(300, 300).cuda(), device_ids=[0], bucket_cap_mb=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(1)).cuda()
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(batch.chunk(size)[rank]).square().mean()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total, dist.ReduceOp.AVG)
            losses.append(total.item())
        torch.cuda.synchronize()
        dist.barrier()
        return losses


def test_ddp_has_the_losses_of_one_process() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    want = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    for got in spawn(with_ddp, 2):
        assert got == pytest.approx(want, rel=1e-4)
