"""The torch transport: a torch.distributed process group carries the frames of the core to other hosts.

The core cuts messages into frames and keeps all the rules (numbers, matching, deadlines, failures); the group only has
to move tensors in order between two ranks, by ``send`` and ``recv`` with a tag, which gloo, UCC and MPI offer. None of
its operations is ever withdrawn: giving up a message happens above, and what is under way arrives and is dropped.

Two threads serve a peer, one a direction. They hold frames, never a user's tensor. After the goodbye that a rank sends
when it closes, its thread that receives ends when the peer has told that it has all frames, or has said goodbye itself:
a connection that ends earlier takes what is on its way with it.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm._core import transport
from hdpcomm.comm.forks import closed_in_children
from hdpcomm.comm.job_store import JobStore
from hdpcomm.comm.secret import MAC_BYTES, NONCE_BYTES, Secret
from hdpcomm.comm.torch_store import SignedStore
from hdpcomm.errors import CommTimeout, Error

__all__ = ["GroupCarrier", "make_group", "own_address"]

_DEPTH = 4  # frames of a direction under way; receives are posted ahead, so that a send needs no round trip
_HEAD_TAG = 0x4844_0000  # tags are below 2^31, as MPI wants them; a frame's are counted modulo the depth
_BULK_TAG = _HEAD_TAG + _DEPTH
_END_TAG = _BULK_TAG + _DEPTH
_PROOF_TAG = _END_TAG + 1
_FOREVER = datetime.timedelta(days=20)  # deadlines are the core's
_GRACE_S = 5.0  # after the last frame has left, for the peers to tell that they have it, before connections are cut
_CUT_S = 2.0  # for the threads to end once they are

# Held until their threads have ended: a thread that drops the last reference to a group ends its connections without
# the GIL, and must not be surprised by the end of the interpreter.
_carriers: set[GroupCarrier] = set()


class GroupCarrier:
    """Moves the frames of a link through a process group until both ends of every pair have said goodbye.

    group: a backend object with ``send(tensors, peer, tag)`` and ``recv(tensors, peer, tag)`` that return works with
        ``wait(timeout)``; its ranks are the link's.
    owned: nobody else uses the group, so its connections may be cut at the end.
    secret: of the job. With one, a peer proves that it knows it before a frame goes to it or comes from it; what does
        not is lost.
    store: kept as long as the group, which may ask it.
    """

    def __init__(
        self, group: Any, link: transport.FrameLink, *, owned: bool, secret: Secret | None = None, store: Any = None
    ) -> None:
        self._group = group
        self._secret = secret
        self._store = store
        self._link = link
        self._owned = owned
        peers = [peer for peer in range(link.size) if peer != link.rank]
        self._proven = {peer: threading.Event() for peer in peers}  # or lost
        self._left = time.monotonic()  # when a frame last left
        self._senders = [self._thread(self._send, peer) for peer in peers]
        self._receivers = [self._thread(self._receive, peer) for peer in peers]
        self._closer = threading.Thread(target=self._close, name="hdpcomm-torch-close", daemon=True)
        for thread in (*self._receivers, *self._senders, self._closer):
            thread.start()
        _carriers.difference_update([carrier for carrier in _carriers if not carrier._closer.is_alive()])
        _carriers.add(self)

    def _thread(self, target: Any, peer: int) -> threading.Thread:
        return threading.Thread(target=self._run, args=(target, peer), name=f"hdpcomm-torch-{peer}", daemon=True)

    def _run(self, target: Any, peer: int) -> None:
        try:
            target(peer)
        except Exception as error:  # whatever a backend raises: the core reports it when it matters
            self._link.lost(peer, _first_line(error))
        finally:
            self._proven[peer].set()

    def _prove(self, secret: Secret, peer: int) -> None:
        """Both ends show that they know the secret, each by a MAC of both nonces and of who is who."""
        ours = torch.frombuffer(bytearray(secrets.token_bytes(NONCE_BYTES)), dtype=torch.uint8)
        theirs, mac = torch.empty(NONCE_BYTES, dtype=torch.uint8), torch.empty(MAC_BYTES, dtype=torch.uint8)
        works = [self._group.send([ours], peer, _PROOF_TAG), self._group.recv([theirs], peer, _PROOF_TAG)]
        _wait(works)

        def places(first: int, second: int) -> bytes:
            return struct.pack(">QQ", first, second)

        mine = secret.sign("frames", places(self._link.rank, peer), bytes(ours.tolist()), bytes(theirs.tolist()))
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        _wait([self._group.send([own], peer, _PROOF_TAG + 1), self._group.recv([mac], peer, _PROOF_TAG + 1)])
        parts = places(peer, self._link.rank), bytes(theirs.tolist()), bytes(ours.tolist())
        if not secret.verify(bytes(mac.tolist()), "frames", *parts):
            raise Error(
                f"who answered as rank {peer} does not know the job's secret (HDPCOMM_SECRET, the same on all ranks)"
            )
        self._proven[peer].set()

    def _send(self, peer: int) -> None:
        if self._secret is not None:
            self._proven[peer].wait()
        under_way: deque[tuple[transport.Frame, list[Any]]] = deque()
        count = 0
        while (frame := self._link.next(peer)) is not None:
            works = [self._group.send([_tensor(frame.head)], peer, _HEAD_TAG + count % _DEPTH)]
            if frame.bulk_bytes:
                works.append(self._group.send([_tensor(frame.bulk)], peer, _BULK_TAG + count % _DEPTH))
            under_way.append((frame, works))
            count += 1
            if len(under_way) == _DEPTH:
                oldest = under_way.popleft()  # its frame is read until the waits are over
                _wait(oldest[1])
                self._left = time.monotonic()
        for _, works in under_way:
            _wait(works)
            self._left = time.monotonic()

    def _receive(self, peer: int) -> None:
        if self._secret is not None:
            self._prove(self._secret, peer)
        posted: deque[tuple[transport.Frame, Any]] = deque()

        def post(count: int) -> None:
            frame = transport.Frame()
            posted.append((frame, self._group.recv([_tensor(frame.head)], peer, _HEAD_TAG + count % _DEPTH)))

        for count in range(_DEPTH):
            post(count)
        count = 0
        while True:
            frame, work = posted.popleft()
            _wait([work])
            if frame.expect_bulk():
                _wait([self._group.recv([_tensor(frame.bulk)], peer, _BULK_TAG + count % _DEPTH)])
            post(count + _DEPTH)
            count += 1
            if not self._link.deliver(peer, frame):
                return

    def _close(self) -> None:
        """After our goodbyes, waits until the peers have what was sent; then ends what nobody will answer."""
        self._link.wait_closed()
        self._left = time.monotonic()
        threads = [*self._senders, *self._receivers]
        for thread in threads:
            while thread.is_alive() and (left := self._left + _GRACE_S - time.monotonic()) > 0:
                thread.join(left)
        if self._owned and any(thread.is_alive() for thread in threads):
            self.cut()
            limit = time.monotonic() + _CUT_S
            for thread in threads:
                thread.join(max(0.0, limit - time.monotonic()))
        self._group = None  # its connections end here

    def cut(self) -> None:
        """Ends all connections of the group at once. Gloo has no call for it, but a wait that times out does it.

        Every peer is tried: on a connection that has failed already the call fails at once, and ends no other.
        """
        for peer in range(self._link.size):
            if peer != self._link.rank:
                with contextlib.suppress(Exception):
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _END_TAG).wait(
                        datetime.timedelta(milliseconds=1)
                    )

    def join(self) -> bool:
        """Waits until the threads have ended, after the world was closed, or should have; returns whether they have."""
        began = time.monotonic()
        while self._closer.is_alive():
            left = max(self._left, began) + _GRACE_S + 2 * _CUT_S - time.monotonic()
            if left <= 0:
                break
            self._closer.join(left)
        return not self._closer.is_alive()


def _join_all() -> None:
    # Worlds were closed before: handlers run in reverse order of registration.
    for carrier in list(_carriers):
        carrier.join()


atexit.register(_join_all)


def make_group(
    store: Any, rank: int, size: int, *, timeout: float, connecting: Callable[[Callable[[], Any]], Any]
) -> tuple[Any, bool]:
    """The group that carries the frames, and whether it is ours alone. Collective over all ranks of the store.

    A gloo group of our own over the interface that leads to the job's store (``GLOO_SOCKET_IFNAME`` names another). If
    torch.distributed runs on MPI or UCC, a new group of that kind. ``connecting``: calls what it is given, which makes
    gloo's connections.

    Raises: CommTimeout, Error, what ``connecting`` raises.
    """
    if dist.is_initialized() and dist.get_backend() in ("mpi", "ucc"):
        made = dist.new_group(backend=dist.get_backend())
        return made._get_backend(torch.device("cpu")), True
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    where = {"interface": interface.split(",")[0]} if interface else {"hostname": own_address(store)}

    def connect() -> Any:
        with closed_in_children():
            options._devices = [dist.ProcessGroupGloo.create_device(**where)]
            return dist.ProcessGroupGloo(store, rank, size, options)

    started = time.monotonic()
    try:
        return connecting(connect), True
    except RuntimeError as error:
        text = _first_line(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise CommTimeout(
                f"rank {rank} did not connect to all ranks in {time.monotonic() - started:.1f} s over {where}: {text}; "
                "check that the hosts reach each other there, or name another interface by GLOO_SOCKET_IFNAME",
                rank=rank,
                op="init",
            ) from error
        raise Error(
            f"gloo cannot be set up over {where}: {text}; name the interface to use by GLOO_SOCKET_IFNAME", rank=rank
        ) from error


def own_address(store: Any) -> str:
    """The address of this host on the way to the job's store; no packet is sent.

    ``store``: if it is served over TCP, the way to its host counts. With another (a file, say) that to ``MASTER_ADDR``
    does, or else the address that this host's name has. Raises: Error, saying what to set.
    """
    while isinstance(store, dist.PrefixStore | SignedStore):  # type: ignore[attr-defined]
        store = store.inner if isinstance(store, SignedStore) else store.underlying_store
    if isinstance(store, JobStore):
        name, target = "the job's store at ", "127.0.0.1" if isinstance(store.place, str) else store.place[0]
    elif isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        name, target = "the job's store at ", store.host
    elif "MASTER_ADDR" in os.environ:
        name, target = "MASTER_ADDR=", os.environ["MASTER_ADDR"]
    else:
        name, target = "the address of its own name ", socket.gethostname()
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Error(
            f"there is no way from this host to {name}{target}: {error}; check the name and the network, or name the "
            "interface to use by GLOO_SOCKET_IFNAME"
        ) from error


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait(_FOREVER)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
