"""Memory that ranks of a host map of each other: what one writes the others read, and who waits in vain is told."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.window import Window
from hdpcomm.testing import run_threads, spawn


def share(turns: int) -> list[float]:
    """Each rank adds to the memory of all others, by turns; the sum of all turns is in each."""
    comm = hdp.init(timeout=60.0)
    window = Window(comm, words=2, nbytes=8 * 1000)
    for turn in range(turns):
        for owner in range(comm.size):
            window.wait(owner, 1, turn * comm.size + comm.rank, (comm.rank - 1) % comm.size)
            window.tensor(owner, 8 * 500, 100, torch.float64).add_(comm.rank + 1)
            window.set(owner, 1, turn * comm.size + comm.rank + 1)
    comm.barrier()
    own = window.tensor(comm.rank, 0, 1000, torch.float64)
    assert not own[:500].any()
    assert not own[600:].any()
    found: list[float] = own[500:600].unique().tolist()
    comm.barrier()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_threads_add_by_turns(ranks: int) -> None:
    wanted = [20.0 * sum(range(1, ranks + 1))]
    assert run_threads(share, ranks, 20, timeout=60.0) == [wanted] * ranks


def test_processes_add_by_turns() -> None:
    assert spawn(share, 3, 20, timeout=60.0) == [[120.0]] * 3


def outlives(folder: str) -> None:
    comm = hdp.init(timeout=60.0)
    window = Window(comm, words=1, nbytes=4096)
    window.tensor(comm.rank, 0, 512, torch.int64).fill_(comm.rank + 5)
    comm.barrier()
    other = window.tensor(1 - comm.rank, 0, 512, torch.int64)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hdp.PeerLost) as caught:
        window.wait(0, 0, 1, 1)
    assert caught.value.peer == 1
    assert (other == 6).all()  # it is mapped here
    del window
    gc.collect()
    assert (other == 6).all()
    (Path(folder) / "done").touch()


def test_memory_outlives_its_owner_whose_death_is_told(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 1"):
        spawn(outlives, 2, str(tmp_path), timeout=60.0)
    assert (tmp_path / "done").exists()


def in_vain() -> str:
    comm = hdp.init(timeout=0.5)
    window = Window(comm, words=3, nbytes=0)
    while comm.rank:  # stays until the other one was told
        try:
            window.wait(0, 0, 1, 0)
        except hdp.CommTimeout:
            continue
        return ""
    try:
        window.wait(1, 2, 7, 1)
    except hdp.CommTimeout as error:
        return str(error)
    finally:
        window.set(0, 0, 1)
    return ""


def test_a_wait_has_a_deadline() -> None:
    told, other = run_threads(in_vain, 2, timeout=60.0)
    assert "for rank 1 to use a window of rank 1 (word 2)" in told
    assert other == ""


def test_a_wait_is_stopped() -> None:
    with hdp.init() as comm:
        window = Window(comm, words=1, nbytes=8)
        raised: list[Any] = []

        def wait() -> None:
            try:
                window.wait(0, 0, 3, 0)
            except hdp.Error as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        window.stop()
        thread.join(timeout=20.0)
        assert isinstance(raised[0], hdp.Aborted)
        with pytest.raises(hdp.Aborted, match="was given up"):
            window.wait(0, 0, 3, 0)
        window.start()
        window.set(0, 0, 3)
        window.wait(0, 0, 3, 0)


def unequal() -> str:
    comm = hdp.init(timeout=20.0)
    try:
        Window(comm, words=1, nbytes=4096 * (1 + comm.rank))
    except hdp.Error as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_sizes_that_are_not_the_same() -> None:
    told = run_threads(unequal, 2, timeout=60.0)
    assert all("all ranks must give the same sizes" in each for each in told)


def test_words_and_positions_that_do_not_exist() -> None:
    with hdp.init() as comm:
        window = _core.comm.Window(comm._core, 2, 16)
        for call in (lambda: window.get(0, 2), lambda: window.set(0, 9, 1), lambda: window.wait(0, 2, 1, 0)):
            with pytest.raises(hdp.InvalidUsage, match="of a window of 2 words"):
                call()
        for call in (lambda: window.get(1, 0), lambda: window.data(5), lambda: window.open(3, 1, 1)):
            with pytest.raises((hdp.InvalidUsage, IndexError)):
                call()
