"""How many streams a stream that waits for a flag holds up: those that share its hardware queue.

Two processes at a time, each with 24 streams and the default one; by the number of queues that they ask for
(``CUDA_DEVICE_MAX_CONNECTIONS``) and by what the others are given: the write of a flag, a copy on the device before it,
a copy from host memory before it; the write where every other stream has a high priority.
"""

from __future__ import annotations

import ctypes
import os
import time

from common import Row, Rows, main, processes_kind, row

from hdpcomm._core.device import open_cuda
from hdpcomm.testing import _native, spawn

STREAMS, COPY_BYTES, PATIENCE_S = 24, 4 << 20, 0.03
KINDS = ("write", "copy", "copy from host")


def held_up(device: _native.TestedDevice, kind: str, waiting: int, priority: int) -> list[int]:
    """Which of the streams were held up while one waited; 0 is the default stream."""
    flags = device.allocate_pinned(4 * (STREAMS + 2))
    host = device.allocate_pinned(COPY_BYTES)
    a, b = device.allocate(COPY_BYTES), device.allocate(COPY_BYTES)
    others = [0, *(device.create_stream(priority if i % 2 else 0) for i in range(STREAMS))]
    for i in range(STREAMS + 2):
        device.store_flag(flags + 4 * i, 0)
    for stream in others:  # a stream's first operations may make its queue
        device.copy(a, b, bytes=4096, stream=stream)
        device.synchronize_stream(stream)
    device.wait_value(others[waiting], flags + 4 * (STREAMS + 1), 1)
    given = [i for i in range(STREAMS + 1) if i != waiting]
    for i in given:
        if kind != "write":
            device.copy(a, b if kind == "copy" else host, bytes=COPY_BYTES, stream=others[i])
        device.write_value(others[i], flags + 4 * i, 1)
    time.sleep(PATIENCE_S)
    found = [i for i in given if ctypes.c_uint32.from_address(flags + 4 * i).value == 0]
    device.store_flag(flags + 4 * (STREAMS + 1), 1)
    for stream in others:
        device.synchronize_stream(stream)
    for stream in others[1:]:
        device.destroy_stream(stream)
    for memory in (a, b):
        device.free(memory)
    for memory in (host, flags):
        device.free_pinned(memory)
    return found


def on_a_rank(connections: int) -> dict[str, list[list[int]]]:
    if connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    else:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    device = open_cuda(0)
    found = {kind: [held_up(device, kind, waiting, 0) for waiting in (0, 1, 6)] for kind in KINDS}
    return found | {"write, priorities": [held_up(device, "write", 1, -5)]}


def rows_of(connections: int) -> list[Row]:
    kind, _ = processes_kind()
    asked = f"{connections} queues" if connections else "queues not set"
    rows = []
    found = spawn(on_a_rank, 2, connections, timeout=40.0)
    for name in found[0]:
        print(f"{kind}, {asked}, {name}: {[rank[name] for rank in found]}", flush=True)
        most = max(len(held) for rank in found for held in rank[name])
        rows.append(row(f"{kind}, {asked}: held up, {name}", most, "streams"))
    return rows


GROUPS: list[Rows] = [lambda n=n: rows_of(n) for n in (0, 8, 16, 32)]  # type: ignore[misc]

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)
