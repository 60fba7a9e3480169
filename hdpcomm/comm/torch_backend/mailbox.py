"""Tags and any-source receives over the core's exchange, which matches the messages of a pair of ranks in order.

A send is two messages in one exchange: a header (group, tag, type, elements) and the payload. On the receiving side a
channel, a thread a peer, takes a header, looks for the first posted receive that matches, and receives the payload
straight into it; a message that no receive wants is kept ("unexpected") for a later one. A channel takes messages only
while a posted receive could want one of its peer's, so what a rank must keep is bounded by what its peers send while it
waits for something else. The rules that users see are in docs/torch-backend.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable

import torch

from hdpcomm import _core
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.work import Work
from hdpcomm.errors import Aborted, CommTimeout, Error, InvalidUsage, Mismatch, PeerLost

__all__ = ["Mailbox", "Receive", "context_of"]

_MARK = 0x6864_706D_6169_6C31  # tells a header from anything else
_HEADER_WORDS = 7  # mark, context, tag, dtype code, elements, and two that are zero
_NO_LIMIT_S = 1e8
_GRACE_S = 5.0  # for a payload that is on its way at the deadline
_TYPES = {code: getattr(torch, name) for name, code in _core.DTYPES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def context_of(name: str) -> int:
    """The number of a group in headers, from its name, which is equal on all its ranks. Signed, 64 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class Receive:
    """A receive that was posted. ``sources``: world ranks from which it may come."""

    __slots__ = ("_ended", "_mailbox", "buffer", "context", "error", "finish", "source", "sources", "tag")

    def __init__(
        self,
        mailbox: Mailbox,
        buffer: torch.Tensor,
        sources: frozenset[int],
        tag: int,
        context: int,
        finish: Callable[[], None],
    ) -> None:
        self.buffer = buffer  # contiguous
        self.sources = sources
        self.tag = tag
        self.context = context
        self.finish = finish  # run when the buffer is full
        self.source = -1  # world rank of the sender, once known
        self.error: Error | None = None
        self._mailbox = mailbox
        self._ended = threading.Event()

    def wants(self, source: int, context: int, tag: int) -> bool:
        return tag == self.tag and context == self.context and source in self.sources

    def end(self, error: Error | None = None) -> None:
        """Called once, by the channel or by the mailbox."""
        if error is None:
            self.finish()
        self.error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        start = time.monotonic()
        if (
            not self._ended.wait(timeout)
            and not self._mailbox.withdraw(self, time.monotonic() - start)
            and not self._ended.wait(_GRACE_S)
        ):
            raise CommTimeout(
                f"the sender, rank {self.source}, has stopped in the middle of a message of tag {self.tag}; the "
                "receive's tensor must not be used",
                peer=self.source,
                op="recv",
            )
        if self.error is not None:
            raise self.error


class _Message:
    """A message that no receive had wanted when it came."""

    __slots__ = ("context", "payload", "source", "tag")

    def __init__(self, source: int, context: int, tag: int, payload: torch.Tensor) -> None:
        self.source = source
        self.context = context
        self.tag = tag
        self.payload = payload


class Mailbox:
    """One rank's sends and receives. All ranks here are world ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._changed = threading.Condition()  # guards all below; notified when a channel may have work
        self._posted: list[Receive] = []  # in the order of the calls
        self._unexpected: list[_Message] = []  # in the order of arrival
        self._channels: dict[int, threading.Thread] = {}
        self._lost: dict[int, Error] = {}
        self._closed: Error | None = None

    def send(self, x: torch.Tensor, dst: int, tag: int, context: int) -> Work:
        """Starts to send contiguous ``x``; it ends when the receiver has taken it. Local errors: InvalidUsage."""
        if dst == self._comm.rank:
            raise InvalidUsage(f"send() from rank {dst} to itself; copy the tensor instead")
        header = torch.tensor([_MARK, context, tag, _CODES[x.dtype], x.numel(), 0, 0], dtype=torch.int64)
        # One exchange, so that both or neither are given up at a deadline.
        return self._comm.exchange(sends=[(header, dst), (x, dst)], async_op=True)

    def receive(
        self, x: torch.Tensor, sources: frozenset[int], tag: int, context: int, finish: Callable[[], None]
    ) -> Receive:
        """Posts a receive into contiguous ``x``; ``finish`` runs when it is full, on some thread."""
        receive = Receive(self, x, sources, tag, context, finish)
        with self._changed:
            for i, message in enumerate(self._unexpected):
                if receive.wants(message.source, message.context, message.tag):
                    del self._unexpected[i]
                    self._deliver(receive, message)
                    return receive
            error = self._hopeless(receive)
            if error is not None:
                receive.end(error)
                return receive
            self._posted.append(receive)
            for source in sources - self._channels.keys() - self._lost.keys():
                channel = threading.Thread(
                    target=self._serve, args=(source,), name=f"hdpcomm-channel-{source}", daemon=True
                )
                self._channels[source] = channel
                channel.start()
            self._changed.notify_all()
        return receive

    def withdraw(self, receive: Receive, waited_s: float) -> bool:
        """Ends a receive that no message has matched with CommTimeout. False: one has, or it has ended."""
        with self._changed:
            if receive not in self._posted:
                return False
            self._posted.remove(receive)
            kept = [f"(rank {each.source}, tag {each.tag})" for each in self._unexpected[:8]]
        receive.end(
            CommTimeout(
                f"rank {self._comm.rank} waited {waited_s:.1f} s to receive tag {receive.tag} from rank "
                f"{_name(receive.sources)}; look for the send, its tag and its group, or raise timeout=. Messages that "
                f"came and no receive wanted: {', '.join(kept) or 'none'}",
                rank=self._comm.rank,
                peer=min(receive.sources) if len(receive.sources) == 1 else None,
                op="recv",
            )
        )
        return True

    def close(self) -> None:
        """After the world was closed: ends what is posted, and the channels."""
        rank = self._comm.rank
        with self._changed:
            self._closed = self._closed or Aborted(
                f"rank {rank} destroyed its process group during a receive", rank=rank, op="recv"
            )
            self._end_hopeless()
            self._unexpected.clear()
            self._changed.notify_all()
            channels = list(self._channels.values())
        for channel in channels:
            if channel is not threading.current_thread():
                channel.join()

    # --- the channels ----------------------------------------------------------------------------------------------

    def _serve(self, peer: int) -> None:
        """The thread of one peer: takes its messages one after the other, while somebody wants one."""
        header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
        while True:
            with self._changed:
                while self._closed is None and not any(peer in receive.sources for receive in self._posted):
                    self._changed.wait()
                if self._closed is not None:
                    return
            try:
                incoming = self._comm.exchange(recvs=[(header, peer)], async_op=True)
            except Error as error:  # this rank has left the world
                self._lose(peer, error)
                return
            try:
                incoming.wait(_NO_LIMIT_S)
            except PeerLost as error:
                self._lose(peer, error)
                return
            except Error:
                continue  # the sender gave its message up before it was taken, or this rank is leaving
            mark, context, tag, code, elements, _, _ = header.tolist()
            assert mark == _MARK, f"rank {self._comm.rank} got a message of rank {peer} that is none of a mailbox"
            self._take(peer, context, tag, code, elements)

    def _take(self, peer: int, context: int, tag: int, code: int, elements: int) -> None:
        """Receives the payload that follows a header, into the receive that wants it or into memory of its own."""
        with self._changed:
            receive = self._match(peer, context, tag)
        buffer = torch.empty(elements, dtype=_TYPES[code]) if receive is None else receive.buffer
        try:
            # The core compares size and type with the payload's, and fails both sides where they differ.
            self._comm.exchange(recvs=[(buffer, peer)], async_op=True).wait(_NO_LIMIT_S)
        except (Mismatch, PeerLost) as error:
            if receive is not None:
                receive.end(error)
            return  # a peer that is gone shows at the next header
        except Error:  # the sender gave it up, so it was no message; or this rank is leaving
            if receive is not None:
                self._repost(receive)
            return
        if receive is not None:
            receive.end()
            return
        with self._changed:
            message = _Message(peer, context, tag, buffer)
            late = self._match(peer, context, tag)  # posted meanwhile
            if late is None:
                self._unexpected.append(message)
            else:
                self._deliver(late, message)

    def _match(self, source: int, context: int, tag: int) -> Receive | None:
        for i, receive in enumerate(self._posted):
            if receive.wants(source, context, tag):
                receive.source = source
                return self._posted.pop(i)
        return None

    def _repost(self, receive: Receive) -> None:
        with self._changed:
            error = self._hopeless(receive)
            if error is None:
                self._posted.insert(0, receive)  # it was the first of those that want such a message
        if error is not None:
            receive.end(error)

    def _deliver(self, receive: Receive, message: _Message) -> None:
        receive.source = message.source
        given, wanted = message.payload, receive.buffer
        if (given.numel(), given.dtype) == (wanted.numel(), wanted.dtype):
            wanted.view(-1).copy_(given)
            receive.end()
            return
        receive.end(
            Mismatch(
                f"rank {self._comm.rank} receives {wanted.numel()} x {wanted.dtype} with tag {message.tag}, but rank "
                f"{message.source} sent {given.numel()} x {given.dtype}: give both the same size and type",
                rank=self._comm.rank,
                peer=message.source,
                op="recv",
            )
        )

    # --- the end of peers --------------------------------------------------------------------------------------------

    def _lose(self, peer: int, error: Error) -> None:
        with self._changed:
            if isinstance(error, PeerLost):
                self._lost[peer] = error
            else:
                self._closed = self._closed or error
                self._changed.notify_all()
            self._end_hopeless()

    def _hopeless(self, receive: Receive) -> Error | None:
        if self._closed is not None:
            return self._closed
        if receive.sources <= self._lost.keys():
            return self._lost[min(receive.sources)]
        return None

    def _end_hopeless(self) -> None:
        for receive in list(self._posted):
            error = self._hopeless(receive)
            if error is not None:
                self._posted.remove(receive)
                with contextlib.suppress(Exception):
                    receive.end(error)


def _name(sources: frozenset[int]) -> str:
    return str(min(sources)) if len(sources) == 1 else "any of " + ", ".join(map(str, sorted(sources)))
