"""Ranks that receive weights die at any moment: the others are told, and go on with those that live."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import spawn
from hdpcomm.train import Reshard
from hdpcomm.train.state import reshard
from hdpcomm.train.state.layout import TensorPart
from tests.harness.fault_cases import LONG_S

RANKS, DIES = 4, 3
SHAPE = (512, 1024)


def whole() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def sides(rank: int) -> tuple[dict[str, TensorPart], dict[str, torch.Tensor]]:
    """Ranks 0 and 1 hold halves, the others want all."""
    half = SHAPE[0] // 2
    if rank > 1:
        return {}, {"w": torch.zeros(SHAPE)}
    return {"w": TensorPart(SHAPE, [((rank * half, 0), whole()[rank * half :][:half].clone())])}, {}


def moving(folder: str, after_s: float, apart: bool) -> None:
    torch.set_num_threads(1)
    comm = hdp.init(timeout=LONG_S)
    me = comm.rank
    source, target = sides(me)
    reshard._MESSAGE_BYTES = 1 << 16
    move = Reshard(source, target, comm)
    move.run()
    comm.barrier()
    if me == DIES:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def go_on() -> None:
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            if apart:
                move.start()
                torch.ones(1000).sum()
                move.finish()
            else:
                move.run()

    with pytest.raises((hdp.PeerLost, hdp.Aborted), match=f"rank {DIES} died") as caught:
        go_on()
    assert caught.type is hdp.Aborted or caught.value.peer == DIES
    for held in source.values():
        for (row, _), values in held.boxes:
            assert torch.equal(values, whole()[row:][: len(values)])
    comm = comm.shrink(timeout=20.0)
    for each in target.values():
        each.zero_()
    Reshard(source, target, comm).run()
    for each in target.values():
        assert torch.equal(each, whole())
    (Path(folder) / f"rank{me}").write_text("")


@pytest.mark.parametrize("number", range(int(os.environ.get("HDPCOMM_RESHARD_KILLS", "3"))))
def test_a_receiver_that_dies_loses_nobody_else(number: int, tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match=f"rank {DIES}"):
        spawn(moving, RANKS, str(tmp_path), 0.01 + 0.002 * number**2, number % 2 == 1, timeout=100.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1", "rank2"]
