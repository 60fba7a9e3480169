"""How the two ends of a job's store talk: the opening of a connection, lists of byte strings, names and addresses.

A connection begins with three passes::

    server -> client   magic, nonce
    client -> server   nonce, MAC of both nonces
    server -> client   1 and its own MAC of both nonces, or 0

After them both ends send lists of byte strings: a request, its answer. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from hdpcomm.comm.deadline_calls import CallThread
from hdpcomm.comm.secret import MAC_BYTES, NONCE_BYTES

__all__ = [
    "ANSWER_BYTES",
    "CAME_KEY",
    "DIED_KEY",
    "MAGIC",
    "MOST_BYTES",
    "OPENING_BYTES",
    "PROOF_BYTES",
    "PROOF_S",
    "REFUSED_KEY",
    "forgotten_in_children",
    "local_name",
    "pack",
    "resolve",
    "unpack",
    "user_of",
]

#: Ranks whose connection ended without a goodbye, as a JSON object of rank and what is known of it.
DIED_KEY = "hdpcomm/died"
#: Begins the key of each rank that has ever connected.
CAME_KEY = "hdpcomm/came"
#: How many connections have been turned away because they did not know the job's secret; not there: none.
REFUSED_KEY = "hdpcomm/refused"

MAGIC = b"hdpstor1"
OPENING_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = NONCE_BYTES + MAC_BYTES
ANSWER_BYTES = 1 + MAC_BYTES
MOST_BYTES = 64 << 20  # of a request or an answer
PROOF_S = 5.0  # to prove who it is


def local_name() -> str:
    """A name for the Unix socket of a new job; such names are freed with their socket, however its process ends."""
    return f"hdpcomm-{secrets.token_hex(16)}"


def pack(parts: Iterable[bytes]) -> bytes:
    body = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return struct.pack(">I", len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """Raises ValueError for bytes that :func:`pack` did not write."""
    parts, at = [], 0
    while at < len(body):
        if len(body) - at < 4:
            raise ValueError("a length is cut short")
        (count,) = struct.unpack_from(">I", body, at)
        at += 4
        if count > len(body) - at:
            raise ValueError("a part is cut short")
        parts.append(body[at : at + count])
        at += count
    return parts


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def resolve(host: str, port: int, seconds: float) -> list[Any]:
    """As ``socket.getaddrinfo()``, which knows no deadline and no Ctrl-C where it has to ask for a name."""
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return CallThread("hdpcomm-resolve")(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), seconds)


class _Holder(Protocol):
    """Holds descriptors of connections."""

    def forget(self) -> None: ...


# Stores and servers of this process. A forked child closes its descriptors of them: a connection that it held would
# hide the death of its parent.
forgotten_in_children: weakref.WeakSet[_Holder] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(forgotten_in_children):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
