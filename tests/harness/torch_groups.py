"""What the rank functions of these tests share."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import hdpcomm.torch_backend  # noqa: F401  (registers the backend)


@functools.cache
def _client() -> Any:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


@contextmanager
def torch_ranks(
    backend: str = "hdpcomm", *, timeout: float = 20.0, key: str = "backend tests"
) -> Iterator[tuple[int, int]]:
    """The default group; gives rank and size.

    The client of the pool's store is kept, since connecting sometimes takes torch 5 s. ``key``: a new string for each
    run in which gloo takes part; it cannot start twice on one store.
    """
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(key, _client())
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    try:
        yield rank, size
    finally:
        dist.destroy_process_group()


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """What a rank contributes: small integers, so that sums are exact in any order; differs by rank and salt."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    return torch.randint(-8 if dtype.is_signed else 0, 9, shape, generator=generator).to(dtype)
