"""The process groups that carry frames to other hosts, and the network interface that they use."""

from __future__ import annotations

import datetime
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm.comm.forks import closed_in_children
from hdpcomm.comm.group_carrier import first_line
from hdpcomm.comm.job_store import JobStore
from hdpcomm.comm.torch_store import SignedStore
from hdpcomm.errors import CommTimeout, Error

__all__ = ["make_groups", "own_address"]

_OTHER_FILES = 64  # that a rank may open beside its connections, before its own limit counts


def make_groups(
    store: Any, rank: int, size: int, *, timeout: float, connecting: Callable[[Callable[[], Any]], list[Any]]
) -> list[Any]:
    """The groups that carry the frames, for a :class:`GroupCarrier`. Collective over all ranks of the store.

    Two gloo groups of our own over the interface that leads to the job's store (``GLOO_SOCKET_IFNAME`` names another).
    If torch.distributed runs on MPI or UCC, a new group of that kind. ``connecting``: calls what it is given, which
    makes gloo's connections.

    Raises: CommTimeout, Error, what ``connecting`` raises.
    """
    if dist.is_initialized() and dist.get_backend() in ("mpi", "ucc"):
        made = dist.new_group(backend=dist.get_backend())
        return [made._get_backend(torch.device("cpu"))]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    where = {"interface": interface.split(",")[0]} if interface else {"hostname": own_address(store)}

    _allow_sockets(rank, 2 * size)

    def connect() -> list[Any]:
        with closed_in_children():
            options._devices = [dist.ProcessGroupGloo.create_device(**where)]
            stores = [dist.PrefixStore(name, store) for name in ("up", "down")]  # type: ignore[attr-defined]
            return [dist.ProcessGroupGloo(each, rank, size, options) for each in stores]

    started = time.monotonic()
    try:
        return connecting(connect)
    except RuntimeError as error:
        text = first_line(error)
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


def _allow_sockets(rank: int, count: int) -> None:
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
