"""Runs that go on with the ranks that are left when some die."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.errors import Aborted, CommTimeout, InvalidUsage, PeerLost

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["run_with_survivors"]

T = TypeVar("T")


def run_with_survivors(
    comm: Communicator,
    attempt: Callable[[Communicator], T],
    on_loss: Callable[[Communicator, str], None],
) -> T:
    """What ``attempt(comm)`` returns. When ranks die, the others call ``on_loss`` and ``attempt`` again, on the
    communicator of those that live. Collective over ``comm``.

    Args:
        attempt: goes on from a checkpoint, and keeps nothing of the attempt before.
        on_loss: (communicator of the living ranks, what happened).

    Raises:
        InvalidUsage: ``comm`` has devices, whose operations end with the first error.
        CommTimeout: a rank that lives has not come to the others within the communicator's timeout.
        What ``attempt`` raises if no rank has died, or if it is no error of communication.
    """
    if isinstance(comm, DeviceCommunicator):
        raise InvalidUsage(
            "operations of devices end for good when a rank dies, so the others cannot go on by themselves (elastic): "
            "start the ranks by torchrun --max-restarts, which starts all of them anew"
        )
    while True:
        try:
            return attempt(comm)
        except (Aborted, CommTimeout, PeerLost) as error:
            failure = error.with_traceback(None)  # whose frames hold the model
            failure.__cause__ = failure.__context__ = None
        living = comm.shrink()
        if living.size == comm.size:
            raise failure
        comm = living
        on_loss(comm, str(failure))
