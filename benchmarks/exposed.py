"""The share of a step in which a rank only waits for what others send: by the order of operations, not by a clock.

    python benchmarks/exposed.py [--json FILE]

A few steps of a small model run on each mesh, and each rank notes in order when it computes a layer, starts an
operation and waits for one. The last step is then replayed with the costs of a large model: a 7B Llama's layers on
H100s that compute 400 TFLOP/s, 400 GB/s between tensor ranks and 50 GB/s of network a device for all else: gradients,
weights, experts' rows, messages of rings and pipelines. The small model's widths are 1/128 of the large one's, its
tokens too, so bytes are 128 x 128 times those that were sent. An operation runs when all of its ranks have come to it,
and those before it have ended that go between the same ranks, as on device links. The host transport, and NCCL among
its own ranks, keep one order for all operations of a rank. ``others`` is the rest of a rank's waits: for ranks that
compute. The same figures on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.comm.communicator import Communicator
from hdpcomm.models import Llama, LlamaConfig, expert_group
from hdpcomm.models.tensor_group import TensorGroup
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, Planner, SequenceInfo, StepPlan
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from hdpcomm.train.step.queue import StepQueue
from hdpcomm.train.zero.gradients import WholeSums
from hdpcomm.train.zero.masters import Masters

SCALE = 128
"""The large model's width, and its tokens, by those of the small one."""
RATE = 400e12
BYTES_S = {"gradients": 50e9, "weights": 50e9, "experts": 50e9, "messages": 50e9, "tensor": 400e9}
KINDS = (*BYTES_S, "others")
DENSE = LlamaConfig(vocabulary=250, layers=32, hidden=32, heads=4, kv_heads=4, ffn=86)
SPARSE = replace(DENSE, layers=16, ffn=43, experts=8, top_k=2)
TOKENS = 64
STEPS = 3


@dataclass(frozen=True)
class Case:
    """``batches``: ranks of each micro-batch, which has ``TOKENS`` tokens for each of them."""

    batches: Sequence[tuple[int, ...]]
    config: LlamaConfig = DENSE
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    queued: int = 0


OWN = [(0,), (1,), (0,), (1,)]
CASES = {
    "plain": Case(OWN),
    "ring last": Case([(0,), (1,), (0, 1)]),
    "TP 2": Case(OWN, tensor=2),
    "EP 2": Case(OWN, SPARSE, expert=2),
    "PP 2": Case([*OWN, *OWN], pipeline=2),
    "PP 2, ring last": Case([*OWN, (0, 1), (0, 1)], pipeline=2),
    "queue": Case(OWN, queued=4),
}


@dataclass(eq=False)
class Operation:
    """One operation of some ranks.

    Attributes:
        called: by rank, when it came to it.
        ahead: operations that must have ended before.
    """

    kind: str
    seconds: float
    ranks: tuple[int, ...]
    message: bool
    called: dict[int, float] = field(default_factory=dict)
    ahead: list[Operation] = field(default_factory=list)
    start: float | None = None

    @property
    def end(self) -> float:
        assert self.start is not None
        return self.start + self.seconds

    def comes_after(self, other: Operation) -> bool:
        """Whether both go between the same ranks, the same way."""
        if self.message and other.message:
            return self.ranks == other.ranks
        return len(set(self.ranks) & set(other.ranks)) > 1


class Log:
    """Actions of one rank in order: ("compute", seconds), ("call", operation), ("wait", operation)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.kind = "others"
        self.counts: Counter[Any] = Counter()
        self.computed = 0.0
        """Seconds of the layer at hand that have been noted."""
        self.inside = self.returning = False

    def compute(self, seconds: float) -> None:
        """The rank computes."""
        self.events.append(("compute", seconds))
        self.computed += seconds

    def call(self, kind: str, ranks: tuple[int, ...], seconds: float, *, message: bool) -> Any:
        """An operation begins; its key."""
        self.counts[ranks, message] += 1
        key = (ranks, message, self.counts[ranks, message])
        self.events.append(("call", (key, kind, seconds)))
        return key


LOGS = threading.local()


def own_log() -> Log:
    """The log of the rank whose thread this is, or whose backward pass."""
    log: Log = LOGS.log
    return log


class NotedWork:
    """A work whose wait is noted, after what is computed beside it."""

    def __init__(self, work: Any, operations: Sequence[Any], beside_s: float = 0.0) -> None:
        self._work, self._operations, self._beside_s = work, operations, beside_s

    def wait(self, *args: Any) -> Any:
        log = own_log()
        if log.inside:
            log.compute(self._beside_s)
        log.events += [("wait", each) for each in self._operations]
        return self._work.wait(*args)

    def done(self) -> bool:
        return bool(self._work.done())


def noting_collective(inner: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``Communicator._collective``."""

    def collective(self: Communicator, operation: int, x: Any, out: Any, *rest: Any) -> Any:
        log, whole = own_log(), max(t.nbytes for t in (x, out) if t is not None) if (x, out) != (None, None) else 0
        share = (self.size - 1) / self.size * (2 if out is None else 1)  # an all-reduce goes both ways
        seconds = share * whole * SCALE**2 / BYTES_S[log.kind] if log.kind in BYTES_S else 0.0
        called = log.call(log.kind, self.ranks, seconds, message=False)
        work = inner(self, operation, x, out, *rest)
        if rest[3]:
            return NotedWork(work, [called])
        log.events.append(("wait", called))
        return work

    return collective


def noting_exchange(inner: Callable[..., Any], beside_s: float) -> Callable[..., Any]:
    """In place of ``Communicator.exchange``; ``beside_s``: what a ring computes beside its messages."""

    def exchange(self: Communicator, sends: Any = (), recvs: Any = (), *, async_op: bool = False) -> Any:
        log, own = own_log(), self.global_rank
        both = [(each[0], (own, self.ranks[each[1]])) for each in sends]
        both += [(each[0], (self.ranks[each[1]], own)) for each in recvs]
        called = [
            log.call("messages", ranks, x.nbytes * SCALE**2 / BYTES_S["messages"], message=True) for x, ranks in both
        ]
        work = inner(self, sends, recvs, async_op=async_op)
        if async_op:
            return NotedWork(work, called, beside_s)
        log.events += [("wait", each) for each in called]
        return work

    return exchange


def of_kind(kind: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose operations are of a kind."""

    def call(*args: Any, **options: Any) -> Any:
        log = own_log()
        before, log.kind = log.kind, kind
        try:
            return inner(*args, **options)
        finally:
            log.kind = before

    return call


def watch(layer: torch.nn.Module, case: Case) -> None:
    """Notes when a rank has computed a layer's products, and what is left of the layer at its end."""
    forward_s = layer_seconds(case)
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            seconds = 2 * module.weight.numel() * SCALE**3 * TOKENS / RATE
            module.register_forward_hook(lambda *_, seconds=seconds: own_log().compute(seconds))
            module.register_full_backward_hook(lambda *_, seconds=seconds: own_log().compute(2 * seconds))

    def enter(*_: Any) -> None:
        own_log().inside, own_log().computed = True, 0.0

    def leave(seconds: float) -> None:
        log = own_log()
        log.compute(max(0.0, seconds - log.computed))
        log.inside = False

    layer.register_forward_pre_hook(enter)
    layer.register_full_backward_pre_hook(enter)
    layer.register_forward_hook(lambda *_: leave(forward_s))
    layer.register_full_backward_hook(lambda *_: leave(2 * forward_s))


def core_seconds(case: Case) -> float:
    """Seconds of attention in a layer's forward pass over ``TOKENS`` tokens, as large as they are meant."""
    return 2 * case.config.hidden * SCALE * (TOKENS * SCALE) ** 2 / RATE / case.tensor


def experts_seconds(case: Case) -> float:
    """Seconds of all tokens' experts in a layer's forward pass."""
    c = case.config
    return 6 * c.hidden * c.ffn * SCALE**3 * TOKENS * (c.top_k if c.experts else 1) / RATE / case.tensor


def layer_seconds(case: Case) -> float:
    """Seconds of a layer's forward pass."""
    products = 8 * (case.config.hidden * SCALE) ** 2 * TOKENS * SCALE
    return products / RATE / case.tensor + core_seconds(case) + experts_seconds(case)


def experts_exchange(inner: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Exchanges of experts' rows; before each second one the experts compute."""
    exchange = of_kind("experts", inner)

    def call(*args: Any) -> Any:
        log = own_log()
        log.returning = not log.returning
        if not log.returning:
            log.compute(seconds * (1 if torch._C._current_graph_task_id() == -1 else 2))
        return exchange(*args)

    return call


class Plans(Planner):
    """The plan of a case."""

    def __init__(self, case: Case) -> None:
        cluster = ClusterSpec(2, 100_000, tensor=case.tensor, pipeline=case.pipeline)
        super().__init__(None, cluster, cost_model=CostModel(attention=1e-6, linear=1e-5, fixed=1e-4, ring_step=1e-4))
        self.case = case

    def plan(self, lengths: Sequence[Any]) -> StepPlan:
        made = tuple(
            MicroBatch(i, ranks, (SequenceInfo(i, lengths[i]),), 0.0, 1.0) for i, ranks in enumerate(self.case.batches)
        )
        return StepPlan("by hand", 2, made, 1.0, 1.0, 0.0, 0.0, queued=self.case.queued)


def run_rank(case: Case) -> list[tuple[str, Any]]:
    """The events of the last step."""
    torch.set_num_threads(1)
    LOGS.log = log = Log()
    with hdp.init() as comm:
        mesh = Mesh(comm, pipeline=case.pipeline, tensor=case.tensor, expert=case.expert)
        model = Llama(case.config, seed=0)
        parts: Any = [model] if case.pipeline == 1 else [split_model(model, case.pipeline)[mesh.stage]]
        for part in parts:
            expert_parallel(part, mesh)
            tensor_parallel(part, mesh)
            for block in part.blocks:
                watch(block, case)
        optimizer = torch.optim.AdamW(parts[0].parameters(), lr=1e-3)
        whole = model if case.pipeline == 1 else parts
        trainer = Trainer(whole, optimizer, Plans(case), mesh, zero=1, dtype=torch.bfloat16)
        lengths = [TOKENS * len(ranks) for ranks in case.batches]
        for _ in range(STEPS):
            comm.barrier()
            log.events.clear()
            trainer.step(lengths, lambda i: torch.arange(lengths[i]) % 250)
    return log.events


def replay(logs: Sequence[list[tuple[str, Any]]]) -> tuple[float, dict[str, float]]:
    """Seconds of the step, and shares of it in which a rank waits, in the mean of the ranks."""
    operations: dict[Any, Operation] = {}
    queues: list[list[Operation]] = [[] for _ in logs]
    clocks, places = [0.0] * len(logs), [0] * len(logs)
    waits: list[list[tuple[float, float]]] = [[] for _ in logs]
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(logs):
            while places[rank] < len(events):
                what, value = events[places[rank]]
                if what == "compute":
                    clocks[rank] += value
                elif what == "call":
                    key, kind, seconds = value
                    operation = operations.setdefault(key, Operation(kind, seconds, key[0], key[1]))
                    operation.called[rank] = clocks[rank]
                    operation.ahead += [each for each in queues[rank] if operation.comes_after(each)]
                    queues[rank].append(operation)
                else:
                    operation = operations[value]
                    if operation.start is None:
                        break
                    waits[rank].append((clocks[rank], max(clocks[rank], operation.end)))
                    clocks[rank] = waits[rank][-1][1]
                places[rank] += 1
                moved = True
        moved |= start_ready(list(operations.values()))
    assert all(place == len(events) for place, events in zip(places, logs, strict=True)), "ranks wait in a circle"
    total, shares = max(clocks), dict.fromkeys(KINDS, 0.0)
    for own, queue in zip(waits, queues, strict=True):
        for begin, end in own:
            rest = end - begin
            for each in queue if end > begin else ():
                assert each.start is not None
                part = min(rest, max(0.0, min(end, each.end) - max(begin, each.start)))
                shares[each.kind] += part
                rest -= part
            shares["others"] += max(0.0, rest)
    return total, {kind: value / total / len(logs) for kind, value in shares.items()}


def start_ready(operations: Sequence[Operation]) -> bool:
    """Starts the operations to which all ranks have come, behind those before them that go between the same ranks."""
    started = False
    for each in operations:
        if each.start is not None or len(each.called) < len(each.ranks):
            continue
        if all(other.start is not None for other in each.ahead):
            each.start = max([*each.called.values(), *(other.end for other in each.ahead)])
            started = True
    return started


def in_turns(queue: StepQueue, _: Any) -> int:
    """In place of asking the counter: the ranks take in turns."""
    return len(queue._taken) * queue._comm.size + queue._comm.rank


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of a step, and the shares of it."""
    with (
        mock.patch.multiple(StepQueue, _ask=in_turns),
        mock.patch.multiple(
            Communicator,
            _collective=noting_collective(Communicator._collective),
            exchange=noting_exchange(Communicator.exchange, core_seconds(case) / 2),
        ),
        mock.patch.multiple(
            TensorGroup,
            _gathered=of_kind("tensor", TensorGroup._gathered),
            _scattered=of_kind("tensor", TensorGroup._scattered),
        ),
        mock.patch.object(WholeSums, "_start", of_kind("gradients", WholeSums._start)),
        mock.patch.object(Masters, "publish", of_kind("weights", Masters.publish)),
        mock.patch(
            "hdpcomm.models.expert_group._exchanged", experts_exchange(expert_group._exchanged, experts_seconds(case))
        ),
        mock.patch.object(Trainer, "bucket_bytes", (32 << 20) // SCALE**2),
    ):
        logs = run_threads(run_rank, 2 * case.tensor * case.pipeline, case, timeout=600)
    seconds, shares = replay(logs)
    return {"step_ms": round(1e3 * seconds, 2)} | {kind: round(share, 4) for kind, share in shares.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    found = {name: measure(case) for name, case in CASES.items()}
    print(f"| case | step ms | {' | '.join(f'{kind} %' for kind in KINDS)} |")
    print("|---" * (len(KINDS) + 2) + "|")
    for name, row in found.items():
        print(f"| {name} | {row['step_ms']:.1f} | " + " | ".join(f"{100 * row[kind]:.1f}" for kind in KINDS) + " |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
