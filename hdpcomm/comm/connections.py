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
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hdpcomm import _core
from hdpcomm._core import transport
from hdpcomm.comm.forks import close_in_children
from hdpcomm.comm.secret import MAC_BYTES, NONCE_BYTES, SAME_SECRET, Secret

__all__ = ["WORLD_BYTES", "Connections", "listen"]

WORLD_BYTES = 16  # that name a world
_HELLO = struct.Struct(f">8s{WORLD_BYTES}sII{NONCE_BYTES}s")
_MAGIC = b"hdpcomm1"  # the last byte is the version of the greeting
_PROOF_S = 5.0  # for the greeting of who connects; who answers may be kept from it as long as it may be silent
_AGAIN_S = 0.1  # until a rank that closed a connection is tried again
_MOST_PROVING = 256  # connections that have not proved themselves; the oldest makes room for the next
_CROWD = 32  # connections being proved, above which they are looked at together every so often, not as each wakes us
_CROWD_S = 0.02
_FULL_S = 0.05  # between looks whether the system has room for a connection again
_MOST_CONNECTING = 64
_GRACE_S = 5.0  # without progress, after which what was not sent when the world was closed is given up
_FOREVER_S = 1e6

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


@dataclass(slots=True)
class _Proving:
    """A connection of somebody who has not proved yet that he is a rank of this world."""

    socket: socket.socket
    until: float
    inbox: bytearray = field(default_factory=bytearray)
    expected: int = _HELLO.size  # bytes of what comes next
    peer: int = -1
    mac_of: tuple[int, int, bytes, bytes] | None = None  # what the proof is to sign; None: the greeting has not come


class Connections:
    """Carries the frames of a link between hosts until the world is closed and all is sent.

    listener: of this rank. ``places``: by rank, host and port of its listener.
    world: the same bytes on all ranks of this world, and on no others.
    secret: of the job. Both ends of a connection prove that they know it before a frame goes over it. Who
        connects without it is turned away; a rank that cannot prove it when this rank connects to it is lost.
    """

    def __init__(
        self,
        link: transport.FrameLink,
        listener: socket.socket,
        places: Sequence[tuple[str, int]],
        world: bytes,
        secret: Secret,
    ) -> None:
        self._link = link
        self._listener = listener
        self._places = list(places)
        self._world = world
        self._secret = secret
        self._carrier = transport.SocketCarrier(link, _GRACE_S)
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
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which closes it

    # --- the side that connects

    def _connect_all(self) -> None:
        while (peer := self._carrier.wanted()) is not None:
            self._connecting.acquire()
            try:
                threading.Thread(target=self._connect, args=(peer,), name="hdpcomm-connect", daemon=True).start()
            except RuntimeError:  # there is no room for a thread: one after the other then
                self._connect(peer)

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
            raise _Refused(f"who answered as rank {peer} does not know the job's secret: {SAME_SECRET}")
        made.sendall(self._mac("connects", rank, peer, nonce, theirs))

    # --- the side that is connected to: one thread for all connections that are not proved yet

    def _accept_all(self) -> None:
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            proving: dict[int, _Proving] = {}  # by descriptor, the oldest first
            try:
                while not self._carrier.join(0):
                    try:
                        for key, _ in selector.select(_nearest_end(proving)):
                            if key.data is None:
                                for _ in range(_CROWD):
                                    if not self._accept(selector, proving):
                                        break
                            elif key.fd in proving:
                                self._take_proof(selector, proving, key.fd)
                        if len(proving) > _CROWD:  # strangers may not take the interpreter from the rank at each step
                            time.sleep(_CROWD_S)
                    except MemoryError:
                        time.sleep(_FULL_S)
                    while proving and next(iter(proving.values())).until <= time.monotonic():
                        _drop(selector, proving, next(iter(proving)))
            finally:
                for made in proving.values():
                    made.socket.close()
                self._listener.close()

    def _accept(self, selector: selectors.BaseSelector, proving: dict[int, _Proving]) -> bool:
        """Takes one connection; returns whether there was one."""
        try:
            made, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except (OSError, MemoryError):  # no descriptor is left, for one: strangers make room first
            if proving:
                _drop(selector, proving, next(iter(proving)))
            else:
                time.sleep(_FULL_S)
            return False
        if len(proving) >= _MOST_PROVING:  # an honest rank proves itself before so many others have come
            _drop(selector, proving, next(iter(proving)))
        try:
            made.setblocking(False)
            close_in_children(made.fileno())
            selector.register(made, selectors.EVENT_READ, made)
            proving[made.fileno()] = _Proving(made, time.monotonic() + _PROOF_S)
        except (OSError, MemoryError):
            made.close()
        return True

    def _take_proof(self, selector: selectors.BaseSelector, proving: dict[int, _Proving], descriptor: int) -> None:
        """Takes what has come over a connection; hands it to the carrier if that was the last of its proof."""
        of = proving[descriptor]
        try:
            if not self._receive_proof(of):
                return
            selector.unregister(of.socket)
            del proving[descriptor]
            _prepare(of.socket)
            self._carrier.accepted(of.peer, of.socket.detach())
        except BlockingIOError:
            return
        except (OSError, MemoryError, _Refused):  # a stranger, or a rank that sees for itself that it was turned away
            if descriptor in proving:
                _drop(selector, proving, descriptor)
            else:
                of.socket.close()

    def _receive_proof(self, of: _Proving) -> bool:
        """Whether the connection has proved itself. Raises: BlockingIOError (nothing has come), _Refused."""
        part = of.socket.recv(of.expected - len(of.inbox))
        if not part:
            raise _Refused("it was closed")
        of.inbox += part
        if len(of.inbox) < of.expected:
            return False
        if of.mac_of is not None:
            if not self._proves(bytes(of.inbox), "connects", *of.mac_of):
                raise _Refused("it does not know the secret")
            return True
        magic, world, peer, rank, theirs = _HELLO.unpack(of.inbox)
        others = 0 <= peer < self._link.size and peer != rank
        if magic != _MAGIC or world != self._world or rank != self._link.rank or not others:
            raise _Refused("it is of another world")
        nonce = secrets.token_bytes(NONCE_BYTES)
        answer = nonce + self._mac("accepts", peer, rank, theirs, nonce)
        if of.socket.send(answer) < len(answer):
            raise _Refused("it takes no answer")
        of.peer, of.mac_of, of.expected = peer, (peer, rank, theirs, nonce), MAC_BYTES
        of.inbox.clear()
        return False

    # --- the proof

    def _mac(self, purpose: str, sender: int, receiver: int, first: bytes, second: bytes) -> bytes:
        return self._secret.sign(purpose, self._world, struct.pack(">QQ", sender, receiver), first, second)

    def _proves(self, mac: bytes, purpose: str, sender: int, receiver: int, first: bytes, second: bytes) -> bool:
        parts = self._world, struct.pack(">QQ", sender, receiver), first, second
        return self._secret.verify(mac, purpose, *parts)


def _nearest_end(proving: dict[int, _Proving]) -> float | None:
    """Seconds until the oldest connection has had its time; ``None``: there is none."""
    return next((max(0.0, each.until - time.monotonic()) for each in proving.values()), None)


def _drop(selector: selectors.BaseSelector, proving: dict[int, _Proving], descriptor: int) -> None:
    made = proving.pop(descriptor).socket
    selector.unregister(made)
    made.close()


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
