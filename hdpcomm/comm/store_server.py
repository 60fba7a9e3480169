"""The server of a job's own key-value store: it gives nothing to who cannot prove that it knows the job's secret."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

from hdpcomm.comm.secret import NONCE_BYTES, Secret
from hdpcomm.comm.store_wire import (
    ANSWER_BYTES,
    CAME_KEY,
    DIED_KEY,
    MAGIC,
    MOST_BYTES,
    PROOF_BYTES,
    PROOF_S,
    REFUSED_KEY,
    forgotten_in_children,
    pack,
    resolve,
    unpack,
    user_of,
)
from hdpcomm.errors import InvalidUsage

__all__ = ["MOST_UNPROVEN", "JobStoreServer"]

MOST_UNPROVEN = 64  # connections; the oldest makes room for the next
_BACKLOG = 1024


class _Client:
    """The server's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.proven = False
        self.since = time.monotonic()
        self.rank: int | None = None
        self.leaving = False


@dataclass(slots=True)
class _Wait:
    """A client's question that is answered when the last missing key is there, or when it is over."""

    missing: set[bytes]
    until: float


class JobStoreServer:
    """Serves the store on a thread of its own until :meth:`close`.

    ``listener``: a listening socket, owned from then on. ``secret``: of the job. On a Unix socket
    other users are sent away whatever they know.
    """

    def __init__(self, listener: socket.socket, secret: Secret) -> None:
        self._listener = listener
        self._secret = secret
        self._same_user = listener.family == socket.AF_UNIX
        self._data: dict[bytes, bytes] = {}
        self._died: dict[int, str] = {}
        self._readers: dict[bytes, set[int]] = {}  # of each key: ranks that have read it
        self._gone: set[int] = set()  # ranks without a connection
        self._waits: dict[_Client, _Wait] = {}
        self._waits_of: dict[bytes, set[_Client]] = {}  # by a key that is missing
        self._clients: set[_Client] = set()
        self._lock = threading.Condition()  # data, died, and what clients have been told
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        listener.setblocking(False)
        woken.setblocking(False)
        self._woken = woken
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(woken, selectors.EVENT_READ, self._stop)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="hdpcomm-store", daemon=True)
        self._thread.start()
        forgotten_in_children.add(self)

    @classmethod
    def on_this_host(cls, name: str, secret: Secret) -> JobStoreServer:
        """Serves on the Unix socket of that name, to processes of this user."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"\0" + name.encode())
        listener.listen(_BACKLOG)
        return cls(listener, secret)

    @classmethod
    def on_network(cls, address: tuple[str, int], secret: Secret, *, seconds: float) -> JobStoreServer:
        """Serves at that address alone; where it is not this host's own (behind NAT), at all of its addresses.

        Raises: InvalidUsage when the port is in use, CommTimeout when the name is not resolved in time.
        """
        host, port = address
        family, _, _, _, place = resolve(host, port, seconds)[0]
        try:
            listener = _listen(family, place)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                listener = _listen(family, ("::" if family == socket.AF_INET6 else "0.0.0.0", port))
            elif error.errno == errno.EADDRINUSE:
                raise InvalidUsage(
                    f"port {port} of {host} is in use, rank 0 cannot serve the job's store there; set MASTER_PORT to a "
                    "free port on all ranks (torchrun chooses one itself)",
                    rank=0,
                ) from error
            else:
                raise InvalidUsage(
                    f"rank 0 cannot serve the job's store at {host}:{port}: {error}; set MASTER_ADDR and MASTER_PORT "
                    "to an address of rank 0's host and a free port, the same on all ranks",
                    rank=0,
                ) from error
        return cls(listener, secret)

    @property
    def port(self) -> int:
        """TCP port."""
        return int(self._listener.getsockname()[1])

    def values(self, prefix: str) -> dict[str, bytes]:
        """Values of the keys that begin so. Any thread."""
        with self._lock:
            return {key.decode(): value for key, value in self._data.items() if key.startswith(prefix.encode())}

    def has_left(self, rank: int) -> bool:
        """Whether a client with this number was there and is no more. Any thread."""
        with self._lock:
            return rank in self._gone

    def report_death(self, rank: int, text: str) -> None:
        """Tells the ranks that join that one of them is gone. Any thread."""
        with self._lock:
            self._died[rank] = text
            self._note_deaths()

    def wait_told(self, key: str, count: int, seconds: float) -> None:
        """Waits until ``count`` ranks have read the key or have left, or the time is over."""
        readers = self._readers.setdefault(key.encode(), set())
        with self._lock:
            self._lock.wait_for(lambda: len(readers | self._gone) >= count, seconds)

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        if self._open:
            self._open = False
            self._wake.close()
            self._thread.join(5)

    def forget(self) -> None:
        """In a forked child: closes what it has inherited. The parent's connections stay."""
        self._open = False
        for each in (self._listener, self._wake, self._woken, *(client.socket for client in self._clients)):
            each.close()
        self._selector.close()

    # --- the server's thread

    def _run(self) -> None:
        try:
            while self._open:
                for key, events in self._selector.select(self._select_timeout_s()):
                    key.data(events) if callable(key.data) else self._serve(key.data, events)
                self._end_overdue()
        finally:
            for client in list(self._clients):
                self._drop(client)
            self._listener.close()
            self._woken.close()
            self._selector.close()

    def _stop(self, _: int) -> None:
        self._open = False

    def _unproven(self) -> list[_Client]:
        return sorted((each for each in self._clients if not each.proven), key=lambda each: each.since)

    def _select_timeout_s(self) -> float | None:
        ends = [each.since + PROOF_S for each in self._unproven()[:1]]
        ends += [wait.until for wait in self._waits.values()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for client in [client for client, wait in self._waits.items() if now >= wait.until]:
            self._end_wait(client, [])
        for client in self._unproven():
            if now - client.since >= PROOF_S:
                self._drop(client)

    def _accept(self, _: int) -> None:
        try:
            connection, _address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors, say: strangers make room first
            unproven = self._unproven()
            if unproven:
                self._drop(unproven[0])
            else:
                time.sleep(0.01)
            return
        if self._same_user and user_of(connection) != os.geteuid():
            connection.close()
            return
        unproven = self._unproven()
        if len(unproven) >= MOST_UNPROVEN:
            self._drop(unproven[0])
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client = _Client(connection)
        with self._lock:
            self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._send(client, MAGIC + client.nonce)

    def _serve(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(client, b"")
        if not events & selectors.EVENT_READ or client not in self._clients:
            return
        try:
            data = client.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.inbox += data
        try:
            self._take(client)
        except (ValueError, IndexError, UnicodeDecodeError):  # what no rank sends
            self._drop(client)

    def _take(self, client: _Client) -> None:
        if not client.proven:
            if len(client.inbox) < PROOF_BYTES:
                return
            nonce, mac = bytes(client.inbox[:NONCE_BYTES]), bytes(client.inbox[NONCE_BYTES:PROOF_BYTES])
            del client.inbox[:PROOF_BYTES]
            if not self._secret.verify(mac, "store client", client.nonce, nonce):
                with self._lock:  # a stranger, or a rank with another secret: the ranks that wait for it say so
                    refused = int(self._data.get(REFUSED_KEY.encode(), b"0")) + 1
                    self._data[REFUSED_KEY.encode()] = str(refused).encode()
                self._send(client, bytes(ANSWER_BYTES))
                self._drop(client)
                return
            client.proven = True
            self._send(client, b"\1" + self._secret.sign("store server", client.nonce, nonce))
        while len(client.inbox) >= 4 and client in self._clients:
            (count,) = struct.unpack_from(">I", client.inbox)
            if count > MOST_BYTES:
                raise ValueError(f"a request of {count} bytes")
            if len(client.inbox) < 4 + count:
                return
            request = unpack(bytes(client.inbox[4 : 4 + count]))
            del client.inbox[: 4 + count]
            if request[0] == b"wait":
                self._begin_wait(client, float(request[1]), request[2:])
                continue
            with self._lock:
                answer = self._answer(client, request[0].decode(), request[1:])
            self._send(client, pack(answer))

    def _begin_wait(self, client: _Client, seconds: float, keys: list[bytes]) -> None:
        missing = {key for key in keys if key not in self._data}
        if not missing or not seconds > 0:
            self._send(client, pack([] if missing else [b"1"]))
            return
        self._end_wait(client, [])  # no rank of ours asks twice at once
        self._waits[client] = _Wait(missing, time.monotonic() + min(seconds, 3600.0))
        for key in missing:
            self._waits_of.setdefault(key, set()).add(client)

    def _end_wait(self, client: _Client, answer: list[bytes]) -> None:
        wait = self._waits.pop(client, None)
        if wait is not None:
            for key in wait.missing:
                self._waits_of[key].discard(client)
                if not self._waits_of[key]:
                    del self._waits_of[key]
            self._send(client, pack(answer))

    def _end_waits_for(self, key: bytes) -> None:
        for client in self._waits_of.pop(key, ()):
            wait = self._waits[client]
            wait.missing.discard(key)
            if not wait.missing:
                self._end_wait(client, [b"1"])

    def _answer(self, client: _Client, call: str, given: list[bytes]) -> list[bytes]:
        data = self._data
        if call == "set":
            data[given[0]] = given[1]
            self._end_waits_for(given[0])
        elif call == "get":
            if given[0] in data:
                if client.rank is not None:
                    self._readers.setdefault(given[0], set()).add(client.rank)
                    self._lock.notify_all()
                return [data[given[0]]]
        elif call == "multi_get":
            return [data[key] for key in given] if all(key in data for key in given) else []
        elif call == "check":
            return [b"1"] if all(key in data for key in given) else []
        elif call == "add":
            data[given[0]] = str(int(data.get(given[0], b"0")) + int(given[1])).encode()
            self._end_waits_for(given[0])
            return [data[given[0]]]
        elif call == "compare_set":
            if data.get(given[0], b"") == given[1]:
                data[given[0]] = given[2]
                self._end_waits_for(given[0])
            return [data.get(given[0], given[1])]
        elif call == "delete":
            return [b"1"] if data.pop(given[0], None) is not None else []
        elif call == "num_keys":
            return [str(len(data)).encode()]
        elif call == "hello":
            client.rank = int(given[0])
            data[f"{CAME_KEY}/{client.rank}".encode()] = b"1"
            self._gone.discard(client.rank)
            if self._died.pop(client.rank, None) is not None:  # its successor
                self._note_deaths()
        elif call == "bye":
            client.leaving = True
        else:
            raise ValueError(call)
        return []

    def _note_deaths(self) -> None:
        self._data[DIED_KEY.encode()] = json.dumps(self._died).encode()

    def _send(self, client: _Client, data: bytes) -> None:
        client.outbox += data
        if len(client.outbox) > 2 * MOST_BYTES:
            self._drop(client)
            return
        try:
            while client.outbox:
                del client.outbox[: client.socket.send(client.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
        self._selector.modify(client.socket, events, client)

    def _drop(self, client: _Client) -> None:
        with self._lock:
            if client not in self._clients:
                return
            self._clients.remove(client)
            self._end_wait(client, [])
            if client.rank is not None:
                self._gone.add(client.rank)
                if not client.leaving:
                    self._died.setdefault(client.rank, "died (its connection to the job's store ended)")
                    self._note_deaths()
            self._lock.notify_all()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()


def _listen(family: int, place: Any) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
