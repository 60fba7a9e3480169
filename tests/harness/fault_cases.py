"""Ways in which the ranks of any transport can disagree, leave or die, and what its ranks say then."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import RankPool
from tests.harness.patience import PATIENCE

LONG_S = 600.0
"""A deadline that no test reaches, since each is ended long before: errors of such worlds came of something else."""


@contextlib.contextmanager
def pool_over(transport: str, ranks: int) -> Iterator[RankPool]:
    """Ranks over ``shm``, the same with ``fragments`` in place of copies between processes, or another transport."""
    with pytest.MonkeyPatch.context() as patch:
        if transport == "fragments":
            patch.setenv("HDPCOMM_SHM_CMA", "0")
        elif transport != "shm":
            patch.setenv("HDPCOMM_TRANSPORT", transport)
        made = RankPool(ranks)
    yield made
    made.close()


def still_works(comm: hdp.Communicator) -> None:
    """Small and large collectives of the world, after an error."""
    for count in (3, 50_000):
        x = torch.full((count,), float(comm.rank))
        comm.all_reduce(x)
        assert (x == sum(range(comm.size))).all()
        out = torch.empty(comm.size * count)
        comm.all_gather(out, torch.full((count,), float(comm.rank)))
        assert out.view(comm.size, count).eq(torch.arange(comm.size)[:, None]).all()


def refused(error: hdp.Error, comm: hdp.Communicator) -> None:
    """Asserts that an operation failed because this rank was out of step with another one."""
    assert isinstance(error, hdp.Aborted), error
    assert f"rank {comm.rank} is out of step with rank " in str(error)
    assert "call resync() on all ranks" in str(error)


def works_again(comm: hdp.Communicator) -> None:
    """Collective: resync() after an error, then all is right."""
    comm.resync(timeout=30.0)
    still_works(comm)


def wait_for(path: Path) -> None:
    """Until another rank has made the file, whatever the machine has to do meanwhile."""
    until = time.monotonic() + 60 * PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"{path} was not made"
        time.sleep(0.01)


def write_process(path: Path) -> None:
    """Tells the other ranks the number of this process; the file is complete as soon as it is there."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(str(os.getpid()))
    part.rename(path)


def caught(call: Callable[[], Any]) -> hdp.Error:
    """The error that ``call`` raises."""
    with pytest.raises(hdp.Error) as info:
        call()
    return info.value


def until(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` has come true within 15 s, which is time enough on any machine."""
    limit = time.monotonic() + 15 * PATIENCE
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def until_it_fails(call: Callable[[], Any]) -> None:
    """Calls again and again; for what is found out by itself."""
    limit = time.monotonic() + 15 * PATIENCE
    while time.monotonic() < limit:
        call()
        time.sleep(0.01)


def send_recv(sent: torch.Tensor, received: torch.Tensor) -> Callable[[hdp.Communicator], Any]:
    return lambda comm: comm.send(sent, 1) if comm.rank == 0 else comm.recv(received, 0)


DISAGREEMENTS: dict[str, Callable[[hdp.Communicator], Any]] = {
    "size": send_recv(torch.zeros(4), torch.zeros(5)),
    "large size": send_recv(torch.zeros(400_000), torch.zeros(500_000)),
    "dtype": send_recv(torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
    "dtype of equal bytes": send_recv(torch.zeros(4), torch.zeros(2, dtype=torch.float64)),
    "op": lambda comm: comm.all_reduce(torch.zeros(4), "sum" if comm.rank else "max"),
    "collective": lambda comm: comm.barrier() if comm.rank else comm.all_reduce(torch.zeros(4)),
    "count": lambda comm: comm.all_reduce(torch.zeros(4 + comm.rank)),
    "root": lambda comm: comm.broadcast(torch.zeros(4), comm.rank),
    "broadcast size": lambda comm: comm.broadcast(torch.zeros(4 + comm.rank), 0),
    "gather size": lambda comm: comm.gather(torch.zeros(8) if comm.rank == 0 else None, torch.zeros(4 + comm.rank), 0),
    "ranks": lambda comm: comm.subset([comm.rank, 1 - comm.rank]).all_reduce(torch.zeros(4)),  # type: ignore[union-attr]
    "algorithm": lambda comm: comm.all_reduce(torch.zeros(4), algorithm=("ring", "direct")[comm.rank]),
    "splits": lambda comm: comm.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [1 + comm.rank, 3 - comm.rank]),
}


def told_mismatch(comm: hdp.Communicator, call: Callable[[], Any]) -> str:
    """What one of two ranks is told, whose calls differ."""
    error = caught(call)
    assert isinstance(error, hdp.Mismatch), error
    assert (error.rank, error.peer) == (comm.rank, 1 - comm.rank)
    assert f"rank {1 - comm.rank}" in str(error)
    assert "call the same operations" in str(error)
    return str(error)


def differs_from_rank_1(comm: hdp.Communicator) -> None:
    """The other ranks of three gather less than rank 1; all hear of it."""
    more = comm.rank == 1
    error = caught(lambda: comm.all_gather(torch.zeros(3 * (2 + more)), torch.zeros(2 + more)))
    assert isinstance(error, hdp.Mismatch)


def late_after_a_timeout(comm: hdp.Communicator, folder: str) -> hdp.Error:
    """Rank 0 waits 0.3 s for an all_reduce that no other rank has called; rank 1, which calls it then, is told."""
    x = torch.ones(50_000)
    gave_up = Path(folder, "gave up")
    if comm.rank == 0:
        with pytest.raises(hdp.CommTimeout, match=r"rank 0 waited [0-9.]+ s in all_reduce.*raise timeout=") as info:
            comm.all_reduce(x, async_op=True).wait(timeout=0.3)  # not the deadline of the world
        assert (info.value.op, info.value.ranks) == ("all_reduce", (0, 1))
        gave_up.touch()
    else:
        wait_for(gave_up)
        with pytest.raises(hdp.CommTimeout, match="told by rank 0") as info:
            comm.all_reduce(x)
    return info.value


def aborted_by_rank_0(comm: hdp.Communicator) -> None:
    """Rank 0 aborts during an operation of ranks 0 and 1 that cannot end: a third rank never calls it, or, of two
    ranks, each receives what the other does not send."""
    x = torch.zeros(100_000)

    def start() -> Any:
        if comm.size > 2:
            return comm.all_reduce(x, async_op=True)
        return comm.recv(x, 1 - comm.rank, async_op=True)

    if comm.rank == 0:
        work = start()
        comm.abort("the user had enough")
        with pytest.raises(hdp.Aborted, match="the user had enough"):
            work.wait()
        with pytest.raises((hdp.Aborted, hdp.InvalidUsage), match="make a new one"):
            comm.all_reduce(torch.zeros(1))
    elif comm.rank == 1:
        error = caught(lambda: start().wait())
        assert isinstance(error, (hdp.Aborted, hdp.PeerLost))
        assert "the user had enough" in str(error)


def in_another_order(comm: hdp.Communicator, changed: int) -> str:
    """What a rank is told of three operations on subsets of 3 ranks when one calls two of them the other way round."""
    operations = [comm.subset([0, 1, 2]), comm.subset([2, 1, 0]), comm.subset([1, 2, 0])]
    if comm.rank == changed:
        operations[0], operations[1] = operations[1], operations[0]

    def call_all() -> None:
        for subset in operations:
            assert subset is not None
            subset.all_reduce(torch.zeros(5), algorithm="ring")

    return str(caught(call_all))


def nccl_fails_by_itself(comm: hdp.Communicator, fake: Any, broken: int, algorithm: str = "auto") -> None:
    """An asynchronous error of the fake while nothing runs: the broken rank finds it, the others are told."""
    still_works(comm)
    if comm.rank == broken:
        fake.set_async_error(broken, 1)
        with pytest.raises(hdp.DeviceError, match=f"an operation of NCCL failed on rank {broken}"):
            until_it_fails(comm.synchronize)
    else:
        error = caught(lambda: comm.all_reduce(torch.zeros(3), algorithm=algorithm))
        assert f"an operation of NCCL failed on rank {broken}" in str(error)


def sums(comm: hdp.Communicator, count: int, algorithm: str) -> None:
    comm.all_reduce(torch.zeros(count), algorithm=algorithm)


def exit_by_exception(transport: str) -> None:
    comm = hdp.init(transport, timeout=LONG_S)
    if comm.rank == 1:
        with pytest.raises(KeyError), comm:
            raise KeyError("no such shard")
        return
    with pytest.raises(hdp.PeerLost, match="no such shard"):
        comm.all_reduce(torch.zeros(4))


def survives(folder: str, transport: str, victim: int, call: Callable[[hdp.Communicator], Any]) -> None:
    """The victim is killed; each other rank writes what it was told of that into a file of its own."""
    comm = hdp.init(transport, timeout=LONG_S)
    comm.barrier()
    Path(folder, f"ready {comm.rank}").touch()  # and needs nothing more that the victim's process may still hold
    if comm.rank == victim:
        for rank in range(comm.size):
            wait_for(Path(folder, f"ready {rank}"))
        os.kill(os.getpid(), signal.SIGKILL)

    def calls() -> None:
        for _ in range(3):  # the first may have all that it needs of the victim
            call(comm)

    error = caught(calls)
    assert isinstance(error, hdp.PeerLost), error
    assert error.peer == victim or f"rank {victim}" in str(error)
    Path(folder, str(comm.rank)).write_text(str(error))


def told_survivors(folder: Path) -> set[int]:
    """The ranks to which :func:`survives` came to its end."""
    return {int(path.name) for path in folder.glob("[0-9]*")}


def interrupt_soon() -> None:
    """Ctrl-C in 0.3 s, for a rank in the pool of the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)


def bad_arguments() -> None:
    comm = hdp.init()
    x = torch.zeros(4)
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.subset([]), "no ranks"),
        (lambda: comm.subset([0, 0]), "rank 0 twice"),
        (lambda: comm.subset([0, 2]), r"rank 2.*ranks 0\.\.1"),
        (lambda: comm.subset([-1]), "rank -1"),
        (lambda: comm.subset("ab"), "'a'"),
        (lambda: comm.send(x, 2), "rank 2"),
        (lambda: comm.recv(x, -1), "rank -1"),
        (lambda: comm.send(x, comm.rank), "itself"),
        (lambda: comm.broadcast(x, 5), "rank 5"),
        (lambda: comm.all_reduce(x, "median"), "known are: sum"),
        (lambda: comm.all_reduce(x, algorithm="magic"), "known are: auto"),
        (lambda: comm.all_reduce(x, algorithm="chain"), "it has: "),
        (lambda: comm.all_reduce(x.int(), "avg"), "floating type"),
        (lambda: comm.all_reduce(x[::2]), "not contiguous"),
        (lambda: comm.all_reduce(x.to(torch.complex64)), "complex64"),
        (lambda: comm.all_reduce([1, 2]), "is a list"),
        (lambda: comm.all_reduce(x, out=torch.zeros(5)), "out has 5 elements, x 4"),
        (lambda: comm.all_gather(torch.zeros(9), x), "must have 8"),
        (lambda: comm.all_gather(torch.zeros(8, dtype=torch.int32), x), "give equal types"),
        (lambda: comm.all_to_all(torch.zeros(4), x, [1, 2], [2, 2]), "sum"),
        (lambda: comm.all_to_all(torch.zeros(4), x, [2, 2]), "both or neither"),
        (lambda: comm.all_to_all(torch.zeros(3), torch.zeros(3)), "divisible"),
        (lambda: comm.algorithms("cast"), "known are"),
        (lambda: hdp.init(transport="pigeon"), "give one of"),
        (lambda: hdp.init(timeout=0), "above 0"),
    ]
    for call, message in bad:
        with pytest.raises(hdp.InvalidUsage, match=message):
            call()
    still_works(comm)
    comm.close()
    with pytest.raises(hdp.InvalidUsage, match="is closed"):
        comm.all_reduce(x)
