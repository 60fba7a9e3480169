"""Where a rank can be reached by those of other hosts, and how many connections it may have."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import resource
import socket
import struct
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hdpcomm.comm.torch_store import SignedStore
from hdpcomm.errors import Error

__all__ = ["allow_sockets", "interface_of", "listening_address", "own_address"]

_OTHER_FILES = 64  # that a rank may open beside its connections, before its own limit counts
_SIOCGIFADDR = 0x8915


def allow_sockets(rank: int, count: int) -> None:
    """Lets this process open ``count`` sockets beside what it has open, and some files.

    Raises: Error, if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise Error(
            f"rank {rank} needs {needed} open files, two connections for each other rank among them, and may have "
            f"{hard}: raise the hard limit on its host (ulimit -Hn)",
            rank=rank,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def own_address(store: Any) -> str:
    """The address of this host on the way to the job's store; no packet is sent.

    ``store``: if it is served over TCP, the way to its host counts. With another (a file, say) that to ``MASTER_ADDR``
    does, or else the address that this host's name has. Raises: Error, saying what to set.
    """
    while isinstance(store, dist.PrefixStore | SignedStore):  # type: ignore[attr-defined]
        store = store.inner if isinstance(store, SignedStore) else store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
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


def listening_address(store: Any) -> str:
    """Address of the interface of ``GLOO_SOCKET_IFNAME`` (the first, if it names several), or else :func:`own_address`.

    Raises: Error, if there is no such interface, or it has no address.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return own_address(store)
    name = names.split(",")[0]
    if found := _address_of(name):
        return found
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != "20":  # of the link alone
                return str(ipaddress.IPv6Address(int(digits, 16)))
    raise Error(
        f"the interface {name!r} of GLOO_SOCKET_IFNAME has no address here; name one of "
        f"{', '.join(sorted(each for _, each in socket.if_nameindex()))}"
    )


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; ``None`` if none has. Local."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; ``None`` if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
