"""Memory that the ranks of a host map of each other: :class:`Window`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hdpcomm import _core
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.errors import Error

if TYPE_CHECKING:
    from hdpcomm.comm.communicator import Communicator

__all__ = ["Window"]

_HANDLE_BYTES = 128


class Window:
    """Memory of each rank of a communicator that all of them map: each reads and writes it when it likes, without the
    help of its owner (one-sided access, as MPI's windows), and sleeps on words for what others do with it.

    Where ranks have devices, the bytes are device memory, which others map by CUDA IPC; the words are the host's, and
    who sets one has to wait for the streams that wrote the bytes before. It ends with its last user; when its owner
    dies, that of the host stays. Making one is collective: equal arguments on all ranks.

    Args:
        comm: ranks of one host.
        words: 32-bit words of each rank, 0 at first.
        nbytes: bytes of each rank, 0 at first; on the host pages are taken when they are first touched.

    Raises:
        Error: on all ranks, if one of them cannot make its memory, or map that of another one.
    """

    def __init__(self, comm: Communicator, *, words: int, nbytes: int) -> None:
        self.comm = comm
        device = comm.streams.device if isinstance(comm, DeviceCommunicator) and nbytes else None
        self._memories: list[_core.device.Memory] = []
        """By rank, that on devices."""
        handle = bytes(_HANDLE_BYTES)
        error: Error | None = None
        try:
            self._core = _core.comm.Window(comm._core, words, 0 if device else nbytes)
            if device:
                own_memory = _core.device.Memory(device, nbytes)
                handle = own_memory.handle
                from_dlpack(own_memory.dlpack()).zero_()
                if not device.is_sim:
                    torch.cuda.synchronize(comm.device)
        except Error as failure:
            error = failure
        places = torch.empty(comm.size, 2, dtype=torch.int64)
        own = torch.tensor([os.getpid(), -1 if error else self._core.descriptor], dtype=torch.int64)
        handles = torch.empty(comm.size, _HANDLE_BYTES, dtype=torch.uint8)
        comm.all_gather(places, own)
        comm.all_gather(handles, torch.frombuffer(bytearray(handle), dtype=torch.uint8))
        if not error and bool((places[:, 1] >= 0).all()):
            try:
                for position, (pid, descriptor) in enumerate(places.tolist()):
                    self._core.open(position, pid, descriptor)
                    if device:
                        mine = position == comm.rank
                        theirs = bytes(handles[position].tolist())
                        self._memories.append(
                            own_memory if mine else _core.device.Memory.mapped(device, theirs, nbytes)
                        )
            except Error as failure:
                error = failure
        failed = torch.tensor([error is not None], dtype=torch.int32)
        comm.all_reduce(failed, "max")  # also: until here, all owners keep their files open
        if error is not None:
            raise error
        if int(failed):
            raise Error(
                "another rank of this host could not map the memory that its ranks are to share; its error says why",
                rank=comm.global_rank,
                op="window",
            )

    def tensor(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """``[count]`` elements of a rank's memory, from the byte ``offset`` on. Local."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device=self.comm.device)
        if self._memories:
            memory = from_dlpack(self._memories[rank].dlpack())
            return memory[offset : offset + count * dtype.itemsize].view(dtype)
        return torch.frombuffer(self._core.data(rank), dtype=dtype, count=count, offset=offset)

    def set(self, rank: int, word: int, value: int) -> None:
        """Sets a word, after all that this thread has written before. Local."""
        self._core.set(rank, word, value)

    def wait(self, rank: int, word: int, value: int, awaited: int) -> None:
        """Sleeps until a word has a value; what was written before it was set is there then. Local.

        Args:
            awaited: the rank that sets it, or lets others do so.

        Raises:
            PeerLost: a rank of the communicator died or left.
            CommTimeout: past the deadline of operations, by liveness inside of
                :meth:`hdpcomm.comm.Communicator.liveness_deadlines`.
            Aborted: :meth:`stop` was called.
        """
        self._core.wait(rank, word, value, awaited)

    def start(self) -> None:
        """Waiting is allowed again. Local."""
        self._core.start()

    def stop(self) -> None:
        """Ends each :meth:`wait` of this rank, now and until :meth:`start`. Local."""
        self._core.stop()
