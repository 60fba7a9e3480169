"""What a planned training step reads on the host from memory of the device: each read waits for the device.

On the CPU all memory is the host's, so tensors are followed: those of the model are the device's, and so is what
operators make of one, until its values are read. docs/gpu.md has the list of reads that stay.
"""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import hdpcomm as hdp
from hdpcomm.attention import api as attention_api
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer

TOP = Path(hdp.__file__).parent
READS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "equal",
    "nonzero",
    "unique",
}
MADE = ("kernels/", "models/", "train/gradients.py", "train/buckets.py", "train/masters.py", "train/row_passes.py")
"""Where tensors that are made of none lie on the device: kernels write them, or gradients are added there."""
SIZES = LlamaConfig(vocabulary=64, layers=3, hidden=32, heads=4, kv_heads=2, ffn=48)
LENGTHS = [120, 40, 33, 9, 5, 2]

STAY = {
    ("train/passes.py", "_pass"): "the loss of a micro-batch, whose end is its time in the timeline",
    ("train/gradients.py", "clip_"): "the gradient norm: a step that is not finite is refused before the update",
}


class Device:
    """The tensors that count as those of a device, and where this thread has read their values."""

    def __init__(self, roots: Any) -> None:
        self.alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.reads: collections.Counter[tuple[str, str]] = collections.Counter()
        self._roots = list(roots)
        self.add(self._roots)

    def add(self, values: Any) -> None:
        for each in tree_iter(values):
            if isinstance(each, Tensor):
                self.alive[id(each)] = each

    def has(self, values: Any) -> bool:
        def lies_here(each: Any) -> bool:
            return self.alive.get(id(each)) is each or any(each is root.grad for root in self._roots)

        return any(isinstance(each, Tensor) and lies_here(each) for each in tree_iter(values))


class Operators(TorchDispatchMode):
    """What operators make of a device's tensors is there, too; also inside of functions with gradients of their own."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if self._device.has(given) or (not given and _caller()[0].startswith(MADE)):
            self._device.add(made)
        return made


class Calls(TorchFunctionMode):
    """Notes the calls that read values."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in READS or not self._device.has((args, kwargs)):
            return func(*args, **(kwargs or {}))
        self._device.reads[_caller()] += 1
        read = func(*args, **(kwargs or {}))
        if isinstance(read, Tensor):  # on the host now, in memory of its own
            read = read.clone()
            self._device.alive.pop(id(read), None)
        return read


def _caller() -> tuple[str, str]:
    """(file, function) of this package that called last."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(TOP):
            return str(path.relative_to(TOP)), frame.f_code.co_name
        frame = frame.f_back
    return "", ""


@contextmanager
def followed(model: torch.nn.Module) -> Iterator[Device]:
    device = Device(list(model.parameters()))
    with Operators(device), Calls(device):
        yield device


def reads(options: dict[str, Any]) -> dict[tuple[str, str], int]:
    torch.set_num_threads(1)
    with hdp.init() as comm:
        model = Llama(SIZES)
        planner = Planner(None, ClusterSpec(comm.size, capacity=128), cost_model=CostModel(1e-9, 1e-6))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        trainer = Trainer(model, optimizer, planner, comm, **options)
        data = [torch.arange(n) % 64 for n in LENGTHS]
        trainer.step(LENGTHS, data.__getitem__)
        with followed(model) as device:
            trainer.step(LENGTHS, data.__getitem__)
        return dict(device.reads)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention looks at the values of its inputs on the CPU only, unless it is asked to."""
    monkeypatch.setattr(attention_api, "careful_of", lambda _x, options: bool(options and options.check))


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"zero": 1}], ids=["plain", "bf16", "zero"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_reads_that_stay(ranks: int, options: dict[str, Any]) -> None:
    for found in run_threads(reads, ranks, options, transport="sim"):
        assert set(found) == set(STAY), found


def test_a_read_is_found() -> None:
    model = torch.nn.Linear(2, 2)
    with followed(model) as device:
        (model.weight * 2).sum().item()
        torch.ones(2).sum().item()
    assert sum(device.reads.values()) == 1
