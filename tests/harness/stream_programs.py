"""Programs like those of a GPU user, for the check mode of simulated devices.

Work on the caller's stream writes inputs and reads outputs, and the host does not wait in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.comm.tensors import describe

__all__ = ["PROGRAMS", "Caller", "joined"]


@dataclass
class Caller:
    """A rank with a stream of its own, and device memory by address."""

    comm: hdp.Communicator
    stream: int

    @property
    def engine(self) -> _core.comm.StreamEngine:
        assert isinstance(self.comm, DeviceCommunicator)
        return self.comm.streams

    @property
    def device(self) -> _core.device.Device:
        return self.engine.device

    def made(self, x: torch.Tensor) -> torch.Tensor:
        """Memory that work of the stream has written."""
        size = x.numel() * x.element_size()
        self.device.fill(x.data_ptr(), self.comm.rank + 1, bytes=size, stream=self.stream)
        return x

    def used(self, x: torch.Tensor) -> None:
        """Lets work of the stream read memory, into a copy that the host checks at the end."""
        copy = torch.empty_like(x)
        size = x.numel() * x.element_size()
        self.device.copy(copy.data_ptr(), x.data_ptr(), bytes=size, stream=self.stream)
        self.device.synchronize_stream(self.stream)
        self.device.annotate_read(copy.data_ptr(), size)

    def exchange(
        self,
        sends: list[tuple[torch.Tensor, int, int | None]],
        recvs: list[tuple[torch.Tensor, int, int | None]],
        *,
        background: bool = False,
    ) -> _core.comm.StreamWork:
        work = _core.comm.stream_exchange(self.engine, self.comm._core, describe, sends, recvs, self.stream, background)
        assert work is not None  # it is a simulated device
        return work

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, algorithm: str) -> _core.comm.StreamWork:
        return self._run("all_to_all", out, x, None, algorithm, background=False)

    def collective(
        self, op: str, out: torch.Tensor, x: torch.Tensor, count: int, algorithm: str, *, background: bool = False
    ) -> _core.comm.StreamWork:
        """``all_gather``, ``reduce_scatter`` (``count`` of a block) or ``all_reduce``."""
        size = self.comm.size
        to, given = out.view(-1)[: count * size], x.view(-1)[: count * size]
        if op != "all_gather":
            to = to[:count]
        if op != "reduce_scatter":
            given = given[:count]
        return self._run(op, to, given, None if op == "all_gather" else "sum", algorithm, background=background)

    def _run(
        self, op: str, out: torch.Tensor, x: torch.Tensor, redop: str | None, algorithm: str, *, background: bool
    ) -> _core.comm.StreamWork:
        arguments = (_core.comm.OPS[op], x, out, redop, None, algorithm, None)
        work = _core.comm.stream_collective(self.engine, self.comm._core, describe, *arguments, self.stream, background)
        assert work is not None
        return work

    def all_reduce(self, x: torch.Tensor, algorithm: str, *, background: bool = False) -> _core.comm.StreamWork:
        return self.collective("all_reduce", x, x, x.numel(), algorithm, background=background)


@contextmanager
def joined() -> Iterator[Caller]:
    """A rank of the run's world; destroys the rank's stream at the end."""
    with hdp.init() as comm:
        assert isinstance(comm, DeviceCommunicator)
        device = comm.streams.device
        caller = Caller(comm, device.create_stream())
        yield caller
        device.synchronize_stream(caller.stream)
        device.destroy_stream(caller.stream)


def exchanges() -> None:
    """Small and large messages round a ring, in the foreground and in the background, over and over."""
    with joined() as rank:
        n, r = rank.comm.size, rank.comm.rank
        to, back = (r + 1) % n, (r - 1) % n
        for count in (0, 5, 6000, 0):
            x, y = torch.empty(count), torch.empty(count)
            for background in (False, True, False):
                rank.made(x)
                work = rank.exchange([(x, to, None)], [(y, back, None)], background=background)
                if background:
                    work.wait_on(rank.stream)
                rank.used(y)


def landings() -> None:
    """A ring that forwards blocks from where they landed, in two alternating places, with work on them in between.

    Messages to a peer without a link have no place; the receiver's memory is the same, if it has a zone.
    """
    with joined() as rank:
        n, r = rank.comm.size, rank.comm.rank
        to, back = (r - 1) % n, (r + 1) % n
        zone = rank.comm.landing_zone(torch.empty(0))
        memory = torch.empty(1 << 16, dtype=torch.uint8) if zone is None else zone.memory
        place = 16384
        block = rank.made(torch.empty(4000))
        kept = [block]  # until the streams are done: nothing else holds what they read and write
        for step in range(6):
            at = step % 2 * place
            arriving = memory[at : at + 16000].view(torch.float32)
            sent = (block, to, at if rank.comm.lands(to) else None)
            work = rank.exchange([sent], [(arriving, back, at if rank.comm.lands(back) else None)], background=True)
            kept.append(used := torch.empty_like(block))  # the work of this step reads what the previous one received
            rank.device.copy(used.data_ptr(), block.data_ptr(), bytes=16000, stream=rank.stream)
            work.wait_on(rank.stream)
            block = arriving
        rank.used(block)


def landings_of_streams() -> None:
    """Landing messages of two streams that nothing orders, in turns, in the foreground and not, with small ones."""
    with joined() as rank:
        n, r, device = rank.comm.size, rank.comm.rank, rank.device
        to, back = (r - 1) % n, (r + 1) % n
        zone = rank.comm.landing_zone(torch.empty(0))
        memory = torch.empty(1 << 16, dtype=torch.uint8) if zone is None else zone.memory
        callers = (rank, Caller(rank.comm, device.create_stream()))
        kept = []
        for step in range(8):
            caller, at, background = callers[step % 2], step * 4096, step % 4 >= 2
            x, small = caller.made(torch.empty(1000)), caller.made(torch.empty(3))
            arriving, got, used = memory[at : at + 4000].view(torch.float32), torch.empty(3), torch.empty(1000)
            sends = [(x, to, at if rank.comm.lands(to) else None), *([(small, to, None)] if step % 3 else [])]
            recvs = [
                (arriving, back, at if rank.comm.lands(back) else None),
                *([(got, back, None)] if step % 3 else []),
            ]
            work = caller.exchange(sends, recvs, background=background)
            if background:
                work.wait_on(caller.stream)
            device.copy(used.data_ptr(), arriving.data_ptr(), bytes=4000, stream=caller.stream)
            kept.append((x, small, got, used, work))
        for caller in callers:
            device.synchronize_stream(caller.stream)
        want = torch.full((4000,), back + 1, dtype=torch.uint8)
        for *_, used, _ in kept:
            device.annotate_read(used.data_ptr(), 4000)
            assert torch.equal(used.view(torch.uint8), want)
        device.destroy_stream(callers[1].stream)


def collectives() -> None:
    """Every algorithm of all-reduce, from one stream and in the background, on reused memory."""
    with joined() as rank:
        x = torch.empty(2500)
        for algorithm in hdp.Communicator.algorithms("all_reduce"):
            for background in (True, False, True):
                rank.made(x)
                work = rank.all_reduce(x, algorithm, background=background)
                if background:
                    work.wait_on(rank.stream)
                rank.used(x)


def two_streams() -> None:
    """Collectives of two streams at once, with scratch memory; nothing orders the streams."""
    with joined() as rank:
        other = Caller(rank.comm, rank.device.create_stream())
        kept = []
        for caller in (rank, other, rank, other):
            x, out = caller.made(torch.empty(2400)), torch.empty(2400)
            kept += [x, out]
            caller.all_to_all(out, x, "bruck")
        rank.used(kept[-3])
        other.used(kept[-1])
        rank.device.destroy_stream(other.stream)


def peer_reads() -> None:
    """Collectives whose kernels read peers, in reused windows and from the landing zone; and small ones."""
    with joined() as rank:
        zone = rank.comm.landing_zone(torch.empty(0))
        assert zone is not None
        landed = zone.memory[4096:].view(torch.float32)
        for count in (3000, 9):
            _peer_reads(rank, landed, count)


def _peer_reads(rank: Caller, landed: torch.Tensor, count: int) -> None:
    n = rank.comm.size
    whole, out, x, total = torch.empty(n * count), torch.empty(n * count), torch.empty(count), torch.empty(count)
    for background in (False, True):
        works = []
        for one, many, to in ((x, whole, out), (landed[:count], landed[: n * count], out)):
            rank.made(many)
            rank.made(one)
            works += [
                rank.collective("all_gather", to, one, count, "one_shot", background=background),
                rank.collective("reduce_scatter", total, many, count, "one_shot", background=background),
                rank.collective("all_reduce", total, one, count, "one_shot", background=background),
                rank.all_reduce(one, "two_shot", background=background),
            ]
        if background:
            for work in works:
                work.wait_on(rank.stream)
        for used in (x, landed[:count], total, out):
            rank.used(used)


def small_messages() -> None:
    """Messages that are a kernel each, more than their slots, from the caller's stream and beside it by turns."""
    with joined() as rank:
        n, r = rank.comm.size, rank.comm.rank
        to, back = (r + 1) % n, (r - 1) % n
        xs, ys = ([torch.empty(7 + i) for i in range(12)] for _ in range(2))
        works = []
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            rank.made(x)
            works.append(rank.exchange([(x, to, None)], [(y, back, None)], background=i % 6 == 0))
        for work in works:
            work.wait_on(rank.stream)
        for y in ys:
            rank.used(y)


def through_the_api() -> None:
    """All collectives and messages as host tensors: the host waits for each."""
    with hdp.init() as comm:
        n, r = comm.size, comm.rank
        x, whole, out = torch.ones(1500), torch.ones(1500 * n), torch.zeros(1500 * n)
        for _ in range(2):
            comm.all_gather(out, x)
            comm.reduce_scatter(x, whole, "avg")
            comm.all_reduce(x)
            comm.broadcast(x, n - 1)
            comm.reduce(x, 0)
            comm.gather(out, x, 0)
            comm.scatter(x, whole, 0)
            comm.all_to_all(out, whole)
            comm.barrier()
            comm.exchange([(x, (r + 1) % n)], [(out[:1500], (r - 1) % n)])
            works = [comm.send(x, (r + 1) % n, async_op=True) for _ in range(6)]
            for _ in range(6):
                comm.recv(out[:1500], (r - 1) % n)
            for work in works:
                work.wait()


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program
    for program in (
        exchanges,
        landings,
        landings_of_streams,
        collectives,
        two_streams,
        peer_reads,
        small_messages,
        through_the_api,
    )
}
