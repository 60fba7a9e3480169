"""The TCP connections between hosts: who listens where, who connects to whom, and the proof that both are of the job.

Each direction between two ranks has its own connection, made by the rank that sends when it has something to send. The
core's thread moves the frames (csrc/transport/host/framed/socket_carrier.hpp); the threads here only make connections.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from hdpcomm import _core
from hdpcomm._core import transport
from hdpcomm.comm.forks import close_in_children
from hdpcomm.comm.secret import MAC_BYTES, NONCE_BYTES, Secret

__all__ = ["WORLD_BYTES", "Connections", "listen"]

WORLD_BYTES = 16  # that name a world
_HELLO = struct.Struct(f">8s{WORLD_BYTES}sII{NONCE_BYTES}s")
_MAGIC = b"hdpcomm1"  # the last byte is the version of the greeting
_PROOF_S = 5.0  # for the greeting of who connects; who answers may be kept from it as long as it may be silent
_AGAIN_S = 0.1  # until a rank that closed a connection is tried again
_MOST_PROVING = 256  # connections that have not proved themselves; more are closed at once
_MOST_CONNECTING = 64
_GRACE_S = 5.0  # without progress, after which what was not sent when the world was closed is given up
_FOREVER_S = 1e6
_NO_MAC = bytes(MAC_BYTES)

_open: set[Connections] = set()  # until their last bytes are out


class _Refused(Exception):
    """The greeting was not that of a rank of this world."""


def listen(address: str) -> socket.socket:
    """A socket that takes the connections of other ranks at a free port of the address. Raises: OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.bind((address, 0))
        made.listen(4096)
        close_in_children(made.fileno())
    except BaseException:
        made.close()
        raise
    return made


class Connections:
    """Carries the frames of a link between hosts until the world is closed and all is sent.

    listener: of this rank. ``places``: by rank, host and port of its listener.
    world: the same bytes on all ranks of this world, and on no others.
    secret: of the job. With one, both ends of a connection prove that they know it before a frame goes over it. Who
        connects without it is turned away; a rank that cannot prove it when this rank connects to it is lost.
    """

    def __init__(
        self,
        link: transport.FrameLink,
        listener: socket.socket,
        places: Sequence[tuple[str, int]],
        world: bytes,
        secret: Secret | None,
    ) -> None:
        self._link = link
        self._listener = listener
        self._places = list(places)
        self._world = world
        self._secret = secret
        self._carrier = transport.SocketCarrier(link, _GRACE_S)
        self._proving = threading.BoundedSemaphore(_MOST_PROVING)
        self._connecting = threading.BoundedSemaphore(_MOST_CONNECTING)
        _open.difference_update([each for each in _open if each._carrier.join(0)])
        _open.add(self)
        self._threads = [
            threading.Thread(target=target, name="hdpcomm-connections", daemon=True)
            for target in (self._accept_all, self._connect_all, self._close)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float = 2 * _GRACE_S) -> bool:
        """Waits until all has been sent, after the world was closed, or should have been, and the threads have ended;
        returns whether they have."""
        limit = time.monotonic() + seconds
        self._carrier.join(seconds)
        for thread in self._threads:
            thread.join(max(0.1, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Gives up what has not been sent, and ends the threads; :meth:`join` waits for them."""
        self._carrier.stop()

    def _close(self) -> None:
        while not self._carrier.join(_FOREVER_S):
            pass
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()

    # --- the side that connects

    def _connect_all(self) -> None:
        while (peer := self._carrier.wanted()) is not None:
            self._connecting.acquire()
            threading.Thread(target=self._connect, args=(peer,), name="hdpcomm-connect", daemon=True).start()

    def _connect(self, peer: int) -> None:
        limit = time.monotonic() + max(1.0, _core.settings().silence_s)
        try:
            while (made := self._tried(peer, limit)) is None:
                time.sleep(_AGAIN_S)
            self._carrier.connected(peer, made.detach())
        except _Refused as refusal:
            self._carrier.unreachable(peer, str(refusal))
        except OSError as error:
            host, port = self._places[peer]
            ended = "; it has ended, or closed its communicator" if isinstance(error, ConnectionRefusedError) else ""
            self._carrier.unreachable(peer, f"no connection to {host} port {port}: {error.strerror or error}{ended}")
        finally:
            self._connecting.release()

    def _tried(self, peer: int, limit: float) -> socket.socket | None:
        """A proven connection; ``None``: the peer closed it, as where it has too many to prove, and there is time."""
        made = socket.create_connection(self._places[peer], timeout=max(0.001, limit - time.monotonic()))
        with contextlib.ExitStack() as closing:
            closing.callback(made.close)
            close_in_children(made.fileno())
            try:
                self._greet(made, peer, limit)
            except ConnectionError:
                if time.monotonic() + _AGAIN_S < limit and not self._link.closed:
                    return None
                raise
            _prepare(made)
            closing.pop_all()
        return made

    def _greet(self, made: socket.socket, peer: int, limit: float) -> None:
        rank, nonce = self._link.rank, secrets.token_bytes(NONCE_BYTES)
        made.sendall(_HELLO.pack(_MAGIC, self._world, rank, peer, nonce))
        answer = _read(made, NONCE_BYTES + MAC_BYTES, limit)
        theirs, mac = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not self._proves(mac, "accepts", rank, peer, nonce, theirs):
            raise _Refused(
                f"who answered as rank {peer} does not know the job's secret (HDPCOMM_SECRET, the same on all ranks)"
            )
        made.sendall(self._mac("connects", rank, peer, nonce, theirs))

    # --- the side that is connected to

    def _accept_all(self) -> None:
        while True:
            try:
                made, _ = self._listener.accept()
            except OSError:
                if self._carrier.join(0):
                    return
                time.sleep(0.05)  # no descriptor is left, for one
                continue
            if not self._proving.acquire(blocking=False):
                made.close()
                continue
            close_in_children(made.fileno())
            threading.Thread(target=self._accept, args=(made,), name="hdpcomm-accept", daemon=True).start()

    def _accept(self, made: socket.socket) -> None:
        try:
            with contextlib.ExitStack() as closing:
                closing.callback(made.close)
                peer = self._greeted(made)
                _prepare(made)
                closing.pop_all()
            self._carrier.accepted(peer, made.detach())
        except (OSError, _Refused):
            pass  # a stranger, or a rank that sees for itself that it was turned away
        finally:
            self._proving.release()

    def _greeted(self, made: socket.socket) -> int:
        limit = time.monotonic() + _PROOF_S
        magic, world, peer, rank, theirs = _HELLO.unpack(_read(made, _HELLO.size, limit))
        if magic != _MAGIC or world != self._world or rank != self._link.rank or not 0 <= peer < self._link.size:
            raise _Refused("it is of another world")
        nonce = secrets.token_bytes(NONCE_BYTES)
        made.sendall(nonce + self._mac("accepts", peer, rank, theirs, nonce))
        if peer == rank or not self._proves(_read(made, MAC_BYTES, limit), "connects", peer, rank, theirs, nonce):
            raise _Refused("it does not know the secret")
        return int(peer)

    # --- the proof

    def _mac(self, purpose: str, sender: int, receiver: int, first: bytes, second: bytes) -> bytes:
        if self._secret is None:
            return _NO_MAC
        return self._secret.sign(purpose, self._world, struct.pack(">QQ", sender, receiver), first, second)

    def _proves(self, mac: bytes, purpose: str, sender: int, receiver: int, first: bytes, second: bytes) -> bool:
        if self._secret is None:
            return mac == _NO_MAC
        parts = self._world, struct.pack(">QQ", sender, receiver), first, second
        return self._secret.verify(mac, purpose, *parts)


def _prepare(made: socket.socket) -> None:
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read(made: socket.socket, count: int, limit: float) -> bytes:
    """As many bytes. Raises: OSError, if they do not come by the limit."""
    found = b""
    while len(found) < count:
        made.settimeout(max(0.001, limit - time.monotonic()))
        part = made.recv(count - len(found))
        if not part:
            raise ConnectionError("the connection was closed before it was proved")
        found += part
    return found


def _join_all() -> None:
    # Worlds were closed before: handlers run in reverse order of registration.
    for each in list(_open):
        if not each.join():
            each.stop()
            each.join()


def _leave_to_parent() -> None:
    """In a forked child, which has none of the carriers' threads: nothing may wait for a carrier or destroy it."""
    for each in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each._carrier))
    _open.clear()


atexit.register(_join_all)
os.register_at_fork(after_in_child=_leave_to_parent)
