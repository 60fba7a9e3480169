"""Functions on ranks that are threads or processes of a pool: no error of a rank is lost, whatever else goes wrong."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.testing import RankPool, _join, run_threads, spawn

# --- threads ----------------------------------------------------------------------------------------------------------


def test_the_error_of_a_rank_is_raised_though_another_is_stuck(capfd: pytest.CaptureFixture[str]) -> None:
    turn, end = iter(range(2)), threading.Event()

    def main() -> None:
        if next(turn) == 0:
            raise KeyError("no such shard")
        end.wait(60)

    with pytest.raises(KeyError, match="no such shard") as info:
        run_threads(main, 2, timeout=2)
    end.set()
    assert isinstance(info.value.__cause__, hdp.CommTimeout)
    assert len(info.value.__cause__.ranks or ()) == 1
    assert "--- stack of rank" in capfd.readouterr().err


def test_the_cause_of_an_error_stays() -> None:
    turn, end = iter(range(2)), threading.Event()

    def main() -> None:
        if next(turn) == 0:
            raise KeyError("no such shard") from OSError("disk")
        end.wait(60)

    with pytest.raises(KeyError) as info:
        run_threads(main, 2, timeout=2)
    end.set()
    assert isinstance(info.value.__cause__, OSError)


def test_ranks_that_are_stuck_are_named() -> None:
    end = threading.Event()
    with pytest.raises(hdp.CommTimeout, match=r"ranks \[0, 1, 2\] did not end within 0\.3 s") as info:
        run_threads(lambda: end.wait(60), 3, timeout=0.3)
    end.set()
    assert tuple(info.value.ranks or ()) == (0, 1, 2)


class Slow:
    """A thread that takes 50 ms longer than the one before, and notes how long it is waited for."""

    def __init__(self) -> None:
        self.given = 0.0

    def join(self, timeout: float) -> None:
        self.given = timeout
        time.sleep(min(timeout, 0.05))

    def is_alive(self) -> bool:
        return False


def test_the_timeout_is_one_for_the_run() -> None:
    """And not one for each rank."""
    threads = [Slow() for _ in range(4)]
    assert _join(threads, 0.12) is None  # type: ignore[arg-type]
    given = [thread.given for thread in threads]
    assert given[0] <= 0.12
    assert all(later <= max(0.0, earlier - 0.049) for earlier, later in itertools.pairwise(given))


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(2) as made:
        yield made


def rank() -> int:
    return int(os.environ["RANK"])


def pid() -> int:
    return os.getpid()


def touch(folder: str) -> None:
    open(f"{folder}/{rank()}", "w").close()


def test_a_rank_that_died_between_runs(pool: RankPool, tmp_path: Any) -> None:
    victim = pool.run(pid)[1]
    os.kill(victim, signal.SIGKILL)
    until = time.monotonic() + 20
    while pool.healthy and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(hdp.PeerLost, match="rank 1 ended by signal SIGKILL between two runs") as info:
        pool.run(touch, str(tmp_path))
    assert info.value.peer == 1
    assert not list(tmp_path.iterdir())  # nobody got the job
    with pytest.raises(hdp.InvalidUsage, match=r"this RankPool is closed .*make a new one"):
        pool.run(rank)


def test_a_rank_that_dies_as_the_job_is_sent(pool: RankPool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe breaks after all were seen alive: the same error as in the middle of a run, and the others are heard."""
    victim = pool.run(pid)[0]
    os.kill(victim, signal.SIGKILL)
    until = time.monotonic() + 20
    while pool.healthy and time.monotonic() < until:
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(type(pool._processes[0]), "is_alive", lambda _: True)
        patch.setattr(pool, "close", lambda: None)
        with pytest.raises(hdp.PeerLost, match="rank 0 ended by signal SIGKILL in the middle of its run"):
            pool.run(touch, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    pool.close()


def test_a_closed_pool_says_so() -> None:
    pool = RankPool(1)
    assert pool.run(rank) == [0]
    pool.close()
    with pytest.raises(hdp.InvalidUsage, match=r"closed \(by close\(\)"):
        pool.run(rank)


def lock_of_rank_1() -> Any:
    return threading.Lock() if rank() else 0


def test_a_result_that_cannot_be_pickled(pool: RankPool) -> None:
    pids = pool.run(pid)
    with pytest.raises(hdp.InvalidUsage, match=r"returned a lock that cannot be pickled \(TypeError: .*pickle") as info:
        pool.run(lock_of_rank_1)
    assert "rank 1:" in str(info.value.__cause__)
    assert pool.run(pid) == pids  # the ranks live on


class OneWay:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("one way",)


def one_way() -> OneWay:
    return OneWay()


def test_a_result_that_cannot_be_unpickled(pool: RankPool) -> None:
    pids = pool.run(pid)
    with pytest.raises(hdp.InvalidUsage, match=r"what rank 0 returned cannot be unpickled here \(ValueError: "):
        pool.run(one_way)
    assert pool.run(pid) == pids


def test_a_job_that_cannot_be_unpickled(pool: RankPool) -> None:
    pids = pool.run(pid)
    with pytest.raises(ValueError, match="one way"):
        pool.run(rank, OneWay())
    assert pool.run(pid) == pids


def test_a_function_that_ends_its_process() -> None:
    with pytest.raises(hdp.PeerLost, match="rank 0 ended with code 3 in the middle of its run"):
        spawn(os._exit, 1, 3, timeout=30)


def dies_or_fails(dying: tuple[int, ...], failing: tuple[int, ...]) -> int:
    if rank() in dying:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() in failing:
        raise ZeroDivisionError
    time.sleep(0.1)  # the others are gone by then
    return rank()


def test_survivors_end_the_run() -> None:
    with RankPool(3) as three:
        assert three.run(dies_or_fails, (0,), (), survivors=True) == [1, 2]
        with pytest.raises(hdp.InvalidUsage, match="this RankPool is closed"):
            three.run(rank)
    with RankPool(2) as two, pytest.raises(hdp.PeerLost, match=r"rank [01] ended by signal SIGKILL in the middle"):
        two.run(dies_or_fails, (0, 1), (), survivors=True)
    with RankPool(2) as two, pytest.raises(ZeroDivisionError):
        two.run(dies_or_fails, (1,), (0,), survivors=True)


def signals(launcher: int, heard: str) -> bool:
    os.kill(launcher, signal.SIGUSR2)
    until = time.monotonic() + 30
    while not os.path.exists(heard) and time.monotonic() < until:
        time.sleep(0.01)
    return os.path.exists(heard)


def test_a_signal_that_another_thread_takes_is_heard(tmp_path: Any) -> None:
    """The system gives one of two signals at once to another thread, maybe both; handlers run on the main one."""
    end, heard = threading.Event(), tmp_path / "heard"
    threading.Thread(target=end.wait, daemon=True).start()
    with RankPool(1) as pool:
        before = signal.signal(signal.SIGUSR2, lambda *_: heard.touch())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            assert pool.run(signals, os.getpid(), str(heard)) == [True]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
            signal.signal(signal.SIGUSR2, before)
            end.set()


def test_errors_of_the_function_leave_the_pool_open(pool: RankPool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.run(divmod, 1, 0)
    with pytest.raises(hdp.InvalidUsage, match="returned a Communicator that cannot be pickled"):
        pool.run(hdp.init)
    assert pool.run(rank) == [0, 1]


def group_of_torch(late: int | None) -> str:
    """Sums over a default group of torch that one rank joins later than the other; returns the port of its store."""
    with hdp.init() as comm:
        rank, world = comm.rank, comm.size
        comm.barrier()
    if rank == late:
        time.sleep(0.5)
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert float(x) == world
    return port_of_torch()


def port_of_torch() -> str:
    return os.environ["MASTER_PORT"]


def test_each_run_of_a_pool_has_groups_of_torch_of_its_own() -> None:
    """Else a rank that is early would take the addresses that the late one had in the run before."""
    ports = set()
    with RankPool(2) as pool:
        for late in (None, 0, 1, None):
            port, same = pool.run(group_of_torch, late, timeout=60)
            assert port == same
            ports.add(port)
        assert len(ports) == 4
        unused = {*pool.run(port_of_torch, timeout=60), *pool.run(port_of_torch, timeout=60)}
        assert len(unused) == 1  # a run that makes no group needs no new store
