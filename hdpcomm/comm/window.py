"""Memory that the ranks of a host map of each other: :class:`Window`."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hdpcomm import _core
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.errors import Error

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
        self.comm, self.nbytes = comm, nbytes
        self._device = comm.streams.device if isinstance(comm, DeviceCommunicator) and nbytes else None
        self._memories: list[_core.device.Memory] = []
        """By rank, that on devices."""
        error: Error | None = None
        try:
            self._core = _core.comm.Window(comm._core, words, 0 if self._device else nbytes)
        except Error as failure:
            error = failure
        places = torch.empty(comm.size, 2, dtype=torch.int64)
        comm.all_gather(places, torch.tensor([os.getpid(), -1 if error else self._core.descriptor], dtype=torch.int64))
        if not error and bool((places[:, 1] >= 0).all()):
            try:
                for position, (pid, descriptor) in enumerate(places.tolist()):
                    self._core.open(position, pid, descriptor)
            except Error as failure:
                error = failure
        self._share(error)

    def _share(self, error: Error | None) -> None:
        """Makes this rank's device memory and maps that of the others. Raises: what has failed on any rank, before this
        or here. Collective; until it ends, all owners keep their files open."""
        comm, device = self.comm, self._device
        handle = bytes(_HANDLE_BYTES)
        if device and not error:
            try:
                own_memory = _core.device.Memory(device, self.nbytes)
                handle = own_memory.handle
                from_dlpack(own_memory.dlpack()).zero_()
                if not device.is_sim:
                    torch.cuda.synchronize(comm.device)
            except Error as failure:
                error = failure
        if device:
            handles = torch.empty(comm.size, _HANDLE_BYTES, dtype=torch.uint8)
            comm.all_gather(handles, torch.frombuffer(bytearray(handle), dtype=torch.uint8))
            if not error and bool(handles.any(1).all()):  # else another rank has none
                try:
                    for position, row in enumerate(handles.tolist()):
                        mine = position == comm.rank
                        self._memories.append(
                            own_memory if mine else _core.device.Memory.mapped(device, bytes(row), self.nbytes)
                        )
                except Error as failure:
                    error = failure
        failed = torch.tensor([error is not None], dtype=torch.int32)
        comm.all_reduce(failed, "max")
        if error is not None or int(failed):
            self._memories.clear()
        if error is not None:
            raise error
        if int(failed):
            raise Error(
                "another rank of this host could not map the memory that its ranks are to share; its error says why",
                rank=comm.global_rank,
                op="window",
            )

    @property
    def on_device(self) -> bool:
        """Whether its bytes are device memory."""
        return self._device is not None

    def release(self) -> None:
        """Gives the device memory back, until :meth:`restore`. Collective, and no rank has tensors of it any more."""
        own = self._memories[self.comm.rank : self.comm.rank + 1]
        self._memories.clear()
        self.comm.barrier()  # nobody maps it
        own.clear()

    def restore(self) -> None:
        """Takes device memory again, 0 at first. Collective.

        Raises: Error: of making the window, on all ranks; nothing is taken then.
        """
        self._share(None)

    def tensor(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """``[count]`` elements of a rank's memory, from the byte ``offset`` on. Local."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device=self.comm.device)
        if self._device:
            memory = from_dlpack(self._memories[rank].dlpack())
            return memory[offset : offset + count * dtype.itemsize].view(dtype).detach()  # knows no other views
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
