"""The job's store, where its ranks meet: a store of torch.distributed, with deadlines and signed values.

A launcher of ours holds a file in memory open for the ranks of its host. Else rank 0 serves the store over TCP at
``MASTER_ADDR``:``MASTER_PORT``, or torchrun's agent does.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from hdpcomm import _core
from hdpcomm.comm.forks import close_in_children
from hdpcomm.comm.secret import MAC_BYTES, Secret
from hdpcomm.errors import CommTimeout, Error, InvalidUsage, PeerLost, first_line

__all__ = ["DIED_KEY", "SignedStore", "TorchStorePort", "connect_store", "open_file_store", "serve_store"]


_LAST_S = 2.0  # for late calls, at the end of the process
_T = TypeVar("_T")


def call_within(seconds: float, call: Callable[[], _T]) -> _T:
    """Returns or raises as ``call`` does, on a thread of its own; one that is late is left alone.

    Raises: TimeoutError past ``seconds``; KeyboardInterrupt at once.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hdpcomm-call", daemon=True)
    thread.start()
    try:
        thread.join(max(0.0, seconds))
        if thread.is_alive():
            raise TimeoutError
    except BaseException:
        _late[:] = [each for each in (*_late, thread) if each.is_alive()]
        raise
    if errors:
        raise errors.pop()
    return results.pop()


# The interpreter's end cuts off threads, which C++ code does not survive.
_late: list[threading.Thread] = []


def _join_late() -> None:
    limit = time.monotonic() + _LAST_S
    for thread in _late:
        with contextlib.suppress(RuntimeError):
            thread.join(max(0.0, limit - time.monotonic()))
    if any(thread.is_alive() for thread in _late):
        _core.outlast_late_threads()


atexit.register(_join_late)


#: Ranks whose process has ended, told by their launcher as a JSON object of rank and what is known of it.
DIED_KEY = "hdpcomm/died"
_BACKLOG = 1024

# Begins the key of what each rank shows of its secret.
_SHOWN_KEY, _SHOWN_BYTES = "hdpcomm/shown", 8


class SignedStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store of torch (the job's, torchrun's, or the program's own), with deadlines and signed values.

    Names of keys are MACs, which no stranger can guess, and every value carries a MAC of key and value.
    A value whose MAC is wrong is as if it were not there; :attr:`forged` keeps its key. What a stranger who reaches
    such a store can still do: docs/security.md.
    """

    def __init__(self, inner: Any, secret: Secret, rank: int, *, seconds: float) -> None:
        super().__init__()
        self.inner = inner
        #: Whether its server has ended.
        self.broken = False
        #: No call waits beyond it, by ``time.monotonic()``.
        self.deadline: float | None = None
        #: Keys under which somebody without the secret has put a value.
        self.forged: set[str] = set()
        self._secret = secret
        self._rank = rank
        self.set_timeout(datetime.timedelta(seconds=seconds))

    def set(self, key: str, value: str | bytes) -> None:
        data = value if isinstance(value, bytes) else value.encode()
        name, signed = self._name(key), self._signed(key, data)
        self._call(lambda: self.inner.set(name, signed))

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for the keys."""
        until = self._until()
        while (values := self._values(keys)) is None:
            self._pause(keys, until)
        return values

    def check(self, keys: list[str]) -> bool:
        return self._values(keys) is not None

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        until = self._until(timeout)
        while not self.check(keys):
            self._pause(keys, until)

    def add(self, key: str, amount: int) -> int:
        name = self._name(key)
        return int(self._call(lambda: self.inner.add(name, amount)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        texts = [each if isinstance(each, bytes) else each.encode() for each in (expected, desired)]
        name, (old, new) = self._name(key), (self._signed(key, each) if each else each for each in texts)
        answer = self._call(lambda: self.inner.compare_set(name, old, new))
        value = self._verified(key, answer)
        return texts[0] if value is None else value

    def delete_key(self, key: str) -> bool:
        name = self._name(key)
        return bool(self._call(lambda: self.inner.delete_key(name)))

    def num_keys(self) -> int:
        return int(self._call(self.inner.num_keys))

    def clone(self) -> SignedStore:
        return self

    def close(self) -> None:
        """Ends the connection, and the server where it is this process's own."""
        self.inner = None

    # --- which secret others have

    @property
    def secret(self) -> Secret:
        """The job's secret."""
        return self._secret

    def show_secret(self) -> None:
        """Lets other ranks see whether they have another secret: a few bytes that follow from it, unsigned."""
        self._call(lambda: self.inner.set(f"{_SHOWN_KEY}/{self._rank}", self._shown))

    def shown_secrets(self, ranks: Iterable[str]) -> dict[str, bool]:
        """Whether each rank that has been at the store showed the same secret. Anybody may have written that: it is for
        messages only."""
        keys = {rank: f"{_SHOWN_KEY}/{rank}" for rank in ranks}

        def ask() -> dict[str, bool]:
            there = [rank for rank, key in keys.items() if self.inner.check([key])]
            shown = self.inner.multi_get([keys[rank] for rank in there]) if there else []
            return {rank: bytes(text) == self._shown for rank, text in zip(there, shown, strict=True)}

        return self._call(ask)

    @property
    def _shown(self) -> bytes:
        return self._secret.sign("shown", b"")[:_SHOWN_BYTES]

    # --- names and values

    def _name(self, key: str) -> str:
        return "hdpcomm/" + self._secret.sign("key", key.encode()).hex()

    def _signed(self, key: str, value: bytes) -> bytes:
        return self._secret.sign("value", key.encode(), value) + value

    def _verified(self, key: str, data: bytes) -> bytes | None:
        mac, value = data[:MAC_BYTES], data[MAC_BYTES:]
        if self._secret.verify(mac, "value", key.encode(), value):
            return value
        self.forged.add(key)
        return None

    def _values(self, keys: list[str]) -> list[bytes] | None:
        """The values of the keys, or ``None`` while one is not there."""
        names = [self._name(key) for key in keys]

        def ask() -> list[bytes] | None:
            return list(self.inner.multi_get(names)) if self.inner.check(names) else None

        found = self._call(ask)
        if found is None:
            return None
        values = [self._verified(key, data) for key, data in zip(keys, found, strict=True)]
        return None if None in values else [value for value in values if value is not None]

    # --- time

    def _until(self, timeout: datetime.timedelta | None = None) -> float:
        until = time.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        return until if self.deadline is None else min(until, self.deadline)

    def _call(self, call: Callable[[], _T]) -> _T:
        try:
            return call_within(self._until() - time.monotonic(), call)
        except Error:
            raise
        except dist.DistError as error:
            self.broken = True
            raise PeerLost(
                f"rank {self._rank} lost the job's store ({first_line(error)}): its process (torchrun's agent, or rank "
                "0) has ended; start the job again",
                rank=self._rank,
                op="init",
            ) from error
        except TimeoutError:
            raise CommTimeout(
                f"rank {self._rank} got no answer of the job's store in time; is its process (torchrun's agent, or "
                "rank 0) stopped?",
                rank=self._rank,
                op="init",
            ) from None

    def _pause(self, keys: list[str], until: float) -> None:
        if time.monotonic() > until:
            forged = sorted(self.forged & set(keys))
            why = f"; what is there under {', '.join(forged)} is not signed with the job's secret" if forged else ""
            raise CommTimeout(
                f"rank {self._rank} waited in vain for {', '.join(keys)} in the job's store{why}; look for the errors "
                "of the other ranks, or raise timeout=",
                rank=self._rank,
                op="init",
            )
        time.sleep(0.002)


def open_file_store(path: str, rank: int) -> Any:
    """The store in the file that a launcher holds open for its ranks; ``rank``: -1 is the launcher's own.

    Raises: PeerLost when the launcher has ended.
    """
    if not os.path.exists(path):
        raise PeerLost(
            f"the launcher of rank {rank} has ended: the job's store is not at {path} any more; start the job again",
            rank=rank,
            op="init",
        )
    return dist.FileStore(path, -1)  # type: ignore[attr-defined]


def connect_store(address: str, port: int, rank: int, *, seconds: float) -> Any:
    """A client of the store that rank 0 or torchrun's agent serves. Raises: CommTimeout when it is not reached in
    time."""

    def connect() -> Any:
        limit = datetime.timedelta(seconds=max(1.0, seconds))
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=False, timeout=limit, wait_for_workers=False
        )

    error: BaseException | None = None
    try:
        return call_within(seconds, connect)
    except Error:
        raise
    except (TimeoutError, dist.DistError) as failure:
        error = failure
    raise CommTimeout(
        f"rank {rank} did not reach the job's store at {address}:{port} within {seconds:.3g} s; is rank 0 running "
        "(under torchrun, its agent there), and are MASTER_ADDR and MASTER_PORT the same on all ranks?",
        rank=rank,
        op="init",
    ) from error


def serve_store(address: str, port: int, *, seconds: float) -> Any:
    """Serves a store at that address alone; where it is not this host's own (behind NAT), at all of its addresses.

    ``port``: 0 for a free one. Raises: InvalidUsage when the port is in use, CommTimeout when the name is not resolved
    in time.
    """
    try:
        found = call_within(seconds, lambda: socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
        family, _, _, _, place = found[0]
        try:
            listener = _listen(family, place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener = _listen(family, ("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    except TimeoutError:
        raise CommTimeout(
            f"rank 0 did not find the address of {address} within {seconds:.3g} s; set MASTER_ADDR to an address of "
            "its host",
            rank=0,
            op="init",
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidUsage(
                f"port {port} of {address} is in use, rank 0 cannot serve the job's store there; set MASTER_PORT to a "
                "free port on all ranks (torchrun chooses one itself)",
                rank=0,
            ) from error
        raise InvalidUsage(
            f"rank 0 cannot serve the job's store at {address}:{port}: {error}; set MASTER_ADDR and MASTER_PORT to an "
            "address of rank 0's host and a free port, the same on all ranks",
            rank=0,
        ) from error
    close_in_children(listener.fileno())
    return _serving(listener, address, max(1.0, seconds))


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


def _serving(listener: socket.socket, address: str, seconds: float) -> Any:
    """A store that serves at the listener, which it owns from then on."""
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


class TorchStorePort:
    """A port of this host for torch.distributed's own store, which exists from the first connection on:
    ``init_process_group()`` of the ranks of a launcher that needs none itself.
    """

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(256)
        self.port: int = self._listener.getsockname()[1]
        self.used = False  # whether there is a store, or will be in a moment
        self._store: Any = None
        self._end, self._ended = os.pipe2(os.O_CLOEXEC)
        threading.Thread(target=self._run, name="hdpcomm-torch-port", daemon=True).start()

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._end, select.POLLIN)
        ready.register(self._listener, select.POLLIN)
        try:
            if all(handle != self._end for handle, _ in ready.poll()):
                self.used = True
                self._store = _serving(self._listener, "127.0.0.1", 300.0)
        finally:
            os.close(self._end)
            self._listener.close()

    def close(self) -> None:
        """Idempotent."""
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1
        self._store = None
