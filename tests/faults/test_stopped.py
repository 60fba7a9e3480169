"""A receiver that is stopped (SIGSTOP) while it copies: its receive is right or fails, nobody waits for the copy."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from tests.harness.fault_cases import LONG_S, caught, until, wait_for, works_again, write_process

COUNT = 4 << 20
ATTEMPTS = 20


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def watched(folder: str) -> torch.Tensor:
    """The receiver's buffer, which the sender sees too. Every round has fresh pages, which makes the copy slow."""
    return torch.from_file(str(Path(folder, "buffer")), shared=True, size=COUNT)


def stop_in_mid_copy(receiver: int, buffer: torch.Tensor) -> bool:
    """Stops the receiver as soon as some of the message has arrived (at either end); whether some had not by then."""
    some = buffer[1000 :: COUNT // 16].numpy()
    limit = time.monotonic() + LONG_S
    while not some.any():
        assert time.monotonic() < limit
    os.kill(receiver, signal.SIGSTOP)
    assert until(lambda: state_of(receiver) == "T")
    return bool((buffer == 0).any())


def sends_to_one_that_stops(comm: hdp.Communicator, folder: str, memory: str, goes_on_in_time: bool) -> dict[str, Any]:
    """The sender of one round; overwrites its buffer once it was told that the send had failed."""
    x = comm.empty(COUNT) if memory == "heap" else torch.empty(COUNT)
    x.fill_(1.0)
    receiver = torch.empty(1, dtype=torch.int64)
    comm.recv(receiver, 1)
    work = comm.send(x, 1, async_op=True)
    started = time.monotonic()
    mid_copy = stop_in_mid_copy(int(receiver), watched(folder))
    try:
        if goes_on_in_time:
            time.sleep(0.3)
            os.kill(int(receiver), signal.SIGCONT)
            work.wait()
            return {"mid_copy": mid_copy, "error": None}
        try:
            work.wait(timeout=0.5)
        except hdp.CommTimeout as error:
            x.fill_(-1.0)
            return {"mid_copy": mid_copy, "error": str(error), "took": time.monotonic() - started}
        return {"mid_copy": False, "error": None}  # it had taken the message before it was stopped
    finally:
        os.kill(int(receiver), signal.SIGCONT)


def receives(comm: hdp.Communicator, folder: str) -> dict[str, Any]:
    x = watched(folder)
    comm.send(torch.tensor([os.getpid()]), 0)
    try:
        comm.recv(x, 0)
    except hdp.Error as error:
        return {"error": str(error), "kind": type(error).__name__, "values": []}
    return {"error": None, "values": x.unique().tolist()}


def one_round(folder: str, memory: str, goes_on_in_time: bool) -> dict[str, Any]:
    with hdp.init("shm", timeout=LONG_S) as comm:
        buffer = Path(folder, "buffer")
        if comm.rank == 0:
            buffer.unlink(missing_ok=True)
            watched(folder)
        comm.barrier()
        told = (
            sends_to_one_that_stops(comm, folder, memory, goes_on_in_time) if comm.rank == 0 else receives(comm, folder)
        )
        works_again(comm)
        return told


@pytest.mark.parametrize("memory", ["heap", "plain"])
def test_a_withdrawn_copy_never_completes(ranks: Any, tmp_path: Path, memory: str) -> None:
    for _ in range(ATTEMPTS):
        sender, receiver = ranks(2, one_round, str(tmp_path), memory, False)
        if sender["error"] is None:
            assert receiver == {"error": None, "values": [1.0]}
            continue
        told = re.match(r"rank 0 waited ([0-9.]+) s in send", sender["error"])
        assert told is not None, sender["error"]
        assert 0.5 <= float(told[1]) <= sender["took"]
        assert receiver["error"] is not None, receiver["values"]
        assert receiver["kind"] == "CommTimeout"
        assert "told by rank 0" in receiver["error"]
        # One system call copies plain memory, so the receiver stops at its end.
        if sender["mid_copy"] or memory == "plain":
            break
    else:
        pytest.skip("the copy was always over before the receiver stopped")


@pytest.mark.parametrize("memory", ["heap", "plain"])
def test_a_receiver_that_goes_on_in_time_is_right(ranks: Any, tmp_path: Path, memory: str) -> None:
    for _ in range(2):
        sender, receiver = ranks(2, one_round, str(tmp_path), memory, True)
        assert sender["error"] is None
        assert receiver == {"error": None, "values": [1.0]}


def stops_before_it_receives(folder: str) -> str:
    """The message lies in the channel when its sender gives up; the receiver goes on after that."""
    with hdp.init("shm", timeout=LONG_S) as comm:
        comm.barrier()
        if comm.rank == 1:
            write_process(Path(folder, "process"))
            os.kill(os.getpid(), signal.SIGSTOP)
            told = caught(lambda: comm.recv(torch.zeros(3), 0))
        else:
            wait_for(Path(folder, "process"))
            receiver = int(Path(folder, "process").read_text())
            assert until(lambda: state_of(receiver) == "T")
            told = caught(lambda: comm.send(torch.ones(3), 1, async_op=True).wait(timeout=0.4))
            os.kill(receiver, signal.SIGCONT)
        works_again(comm)
        return f"{type(told).__name__}: {told}"


def test_a_message_of_a_sender_that_gave_up_is_not_received(ranks: Any, tmp_path: Path) -> None:
    sender, receiver = ranks(2, stops_before_it_receives, str(tmp_path))
    assert sender.startswith("CommTimeout: rank 0 waited ")
    # Aborted: the notice, or rank 0's resync(), had arrived before the receive was posted.
    assert receiver.startswith(("CommTimeout: rank 0 waited ", "Aborted: rank 1 is out of step with rank 0 since: "))
