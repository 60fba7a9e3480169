"""What a planned training step reads on the host from memory of the device: each read waits for the device. And
whether an operator gets tensors of both, which fails on a device.

On the CPU all memory is the host's, so tensors are followed: those of the model are the device's, and so is what is
made with a device named and what operators make of one, until its values are read. docs/gpu.md has the list of reads
that stay.
"""

from __future__ import annotations

import collections
import inspect
import linecache
import sys
import threading
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
from hdpcomm.attention import pack_context
from hdpcomm.kernels.transfers import HostNumbers
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner, trees_of_prompts
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.mesh_shapes import DENSE
from tests.harness.pipelines import CONFIG, FixedPlanner, trainer_of
from tests.harness.plain_losses import PLAIN
from tests.ranks.train.test_log_prob_losses import answers, cheap_fixed

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
COPIES = ("copy_", "_to_copy")
SIZES = LlamaConfig(vocabulary=64, layers=3, hidden=32, heads=4, kv_heads=2, ffn=48)
LENGTHS = [120, 40, 33, 9, 5, 2]

STAY = {("kernels/transfers.py", "get"), ("train/zero/gradients.py", "clip_")}
"""The loss of a micro-batch, when the next one was issued; the gradient norm: a step that is not finite is refused."""


class Device:
    """The memory that counts as that of a device, and where this thread has read values of it."""

    def __init__(self, roots: Any) -> None:
        self.reads: collections.Counter[tuple[str, str]] = collections.Counter()
        self.mixed: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used again
        self._of_host: dict[int, torch.UntypedStorage] = {}  # what else there is may be of either
        self._roots = list(roots)
        self.add(self._roots)

    def add(self, values: Any) -> None:
        for each in tree_iter(values):
            if isinstance(each, Tensor):
                self._of_host.pop(_storage(each), None)
                self._storages[_storage(each)] = each.untyped_storage()

    def add_to_host(self, values: Any) -> None:
        for each in tree_iter(values):
            if isinstance(each, Tensor):
                self._storages.pop(_storage(each), None)
                self._of_host[_storage(each)] = each.untyped_storage()

    def has(self, values: Any) -> bool:
        known = self._known()
        return any(_storage(each) in known for each in tree_iter(values) if isinstance(each, Tensor))

    def has_of_host(self, values: Any, *, scalars: bool) -> bool:
        """Whether one of the tensors is the host's; scalars of it may take part in most operators."""
        tensors = [each for each in tree_iter(values) if isinstance(each, Tensor) and each.numel() > 0]
        return any(_storage(each) in self._of_host for each in tensors if scalars or each.dim() > 0)

    def is_of_host(self, values: Any) -> bool:
        return all(_storage(each) in self._of_host for each in tree_iter(values) if isinstance(each, Tensor))

    def _known(self) -> set[int]:
        gradients = {_storage(root.grad) for root in self._roots if root.grad is not None}
        return self._storages.keys() | gradients


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Operators(TorchDispatchMode):
    """What operators make of a device's tensors is there, too; also inside of functions with gradients of their own."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if self._device.has(given) or (not given and _names_device()):
            name = func.overloadpacket.__name__
            if name not in COPIES and self._device.has_of_host(given, scalars=name in ("cat", "stack")):
                self._device.mixed[(*_caller(), name)] += 1
            self._device.add(made)
        elif self._device.is_of_host(given):
            self._device.add_to_host(made)
        return made


class Calls(TorchFunctionMode):
    """Notes the calls that read values."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is Tensor.backward:
            given = dict(kwargs or {})
            with self:  # what is called in it, too
                return torch.autograd.backward(args[0], given.pop("gradient"), **given)
        if name not in READS or not self._device.has((args, kwargs)):
            made = func(*args, **(kwargs or {}))
            if not isinstance(made, Tensor) or self._device.has(made):
                return made
            if name == "to" and any(isinstance(each, torch.device) for each in (*args, *(kwargs or {}).values())):
                made = made.clone()
                self._device.add(made)
            elif name in ("tensor", "from_numpy"):
                (self._device.add if "device" in (kwargs or {}) else self._device.add_to_host)(made)
            return made
        self._device.reads[_caller()] += 1
        read = func(*args, **(kwargs or {}))
        if isinstance(read, Tensor) and name not in ("nonzero", "unique"):  # on the host now, in memory of its own
            read = read.clone()
            self._device.add_to_host(read)
        return read


def _caller() -> tuple[str, str]:
    """(file, function) of this package that called last."""
    frame = _frame()
    return ("", "") if frame is None else (_file(frame), frame.f_code.co_name)


def _names_device() -> bool:
    """Whether the call of this package that made a tensor named a device. Operators are told one in any case, and modes
    of functions do not see what is called in a backward pass."""
    frame = _frame()
    if frame is None:
        return False
    lines = inspect.getframeinfo(frame)
    last = lines.positions.end_lineno or lines.lineno if lines.positions else lines.lineno
    text = [linecache.getline(lines.filename, line) for line in range(lines.lineno, last + 1)]
    return any("device" in line for line in text)


def _frame() -> Any:
    """But for the meter, which follows operators, too."""
    frame: Any = sys._getframe(2)
    while frame is not None and _file(frame) in ("", "offload/meter.py"):
        frame = frame.f_back
    return frame


def _file(frame: Any) -> str:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(TOP)) if path.is_relative_to(TOP) else ""


@contextmanager
def followed(model: torch.nn.Module) -> Iterator[Device]:
    device = Device(list(model.parameters()))
    with Operators(device), Calls(device):
        yield device
    assert not device.mixed, f"memory of the host and of the device, by file, function, operator: {device.mixed}"


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
    for module in (attention_api, pack_context):
        monkeypatch.setattr(module, "careful_of", lambda _x, options: bool(options and options.check))


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"zero": 1}], ids=["plain", "bf16", "zero"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_reads_that_stay(ranks: int, options: dict[str, Any]) -> None:
    for found in run_threads(reads, ranks, options, transport="sim"):
        assert set(found) == STAY, found


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
    assert set().union(*found) == STAY, found


def losses_in_turn(queue: bool) -> int:
    torch.set_num_threads(1)
    with hdp.init() as comm:
        model = Llama(SIZES)
        planner = Planner(None, ClusterSpec(2, capacity=128), cost_model=CostModel(1e-6, 1e-5), queue=queue)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-2), planner, comm)
        return trainer.step([100] * 12, lambda _: torch.arange(100) % 64).queued


@pytest.mark.parametrize("queue", [False, True])
def test_losses_are_read_when_the_next_micro_batch_was_issued(queue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for micro-batches of a queue: a rank takes one when it has ended the one before."""
    waiting: collections.Counter[int] = collections.Counter()
    most: collections.Counter[int] = collections.Counter()
    make, get = HostNumbers.__init__, HostNumbers.get

    def made(self: HostNumbers, numbers: Tensor, *rest: Any) -> None:
        rank = threading.get_ident()
        waiting[rank] += 1
        most[rank] = max(most[rank], waiting[rank])
        make(self, numbers, *rest)

    def read(self: HostNumbers) -> Any:
        waiting[threading.get_ident()] -= 1
        return get(self)

    monkeypatch.setattr(HostNumbers, "__init__", made)
    monkeypatch.setattr(HostNumbers, "get", read)
    queued = run_threads(losses_in_turn, 2, queue, transport="sim")
    assert queued == [12 * queue] * 2
    assert set(waiting.values()) == {0}
    assert list(most.values()) == [2 - queue] * 2


def losses_of(name: str) -> None:
    """Losses of log-probabilities, and where prompts are computed once; what is scored."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        made, prompts = answers()
        lengths = [len(each["tokens"]) for each in made]
        model = Llama(DENSE, dtype=torch.float64)
        loss, optimizer = PLAIN[name][0], torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = Trainer(model, optimizer, cheap_fixed(comm.size, 40), comm, loss=loss)
        groups = [i // 2 for i in range(len(made))] if name == "dpo" else None
        for trees in ([], [] if name == "dpo" else trees_of_prompts(lengths, prompts)):
            with followed(model):
                trainer.step(lengths, made.__getitem__, trees=trees, groups=groups)
                trainer.log_probs(lengths, made.__getitem__, trees=trees, entropy=True)


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "dpo"])
def test_losses_of_log_probabilities_mix_no_memory(name: str) -> None:
    run_threads(losses_of, 2, name, transport="sim")


def test_a_read_is_found() -> None:
    model = torch.nn.Linear(2, 2)
    with followed(model) as device:
        (model.weight * 2).sum().item()
        torch.ones(2).sum().item()
    assert sum(device.reads.values()) == 1


def test_mixed_memory_is_found() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="'mul'"), followed(model):
        model.weight * torch.ones(2)
    with pytest.raises(AssertionError, match="'stack'"), followed(model):
        torch.stack((model.weight.sum(), torch.ones(())))
    with followed(model):
        model.weight * torch.ones(()) + torch.ones(2).to(torch.device("cpu"))
