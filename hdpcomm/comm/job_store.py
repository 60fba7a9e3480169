"""The job's own key-value store: where its ranks meet.

A launcher on one host serves it on a Unix socket without a name in the file system, to processes of its own user; rank
0 of a job without a launcher of ours serves it over TCP at ``MASTER_ADDR``:``MASTER_PORT``.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from hdpcomm.comm.secret import NONCE_BYTES, SAME_SECRET, Secret
from hdpcomm.comm.store_wire import (
    ANSWER_BYTES,
    MAGIC,
    MOST_BYTES,
    OPENING_BYTES,
    PROOF_S,
    forgotten_in_children,
    pack,
    resolve,
    unpack,
    user_of,
)
from hdpcomm.errors import CommTimeout, Error, InvalidUsage

__all__ = ["JobStore"]

_GOODBYE_S = 0.5
_WAIT_S = 1.0  # that a question may wait at the server
_SHARED_WAIT_S = 0.1  # where another thread may have a question, too


class JobStore(dist.Store):  # type: ignore[misc, name-defined]
    """A rank's connection to a :class:`JobStoreServer`; what torch.distributed takes for a store, too.

    place: the name of a Unix socket, or host and port. ``rank``: told to the server, which reports its death to the
        others if the connection ends without :meth:`close`. Values are bytes; calls wait as long as
        ``set_timeout()`` says, and not beyond :attr:`deadline`.

    Raises: CommTimeout (not reached within ``seconds``), InvalidUsage (one end does not know the job's secret).
    """

    def __init__(self, place: str | tuple[str, int], secret: Secret, rank: int, *, seconds: float) -> None:
        super().__init__()
        self.place = place
        #: No call waits beyond it, by ``time.monotonic()``.
        self.deadline: float | None = None
        #: Why the connection is of no use any more; empty while it is.
        self.broken = ""
        self._secret = secret
        self._rank = rank
        self._lock = threading.Lock()
        self._next = threading.Lock()  # held by the thread that gets the connection next
        self._shared = False  # two threads have asked at the same time
        self._socket: socket.socket | None = None
        self.set_timeout(datetime.timedelta(seconds=seconds))
        self._connect(time.monotonic() + seconds, seconds)
        forgotten_in_children.add(self)

    # --- what torch.distributed.Store has

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        self.wait([key])
        return self._ask("get", key)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for the keys."""
        self.wait(keys)
        return self._ask("multi_get", *keys)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        until = self._until(timeout)
        while not self.there_within(keys, min(_SHARED_WAIT_S if self._shared else _WAIT_S, until - time.monotonic())):
            if time.monotonic() > until:
                raise CommTimeout(
                    f"rank {self._rank} waited in vain for {', '.join(keys)} in the job's store; look for the errors "
                    "of the other ranks, or raise timeout=",
                    rank=self._rank,
                    op="init",
                )

    def there_within(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys are there, or come within this time (at most a few seconds)."""
        return bool(self._ask("wait", f"{max(0.0, seconds):.3f}", *keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, str(amount).encode())[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        texts = [each if isinstance(each, bytes) else each.encode() for each in (expected, desired)]
        return self._ask("compare_set", key, *texts)[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys")[0])

    def clone(self) -> JobStore:
        return self

    # --- the connection

    def close(self) -> None:
        """Says goodbye: the server does not take the end of the connection for this rank's death."""
        if self._socket is not None:
            self.deadline = time.monotonic() + _GOODBYE_S
            with contextlib.suppress(Exception):
                self._ask("bye")
            self.forget()
        self.broken = self.broken or "it was closed"

    def forget(self) -> None:
        """Closes this process's descriptor: in a forked child, where the connection is its parent's."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def secret(self) -> Secret:
        """The job's secret."""
        return self._secret

    @property
    def _where(self) -> str:
        return f"the Unix socket {self.place}" if isinstance(self.place, str) else "{}:{}".format(*self.place)

    def _until(self, timeout: datetime.timedelta | None = None) -> float:
        until = time.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        return until if self.deadline is None else min(until, self.deadline)

    def _ask(self, call: str, key: str = "", *more: str | bytes) -> list[bytes]:
        parts = [call.encode(), *([key.encode()] if key else [])]
        parts += [each if isinstance(each, bytes) else each.encode() for each in more]
        until = self._until()
        with self._exclusive_connection():
            if self.broken:
                raise RuntimeError(f"the connection to {self._where} is over: {self.broken}")
            try:
                if self._socket is None:  # a call was late or interrupted
                    self._connect(until, max(0.0, until - time.monotonic()))
                assert self._socket is not None
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                self._socket.sendall(pack(parts))
                (count,) = struct.unpack(">I", self._receive(4))
                if count > MOST_BYTES:
                    raise ConnectionError(f"an answer of {count} bytes")
                return unpack(self._receive(count))
            except TimeoutError as error:
                self.forget()
                if isinstance(error, CommTimeout):
                    raise
                raise CommTimeout(
                    f"rank {self._rank} got no answer of the job's store at {self._where} in time; is its process "
                    "stopped?",
                    rank=self._rank,
                    op="init",
                ) from None
            except (OSError, ValueError) as error:
                self.forget()
                if isinstance(error, Error):
                    raise
                self.broken = str(error)
                raise RuntimeError(f"the connection to {self._where} broke ({error})") from error
            except BaseException:  # the answer would be taken for that of the next request
                self.forget()
                raise

    @contextlib.contextmanager
    def _exclusive_connection(self) -> Iterator[None]:
        """The connection is this thread's. Threads get it in turn: one that waits for a key, asking again and again,
        would else keep it from one that wants to know whether the others live."""
        self._shared = self._shared or self._lock.locked()
        with self._next:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _receive(self, count: int) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < count:
            part = self._socket.recv(min(count - len(data), 1 << 20))
            if not part:
                raise ConnectionError("its server ended")
            data += part
        return bytes(data)

    def _connect(self, until: float, seconds: float) -> None:
        """Tries until it is connected and both ends have proved themselves."""
        pause = 0.005
        while True:
            left = until - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError("no time is left")
                self._socket = self._opened(left)
                self._prove(until)
                return
            except OSError as error:
                self.forget()
                if isinstance(error, Error):
                    raise
                if until - time.monotonic() <= 0:
                    raise CommTimeout(
                        f"rank {self._rank} did not reach the job's store at {self._where} within {seconds:.3g} s "
                        f"({error}); is rank 0 running, and are MASTER_ADDR and MASTER_PORT the same on all ranks?",
                        rank=self._rank,
                        op="init",
                    ) from error
            except BaseException:
                self.forget()
                raise
            time.sleep(max(0.0, min(pause, until - time.monotonic())))
            pause = min(0.2, pause * 1.5)

    def _opened(self, left: float) -> socket.socket:
        if isinstance(self.place, str):
            made, target = socket.socket(socket.AF_UNIX), b"\0" + self.place.encode()
        else:
            family, _, _, _, target = resolve(*self.place, left)[0]
            made = socket.socket(family)
        try:
            made.settimeout(min(left, 2.0))
            made.connect(target)
            if made.family != socket.AF_UNIX:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            elif user_of(made) != os.geteuid():
                raise InvalidUsage(f"{self._where} is served by user {user_of(made)}, not by {os.geteuid()}")
        except BaseException:
            made.close()
            raise
        return made

    def _prove(self, until: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(max(0.001, min(PROOF_S, until - time.monotonic())))
        opening = self._receive(OPENING_BYTES)
        if not opening.startswith(MAGIC):
            raise InvalidUsage(
                f"{self._where} is no store of this version of hdpcomm: another program serves there; set MASTER_PORT "
                "to a port that nobody uses, or install the same version for all ranks",
                rank=self._rank,
            )
        theirs, ours = opening[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        self._socket.sendall(ours + self._secret.sign("store client", theirs, ours))
        answer = self._receive(ANSWER_BYTES)
        if answer[0] != 1 or not self._secret.verify(answer[1:], "store server", theirs, ours):
            raise InvalidUsage(
                f"rank {self._rank} and the job's store at {self._where} do not share the job's secret: {SAME_SECRET}",
                rank=self._rank,
            )
        self._socket.sendall(pack([b"hello", str(self._rank).encode()]))
        self._receive(4)
