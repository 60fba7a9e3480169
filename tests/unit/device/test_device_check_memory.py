"""During a check no address stands for two tensors: each rank's memory is its own until the run is over."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from hdpcomm.testing.device_check import check, current_rank
from hdpcomm.testing.kept_memory import KeptMemory

REPO = Path(__file__).parents[3]


class Seen(torch.autograd.Function):
    """Writes down the address of memory that only lives during the pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: list[int]) -> torch.Tensor:
        ctx.places = places
        places.append((x * 2).data_ptr())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.places.append((grad * 2).data_ptr())
        return grad.clone(), None


class Wrapped(torch.Tensor):
    """A subclass that computes with the tensor in it, as DTensor does."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        opened = [each.inner if isinstance(each, Wrapped) else each for each in args]
        return Wrapped(func(*opened, **(kwargs or {})))


def places(rounds: int, count: int) -> list[int]:
    """Addresses of tensors that are freed at once."""
    seen: list[int] = []
    for number in range(rounds):
        seen.append(torch.empty(count).data_ptr())
        seen.append(torch.tensor([float(number)] * count).data_ptr())
        seen.append((Wrapped(torch.ones(count)) + 1).inner.data_ptr())
        seen += [part.data_ptr() for part in torch.ones(2, count).sum(0, keepdim=True).max(0)]  # two results
        x = torch.ones(count, requires_grad=True)
        Seen.apply(x, seen).sum().backward()
        torch.eye(3).to_sparse()  # has no storage
    return seen


@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_no_address_stands_for_two_tensors(count: int) -> None:
    (by_rank,) = check(places, 2, 5, count, seeds=[0])
    seen = [place for rank in by_rank for place in rank]
    assert len(seen) == 2 * 5 * 7
    assert len(set(seen)) == len(seen)


def test_memory_is_freed_after_the_run() -> None:
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    kept = KeptMemory()
    with kept:
        x = torch.ones(100)
    storages += [weakref.ref(each) for each in kept._storages.values()]
    assert storages
    del x
    assert all(each() is not None for each in storages)
    del kept
    gc.collect()
    assert all(each() is None for each in storages)


def test_the_graph_of_a_tensor_is_not_kept() -> None:
    with KeptMemory() as kept:
        x = torch.ones(100, requires_grad=True)
        y = x * 2
        hook = lambda grad: grad
        y.register_hook(hook)
        held = weakref.ref(hook)
        del y, hook
        gc.collect()
        assert held() is None
    assert kept._storages


def test_a_bad_program_leaves_no_mode_behind() -> None:
    def fails() -> None:
        raise KeyError(current_rank())

    with pytest.raises(KeyError):
        check(fails, 1, seeds=[0])
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_ranks_whose_memory_comes_from_one_arena() -> None:
    """As glibc gives it to threads when there are many: what one has freed is the next one's."""
    program = "from tests.ranks.device.test_device_check import run; run('peer_reads', 2, range(6))"
    env = os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()
