"""After any error a rank's results are right or refused, and all are right again after ``resync()``."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import RankPool
from tests.harness.fault_cases import LONG_S, aborted_by_rank_0, caught, interrupt_soon, pool_over, refused, wait_for

SIZES = {"inline": 2, "eager": 1024, "direct": 262_144}
STEPS = 6
PROGRAMS = int(os.environ.get("AFTER_ERRORS_PROGRAMS", "10"))  # of each kind of world

Call = Callable[[hdp.Communicator, int], Any]


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count)


def waits(seconds: float, start: Callable[[], Any]) -> None:
    start().wait(timeout=seconds)


def extra(comm: hdp.Communicator, count: int) -> None:
    """Rank 0 calls an operation more."""
    if comm.rank == 0:
        waits(0.1, lambda: comm.all_reduce(torch.full((count,), 300.0), async_op=True))


def both(comm: hdp.Communicator, count: int) -> None:
    """Each rank receives a message that the other does not send."""
    waits(0.1, lambda: comm.recv(zeros(count), 1 - comm.rank, async_op=True))


def interrupted(comm: hdp.Communicator, count: int) -> None:
    if comm.rank == 0:
        interrupt_soon()
        try:
            comm.recv(zeros(count), 1)
        except KeyboardInterrupt:
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def sends_only(comm: hdp.Communicator, count: int) -> None:
    if comm.rank == 0:
        waits(0.1, lambda: comm.send(torch.full((count,), 300.0), 1, async_op=True))


def receives_only(comm: hdp.Communicator, count: int) -> None:
    if comm.rank == 0:
        waits(0.1, lambda: comm.recv(zeros(count), 1, async_op=True))


def skips(comm: hdp.Communicator, count: int) -> None:
    """Rank 1 leaves a reduction out, and rank 0 notices when it waits for the operation behind it."""
    if comm.rank == 0:
        work = comm.all_reduce(torch.full((count,), 300.0), async_op=True)
        waits(0.1, lambda: comm.gather(zeros(2 * count), zeros(count), 0, async_op=True))
        work.wait(timeout=0.1)


def several(comm: hdp.Communicator, count: int) -> None:
    if comm.rank == 0:
        works = [comm.all_reduce(torch.full((count,), 300.0), async_op=True) for _ in range(3)]
        works[0].wait(timeout=0.1)


ERRORS: dict[str, Call] = {
    "timeout": extra,
    "timeout of both": both,
    "operation": lambda comm, n: comm.barrier() if comm.rank else comm.all_reduce(zeros(n)),
    "size": lambda comm, n: comm.all_reduce(zeros(n + comm.rank)),
    "dtype": lambda comm, n: comm.all_reduce(torch.zeros(n, dtype=(torch.float32, torch.int32)[comm.rank])),
    "root": lambda comm, n: comm.broadcast(zeros(n), comm.rank),
    "algorithm": lambda comm, n: comm.all_reduce(zeros(n), algorithm=("ring", "direct")[comm.rank]),
    "order": lambda comm, n: [
        comm.send(zeros(n + tag), 1) if comm.rank == 0 else comm.recv(zeros(n + 1 - tag), 0) for tag in range(2)
    ],
    "send without receive": sends_only,
    "receive without send": receives_only,
    "interrupt": interrupted,
    "skipped": skips,
    "extra operations": several,
}


def step(comm: hdp.Communicator, count: int, number: int) -> None:
    """An operation whose result tells its step and its ranks; right, or an error."""
    mine = float(100 * (comm.rank + 1) + number)
    other = float(100 * (2 - comm.rank) + number)
    if number % 2 == 0:
        x = torch.full((count,), mine)
        comm.all_reduce(x)
        assert (x == mine + other).all(), (comm.rank, number, x[0].item(), mine + other)
    else:
        y = zeros(count)
        comm.exchange([(torch.full((count,), mine), 1 - comm.rank)], [(y, 1 - comm.rank)])
        assert (y == other).all(), (comm.rank, number, y[0].item(), other)


def assert_told(error: hdp.Error) -> None:
    assert "(told by rank" in str(error)


def await_notice(comm: hdp.Communicator) -> None:
    """Returns when this rank is out of step. Over a network the other one's notice may still be on its way."""
    if comm.transport == "tcp":
        caught(lambda: comm.recv(zeros(3333), 1 - comm.rank))


def after(name: str, folder: str) -> list[int]:
    num_refused = []
    for size, count in SIZES.items():
        with hdp.init(timeout=LONG_S) as comm:
            raised, over = Path(folder, f"{size} raised"), Path(folder, f"{size} over {comm.rank}")
            with contextlib.suppress(hdp.Error):
                ERRORS[name](comm, count)
            if comm.rank == 0:
                raised.touch()
            else:
                wait_for(raised)
                await_notice(comm)
            errors: list[hdp.Error] = []
            for number in range(STEPS):
                try:
                    step(comm, count, number)
                except hdp.Error as again:
                    errors.append(again)
            refusals = [" is out of step with rank " in str(each) for each in errors]
            assert refusals == sorted(refusals)  # first those of operations that the other rank gave up
            for each, refusal in zip(errors, refusals, strict=True):
                refused(each, comm) if refusal else assert_told(each)
            assert refusals[-1]
            over.touch()
            wait_for(Path(folder, f"{size} over {1 - comm.rank}"))
            comm.resync()
            for number in range(STEPS):
                step(comm, count, number)
            num_refused.append(len(errors))
    return num_refused


@pytest.fixture(scope="module", params=["shm", "fragments", "tcp"])
def pool(request: pytest.FixtureRequest) -> Any:
    with pool_over(request.param, 2) as made:
        yield made


@pytest.mark.parametrize("name", ERRORS)
def test_right_or_refused(pool: RankPool, name: str, tmp_path: Path) -> None:
    for num_refused in pool.run(after, name, str(tmp_path), timeout=60):
        assert all(count > 0 for count in num_refused), num_refused


def aborts() -> None:
    """The world of rank 0 is over, and the pair for rank 1; a new world is right."""
    comm = hdp.init(timeout=LONG_S)
    aborted_by_rank_0(comm)
    for number in range(STEPS):
        assert isinstance(caught(lambda: step(comm, 3, number)), hdp.Aborted | hdp.PeerLost)  # noqa: B023
    assert isinstance(caught(comm.resync), hdp.Aborted if comm.rank == 0 else hdp.PeerLost)
    with hdp.init(timeout=LONG_S) as other:
        for number in range(STEPS):
            step(other, 3, number)


def test_after_abort(pool: RankPool) -> None:
    pool.run(aborts, timeout=60)


def resync_deadline() -> None:
    with hdp.init(timeout=LONG_S) as comm:
        for _ in range(3):
            if comm.rank == 0:
                with pytest.raises(hdp.CommTimeout, match=r"in resync\(.* for rank 1: ") as info:
                    comm.resync(timeout=0.3)
                assert info.value.peer == 1
                with pytest.raises(hdp.Aborted, match="rank 0 is out of step with rank 1 since: "):
                    comm.barrier()
            else:
                time.sleep(0.5)
        comm.resync()
        for number in range(STEPS):
            step(comm, 1000, number)


def test_a_deadline_bounds_resync(pool: RankPool) -> None:
    pool.run(resync_deadline, timeout=60)


def resync_without_need() -> None:
    """resync() where nothing failed: by all ranks many times, by two threads at once, and by some of the ranks."""
    with hdp.init(timeout=LONG_S) as comm:
        for bad in (0, -1.0, float("nan")):
            with pytest.raises(hdp.InvalidUsage, match=r"resync\(\) got timeout=.*above 0"):
                comm.resync(bad)
        for number in range(20):
            comm.resync()
            step(comm, 1000, number)
        errors: list[hdp.Error] = []

        def many() -> None:
            try:
                for _ in range(20):
                    comm.resync()
            except hdp.Error as error:
                errors.append(error)

        threads = [threading.Thread(target=many) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        step(comm, 3, 0)
        alone = comm.subset([comm.rank])
        assert alone is not None
        alone.resync()
        step(comm, 3, 1)


def test_resync_without_need(pool: RankPool) -> None:
    pool.run(resync_without_need, timeout=60)


def resync_ends_operations() -> None:
    with hdp.init(timeout=LONG_S) as comm:
        if comm.rank == 0:
            work = comm.recv(zeros(3), 1, async_op=True)
            comm.resync()
            assert "rank 0 called resync()" in str(caught(work.wait))
        else:
            time.sleep(0.3)
            error = caught(lambda: comm.recv(zeros(3), 0))
            assert isinstance(error, hdp.Aborted)
            assert "rank 0 called resync()" in str(error)
            comm.resync()
        step(comm, 3, 0)


def test_resync_ends_operations(pool: RankPool) -> None:
    pool.run(resync_ends_operations, timeout=60)


def leaves_in_resync() -> None:
    comm = hdp.init(timeout=LONG_S)
    if comm.rank == 1:
        time.sleep(0.3)
        comm.close()
        return
    with pytest.raises(hdp.PeerLost, match="rank 1 closed its communicator") as info:
        comm.resync()
    assert info.value.peer == 1
    comm.close()


def test_a_rank_that_leaves_during_resync(pool: RankPool) -> None:
    pool.run(leaves_in_resync, timeout=60)


def random_program(seed: int, folder: str) -> int:
    """Operations of random kinds and sizes with errors in between; both ranks draw the same ones. After an error each
    rank goes on when both have had theirs: equal calls that are under way at the same time are one operation."""
    draw = random.Random(seed)
    num_refused = 0
    with hdp.init(timeout=LONG_S) as comm:
        for number in range(12):
            count = draw.choice([1, 2, 100, 5000, 60_000])
            if draw.random() < 0.3:
                name = draw.choice([name for name in ERRORS if name != "interrupt"])
                try:
                    ERRORS[name](comm, count)
                except hdp.Error:
                    num_refused += 1
                Path(folder, f"{seed} {number} {comm.rank}").touch()
                wait_for(Path(folder, f"{seed} {number} {1 - comm.rank}"))
                await_notice(comm)
                for late in range(draw.randrange(3)):
                    try:
                        step(comm, count, late)
                    except hdp.Error:
                        num_refused += 1
                comm.resync(timeout=20.0)
            step(comm, count, number)
    return num_refused


def test_random_programs(pool: RankPool, tmp_path: Path) -> None:
    for seed in range(PROGRAMS):
        pool.run(random_program, seed, str(tmp_path), timeout=120)
