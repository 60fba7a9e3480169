"""How a rank joins its world: from torchrun's environment, from a launcher of this package, or alone."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hdpcomm import _core
from hdpcomm.arguments import check_seconds
from hdpcomm.comm import flight_recorder
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.connections import WORLD_BYTES, Connections, listen
from hdpcomm.comm.costs import cost_names, link_costs, load_costs
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.comm.device.paths import AUTOMATIC, DEVICE_TRANSPORTS, join_devices
from hdpcomm.comm.launchers import agent_restarts, joined, master, rank_and_size
from hdpcomm.comm.machine import allow_sockets, listening_address, machine
from hdpcomm.comm.secret import SAME_SECRET, job_secret
from hdpcomm.comm.torch_store import DIED_KEY, SignedStore, connect_store, open_file_store, serve_store
from hdpcomm.errors import CommTimeout, Error, InvalidUsage, PeerLost
from hdpcomm.log import LOG

__all__ = [
    *("TRANSPORTS", "Joining", "ThreadRank", "close_all", "default_timeout", "init"),
    *("join", "open_store", "thread_rank", "uses_gpus", "wait_for_all"),
]


_TOLD_S = 2.0  # for the others to read why the rank that serves the store gives up
_CHECK_S = 0.1  # between checks whether all who are awaited can still come
_LISTED = 32  # names in a message
_HINT = ": look for its error"


@dataclass(frozen=True, slots=True)
class Joining:
    """Arguments of a rank that joins a world.

    Attributes:
        store: key-value store of the job; the world's keys begin with ``prefix``.
        seconds: that the ranks have for joining; ``deadline``: when they are over, by ``time.monotonic()``.
        pids: the process of each rank, 0 where it runs elsewhere; empty: not known yet.
        serves: the store is in this process.
    """

    store: Any
    prefix: str
    rank: int
    size: int
    seconds: float
    deadline: float
    pids: tuple[int, ...] = ()
    serves: bool = False

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.1, self.deadline - time.monotonic())

    def wait(self, *keys: str) -> None:
        """Waits for keys of this world. Raises: CommTimeout past the deadline; PeerLost as :meth:`check_peers`."""
        full = [f"{self.prefix}/{key}" for key in keys]
        wait_for_all(self.store, full, self.deadline, self.seconds, self.rank, check_peers=self.check_peers)

    def from_rank_0(self, key: str, make: Callable[[], Any]) -> Any:
        """A JSON value that rank 0 makes, returned on all ranks. Collective."""
        if self.rank == 0:
            self.store.set(f"{self.prefix}/{key}", json.dumps(make()))
        self.wait(key)
        with self.reading(key):
            return json.loads(self.store.get(f"{self.prefix}/{key}"))

    def from_all(self, key: str, value: str) -> list[str]:
        """The values of all ranks, by rank. Collective."""
        self.store.set(f"{self.prefix}/{key}/{self.rank}", value)
        self.wait(*(f"{key}/{peer}" for peer in range(self.size)))
        texts = self.store.multi_get([f"{self.prefix}/{key}/{peer}" for peer in range(self.size)])
        with self.reading(key):
            return [text.decode() for text in texts]

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Turns errors of the block, which values of ``key`` that no rank writes cause, into an Error with the key."""
        try:
            yield
        except Error:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Error(
                f"rank {self.rank} read values of '{key}' in the job's store that no rank of this version of hdpcomm "
                f"writes ({str(error)[:200]}): start all ranks with the same version, and keep others from the store",
                rank=self.rank,
                op="init",
            ) from error

    def check_peers(self) -> None:
        """Raises PeerLost when the process of a rank of this host has ended, or another rank has reported a failure."""
        for peer, pid in enumerate(self.pids):
            if pid and not _core.comm.process_runs(pid):
                raise self._lost(f"rank {peer} died (process {pid}) while the ranks joined the world", peer)
        if self.store.check([DIED_KEY]):
            with self.reading("died"):
                for peer, text in json.loads(self.store.get(DIED_KEY)).items():
                    raise self._lost(f"rank {peer} {text} while the ranks joined the world", int(peer))
        if self.store.check([self._lost_key]):
            with self.reading("lost"):
                report = json.loads(self.store.get(self._lost_key))
                self.store.add(f"{self._lost_key}/read", 1)
                raise self._lost(f"{report['text']} (told by rank {report['by']})", int(report["peer"]))

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Reports an error of the block to the other ranks, on whatever host, so that they stop waiting for this one.

        Timeouts are not reported: the others' time is over, too, and each names whom it misses. A rank that serves the
        store may end with the error, and waits until the others have read the report.
        """
        try:
            yield
        except CommTimeout:
            raise
        except PeerLost as error:
            self._report(str(error), self.rank if error.peer is None else error.peer)
            self._wait_told()
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._report(
                f"rank {self.rank} gave up while the ranks joined the world; its last words: {reason}", self.rank
            )
            self._wait_told()
            raise

    def _wait_told(self) -> None:
        until = time.monotonic() + min(_TOLD_S, self.left)
        with contextlib.suppress(RuntimeError, Error):
            while (
                self.serves and time.monotonic() < until and self.store.add(f"{self._lost_key}/read", 0) < self.size - 1
            ):
                time.sleep(0.01)

    @property
    def _lost_key(self) -> str:
        return f"{self.prefix}/lost"

    def _lost(self, text: str, peer: int) -> PeerLost:
        return PeerLost(text + _HINT, rank=self.rank, peer=peer, op="init")

    def _report(self, text: str, peer: int) -> None:
        """Only the first report counts. The store itself may be what is lost."""
        with contextlib.suppress(RuntimeError, Error):
            if not self.store.check([self._lost_key]):
                self.store.set(
                    self._lost_key, json.dumps({"peer": peer, "by": self.rank, "text": text.removesuffix(_HINT)})
                )


def wait_for_all(
    store: Any,
    keys: list[str],
    deadline: float,
    seconds: float,
    rank: int,
    *,
    check_peers: Callable[[], None] = lambda: None,
) -> None:
    """Waits until all keys are there. Raises: CommTimeout past the deadline, and what ``check_peers`` raises.

    It polls, since ``store.wait()`` is ended neither by Ctrl-C nor by the death of a neighbour. Where there are many
    keys it narrows down to a missing one and polls for that, so that the store of many ranks has little to do.
    """
    started = time.monotonic()
    next_check = started
    few = len(keys)
    try:
        while keys:
            if store.check(keys[:few]):
                keys = keys[few:]
                few = len(keys)
            elif few > 1:
                few //= 2
            else:
                now = time.monotonic()
                if now >= next_check:
                    next_check = now + _CHECK_S
                    check_peers()
                if now > deadline:
                    break
                time.sleep(min(0.1, 1e-3 + (now - started) / 10))
        absent = [key.rsplit("/", 1)[1] for key in keys if not store.check([key])]
        known = _what_the_store_knows(store, absent) if absent else ""
    except RuntimeError as error:
        raise Error(f"rank {rank} lost the job's store in init(): {error}; did rank 0 end?", rank=rank) from error
    if absent:
        raise CommTimeout(
            f"rank {rank} waited {seconds} s in init() for: {_listed(absent)} (ranks that did not come, or rank 0's "
            f"segment){known}; look for their errors, or raise timeout=",
            rank=rank,
            op="init",
        )


def _what_the_store_knows(store: Any, absent: Sequence[str]) -> str:
    """Which ranks have never reached the store, and which have another secret."""
    if not isinstance(store, SignedStore):
        return ""
    ranks = [rank for rank in absent if rank.isdigit()]
    shown = store.shown_secrets(ranks)
    never, others = [rank for rank in ranks if rank not in shown], [rank for rank in ranks if not shown.get(rank, True)]
    told = f"; never at the job's store: {_listed(never)} (not started, or ended before)" if never else ""
    return told + (f"; ranks with another secret: {_listed(others)}: {SAME_SECRET}" if others else "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@dataclass(frozen=True, slots=True)
class ThreadRank:
    """How a rank that is a thread of this process joins; see :func:`hdpcomm.testing.run_threads`."""

    segment: _core.transport.ShmSegment
    rank: int
    timeout: float
    transport: str = "shm"
    worlds: list[_core.comm.World] = field(default_factory=list)


thread_rank = threading.local()  # .value: ThreadRank, set on the threads of run_threads

_GRACE_S = 0.3  # beyond the deadline, to find out whom to name

# One store a process and address, kept: a new connection of torch's TCPStore now and then takes 5 s, and rank 0 cannot
# serve a second one on the same port while an earlier world still holds the first.
_stores: dict[tuple[str, int], SignedStore] = {}


def init(transport: str = "auto", timeout: float | None = None) -> Communicator:
    """Joins the world and returns the communicator of all its ranks.

    Collective over all ranks of the job. The world is the one of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` (torchrun, ``hdpcomm train``, ``hdpcomm.testing.spawn``), or that of srun or mpirun; without any of
    them a world of one.
    If torch.distributed is initialised already, its store is used, whatever it is, and no port of one is asked for.
    Only ranks with the same secret join: this user's own, unless ``HDPCOMM_SECRET`` says another (docs/security.md).
    ``init()`` may be called again after ``close()``, or for a second, independent world.

    transport: ``shm`` (ranks on one host, host tensors); ``tcp`` (host tensors on any hosts, by connections of our
        own); ``cuda`` (ranks on one host; host tensors as with shm, and CUDA tensors by streams; several ranks may
        share a GPU); ``nccl`` (ranks on any hosts, one GPU each; host
        tensors as with auto, and CUDA tensors by one NCCL communicator); ``cuda+nccl`` (ranks on any hosts; CUDA
        tensors by streams between GPUs of one host that reach each other, by NCCL between all others; NCCL is asked for
        only if there are such); ``sim`` (host tensors by the streams of a simulated device); ``auto``: shm inside each
        host and tcp between hosts, and where torch sees a GPU on every rank cuda+nccl. ``HDPCOMM_TRANSPORT`` says what
        ``auto`` means.
    timeout: seconds for joining and for every operation; default ``HDPCOMM_TIMEOUT`` or 60.
    Raises: InvalidUsage (environment, port in use, ranks on several hosts), CommTimeout (names the absent ranks),
        PeerLost (a rank died or gave up while the ranks joined: told by the ranks of its host).
    """
    joining: ThreadRank | None = getattr(thread_rank, "value", None)
    transport = _chosen(joining.transport if joining is not None and transport == "auto" else transport)
    seconds = default_timeout() if timeout is None else check_seconds("init", timeout)
    if joining is not None:
        seconds = joining.timeout if timeout is None else seconds
        world = _core.comm.join_shm_world(joining.segment, joining.rank, timeout=seconds, joining=seconds)
        joining.worlds.append(world)
        machine().refuse_threads(transport, world.size)
        world.set_costs(**load_costs("shm"))
        names = [machine().host(each) for each in range(world.size)]
        _set_nodes(world, [names.index(name) for name in names], load_costs("tcp"))
        return _communicator(world, transport)
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = rank_and_size() if joined() else (0, 1)
    return _joined(transport, rank, size, seconds, lambda: open_store(rank, seconds))


def join(store: Any, rank: int, size: int, *, timeout: float, devices: bool = True) -> Communicator:
    """As :func:`init`, for ranks that have a key-value store of torch.distributed already (a world of one needs none).

    Collective over the ``size`` ranks of the store. ``timeout``: seconds, also of every operation. ``devices``: False
    leaves out the streams that the transport has for device tensors. Raises: as ``init()``.
    """
    return _joined(_chosen("auto"), rank, size, timeout, lambda: store, devices=devices)


def _joined(
    transport: str, rank: int, size: int, seconds: float, store: Callable[[], Any], *, devices: bool = True
) -> Communicator:
    deadline = time.monotonic() + seconds
    gpus = machine().has_gpu(rank)
    if size == 1:
        world = _join_alone(transport, seconds)
    else:
        world, gpus = _join_processes(transport, store(), rank, size, seconds, deadline)
    _core.comm.close_at_end(world)
    if not devices:
        return _communicator(world, "auto")
    comm = _communicator(world, AUTOMATIC if transport == "auto" and gpus else transport)
    LOG.debug(f"rank {rank} of {size} joined, transport {comm.transport}")
    return comm


def _join_alone(transport: str, timeout: float) -> _core.comm.World:
    if transport == "tcp":
        return _core.comm.join_framed_world(_core.transport.FrameLink(0, 1), timeout)
    return _core.comm.join_shm_world(_core.transport.create_segment(1), 0, timeout=timeout, joining=timeout)


def _communicator(world: _core.comm.World, transport: str) -> Communicator:
    place = world.communicator(), world.rank, world.size
    if transport not in DEVICE_TRANSPORTS:
        flight_recorder.watch(world)
        return Communicator(*place)
    try:
        devices = join_devices(transport, world)
        flight_recorder.watch(world, devices.engine)
        return DeviceCommunicator(*place, devices)
    except BaseException as error:  # the others must not wait for this rank
        world.close(f"{type(error).__name__}: {error}")
        raise


def close_all(reason: str) -> None:
    """Closes what this process (or, on a thread of ``run_threads``, this rank) has open; peers are told the reason."""
    joining: ThreadRank | None = getattr(thread_rank, "value", None)
    if joining is None:
        _core.comm.close_worlds(reason)
    else:
        for world in joining.worlds:
            world.close(reason)


atexit.register(close_all, "its process ended")


def default_timeout() -> float:
    """Seconds for joining and for operations where the program names none."""
    return _core.settings().timeout_s


def _chosen(transport: str) -> str:
    """The transport that the program or, for ``auto``, the environment names."""
    given = transport if transport != "auto" else _core.settings().transport
    if given not in TRANSPORTS:
        source = "" if given == transport else " of HDPCOMM_TRANSPORT"
        raise InvalidUsage(f"transport {given!r}{source} is unknown; give one of: {', '.join(TRANSPORTS)}")
    return given


def uses_gpus(transport: str) -> bool:
    """Whether ranks that are started with this transport on machines like this one compute on GPUs. Local."""
    chosen = _chosen(transport)
    return chosen in ("cuda", "nccl", "cuda+nccl") or (chosen == "auto" and machine().has_gpu(0))


def open_store(rank: int, seconds: float) -> Any:
    """The key-value store of the job, as a client or, on rank 0 without a launcher's, also as its server.

    Raises: InvalidUsage (nothing says where it is, port in use), CommTimeout (not reached within ``seconds``).
    """
    secret = job_secret()
    if dist.is_initialized():
        return SignedStore(dist.distributed_c10d._get_default_store(), secret, rank, seconds=seconds)
    address, port = master()
    store = _stores.get((address, port))
    if store is not None and not store.broken:
        store.set_timeout(datetime.timedelta(seconds=seconds))
        return store
    inner = _new_store(address, port, rank, seconds)
    store = _stores[address, port] = SignedStore(inner, secret, rank, seconds=seconds)
    return store


def _new_store(address: str, port: int, rank: int, seconds: float) -> Any:
    launcher = _core.settings().store
    if launcher.startswith(f"{port}:"):  # a launcher inside of our launcher has another port
        return open_file_store(launcher.partition(":")[2], rank)
    if rank == 0 and not _agent_serves():
        return serve_store(address, port, seconds=seconds)
    return connect_store(address, port, rank, seconds=seconds)


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _join_processes(
    transport: str, store: Any, rank: int, size: int, seconds: float, deadline: float
) -> tuple[_core.comm.World, bool]:
    """The world, and whether every rank sees a GPU."""
    if not isinstance(store, SignedStore):  # the program's own
        store = SignedStore(store, job_secret(), rank, seconds=seconds)
    store.deadline = deadline + _GRACE_S  # so that who is awaited can still be named
    try:
        store.show_secret()
        # The n-th init() of a rank joins the n-th init() of the others. torchrun's store outlives its ranks, of which
        # one may have died before its first init().
        job = f"hdpcomm/{restarts}" if (restarts := agent_restarts()) else "hdpcomm"
        generation = store.add(f"{job}/inits/{rank}", 1)
        serves = isinstance(store.inner, dist.TCPStore) and rank == 0 and not _agent_serves()  # type: ignore[attr-defined]
        joining = Joining(store, f"{job}/{generation}", rank, size, seconds, deadline, serves=serves)
        return _join_all(joining, transport)
    finally:
        store.deadline = None


def _join_all(joining: Joining, transport: str) -> tuple[_core.comm.World, bool]:
    rank = joining.rank
    with joining.reporting_failure():
        here = machine().host(rank)
        answers = joining.from_all("host", f"{int(machine().has_gpu(rank))} {os.getpid()} {here}")
        with joining.reading("host"):
            seen, pids, identities = zip(*(each.split(" ", 2) for each in answers), strict=True)
            near = [_pid(pid) if identity == here else 0 for pid, identity in zip(pids, identities, strict=True)]
        joining = dataclasses.replace(joining, pids=tuple(near))
        places = [identities.index(identity) for identity in identities]
        world, hosts = _JOINS.get(transport, _join_shm)(joining, places)
        try:  # rank 0's costs are everybody's, so that all choose the same algorithms
            names = cost_names(world.transport)
            inside, between = joining.from_rank_0("costs", lambda: [load_costs(name) for name in names])
        except BaseException as error:  # those that have joined learn why this rank has not
            world.close(f"{type(error).__name__}: {error}")
            raise
    with joining.reading("costs"):
        world.set_costs(**inside)
        _set_nodes(world, hosts, between)
    return world, "0" not in seen


def _pid(text: str) -> int:
    pid = int(text)
    if not 0 < pid < 2**31:
        raise ValueError(f"{pid} is no process")
    return pid


def _set_nodes(world: _core.comm.World, hosts: Sequence[int], remote: dict[str, float]) -> None:
    """Tells a world with ranks on several hosts the host of each, and the costs between hosts."""
    if len(set(hosts)) > 1:
        world.set_nodes(hosts, link_costs(remote))


# How to join: the world, and the host of each rank as a number. The second argument has equal numbers for ranks with
# equal identities.
_Join = Callable[[Joining, list[int]], tuple[_core.comm.World, list[int]]]


def _join_shm(joining: Joining, hosts: list[int]) -> tuple[_core.comm.World, list[int]]:
    rank = joining.rank
    elsewhere = [peer for peer in range(joining.size) if hosts[peer] != hosts[0]]
    if elsewhere:
        raise InvalidUsage(
            f"ranks {elsewhere} run on another host (or as another user, or in another container) than rank 0; the shm "
            "transport connects ranks of one host: start them all there, or use transport='auto'",
            rank=rank,
            ranks=range(joining.size),
        )
    # Rank 0 makes the segment; its descriptor stays open until all have mapped it.
    made = _core.transport.create_segment(joining.size) if rank == 0 else None
    address = joining.from_rank_0("segment", lambda: made.address() if made else "")
    with joining.reading("segment"):
        segment = made or _core.transport.open_segment(address, joining.size)
    world = _core.comm.join_shm_world(segment, rank, timeout=joining.seconds, joining=joining.left, pids=joining.pids)
    segment.release()
    return world, hosts


def _join_tcp(joining: Joining, hosts: list[int]) -> tuple[_core.comm.World, list[int]]:
    link = _core.transport.FrameLink(joining.rank, joining.size)
    world = _core.comm.join_framed_world(link, joining.seconds)
    _connect(joining, link)
    return world, hosts


def _connect(joining: Joining, link: _core.transport.FrameLink) -> None:
    """Carries the frames of the link over TCP. Collective over all ranks of the world."""
    address = listening_address(joining.store)
    try:
        listener = listen(address)
    except OSError as error:
        raise Error(
            f"rank {joining.rank} cannot listen at {address}: {error}; name the interface to use by GLOO_SOCKET_IFNAME",
            rank=joining.rank,
        ) from error
    places = []
    for text in joining.from_all("place", json.dumps([address, listener.getsockname()[1]])):
        with joining.reading("place"):
            host, port = json.loads(text)
            places.append((str(host), int(port)))
    name = joining.from_rank_0("world", lambda: secrets.token_hex(WORLD_BYTES))
    with joining.reading("world"):
        world = bytes.fromhex(name)
    allow_sockets(joining.rank, 2 * joining.size)
    Connections(link, listener, places, world, joining.store.secret)


def _join_auto(joining: Joining, hosts: list[int]) -> tuple[_core.comm.World, list[int]]:
    """Shared memory inside the hosts, TCP between them.

    Equal identities are not enough for a common host: a rank that cannot open the segment of its host's first rank (a
    hardened /proc, say) is taken as a host of its own.
    """
    rank, first = joining.rank, hosts[joining.rank]
    segment = _core.transport.create_segment(joining.size) if rank == first else None
    addresses = joining.from_all("segment", segment.address() if segment else "")
    if segment is None:
        with contextlib.suppress(Error):
            segment = _core.transport.open_segment(addresses[first], joining.size)
    reached = joining.from_all("reached", "yes" if segment else "no")
    hosts = [host if reached[peer] == "yes" else peer for peer, host in enumerate(hosts)]
    segment = segment or _core.transport.create_segment(joining.size)
    if len(set(hosts)) == 1:
        world = _core.comm.join_shm_world(
            segment, rank, timeout=joining.seconds, joining=joining.left, pids=joining.pids
        )
    else:
        link = _core.transport.FrameLink(rank, joining.size)
        world = _core.comm.join_hosts(
            segment, link, hosts, timeout=joining.seconds, joining=joining.left, pids=joining.pids
        )
        _connect(joining, link)
    segment.release()
    return world, hosts


# A device's host world is shm, but where NCCL takes part: then ranks may be anywhere.
_JOINS: dict[str, _Join] = {
    "auto": _join_auto,
    "shm": _join_shm,
    "tcp": _join_tcp,
    "nccl": _join_auto,
    "cuda+nccl": _join_auto,
}
TRANSPORTS = ("auto", "shm", "tcp", *DEVICE_TRANSPORTS)
