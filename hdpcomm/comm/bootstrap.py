"""How a rank joins its world: from torchrun's environment, from a launcher of this package, or alone."""

from __future__ import annotations

import atexit
import datetime
import json
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hdpcomm import _core
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.costs import load_costs
from hdpcomm.comm.device_communicator import DeviceCommunicator
from hdpcomm.comm.device_world import DEVICE_TRANSPORTS, automatic, join_devices
from hdpcomm.errors import CommTimeout, Error, InvalidUsage

__all__ = ["TRANSPORTS", "ThreadRank", "close_all", "init", "join", "thread_rank"]


@dataclass(frozen=True, slots=True)
class ThreadRank:
    """What a rank that is a thread of this process joins with; see :func:`hdpcomm.testing.run_threads`."""

    segment: _core.comm.ShmSegment
    rank: int
    timeout: float
    transport: str = "shm"
    worlds: list[_core.comm.World] = field(default_factory=list)


thread_rank = threading.local()  # .value: ThreadRank, set on the threads of run_threads

TRANSPORTS = ("auto", "shm", *DEVICE_TRANSPORTS)
# One client of a launcher's store a process, kept: a new connection of torch's TCPStore now and then takes 5 s.
_agent_stores: dict[tuple[str, int], Any] = {}
_open_worlds: weakref.WeakSet[_core.comm.World] = weakref.WeakSet()


def init(transport: str = "auto", timeout: float | None = None) -> Communicator:
    """Joins the world and returns the communicator of all its ranks.

    Collective over all ranks of the job. The world is the one of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` (torchrun, ``hdpcomm train``, ``hdpcomm.testing.spawn``); a world of one without ``WORLD_SIZE``.
    If torch.distributed is initialised already, its store is used and no port is opened. ``init()`` may be called again
    after ``close()``, or for a second, independent world.

    transport: ``shm`` (ranks on one host, host tensors); ``cuda`` (the same, and CUDA tensors by streams; several ranks
    may share a GPU); ``sim`` (host tensors by the streams of a simulated device); ``auto``: ``cuda`` where torch sees a
    GPU, else ``shm``; ``HDPCOMM_TRANSPORT`` overrides it.
    timeout: seconds for joining and for every operation; default ``HDPCOMM_TIMEOUT`` or 60.
    Raises: InvalidUsage (environment, port in use, ranks on several hosts), CommTimeout (names the absent ranks).
    """
    joining: ThreadRank | None = getattr(thread_rank, "value", None)
    if transport == "auto":
        transport = _environment("HDPCOMM_TRANSPORT") if joining is None else joining.transport
    if transport not in TRANSPORTS:
        raise InvalidUsage(f"transport {transport!r} is unknown; give one of: {', '.join(TRANSPORTS)}")
    seconds = _default_timeout() if timeout is None else float(timeout)
    if not seconds > 0:
        raise InvalidUsage(f"timeout is {timeout!r}; give a number of seconds above 0")
    if joining is not None:
        seconds = joining.timeout if timeout is None else seconds
        world = _core.comm.join_shm_world(joining.segment, joining.rank, seconds)
        joining.worlds.append(world)
        world.set_costs(**load_costs("shm"))
        return _communicator(world, transport)
    rank, size = _rank_and_size()
    if size == 1:
        return join(None, 0, 1, timeout=seconds, transport=transport)
    deadline = time.monotonic() + seconds
    store = _open_store(rank, size, seconds)
    store.set_timeout(datetime.timedelta(seconds=seconds))
    return _adopt(_join_processes(store, rank, size, seconds, deadline), transport)


def join(store: Any, rank: int, size: int, *, timeout: float, transport: str = "shm") -> Communicator:
    """As :func:`init`, for ranks that have a key-value store of torch.distributed already (a world of one needs none).

    Collective over the ``size`` ranks of the store. ``timeout``: seconds, also of every operation.
    Raises: as ``init()``.
    """
    if size == 1:
        return _adopt(_core.comm.join_shm_world(_core.comm.create_segment(1), 0, timeout), transport)
    return _adopt(_join_processes(store, rank, size, timeout, time.monotonic() + timeout), transport)


def _adopt(world: _core.comm.World, transport: str) -> Communicator:
    _open_worlds.add(world)
    return _communicator(world, transport)


def _communicator(world: _core.comm.World, transport: str) -> Communicator:
    place = world.communicator(), world.rank, world.size
    device = automatic() if transport == "auto" else transport
    if device not in DEVICE_TRANSPORTS:
        return Communicator(*place)
    try:
        return DeviceCommunicator(*place, join_devices(device, world))
    except BaseException as error:  # the others must not wait for this rank
        world.close(f"{type(error).__name__}: {error}")
        raise


def close_all(reason: str) -> None:
    """Closes what this process (or, on a thread of ``run_threads``, this rank) has open; peers are told the reason."""
    joining: ThreadRank | None = getattr(thread_rank, "value", None)
    for world in list(_open_worlds if joining is None else joining.worlds):
        world.close(reason)


atexit.register(close_all, "its process ended")


def _environment(name: str) -> str:
    return {row: value for row, value, _, _ in _core.environment()}[name]


def _default_timeout() -> float:
    return float(_environment("HDPCOMM_TIMEOUT"))


def _integer(name: str) -> int:
    text = os.environ.get(name)
    if text is None:
        raise InvalidUsage(f"{name} is not set, but WORLD_SIZE is; start the ranks with torchrun, or set both")
    try:
        return int(text)
    except ValueError as error:
        raise InvalidUsage(f"{name}={text!r} is not an integer; torchrun sets it right") from error


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    size = _integer("WORLD_SIZE")
    if size < 1:
        raise InvalidUsage(f"WORLD_SIZE={size}; give at least 1")
    rank = _integer("RANK")
    if not 0 <= rank < size:
        raise InvalidUsage(f"RANK={rank} is not in 0..{size - 1} (WORLD_SIZE={size})")
    return rank, size


def _open_store(rank: int, size: int, seconds: float) -> Any:
    """The key-value store of the job, as a client or, on rank 0 without an agent, as its server."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = _integer("MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    if agent and (address, port) in _agent_stores:
        return _agent_stores[address, port]
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            size,
            is_master=serves,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        if agent:
            _agent_stores[address, port] = store
        return store
    except dist.DistNetworkError as error:
        text = str(error)
        if serves and ("EADDRINUSE" in text or "address already in use" in text):
            raise InvalidUsage(
                f"port {port} of {address} is in use, rank 0 cannot serve the job's store there; set MASTER_PORT to a "
                "free port on all ranks (torchrun chooses one itself)",
                rank=rank,
            ) from error
        raise CommTimeout(
            f"rank {rank} did not reach the job's store at {address}:{port} within {seconds} s; is rank 0 running, and "
            "are MASTER_ADDR and MASTER_PORT the same on all ranks?",
            rank=rank,
        ) from error


def _join_processes(store: Any, rank: int, size: int, seconds: float, deadline: float) -> _core.comm.World:
    # The n-th init() of a rank joins the n-th init() of the others.
    generation = store.add(f"hdpcomm/inits/{rank}", 1)
    prefix = f"hdpcomm/{generation}"
    store.set(f"{prefix}/host/{rank}", _core.comm.host_identity())
    _wait_for_all(store, [f"{prefix}/host/{peer}" for peer in range(size)], deadline, seconds, rank)
    hosts = store.multi_get([f"{prefix}/host/{peer}" for peer in range(size)])
    elsewhere = [peer for peer in range(size) if hosts[peer] != hosts[0]]
    if elsewhere:
        raise InvalidUsage(
            f"ranks {elsewhere} run on another host (or as another user, or in another container) than rank 0; the shm "
            "transport connects ranks of one host: start them all there",
            rank=rank,
            ranks=range(size),
        )
    # Rank 0 makes the segment; its descriptor stays open until all have mapped it.
    if rank == 0:
        segment = _core.comm.create_segment(size)
        costs = load_costs("shm")  # rank 0's are everybody's, so that all choose the same algorithms
        store.set(f"{prefix}/segment", json.dumps({"address": segment.address(), "costs": costs}))
    else:
        _wait_for_all(store, [f"{prefix}/segment"], deadline, seconds, rank)
        published = json.loads(store.get(f"{prefix}/segment"))
        segment = _core.comm.open_segment(published["address"], size)
        costs = published["costs"]
    world = _core.comm.join_shm_world(segment, rank, max(0.1, deadline - time.monotonic()))
    segment.release()
    world.set_costs(**costs)
    return world


def _wait_for_all(store: Any, keys: list[str], deadline: float, seconds: float, rank: int) -> None:
    left = max(0.1, deadline - time.monotonic())
    try:
        store.wait(keys, datetime.timedelta(seconds=left))
    except dist.DistStoreError as error:
        absent = [key.rsplit("/", 1)[1] for key in keys if not store.check([key])]
        raise CommTimeout(
            f"rank {rank} waited {seconds} s in init() for: {', '.join(absent)} (ranks that did not come, or rank 0's "
            "segment); look for their errors, or raise timeout=",
            rank=rank,
            op="init",
        ) from error
    except RuntimeError as error:
        raise Error(f"rank {rank} lost the job's store in init(): {error}; did rank 0 end?", rank=rank) from error
