"""What the ranks of the simulated hosts run: ``python -m tests.harness.host_program NAME FOLDER``."""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.acceptance import checks
from hdpcomm.acceptance.checks import check_links, check_recovery
from hdpcomm.comm import bootstrap, topology
from hdpcomm.measure.topology import measure_topology
from hdpcomm.torch_backend import communicator
from tests.harness.attention_oracle import Case, on_rank
from tests.ranks.comm import test_collectives as collectives
from tests.ranks.comm.test_subsets import random_mix

RING = Case(size=4, lengths=[150, 7, 1, 61], heads=4, kv_heads=2)


def write(folder: Path, name: str, value: Any) -> None:
    """For the test to read; complete as soon as it is there."""
    temporary = folder / f"{name}.part"
    torch.save(value, temporary)
    temporary.rename(folder / name)


def everything(folder: Path) -> None:
    """Collectives on subsets within and across hosts, a random mix of them, and ring attention."""
    random_mix(7, 150)
    with hdp.init(timeout=60) as world:
        n = world.size
        for positions in (tuple(range(n)), (n - 1, 0), (n - 1, 1, 2), (0, 1)):
            comm = world.subset(positions)
            if comm is None:
                continue
            for count in (0, 5, 70_001):
                collectives.check_gathers(comm, count, torch.float32)
                collectives.check_all_to_all(comm, count, torch.float32)
                collectives.check_reductions(comm, count, torch.float32, "sum")
            comm.barrier()
        ring = world.subset([2, 0, 3, 1])
        if ring is not None:
            write(folder, f"ring{ring.rank}", on_rank(RING, ring))
        traffic(world, folder)
        write(folder, f"transport{world.rank}", world.transport)


def interfaces(folder: Path) -> None:
    """What the ranks find that they share, and what a planner gets of it."""
    topology._LARGE_BYTES = 8 << 20  # the link is slow
    with hdp.init(timeout=60) as world:
        found = measure_topology(world)
        write(folder, f"nics{world.rank}", found.nics)


def cut(folder: Path) -> None:
    """Waits until the test has cut off the last rank's host, then works: with it, and then without."""
    world = hdp.init(timeout=600)  # more than the test has: the silence tells, not the deadline
    world.barrier()
    write(folder, f"ready{world.rank}", None)
    limit = time.monotonic() + 30
    while not (folder / "cut").exists():
        assert time.monotonic() < limit
        time.sleep(0.02)
    found: dict[str, Any] = {}
    try:
        world.all_reduce(torch.ones(50_000))
    except hdp.Error as error:
        found = {"type": type(error).__name__, "text": str(error)}
    rest = world.subset(range(world.size - 1))
    if rest is not None:
        rest.resync()
        y = torch.full((70_000,), float(world.rank))
        rest.all_reduce(y)
        found["sum"] = float(y[0])
    write(folder, f"found{world.rank}", found)


def dies_while_joining(folder: Path) -> None:
    """The last rank is gone after it has told who it is; only its neighbours can see that."""

    def die(*_: Any) -> Any:
        os._exit(0)

    rank = int(os.environ["RANK"])
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        bootstrap._JOINS["auto"] = die
    try:
        hdp.init(timeout=600)  # more than the test has
    except hdp.PeerLost as error:
        write(folder, f"found{rank}", (error.peer, str(error)))


def torch_backend(folder: Path) -> None:
    """``backend="hdpcomm"``: collectives, a group across the hosts, messages, objects."""
    dist.init_process_group("hdpcomm", timeout=datetime.timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = communicator()
    before = sent_over_the_link()
    x = torch.full((TRAFFIC_BYTES // 4,), float(rank))
    dist.all_reduce(x)
    assert (x == size * (size - 1) / 2).all()
    dist.barrier()
    write(folder, f"sent{rank}", sent_over_the_link() - before)
    group = dist.new_group([size - 1, 0], sort_ranks=False)
    if rank in (0, size - 1):
        y = torch.full((70_001,), float(rank))
        dist.broadcast(y, 0, group=group)
        assert (y == 0).all()
    a, b = torch.full((70_001,), float(rank)), torch.empty(70_001)
    ops = [dist.P2POp(dist.irecv, b, (rank - 1) % size), dist.P2POp(dist.isend, a, (rank + 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (b == (rank - 1) % size).all()
    if rank == 0:
        for peer in range(1, size):
            dist.recv(b, peer)
            assert (b == peer).all()
    else:
        dist.send(a, 0)
    told = [None] * size
    dist.all_gather_object(told, (rank, comm.transport))
    dist.destroy_process_group()
    write(folder, f"told{rank}", told)


def sent_over_the_link() -> int:
    """Bytes that this host's interface has sent, with all headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line for line in lines if "eth0" in line).split(":")[1].split()
    return int(fields[8])


TRAFFIC_BYTES = 12 << 20  # of the whole buffer
TRAFFIC_SUBSETS = ((0, 1, 2, 3), (3, 0, 2), (0, 2), (2, 3))


def traffic(world: hdp.Communicator, folder: Path) -> None:
    """What collectives send to the other host: by the transport's count, and by the interface's."""
    found: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for ranks in TRAFFIC_SUBSETS:
        for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            world.barrier()
            before = world.stats()["remote_bytes_sent"], sent_over_the_link()
            world.barrier()
            comm = world.subset(ranks)
            if comm is not None:
                run(comm, op, TRAFFIC_BYTES // 4)
            world.barrier()
            after = world.stats()["remote_bytes_sent"], sent_over_the_link()
            found[op, ranks] = (after[0] - before[0], after[1] - before[1])
    write(folder, f"traffic{world.rank}", found)


RESHARD_SHAPE = (512, 4096)


def reshard(folder: Path) -> None:
    """Ranks 0 and 1, on one host, hold halves of a matrix; 2 and 3, on the other, and 1 want all of it."""
    from hdpcomm.train import Reshard
    from hdpcomm.train.state.layout import TensorPart

    with hdp.init() as world:
        whole = torch.arange(RESHARD_SHAPE[0] * RESHARD_SHAPE[1], dtype=torch.float32).view(RESHARD_SHAPE)
        half = RESHARD_SHAPE[0] // 2
        source, target = {}, {}
        if world.rank < 2:
            own = whole[world.rank * half :][:half].clone()
            source["w"] = TensorPart(RESHARD_SHAPE, [((world.rank * half, 0), own)])
        if world.rank:
            target["w"] = torch.zeros(RESHARD_SHAPE)
        moving = Reshard(source, target, world)
        world.barrier()
        before = sent_over_the_link()
        world.barrier()  # nobody sends before all have looked
        moving.run()
        world.barrier()
        wire = sent_over_the_link() - before
        right = not target or torch.equal(target["w"], whole)
        write(folder, f"reshard{world.rank}", (right, moving.bytes_sent, moving.bytes_between_hosts, wire))


def acceptance(folder: Path) -> None:
    """Rows of the links, and of collectives beside gloo's."""
    checks._BUDGET_S = 0.2
    with hdp.init(timeout=60) as world:
        write(folder, f"rows{world.rank}", [*check_links(world), *checks.check_collectives(world)])


def recovery(folder: Path) -> None:
    """The row of a job that loses a rank."""
    with hdp.init(timeout=60) as world:
        write(folder, f"rows{world.rank}", check_recovery(world))


def run(comm: hdp.Communicator, op: str, count: int) -> None:
    """One collective of ``count`` float32 in the whole buffer, checked."""
    n = comm.size
    part = count // n
    if op == "all_gather":
        out = torch.empty(part * n)
        comm.all_gather(out, torch.full((part,), float(comm.rank)))
        assert torch.equal(out, torch.arange(float(n)).repeat_interleave(part))
    elif op == "reduce_scatter":
        out = torch.empty(part)
        comm.reduce_scatter(out, torch.full((part * n,), float(comm.rank)))
        assert (out == n * (n - 1) / 2).all()
    elif op == "all_reduce":
        out = torch.full((count,), float(comm.rank))
        comm.all_reduce(out)
        assert (out == n * (n - 1) / 2).all()
    else:
        out = torch.full((count,), float(comm.rank))
        comm.broadcast(out, n - 1)
        assert (out == n - 1).all()


def _rank(program: Callable[[Path], None], folder: Path) -> None:
    try:
        program(folder)
    finally:
        atexit._run_exitfuncs()  # a forked child of multiprocessing leaves them out


def main() -> int:
    """The one rank of torchrun's environment, or all of HOST_RANKS as forks: torch is imported once."""
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(170, exit=True)
    program = globals()[sys.argv[1]]
    folder = Path(sys.argv[2])
    if "HOST_RANKS" not in os.environ:
        program(folder)
        return 0
    children = []
    for local, rank in enumerate(os.environ.pop("HOST_RANKS").split()):
        os.environ |= {"RANK": rank, "LOCAL_RANK": str(local)}
        child = multiprocessing.get_context("fork").Process(target=_rank, args=(program, folder))
        child.start()
        children.append(child)
    for child in children:
        child.join()
    return max(abs(child.exitcode or 0) for child in children)


if __name__ == "__main__":
    sys.exit(main())
