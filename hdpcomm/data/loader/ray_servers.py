"""Servers of a loader as actors of a Ray cluster, and this rank as their client."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hdpcomm.data.agree import on_rank_0, raise_together
from hdpcomm.data.loader.block import SequencePart
from hdpcomm.data.loader.order import LoadedBatch
from hdpcomm.data.loader.ray_actors import LoaderScheduler, LoaderServer, PlacedPart, unpack_parts
from hdpcomm.data.loader.ray_calls import get, import_ray
from hdpcomm.data.loader.servers import PartOf
from hdpcomm.data.loader.stream import DocumentStream
from hdpcomm.errors import Error, InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["RayServers"]

_START_S = 120.0  # for a cluster on this machine, or actors on a busy one
_CONNECT_S = 10.0
_LEAVE_S = 5.0  # that rank 0 waits for the others before it ends the actors
_SMALL_BYTES = 50_000
_CALLS = 16  # that may overlap in a server


class RayServers:
    """Actors that rank 0 owns, which Ray starts again when they die and ends with rank 0. Collective over ``comm``.

    Ranks that have not called ``ray.init`` do so here: rank 0 with ``RAY_ADDRESS``, or, where that is not set, for a
    new cluster of this machine that ends with it; the others with the address of rank 0's cluster.

    Args:
        options: keyword arguments of the sampler, but for its state.
        state: of the sampler, from which the first batch follows.
        servers: how many; ``None``: one on each node of the cluster.
        deadline_s: longest wait for an answer.

    Raises:
        InvalidUsage: Ray is not installed; Error: no cluster, or its actors do not start.
    """

    def __init__(
        self,
        stream: DocumentStream,
        options: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        servers: int | None,
        comm: Communicator | None,
        deadline_s: float,
    ) -> None:
        self._deadline_s, self._state = deadline_s, state
        self._rank, self._size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._stopped = threading.Event()
        self._instances: set[str] = set()
        self._connected = self._made_connection = False
        self._owned: list[Any] = []
        try:
            told = json.loads(on_rank_0(comm, lambda: self._begin(stream, options, servers)))
            self._join(told, comm)
        except BaseException:
            self.close()
            raise

    @property
    def restarts(self) -> int:
        """Starts of servers beyond the first of each, as far as this rank has heard of them."""
        return max(0, len(self._instances) - len(self._servers))

    def next_batch(self) -> LoadedBatch:
        step = int(self._state["step"])
        batch, instances = self._get(self._scheduler.batch.remote(step, self._state), "the scheduler of the loader")
        self._instances.update(instances)
        self._state = batch.state
        found: LoadedBatch = batch
        return found

    def read(self, parts: Sequence[PartOf]) -> list[SequencePart]:
        by_server: dict[int, list[int]] = {}
        for place, part in enumerate(parts):
            by_server.setdefault(part.sequence.position % len(self._servers), []).append(place)
        asked = {
            server: self._servers[server].read.remote(
                [
                    PlacedPart(parts[place].sequence.block, parts[place].sequence.number, *parts[place][1:])
                    for place in places
                ]
            )
            for server, places in by_server.items()
        }
        found: dict[int, SequencePart] = {}
        for server, answer in asked.items():
            instance, packed = self._get(answer, f"server {server} of the loader")
            self._instances.add(instance)
            found.update(zip(by_server[server], unpack_parts(packed), strict=True))
        return [found[place] for place in range(len(parts))]

    def used(self, batches: Sequence[LoadedBatch]) -> None:
        """Servers keep the latest blocks, and make others again."""

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        if not self._connected:
            return
        ray = import_ray()
        with contextlib.suppress(Exception):  # the cluster may be gone
            if self._rank == 0:
                self._end_servers(ray)
            else:
                get(self._scheduler.leave.remote(), _LEAVE_S, what="the scheduler of the loader")
        if self._made_connection:
            ray.shutdown()
        self._connected = False

    def _end_servers(self, ray: Any) -> None:
        """Lets living servers leave first: the cluster may end with this process."""
        started = time.monotonic()
        while self._size > 1 and time.monotonic() - started < _LEAVE_S:
            if get(self._scheduler.left.remote(), _LEAVE_S, what="the scheduler of the loader") >= self._size - 1:
                break
            time.sleep(0.02)
        for actor in self._owned:
            ray.kill(actor, no_restart=True)

    def _begin(self, stream: DocumentStream, options: Mapping[str, Any], servers: int | None) -> str:
        """On rank 0: the cluster and the actors."""
        ray = import_ray()
        with _own_signals():
            self._connect(ray, os.environ.get("RAY_ADDRESS") or "local")
        namespace = ray.get_runtime_context().namespace
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        session = secrets.token_hex(6)
        names = [f"hdpcomm-loader-{session}-{number}" for number in range(servers or len(nodes))]
        forever = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": 0}
        # Ray needs the argument to start a server again: it keeps a small one by itself.
        given = stream if len(pickle.dumps(stream)) < _SMALL_BYTES else ray.put(stream)
        self._kept = given
        spread = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        self._servers = [
            ray.remote(LoaderServer)
            .options(
                name=name,
                max_concurrency=_CALLS,
                scheduling_strategy=spread(nodes[number % len(nodes)], soft=True),
                **forever,
            )
            .remote(given)
            for number, name in enumerate(names)
        ]
        self._owned = list(self._servers)
        scheduler = f"hdpcomm-loader-{session}-scheduler"
        self._scheduler = (
            ray.remote(LoaderScheduler)
            .options(name=scheduler, **forever)
            .remote(len(stream.blocks), names, options, self._deadline_s)
        )
        self._owned.append(self._scheduler)
        what = f"the {len(names)} servers of the loader on {len(nodes)} Ray nodes"
        deadline = time.monotonic() + _START_S
        for server in self._servers:
            self._instances.add(get(server.instance.remote(), max(0.1, deadline - time.monotonic()), what=what))
        address = ray.get_runtime_context().gcs_address
        mode = os.environ.get("RAY_AUTH_MODE")  # which ray.init may have set; the token stays where Ray keeps it
        told = {"address": address, "namespace": namespace, "servers": names, "scheduler": scheduler, "mode": mode}
        return json.dumps(told)

    def _join(self, told: Mapping[str, Any], comm: Communicator | None) -> None:
        error: Error | None = None
        if self._rank > 0:
            if told["mode"] is not None:
                os.environ.setdefault("RAY_AUTH_MODE", told["mode"])
            try:
                ray = import_ray()
                with _own_signals():
                    self._connect(ray, told["address"])
                namespace = told["namespace"]
                self._servers = [ray.get_actor(name, namespace=namespace) for name in told["servers"]]
                self._scheduler = ray.get_actor(told["scheduler"], namespace=namespace)
            except Exception as failure:
                text = str(failure).strip().splitlines() or [type(failure).__name__]
                error = InvalidUsage(
                    f"rank {self._rank} cannot reach the Ray cluster of rank 0 at {told['address']} ({text[0]}); start "
                    "Ray on this host, too (ray start --address), or use --loader threads"
                )
        raise_together(comm, error)

    def _connect(self, ray: Any, address: str) -> None:
        self._made_connection = not ray.is_initialized()
        if self._made_connection:
            try:
                _check_listening(address)
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
            except (OSError, RuntimeError, ValueError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise InvalidUsage(
                    f"Ray cannot be reached or started ({reason}); check RAY_ADDRESS and ray status, or use "
                    "--loader threads"
                ) from None
        self._connected = True

    def _get(self, answer: Any, what: str) -> Any:
        return get(answer, self._deadline_s, what=what, stopped=self._stopped)


def _check_listening(address: str) -> None:
    """Raises OSError if nobody listens at host:port, for which Ray itself waits a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise OSError(f"nobody answers at {address}: {error.strerror or error}") from None


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """ray.init takes SIGTERM, by which a run is asked to save and end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
