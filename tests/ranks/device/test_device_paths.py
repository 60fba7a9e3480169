"""Where an operation's tensors are is found out once for each of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import testing
from hdpcomm.comm.device.paths import Devices

OPERATIONS: dict[str, Callable[[hdp.Communicator, torch.Tensor, torch.Tensor], Any]] = {
    "send and recv": lambda comm, x, y: comm.send(x, 1) if comm.rank == 0 else comm.recv(y, 0),
    "exchange": lambda comm, x, y: comm.exchange([(x, 1 - comm.rank)], [(y, 1 - comm.rank)]),
    "all_reduce": lambda comm, x, _: comm.all_reduce(x),
    "all_to_all": lambda comm, x, y: comm.all_to_all(y, x),
    "broadcast": lambda comm, x, _: comm.broadcast(x, 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tensor_is_asked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[tuple[int, int]] = Counter()
    takes = Devices.takes

    def noted(self: Devices, x: Any) -> bool:
        asked[threading.get_ident(), id(x)] += 1
        return takes(self, x)

    monkeypatch.setattr(Devices, "takes", noted)

    def main() -> None:
        with hdp.init() as comm:
            x, y = torch.arange(4.0), torch.zeros(4)
            OPERATIONS[name](comm, x, y)
            comm.synchronize()

    testing.run_threads(main, 2, transport="sim", timeout=60)
    assert asked
    assert set(asked.values()) == {1}
