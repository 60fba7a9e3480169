"""The checks: hosts, devices and links, with versions, disks, matrix products, copies and messages between each two
ranks; collectives, their results and times beside those of torch.distributed; and whole steps, a ring attention, a
planned training step, and a job that loses a rank.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm import __version__, _core
from hdpcomm.acceptance.report import BROKEN, GOOD, LOOK, NOT_TRIED, Row, Rule, named, rated
from hdpcomm.attention import ring_attention
from hdpcomm.comm import Communicator
from hdpcomm.comm.device.nccl_library import describe
from hdpcomm.comm.launchers import master
from hdpcomm.comm.secret import new_secret
from hdpcomm.comm.topology import cores_of_rank, nodes_of, shared_cores
from hdpcomm.data.agree import from_rank, gather_json
from hdpcomm.data.corpus import standard_library
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.timing import call_s, repeated_s, slowest_s
from hdpcomm.measure.topology import host_facts, pair_costs
from hdpcomm.models import LlamaConfig
from hdpcomm.offload import PinnedPool, measure_copies
from hdpcomm.perf.data import element_type
from hdpcomm.perf.ops import Bound, Case, operation
from hdpcomm.run import RunConfig, train
from hdpcomm.run.model import known_device
from hdpcomm.train.step.data_parallel import torch_group

__all__ = [
    "check_collectives",
    "check_copies",
    "check_disks",
    "check_links",
    "check_processors",
    "check_products",
    "check_recovery",
    "check_ring",
    "check_step",
    "check_versions",
    "step_config",
]

_MUST_AGREE = ("hdpcomm", "torch", "NCCL", "CUDA")
"""Others that differ are named only: messages and results do not depend on them."""
_DISK_BYTES = 64 << 20
_DISK = Rule(1.0, 0.1)
_LEAST_DISK = 2e8
"""bytes/s: a checkpoint of 7B with its optimizer, 84 GB, then takes 7 minutes."""


def check_versions(comm: Communicator) -> list[Row]:
    """Versions and devices of all ranks, which have to be alike. Collective."""
    facts = gather_json(comm, _facts(comm.device))
    rows = []
    for name in facts[0]:
        ranks = defaultdict(list)
        for rank, each in enumerate(facts):
            ranks[each[name]].append(rank)
        common = max(ranks, key=lambda value: len(ranks[value]))
        unlike = "; ".join(f"{named(who)} {'has' if len(who) == 1 else 'have'} {value}"
                           for value, who in ranks.items() if value != common)  # fmt: skip
        judged = GOOD if not unlike else BROKEN if name in _MUST_AGREE else LOOK
        rows.append(Row("versions", name, judged, common, note=unlike and f"{unlike}; give all hosts the same"))
    return rows


def _facts(device: torch.device) -> dict[str, str]:
    try:
        there, nccl = describe()
    except InvalidUsage as error:
        there, nccl = False, str(error)
    return {
        "hdpcomm": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "CUDA": str(_core.build_info()["cuda"] or "none"),
        "NCCL": nccl if there else "none",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
    }


def check_processors(comm: Communicator) -> list[Row]:
    """Cores of a rank. Collective."""
    shared = shared_cores(comm)
    if shared is None:
        return [Row("hosts", "cores for each rank", GOOD, "1 or more")]
    note = "ranks share cores, so no time below is broken for sure: start fewer ranks, or bind each to cores of its own"
    return [Row("hosts", "cores for all ranks", LOOK, str(shared), str(comm.size), shared / comm.size, note)]


def check_disks(comm: Communicator, folder: Path) -> list[Row]:
    """Writes a file in ``folder`` from the first rank of each host, as a checkpoint would. Collective."""
    nodes = nodes_of(comm)
    rate, error = 0.0, ""
    if comm.rank == nodes.index(nodes[comm.rank]):
        try:
            rate = _write_rate(folder)
        except OSError as failure:
            error = f"{platform.node()}, rank {comm.rank}: {failure.strerror or failure}"
    found = gather_json(comm, [rate, error])
    errors = [text for _, text in found if text]
    check = f"writing to {folder}"
    if errors:
        note = f"{'; '.join(errors)}: give --folder a place where checkpoints can be written"
        return [Row("hosts", check, BROKEN, note=note)]
    slowest, rank = min((rate, rank) for rank, (rate, _) in enumerate(found) if rate)
    return [rated("hosts", check, slowest, _LEAST_DISK, "GB/s", _DISK, f"the host of rank {rank} is the slowest")]


def _write_rate(folder: Path) -> float:
    """bytes/s of a file that is written and reaches the disk."""
    data = os.urandom(1 << 20)
    with NamedTemporaryFile(dir=folder, prefix="hdpcomm-acceptance-") as file:
        started = time.perf_counter()
        for _ in range(_DISK_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _DISK_BYTES / (time.perf_counter() - started)


BUSBW = Rule(0.8, 0.5)
"""A link that has lost more than a fifth of what others of its kind reach is set up wrongly, or has lost a lane."""
_STRAGGLER = Rule(1 / 1.1, 0.6)
"""A job that runs 1.1 times as long as without its slowest worker is a straggling one (arXiv 2505.05713)."""
_LATENCY = Rule(0.5, 0.2)
_TOGETHER = Rule(0.7, 0.3)
_OWN_MEMORY = Rule(0.3, 0.1)
"""A message between two processes on CPUs beside a copy that one of them makes, whose bytes are in its caches."""
_MOST_RANKS = 8
"""Up to so many, each two ranks are measured; of more, neighbours on hosts, and neighbouring hosts."""
_REPEATS, _SAMPLE_S = 7, 0.05
_COPY_BYTES = 4 << 20


def check_products(comm: Communicator) -> list[Row]:
    """FLOP/s of matrix products on all ranks at once, and while each exchanges messages with its neighbours.
    Collective."""
    size, dtype = (8192, torch.bfloat16) if comm.device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=comm.device).to(dtype) for _ in range(2))
    flops = 2.0 * size**3
    count = max(1, round(_SAMPLE_S / min(call_s(comm.device, lambda: a @ b) for _ in range(_REPEATS))))
    comm.barrier()
    # A rank that shares its core gets it for milliseconds in turn, so one product may seem to have it alone.
    alone_s = statistics.median(repeated_s(comm.device, lambda: a @ b, count) for _ in range(_REPEATS))
    rates = [flops / seconds for seconds in gather_json(comm, alone_s)]
    spec = known_device(comm.device)
    typical = statistics.median(rates)
    rows = [
        rated("devices", "matrix products", typical, spec.peak_flops * 0.65 if spec else None, "TFLOP/s", BUSBW,
              "below what such devices sustain: look at clock rates, power limits and other jobs on them"),
    ]  # fmt: skip
    if comm.size == 1:
        return rows
    slow = [rank for rank, rate in enumerate(rates) if rate < typical * _STRAGGLER.good]
    note = f"{named(slow)} slower than others: look at what else runs there, clock rates, cooling" if slow else ""
    rows.append(rated("devices", "slowest of the ranks", min(rates), typical, "TFLOP/s", _STRAGGLER, note))
    return [*rows, _beside_messages(comm, a, b, alone_s)]


def _beside_messages(comm: Communicator, a: torch.Tensor, b: torch.Tensor, alone_s: float) -> Row:
    """Products while messages of as many seconds are on their way; without a limit on CPUs, which copy the bytes
    themselves."""
    out, back = (torch.zeros(16 << 20, dtype=torch.uint8, device=comm.device) for _ in range(2))
    around = [(comm.rank + step) % comm.size for step in (1, -1)]

    def exchange() -> None:
        comm.exchange([(out, around[0])], [(back, around[1])])

    def both() -> None:
        work = comm.exchange([(out, around[0])], [(back, around[1])], async_op=True)
        for _ in range(products):
            a @ b
        work.wait()

    comm.barrier()
    message_s = min(call_s(comm.device, exchange) for _ in range(_REPEATS))
    products = max(1, round(statistics.median(gather_json(comm, message_s / alone_s))))
    comm.barrier()
    together_s = min(call_s(comm.device, both) for _ in range(_REPEATS))
    found = gather_json(comm, [together_s, max(products * alone_s, message_s)])
    seconds, limit = max(found)
    known, note = limit if comm.device.type == "cuda" else None, "messages take cores of the device"
    return rated("devices", "products beside messages", seconds, known, "s", _TOGETHER, note)


def check_copies(comm: Communicator) -> list[Row]:
    """Copies between devices and host memory, of one rank of each host, and of all at once, as offload makes them.
    Collective."""
    nodes = nodes_of(comm)
    first = nodes.index(nodes[comm.rank])
    pool = PinnedPool(8 * _COPY_BYTES, device=comm.device)
    alone = max(gather_json(comm, measure_copies(pool, _COPY_BYTES) if comm.rank == first else 0.0))
    together = gather_json(comm, measure_copies(pool, _COPY_BYTES))
    spec, found = known_device(comm.device), alone if comm.device.type == "cuda" else None
    limit = min(spec.d2h_bandwidth, spec.h2d_bandwidth) if spec else found
    slowest, rank = min((rate, rank) for rank, rate in enumerate(together))
    note = f"rank {rank} is the slowest: bind ranks to the memory nearest their device"
    return [rated("devices", "copies to host memory", slowest, limit, "GB/s", _TOGETHER, note)]


def check_links(comm: Communicator) -> list[Row]:
    """Latency and bandwidth of messages between ranks. Collective."""
    if comm.size == 1:
        return []
    nodes = nodes_of(comm)
    facts = gather_json(comm, host_facts())
    figures = pair_costs(comm, _pairs(nodes))
    spec = known_device(comm.device)
    copy = max(gather_json(comm, _copy_rate(comm.device) if comm.rank == 0 else 0.0))
    rows: list[Row] = []
    for inside in (True, False):
        pairs = [pair for pair in figures if (nodes[pair[0]] == nodes[pair[1]]) == inside]
        if not pairs:
            continue
        if inside:
            limit = spec.intra_bandwidth if spec else copy
        else:
            speeds = [min(_network(facts[a]), _network(facts[b])) for a, b in pairs]
            limit = spec.inter_bandwidth if spec else min(speeds)
        found = {pair: figures[pair] for pair in pairs}
        rule = _OWN_MEMORY if inside and spec is None else BUSBW
        names = [each["name"] for each in facts]
        rows += _of_kind("on a host" if inside else "between hosts", found, limit or None, rule, names)
    return rows


def _pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of ranks that are measured, one after the other."""
    size = len(nodes)
    if size <= _MOST_RANKS:
        return [(a, b) for a in range(size) for b in range(a + 1, size)]
    firsts = [nodes.index(node) for node in sorted(set(nodes))]
    along = [(a, b) for a in range(size) if (b := next((c for c in range(a + 1, size) if nodes[c] == nodes[a]), None))]
    around = list(zip(firsts, firsts[1:] + firsts[:1], strict=True)) if len(firsts) > 2 else [tuple(firsts)]
    return along + [(a, b) for a, b in around if len(firsts) > 1]


def _of_kind(
    where: str, pairs: dict[tuple[int, int], tuple[float, float]], limit: float | None, rule: Rule, names: Sequence[str]
) -> list[Row]:
    """Rows of the pairs on hosts, or between hosts: the better half beside the limit, and the worst pair beside it."""
    late = sorted((latency, pair) for pair, (latency, _) in pairs.items())
    slow = sorted((bandwidth, pair) for pair, (_, bandwidth) in pairs.items())
    half = len(pairs) // 2
    latency = statistics.median(each for each, _ in late[: len(late) - half])
    bandwidth = statistics.median(each for each, _ in slow[half:])
    note = "below the speed of the link: look at what else uses it, its cable, and which interface messages take"
    rows = [
        rated("links", f"latency {where}, 8 B", latency, None, "us", _LATENCY),
        rated("links", f"bandwidth {where}, 16 MiB", bandwidth, limit, "GB/s", rule, note),
    ]
    if len(pairs) > 1:
        behind = [pair for each, pair in late if latency < _LATENCY.good * each]
        rows.append(
            rated("links", f"latest pair {where}", late[-1][0], latency, "us", _LATENCY, _of_all(behind, names))
        )
        behind = [pair for each, pair in slow if each < BUSBW.good * bandwidth]
        rows.append(
            rated("links", f"slowest pair {where}", slow[0][0], bandwidth, "GB/s", BUSBW, _of_all(behind, names))
        )
    return rows


def _of_all(pairs: Sequence[tuple[int, int]], names: Sequence[str]) -> str:
    """Names the ranks of slow pairs: one, if it is in all of several."""
    if not pairs:
        return ""
    shared = set(pairs[0]).intersection(*pairs) if len(pairs) > 1 else set()
    ranks = sorted(shared or {rank for pair in pairs for rank in pair})
    return f"{named(ranks)} on {', '.join(sorted({names[rank] for rank in ranks}))}: look at its links"


def _network(facts: dict[str, list[list[float]]]) -> float:
    """bytes/s of a host's fastest interface; 0 where none says."""
    return max((float(speed) * 1e9 / 8 for _, speed in facts["links"]), default=0.0)


def _copy_rate(device: torch.device) -> float:
    """bytes/s of a copy in the rank's own memory, which a message on a host has to make."""
    data, out = (torch.zeros(16 << 20, dtype=torch.uint8, device=device) for _ in range(2))
    return data.numel() / min(call_s(device, lambda: out.copy_(data)) for _ in range(_REPEATS))


_RIVAL = Rule(0.9, 0.5)
"""Ours to choose: times of two runs differ by a tenth on a quiet host (docs/acceptance.md)."""
_BUDGET_S = 2.0
_TIMEOUT_S = 60.0
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "alltoall")


def check_collectives(comm: Communicator) -> list[Row]:
    """The four on all ranks, on those of each host, and on half of the ranks in no order. Collective."""
    if comm.size == 1:
        return []
    rows = []
    backend = "nccl" if comm.device.type == "cuda" else "gloo"
    with torch_group(comm, backend, timeout=_TIMEOUT_S):
        for name, groups in _groups(comm):
            # torch orders the ranks of a group as they are given only if it is asked to; all call it for each group.
            limit = timedelta(seconds=_TIMEOUT_S)
            theirs = [dist.new_group(each, timeout=limit, backend=backend, sort_ranks=False) for each in groups]
            place = next((index for index, ranks in enumerate(groups) if comm.rank in ranks), None)
            ours = None if place is None else comm.subset(groups[place])
            for called in _OPERATIONS:
                measured = None
                comm.barrier()
                if place is not None and ours is not None:
                    measured = _measured(ours, theirs[place], called)
                rows.append(_row(comm, called, name, groups, backend, measured))
    return rows


def _groups(comm: Communicator) -> list[tuple[str, list[list[int]]]]:
    nodes = nodes_of(comm)
    everyone = list(range(comm.size))
    hosts = [[rank for rank in everyone if nodes[rank] == node] for node in sorted(set(nodes))]
    found = [(f"all {comm.size} ranks", [everyone])]
    if len(hosts) > 1 and all(len(ranks) > 1 for ranks in hosts):
        found.append(("each host", hosts))
    if comm.size > 2:
        half = random.Random(0).sample(everyone, max(2, comm.size // 2))
        found.append((named(half), [half]))
    return found


class _Torch:
    """torch's group with the methods of a communicator that the operations of ``hdpcomm perf`` call."""

    def __init__(self, comm: Communicator, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.device, self._group = comm.rank, comm.size, comm.device, group

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(out, x, group=self._group)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str) -> None:
        del op  # sum
        (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(out, x, group=self._group)

    def all_reduce(self, x: torch.Tensor, op: str, *, out: torch.Tensor) -> None:
        del op
        dist.all_reduce(out.copy_(x), group=self._group)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_to_all_single(out, x, group=self._group)


def _measured(comm: Communicator, group: dist.ProcessGroup, name: str) -> tuple[float, float, int]:
    """Seconds of a call of ours and of torch's, the fastest of rounds in turns, and wrong elements of ours; 64 MiB on
    devices, else 1 MiB."""
    kind = element_type("float")
    shape = operation(name).shape((1 << 24 if comm.device.type == "cuda" else 1 << 18), comm.size)
    both = [Bound(operation(name), Case(each, kind, shape)) for each in (comm, _Torch(comm, group))]
    slowest = torch.zeros(1, dtype=torch.float64)
    for bound in both:
        bound.fill()
        slowest += sum(call_s(comm.device, bound.run) for _ in range(2))  # the first one makes connections
    comm.all_reduce(slowest, "max")
    turns = 2 * _BUDGET_S / float(slowest)
    calls, rounds = (max(1, min(5, round(turns / share))) for share in (5, 25))
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for place, bound in enumerate(both):
            comm.barrier()
            best[place] = min(best[place], repeated_s(comm.device, bound.run, calls))
    ours = both[0]
    for step in (ours.fill, ours.synchronize, comm.barrier, ours.run, ours.synchronize):
        step()
    return best[0], best[1], ours.wrong()


def _row(
    comm: Communicator,
    called: str,
    name: str,
    groups: Sequence[Sequence[int]],
    backend: str,
    measured: tuple[float, float, int] | None,
) -> Row:
    found = gather_json(comm, measured)
    members = [found[rank] for ranks in groups for rank in ranks]
    check = f"{called}, {name}"
    bad = [rank for rank, each in enumerate(found) if each is not None and each[2]]
    if bad:
        return Row("collectives", check, BROKEN, note=f"wrong elements on {named(bad)}: report it")
    ours, theirs = (max(each[place] for each in members) for place in range(2))
    return rated("collectives", check, ours, theirs, "us", _RIVAL, f"slower than torch's {backend}")


_HIDDEN = Rule(0.8, 0.4)
_STEP_RIVAL = Rule(0.9, 0.7)
_PREDICTION = Rule(0.75, 0.3)
_STEPS = 12
_RECOVERY_S = 120.0


def check_ring(comm: Communicator) -> list[Row]:
    """Forward and backward of one sequence on all ranks, beside as many pairs of tokens on each rank alone. Collective.

    The sequence has p times the tokens of a rank, which so computes a p-th of p^2 as many pairs: those of a sequence
    that is sqrt(p) times as long as its part.
    """
    if comm.size == 1:
        return []
    on_gpu = comm.device.type == "cuda"
    part, heads, dim = (8192, 16, 128) if on_gpu else (2048, 2, 32)
    alone = comm.subset([comm.rank])
    assert alone is not None
    same = 2 * math.ceil(part * math.sqrt(comm.size) / 2)

    def call(group: Communicator, tokens: int) -> None:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        q, k, v = (torch.randn(tokens // group.size, heads, dim, device=group.device).to(dtype).requires_grad_()
                   for _ in range(3))  # fmt: skip
        out = ring_attention(q, k, v, comm=group, cu_seqlens=[0, tokens])
        assert isinstance(out, torch.Tensor)  # not asked for more
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]

    lone_s = slowest_s(comm, lambda: call(alone, same))
    ring_s = slowest_s(comm, lambda: call(comm, part * comm.size))
    note = f"{1 - lone_s / ring_s:.0%} of the time waits for messages: look at the links"
    return [rated("steps", f"ring attention, {part * comm.size:,} tokens", ring_s, lone_s, "s", _HIDDEN, note)]


def step_config(comm: Communicator) -> RunConfig:
    """The model of the check where none was given: a Llama that trains on this device in seconds."""
    if comm.device.type == "cuda":
        model = LlamaConfig(layers=4, hidden=2048, heads=16, kv_heads=4, ffn=5632)
        return RunConfig(model=model, capacity=16384)
    return RunConfig(capacity=2048)


def check_step(comm: Communicator, config: RunConfig) -> list[Row]:
    """Steps that are planned, beside those of static context parallelism and of torch's DDP on the same batches.
    Collective."""
    torch.set_num_threads(cores_of_rank(comm))
    on_gpu = comm.device.type == "cuda"
    policies = ("balanced", "static") if on_gpu else ("balanced", "static", "ddp")
    dtype, tokens = "bf16" if on_gpu else "fp32", config.capacity * comm.size
    config = replace(config, policies=policies, steps=_STEPS, dtype=dtype, tokens_per_step=tokens)
    corpus = standard_library(context=tokens if on_gpu else config.capacity, whole_every=16)  # of DDP's one rank
    result = train(comm, corpus, config)
    seconds = {name: statistics.median(each.seconds for each in steps[1:]) for name, steps in result.steps.items()}
    ours = seconds["balanced"]
    rows = []
    for rival, name in (("static", "static CP"), ("ddp", "DDP")):
        if rival in seconds:
            rows.append(rated("steps", f"step beside {name}", ours, seconds[rival], "s", _STEP_RIVAL,
                              f"a planned step takes longer than one of {name}"))  # fmt: skip
    predicted = statistics.median(step.predicted_s for step in result.steps["balanced"][1:])
    ratio = min(predicted / ours, ours / predicted)
    judged = _PREDICTION.judge(ratio)
    note = "" if judged == GOOD else "the costs that plans are made from do not hold: look for what else runs here"
    rows.append(Row("steps", "step beside its prediction", judged, f"{ours:.3g} s", f"{predicted:.3g} s", ratio, note))
    return rows


def check_recovery(comm: Communicator) -> list[Row]:
    """A job of as many processes, of which one is killed in its fourth step: do the others go on? Collective."""
    check = "pause when a rank is killed"
    if comm.size == 1:
        return []
    if comm.device.type == "cuda":
        return [Row("recovery", check, NOT_TRIED, note="runs with devices end with a rank and begin again")]
    place = json.loads(from_rank(comm, json.dumps(_meeting_place()) if comm.rank == 0 else ""))
    with tempfile.TemporaryDirectory(prefix="hdpcomm-acceptance-") as folder:
        found, error = _in_child(comm, place, Path(folder))
    every = gather_json(comm, [found, error])
    victim = comm.size - 1
    errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(every) if text and rank != victim]
    if errors:
        return [Row("recovery", check, BROKEN, note="; ".join(errors[:3]))]
    gone_on = [each for rank, (each, _) in enumerate(every) if rank != victim]
    seconds, again = (max(each[name] for each in gone_on) for name in ("pause_s", "again"))
    note = f"{again} steps were made again" if again > 1 else ""
    return [Row("recovery", check, BROKEN if again > 1 else GOOD, f"{seconds:.3g} s", note=note)]


def _meeting_place() -> dict[str, str]:
    """Where the processes of the job meet: on rank 0's host, as the ranks themselves do."""
    try:
        address = master()[0]
    except InvalidUsage:  # ranks that were started without a launcher of several hosts
        address = "127.0.0.1"
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    return {"MASTER_ADDR": address, "MASTER_PORT": port, "HDPCOMM_SECRET": new_secret(), "HDPCOMM_SECRET_FILE": ""}


def _in_child(comm: Communicator, place: dict[str, str], folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Figures of this rank's process of the job, or why it failed. Local."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    kept.pop("HDPCOMM_STORE", None)
    environment = kept | place | {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size), "HDPCOMM_TRANSPORT": ""}
    command = [sys.executable, "-m", "hdpcomm.acceptance.victim", str(folder)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = child.communicate(timeout=_RECOVERY_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return None, f"its process did not end within {_RECOVERY_S:g} s"
    if child.returncode == -signal.SIGKILL:
        return None, "its process was killed"
    if child.returncode:
        return None, (err.strip().splitlines() or ["no message"])[-1]
    return json.loads(out.splitlines()[-1]), ""
