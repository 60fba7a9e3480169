"""The process groups that carry frames to other hosts."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm.comm.addresses import allow_sockets, own_address
from hdpcomm.comm.forks import closed_in_children
from hdpcomm.errors import CommTimeout, Error, first_line

__all__ = ["make_groups", "torch_runs_on_fabric"]


def torch_runs_on_fabric() -> bool:
    """Whether torch.distributed runs on MPI or UCC here, which may know faster ways between hosts than TCP."""
    return dist.is_initialized() and dist.get_backend() in ("mpi", "ucc")


def make_groups(
    store: Any, rank: int, size: int, *, timeout: float, connecting: Callable[[Callable[[], Any]], list[Any]]
) -> list[Any]:
    """The groups that carry the frames, for a :class:`GroupCarrier`. Collective over all ranks of the store.

    Two gloo groups of our own over the interface that leads to the job's store (``GLOO_SOCKET_IFNAME`` names another).
    If torch.distributed runs on MPI or UCC, a new group of that kind. ``connecting``: calls what it is given, which
    makes gloo's connections.

    Raises: CommTimeout, Error, what ``connecting`` raises.
    """
    if torch_runs_on_fabric():
        made = dist.new_group(backend=dist.get_backend())
        return [made._get_backend(torch.device("cpu"))]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    where = {"interface": interface.split(",")[0]} if interface else {"hostname": own_address(store)}

    allow_sockets(rank, 2 * size)

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
