"""The torch transport: torch.distributed process groups carry the frames of the core to other hosts.

The core cuts messages into frames and keeps all the rules (numbers, matching, deadlines, failures); a group only has
to move tensors in order between two ranks, by ``send`` and ``recv`` with a tag, which gloo, UCC and MPI offer. None of
its operations is ever withdrawn: giving up a message happens above, and what is under way arrives and is dropped.

Two threads serve a peer, one a direction, and over gloo each has a connection of its own: a receiver asks for the bytes
of a frame before they are sent, and on a common connection it would ask behind all that its own end is sending. They
hold frames, never a user's tensor. After the goodbye that a rank sends when it closes, its thread that receives ends
when the peer has told that it has all frames, or has said goodbye itself: a connection that ends earlier takes what is
on its way with it.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm._core import transport
from hdpcomm.comm.secret import MAC_BYTES, NONCE_BYTES, SAME_SECRET, Secret
from hdpcomm.errors import Error, first_line

__all__ = ["GroupCarrier"]

_DEPTH = 8  # frames of a direction under way; receives of heads are posted ahead, so that one needs no round trip
_BULKS = 2  # frames of a direction whose bulk the group has to send
_HEAD_TAG = 0x4844_0000  # tags are below 2^31, as MPI wants them; a frame's are counted modulo the depth
_BULK_TAG = _HEAD_TAG + _DEPTH
_END_TAG = _BULK_TAG + _DEPTH
_PROOF_TAG = _END_TAG + 1
_FOREVER = datetime.timedelta(days=20)  # deadlines are the core's
_GRACE_S = 5.0  # after the last frame has left, for the peers to tell that they have it, before connections are cut
_CUT_S = 2.0  # for the threads to end once they are

# Held until their threads have ended: a thread that drops the last reference to a group ends its connections without
# the GIL, and must not be surprised by the end of the interpreter.
_carriers: set[GroupCarrier] = set()


class GroupCarrier:
    """Moves the frames of a link through process groups until both ends of every pair have said goodbye.

    groups: one or two backend objects with ``send(tensors, peer, tag)`` and ``recv(tensors, peer, tag)`` that return
        works with ``wait(timeout)``; their ranks are the link's. The first of two carries what goes to higher ranks.
    owned: nobody else uses the groups, so their connections may be cut at the end.
    secret: of the job. A peer proves in every group that it knows it before a frame goes to it or comes from it; what
        does not is lost.
    store: kept as long as the groups, which may ask it.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        link: transport.FrameLink,
        *,
        owned: bool,
        secret: Secret,
        store: Any = None,
    ) -> None:
        self._groups = list(groups)
        self._secret = secret
        self._store = store
        self._link = link
        self._owned = owned
        peers = [peer for peer in range(link.size) if peer != link.rank]
        self._proven = {peer: threading.Event() for peer in peers}  # or lost
        self._left = time.monotonic()  # when a frame last left
        self._senders = [self._thread(self._send, peer) for peer in peers]
        self._receivers = [self._thread(self._receive, peer) for peer in peers]
        self._closer = threading.Thread(target=self._close, name="hdpcomm-torch-close", daemon=True)
        for thread in (*self._receivers, *self._senders, self._closer):
            thread.start()
        _carriers.difference_update([carrier for carrier in _carriers if not carrier._closer.is_alive()])
        _carriers.add(self)

    def _thread(self, target: Any, peer: int) -> threading.Thread:
        return threading.Thread(target=self._run, args=(target, peer), name=f"hdpcomm-torch-{peer}", daemon=True)

    def _run(self, target: Any, peer: int) -> None:
        try:
            target(peer)
        except Exception as error:  # whatever a backend raises: the core reports it when it matters
            self._link.lost(peer, first_line(error))
        finally:
            self._proven[peer].set()

    def _group(self, sender: int, receiver: int) -> Any:
        return self._groups[0 if sender < receiver else -1]

    def _prove(self, secret: Secret, peer: int) -> None:
        for group in self._groups:
            self._prove_over(group, secret, peer)
        self._proven[peer].set()

    def _prove_over(self, group: Any, secret: Secret, peer: int) -> None:
        """Both ends show that they know the secret, each by a MAC of both nonces and of who is who."""
        ours = torch.frombuffer(bytearray(secrets.token_bytes(NONCE_BYTES)), dtype=torch.uint8)
        theirs, mac = torch.empty(NONCE_BYTES, dtype=torch.uint8), torch.empty(MAC_BYTES, dtype=torch.uint8)
        _wait([group.send([ours], peer, _PROOF_TAG), group.recv([theirs], peer, _PROOF_TAG)])

        def places(first: int, second: int) -> bytes:
            return struct.pack(">QQ", first, second)

        mine = secret.sign("frames", places(self._link.rank, peer), bytes(ours.tolist()), bytes(theirs.tolist()))
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        _wait([group.send([own], peer, _PROOF_TAG + 1), group.recv([mac], peer, _PROOF_TAG + 1)])
        parts = places(peer, self._link.rank), bytes(theirs.tolist()), bytes(ours.tolist())
        if not secret.verify(bytes(mac.tolist()), "frames", *parts):
            raise Error(f"who answered as rank {peer} does not know the job's secret: {SAME_SECRET}")

    def _send(self, peer: int) -> None:
        self._proven[peer].wait()
        group = self._group(self._link.rank, peer)
        sent: deque[tuple[transport.Frame, list[Any]]] = deque()  # a frame is read until its waits are over
        # Heads go out as soon as there are frames, so that the receiver asks for the bulks early; but what the group
        # has to send stays little, since the next head waits behind it.
        headed: deque[tuple[transport.Frame, list[Any], int]] = deque()
        count, bulks, ended = 0, 0, False
        while sent or not ended:
            now, frame = False, None
            if not ended and not sent:
                now, frame = True, self._link.next(peer)
            elif not ended and len(sent) < _DEPTH:
                now, frame = self._link.try_next(peer)
            ended = ended or (now and frame is None)
            if frame is not None:
                works = [group.send([_tensor(frame.head)], peer, _HEAD_TAG + count % _DEPTH)]
                sent.append((frame, works))
                if frame.bulk_bytes:
                    headed.append((frame, works, _BULK_TAG + count % _DEPTH))
                count += 1
            elif headed and bulks < _BULKS:
                frame, works, tag = headed.popleft()
                works.append(group.send([_tensor(frame.bulk)], peer, tag))
                bulks += 1
            elif sent:
                frame, works = sent.popleft()
                _wait(works)
                bulks -= bool(frame.bulk_bytes)
                self._left = time.monotonic()

    def _receive(self, peer: int) -> None:
        self._prove(self._secret, peer)
        group = self._group(peer, self._link.rank)
        posted: deque[tuple[transport.Frame, Any]] = deque()  # receives of heads
        arriving: deque[tuple[transport.Frame, list[Any]]] = deque()  # their heads have come, their bulks are asked for

        def post(count: int) -> None:
            frame = transport.Frame()
            posted.append((frame, group.recv([_tensor(frame.head)], peer, _HEAD_TAG + count % _DEPTH)))

        for count in range(_DEPTH):
            post(count)
        delivered = 0
        while True:
            frame, head = posted.popleft()
            _wait([head])
            bulks = []
            if frame.expect_bulk():
                tag = _BULK_TAG + (delivered + len(arriving)) % _DEPTH
                bulks.append(group.recv([_tensor(frame.bulk)], peer, tag))
            arriving.append((frame, bulks))
            # Where another head is on its way, its bulk is asked for before this one has come.
            while arriving and not (frame.more and len(arriving) < _DEPTH):
                oldest, bulks = arriving.popleft()
                _wait(bulks)
                post(delivered + _DEPTH)
                delivered += 1
                if not self._link.deliver(peer, oldest):
                    return

    def _close(self) -> None:
        """After our goodbyes, waits until the peers have what was sent; then ends what nobody will answer."""
        self._link.wait_closed()
        self._left = time.monotonic()
        threads = [*self._senders, *self._receivers]
        for thread in threads:
            while thread.is_alive() and (left := self._left + _GRACE_S - time.monotonic()) > 0:
                thread.join(left)
        if self._owned and any(thread.is_alive() for thread in threads):
            self.cut()
            limit = time.monotonic() + _CUT_S
            for thread in threads:
                thread.join(max(0.0, limit - time.monotonic()))
        self._groups = []  # their connections end here

    def cut(self) -> None:
        """Ends all connections of the groups at once. Gloo has no call for it, but a wait that times out does it.

        Every peer is tried: on a connection that has failed already the call fails at once, and ends no other.
        """
        for peer in range(self._link.size):
            for group in self._groups if peer != self._link.rank else []:
                with contextlib.suppress(Exception):
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _END_TAG).wait(
                        datetime.timedelta(milliseconds=1)
                    )

    def join(self) -> bool:
        """Waits until the threads have ended, after the world was closed, or should have; returns whether they have."""
        began = time.monotonic()
        while self._closer.is_alive():
            left = max(self._left, began) + _GRACE_S + 2 * _CUT_S - time.monotonic()
            if left <= 0:
                break
            self._closer.join(left)
        return not self._closer.is_alive()


def _join_all() -> None:
    # Worlds were closed before: handlers run in reverse order of registration.
    for carrier in list(_carriers):
        carrier.join()


atexit.register(_join_all)


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait(_FOREVER)
