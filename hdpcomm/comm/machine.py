"""Facts of the machine on which a rank joins a world."""

from __future__ import annotations

import os
from contextvars import ContextVar

import torch

from hdpcomm import _core
from hdpcomm.comm.device.nccl_library import load
from hdpcomm.comm.launchers import local_place
from hdpcomm.errors import InvalidUsage

__all__ = ["Machine", "machine"]


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
