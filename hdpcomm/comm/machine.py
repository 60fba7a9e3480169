"""Facts of the machine on which a rank joins a world, where the rank can be reached by those of other hosts, and how
many connections it may have.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import resource
import socket
import struct
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hdpcomm import _core
from hdpcomm.comm.device.nccl_library import load
from hdpcomm.comm.launchers import local_place
from hdpcomm.comm.torch_store import SignedStore
from hdpcomm.errors import Error, InvalidUsage

__all__ = ["Machine", "allow_sockets", "interface_of", "listening_address", "machine", "own_address"]

# A pair of ranks has streams that wait for each other's, and streams that share one of the device's queues wait for
# whatever is ahead of them. The default is 8 queues, and 2 for each process under the Multi-Process Service
# (docs/gpu.md). Set here, since the variable is read by what first initialises CUDA, even a question for its devices.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class Machine:
    """Answers for the machine that the process runs on; a subclass may answer for one that is not there.

    All calls are local, and made on the thread of the rank that joins.
    """

    def host(self, rank: int) -> str:
        """A text that is equal for ranks with common memory: those of one host, user and container."""
        del rank  # a process knows its own host only; ranks that are threads share it
        return f"{_core.comm.host_identity()}/{_core.settings().host_id}"

    def has_gpu(self, rank: int) -> bool:
        """Whether ``auto`` may give the rank a CUDA device."""
        del rank
        return torch.cuda.is_available()

    def device(self, transport: str, rank: int, size: int) -> _core.device.Device:
        """Opens the rank's device for a device transport.

        A simulated one for ``sim``; else the current CUDA device if the program has chosen one, or the local rank's,
        modulo their number. Raises: InvalidUsage where torch sees no CUDA device; DeviceError.
        """
        if transport == "sim":
            return _core.device.open_sim(rank)
        count = torch.cuda.device_count()
        if count == 0:
            raise InvalidUsage(
                f"rank {rank} asked for a transport of CUDA devices, but torch sees no CUDA device: look at "
                "nvidia-smi and CUDA_VISIBLE_DEVICES, or take transport='sim' to try the same on the CPU",
                rank=rank,
            )
        if torch.cuda.current_device() == 0:
            torch.cuda.set_device(local_place(rank, size)[0] % count)
        return _core.device.open_cuda(torch.cuda.current_device())

    def refuse_threads(self, transport: str, size: int) -> None:
        """Raises InvalidUsage where ranks that are threads would wait for each other in CUDA's locks."""
        if size > 1 and transport in ("cuda", "nccl", "cuda+nccl") and torch.cuda.is_available():
            raise InvalidUsage(
                f"{size} ranks that are threads of one process asked for transport={transport!r}: on CUDA each rank is "
                "a process, since threads share the driver's locks and autograd's thread, and one rank's work may wait "
                "there for another's; take hdpcomm.testing.spawn, or transport='sim' for threads"
            )

    def nccl(self, rank: int, device: _core.device.Device) -> _core.transport.NcclLibrary:
        """The NCCL that works on the rank's device. Raises: DeviceError, saying what was tried."""
        del rank, device  # one library serves all GPUs
        return load()


_machine: ContextVar[Machine] = ContextVar("hdpcomm machine", default=Machine())  # noqa: B039, it has no state


def machine() -> Machine:
    """The machine that ranks of this thread join on."""
    return _machine.get()


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
