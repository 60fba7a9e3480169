"""What a planned training step reads on the host from memory of the device: each read waits for the device.

On the CPU all memory is the host's, so tensors are followed: those of the model are the device's, and so is what
operators make of one, until its values are read. docs/gpu.md has the list of reads that stay.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from tests.harness.pipelines import CONFIG, FixedPlanner, trainer_of

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
    ("train/pipeline.py", "_forward"): "the same, on a pipeline's last stage",
    ("train/gradients.py", "clip_"): "the gradient norm: a step that is not finite is refused before the update",
}


class Device:
    """The memory that counts as that of a device, and where this thread has read values of it."""

    def __init__(self, roots: Any) -> None:
        self.reads: collections.Counter[tuple[str, str]] = collections.Counter()
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used again
        self._roots = list(roots)
        self.add(self._roots)

    def add(self, values: Any) -> None:
        for each in tree_iter(values):
            if isinstance(each, Tensor):
                self._storages[each.untyped_storage()._cdata] = each.untyped_storage()

    def remove(self, tensor: Tensor) -> None:
        self._storages.pop(tensor.untyped_storage()._cdata, None)

    def has(self, values: Any) -> bool:
        gradients = {root.grad.untyped_storage()._cdata for root in self._roots if root.grad is not None}
        found = {each.untyped_storage()._cdata for each in tree_iter(values) if isinstance(each, Tensor)}
        return not found.isdisjoint(self._storages.keys() | gradients)


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
            self._device.remove(read)
        return read


def _caller() -> tuple[str, str]:
    """(file, function) of this package that called last, but for the meter, which follows operators, too."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(TOP) and path != TOP / "offload/meter.py":
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
        assert set(found) == {("train/passes.py", "_pass"), ("train/gradients.py", "clip_")}, found


PIPELINES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one stage": (1, {}, {}),
    "offload": (1, {}, {"offload": True}),
    "offload, 2 ranks": (2, {}, {"offload": True}),
    "pipeline 2": (2, {"stages": 2}, {}),
    "pipeline 2, offload": (2, {"stages": 2}, {"offload": True}),
    "pipeline 2, recompute": (2, {"stages": 2}, {"recompute": "full"}),
    "pipeline 2 of 2 chunks": (2, {"stages": 2, "chunks": 2}, {}),
    "pipeline 2, split backward": (2, {"stages": 2, "split": True}, {}),
    "pipeline 2 x tensor 2": (4, {"stages": 2, "tensor": 2}, {}),
    "pipeline 2 x hdp 2": (4, {"stages": 2}, {}),
}


def reads_of(planning: dict[str, Any], options: dict[str, Any]) -> dict[tuple[str, str], int]:
    torch.set_num_threads(1)
    with hdp.init() as comm:
        stages, tensor = planning.get("stages", 1), planning.get("tensor", 1)
        hdp_ranks = comm.size // stages // tensor
        batches = [((0,), (1, 2)), (tuple(range(hdp_ranks)), (0,)), ((hdp_ranks - 1,), (3, 4, 5))]
        ratio = 1.0 if options.get("offload") else 0.0
        planner = FixedPlanner(hdp_ranks, planning.get("stages", 1), batches, ratio=ratio, **_without_stages(planning))
        trainer = trainer_of(comm, planner, replace(CONFIG, vocabulary=62), torch.float32, **options)
        data = [torch.arange(n) % 61 for n in LENGTHS]
        trainer.step(LENGTHS, data.__getitem__)
        with followed(trainer.model) as device:
            trainer.step(LENGTHS, data.__getitem__)
        return dict(device.reads)


def _without_stages(planning: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in planning.items() if name != "stages"}


@pytest.mark.parametrize("mesh", PIPELINES)
def test_reads_of_pipelines_and_offload_that_stay(mesh: str) -> None:
    ranks, planning, options = PIPELINES[mesh]
    found = run_threads(reads_of, ranks, planning, options, transport="sim", timeout=60)
    assert set().union(*found) == {("train/pipeline.py", "_forward"), ("train/gradients.py", "clip_")}, found


def test_a_read_is_found() -> None:
    model = torch.nn.Linear(2, 2)
    with followed(model) as device:
        (model.weight * 2).sum().item()
        torch.ones(2).sum().item()
    assert sum(device.reads.values()) == 1
