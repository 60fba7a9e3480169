"""A process whose streams nobody can release any more: it says so and ends, in place of hanging."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.testing import run_threads
from tests.harness.fakes import FakeMachine
from tests.harness.native import _testing
from tests.harness.stream_programs import Caller

TOP = Path(__file__).resolve().parents[2]
HELD, LIMIT_S = 40, 2.0


def blocking(ordinal: int, out_of_reach: list[int]) -> _testing.TestDevice:
    device = _testing.TestDevice(ordinal, out_of_reach)
    device.limit_queues(HELD, blocks=True)
    return device


def fills_its_stream(ending: str) -> None:
    """Rank 0 receives from rank 1, and enqueues work of its own behind it until the driver blocks it."""
    comm = hdp.init(timeout=LIMIT_S)
    assert isinstance(comm, DeviceCommunicator)
    if comm.rank == 1:
        time.sleep(0.5)  # rank 0 is in the driver by then
        if ending == "fails":
            comm.abort("planted")
        else:
            comm.send(torch.ones(10_000), 0)
            comm.close()
        return
    device = comm.streams.device
    caller = Caller(comm, device.create_stream())
    x = torch.zeros(10_000)
    caller.exchange([], [(x, 1, None)])
    for _ in range(3 * HELD):
        device.fill(x.data_ptr(), 1, bytes=4, stream=caller.stream)
    device.synchronize_stream(caller.stream)
    print("went on", flush=True)
    comm.close()


def main(ending: str) -> None:
    machine = FakeMachine(2, opens=blocking)
    run_threads(machine.ranks(fills_its_stream), 2, ending, transport="sim", timeout=60)


@pytest.mark.parametrize("ending", ["fails", "comes late"])
def test_a_full_stream_behind_a_rank_that_is_gone(ending: str) -> None:
    call = f"from tests.faults.test_stuck_guard import main; main({ending!r})"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=TOP, capture_output=True, text=True, timeout=60, check=False
    )
    if ending == "comes late":  # a rank that is there is waited for
        assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
        return
    assert done.returncode == 70, done.stderr
    assert "rank 0 ends its process: " in done.stderr
    assert "nothing has come back from the driver" in done.stderr
    assert "went on" not in done.stdout
    assert time.monotonic() - started > LIMIT_S
