"""torch.distributed with hdpcomm and with gloo, called as PyTorch programs call it, in the same processes.

    python benchmarks/torch_backend.py [--free] [--sizes 8,1K,64K,1M] [--rounds 7] [--json FILE]

Two ranks. A time is the median over the rounds, in which the backends alternate, of the mean over the iterations on
rank 0. ``send / recv`` is a ping-pong, and its time that of one way; all other rows are times of a call and its wait.
``torch alone`` is the same loop on a group whose methods do nothing, which shows the time of torch.distributed itself.
The training steps are of a small multi-layer perceptron with one thread a rank; their size is that of the parameters.
If there are two cores, each rank is bound to one; ``--free`` binds none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdpcomm as hdp
import hdpcomm.torch_backend
from hdpcomm.comm.launch import run_ranks
from hdpcomm.comm.launchers import master
from hdpcomm.perf.config import parse_size

BACKENDS = ("hdpcomm", "gloo")
ALONE = "torch alone"
WIDTH, LAYERS = 256, 4  # of the model

Step = Callable[[], object]
Row = tuple[str, int]  # operation, bytes


class _Nothing(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True


class _NothingGroup(dist.ProcessGroup):
    """A group whose operations do nothing."""

    def getBackendName(self) -> str:
        return "nothing"

    def _ended(self, *_arguments: Any, **_options: Any) -> dist.Work:
        return _NOTHING

    send = recv = allreduce = barrier = all_gather_single = _allgather_base = _ended


_NOTHING = _Nothing()


def message_steps(rank: int, size: int) -> Iterator[tuple[str, Step]]:
    peer = 1 - rank
    x, y = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def ping_pong() -> None:
        if rank == 0:
            dist.send(x, peer)
            dist.recv(y, peer)
        else:
            dist.recv(y, peer)
            dist.send(x, peer)

    def both_ways() -> None:
        incoming, outgoing = dist.irecv(y, peer), dist.isend(x, peer)
        incoming.wait()
        outgoing.wait()

    def batch() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]):
            work.wait()

    yield "send / recv", ping_pong
    yield "isend + irecv + wait", both_ways
    yield "batch_isend_irecv + wait", batch


def collective_steps(size: int) -> Iterator[tuple[str, Step]]:
    x, everyone = torch.zeros(size // 4), torch.zeros(size // 4 * 2)
    # Its name since torch 2.13, which warns of the old one.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    yield "all_reduce", lambda: dist.all_reduce(x)
    yield "all_reduce async + wait", lambda: dist.all_reduce(x, async_op=True).wait()
    yield "all_gather_into_tensor", lambda: all_gather(everyone, x)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*itertools.chain(*((nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))))


def training_steps() -> Iterator[tuple[str, int, Step]]:
    x = torch.randn(16, WIDTH)

    def step_of(model: nn.Module) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    size = sum(parameter.nbytes for parameter in perceptron().parameters())
    yield "step under DDP", size, step_of(DistributedDataParallel(perceptron()))
    sharded, mesh = perceptron(), init_device_mesh("cpu", (2,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    yield "step under FSDP2", size, step_of(fully_shard(sharded, mesh=mesh))


def steps(rank: int, sizes: list[int], alone: bool) -> Iterator[tuple[Row, Step, float]]:
    """For each row: its key, the step to repeat, and the share of the step's time that the row shows."""
    for size in sizes:
        for name, step in message_steps(rank, size):
            yield (name, size), step, 0.5 if name == "send / recv" else 1.0
        for name, step in collective_steps(size):
            yield (name, size), step, 1.0
    yield ("barrier", 0), dist.barrier, 1.0
    if not alone:
        for name, size, step in training_steps():
            yield (name, size), step, 1.0


def seconds_of(step: Step, size: int, most: int, alone: bool) -> float:
    """Seconds of one step: the mean of many (fewer if they are large), after a quarter as many for warm-up."""
    times = min(most, max(5, 50_000_000 // (size + 50_000)))
    for timed in (False, True):
        if not alone:
            dist.barrier()
        started = time.perf_counter()
        for _ in range(times if timed else times // 4 + 3):
            step()
    return (time.perf_counter() - started) / times


def measure(free: bool, sizes: list[int], rounds: int, most: int) -> list[dict[str, Any]]:
    """The rows, on rank 0: operation, bytes, and the median microseconds of each backend."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.Backend.register_backend(
        "nothing", lambda options, _: _NothingGroup(options.group_rank, 2), extended_api=True, devices=["cpu"]
    )
    rank = int(os.environ["RANK"])
    address, port = master()
    store = dist.TCPStore(address, port, is_master=False)
    cores = sorted(os.sched_getaffinity(0))
    times: dict[Row, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in (*BACKENDS, ALONE):
            alone = name == ALONE
            place = dist.PrefixStore(f"{name} {number}", store)
            dist.init_process_group("nothing" if alone else name, store=place, rank=rank, world_size=2)
            if not free and len(cores) >= 2:  # binds only this thread, not the threads that gloo has started
                os.sched_setaffinity(0, {cores[rank]})
            for row, step, share in steps(rank, sizes, alone):
                taken = seconds_of(step, row[1], most, alone) * share
                times.setdefault(row, {}).setdefault(name, []).append(taken * 1e6)
            if not alone:
                dist.barrier()
            dist.destroy_process_group()
            os.sched_setaffinity(0, cores)
    return [
        {"operation": row[0], "bytes": row[1]} | {name: statistics.median(all_of) for name, all_of in by_name.items()}
        for row, by_name in times.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    names = f"{'operation':<25} {'bytes':>9}  {'hdpcomm us':>11}  {'gloo us':>9}  {'gloo / hdpcomm':>14}"
    print(f"{names}  {ALONE + ' us':>14}")
    for row in sorted(rows, key=lambda each: each["operation"]):
        alone = f"{row[ALONE]:>14.1f}" if ALONE in row else ""
        print(
            f"{row['operation']:<25} {row['bytes']:>9}  {row['hdpcomm']:>11.1f}  {row['gloo']:>9.1f}  "
            f"{row['gloo'] / row['hdpcomm']:>14.1f}  {alone}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--free", action="store_true", help="do not bind the ranks to cores")
    parser.add_argument("--sizes", default="8,1K,64K,1M", help="bytes of messages and of each rank's part")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=200, help="the most in a round")
    arguments = parser.parse_args()
    sizes = [parse_size(size) for size in arguments.sizes.split(",")]
    given = arguments.free, sizes, arguments.rounds, arguments.iterations
    rows = run_ranks(measure, 2, *given, timeout=600)[0]
    show(rows)
    if arguments.json:
        record = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "hdpcomm": hdp.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "bound": not arguments.free and (os.cpu_count() or 1) >= 2,
            "rows": rows,
        }
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
