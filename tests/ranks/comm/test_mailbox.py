"""The core's mailbox by itself, which has the world for its own: arguments, deadlines, what is kept, the end.

torch's point to point, with its random programs, is in tests/ranks/torch_backend.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.tensors import describe
from hdpcomm.testing import run_threads

mail_send, mail_receive, mail_wait = _core.comm.mail_send, _core.comm.mail_receive, _core.comm.mail_wait


def arguments() -> None:
    with hdp.init() as comm:
        mailbox = _core.comm.Mailbox(comm._core.world)
        x = torch.arange(4.0)
        for call, message in (
            (lambda: _core.comm.Mailbox(comm._core.world), "has a mailbox"),
            (lambda: mail_send(mailbox, x, 2, 0, 0, x), r"send\(\) got rank 2; this world has ranks 0\.\.1"),
            (lambda: mail_receive(mailbox, x, -1, 0, 0, x), r"recv\(\) got rank -1"),
            (lambda: mail_receive(mailbox, x, (0, 7), 0, 0, x), r"recv\(\) got rank 7"),
            (lambda: mail_receive(mailbox, x, (), 0, 0, x), "got no ranks"),
        ):
            with pytest.raises(hdp.InvalidUsage, match=message):
                call()
        with pytest.raises(TypeError, match="expected 6 arguments, got 1"):
            mail_send(mailbox)
        with pytest.raises(TypeError, match="ranks to receive from"):
            mail_receive(mailbox, x, None, 0, 0, x)
        assert mail_send(mailbox, x[::2], 0, 0, 0, x[::2]) is None  # no plain tensor: nothing was done
        assert mail_receive(mailbox, [1.0], 0, 0, 0, [1.0]) is None
        # by address, and healthy
        out = torch.empty(4)
        received = mail_receive(mailbox, describe(out, "out"), (1 - comm.rank,), 5, -3, out)
        x += comm.rank
        sent = mail_send(mailbox, describe(x, "x"), 1 - comm.rank, 5, -3, x)
        assert received.receives
        assert not sent.receives
        mail_wait(received, 20.0)
        mail_wait(sent, 20.0)
        assert received.source == 1 - comm.rank
        assert sent.source == -1
        assert out.tolist() == (torch.arange(4.0) + 1 - comm.rank).tolist()
        assert repr(sent).startswith("<Mail send/recv(4 x float32)")


def test_arguments() -> None:
    run_threads(arguments, 2, timeout=20)


def kept(meet: threading.Barrier) -> None:
    """A timeout says what came and was not wanted, and what is kept is there afterwards, also for several threads."""
    with hdp.init(timeout=20) as comm:
        mailbox = _core.comm.Mailbox(comm._core.world)
        if comm.rank == 1:
            tensors = [torch.full((50_000,), float(tag)) for tag in range(12)]
            sent = [mail_send(mailbox, x, 0, tag, 0, x) for tag, x in enumerate(tensors)]
            for each in sent:
                mail_wait(each, 20.0)
            meet.wait(20.0)
            return
        outs = [torch.empty(50_000) for _ in range(12)]
        with pytest.raises(hdp.CommTimeout, match=r"tag 99 from rank 1; .* wanted: \(rank 1, tag 0\), .*, \.\.\."):
            mail_wait(mail_receive(mailbox, outs[0], 1, 99, 0, outs[0]), 1.0)

        def take(tag: int) -> None:
            mail_wait(mail_receive(mailbox, outs[tag], (0, 1), tag, 0, outs[tag]), 20.0)

        threads = [threading.Thread(target=take, args=(tag,)) for tag in reversed(range(12))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [out[-1].item() for out in outs] == list(range(12))
        meet.wait(20.0)


def test_kept() -> None:
    run_threads(kept, 2, threading.Barrier(2), timeout=20)


def closed(meet: threading.Barrier) -> None:
    comm = hdp.init(timeout=20)
    mailbox = _core.comm.Mailbox(comm._core.world)
    other = 1 - comm.rank
    x = torch.empty(1)
    waiting = mail_receive(mailbox, x, other, 0, 0, x)
    meet.wait(20.0)
    if comm.rank == 0:
        comm.close()
        with pytest.raises(hdp.Aborted, match="rank 0 closed its communicator during"):
            mail_wait(waiting, 5.0)
        with pytest.raises(hdp.InvalidUsage, match="this communicator is closed"):
            mail_send(mailbox, x, other, 0, 0, x)
    else:
        with pytest.raises(hdp.PeerLost, match="rank 0 closed"):
            mail_wait(waiting, 20.0)
        with pytest.raises(hdp.PeerLost, match="rank 0 closed"):  # at once, by what is known
            mail_wait(mail_receive(mailbox, x, other, 0, 0, x), 20.0)
        with pytest.raises(hdp.PeerLost, match="rank 0 closed"):
            mail_wait(mail_send(mailbox, x, other, 0, 0, x), 20.0)
        comm.close()


def test_closed() -> None:
    run_threads(closed, 2, threading.Barrier(2), timeout=20)


def nobody_waits(meet: threading.Barrier) -> None:
    """A message whose sender and receiver are busy arrives all the same."""
    with hdp.init(timeout=20) as comm:
        mailbox = _core.comm.Mailbox(comm._core.world)
        x, out = torch.ones(300_000), torch.zeros(300_000)  # kept here: the core takes addresses
        if comm.rank == 0:
            message = mail_receive(mailbox, out, 1, 0, 0, out)
        else:
            message = mail_send(mailbox, x, 0, 0, 0, x)
        limit = time.monotonic() + 15
        while not (out == 1).all() and comm.rank == 0:
            assert time.monotonic() < limit
            time.sleep(0.01)
        meet.wait(20.0)
        mail_wait(message, 20.0)


def test_nobody_waits() -> None:
    run_threads(nobody_waits, 2, threading.Barrier(2), timeout=20)
