"""hdpcomm's errors as torch's users expect them: each is also a ``dist.DistBackendError`` (a RuntimeError)."""

from __future__ import annotations

import torch.distributed as dist

from hdpcomm import _core
from hdpcomm.errors import Aborted, CommTimeout, Error, Mismatch, PeerLost

__all__ = [
    "BackendAborted",
    "BackendError",
    "BackendLost",
    "BackendMismatch",
    "BackendTimeout",
    "translate",
]


class BackendError(Error, dist.DistBackendError):
    """A failure inside the library or the operating system."""


class BackendTimeout(CommTimeout, dist.DistBackendError):
    """An operation did not end before its deadline."""


class BackendLost(PeerLost, dist.DistBackendError):
    """Another rank died or left its group while this one depended on it."""


class BackendMismatch(Mismatch, dist.DistBackendError):
    """Ranks called different operations, or the same one with different sizes, types, roots or order."""


class BackendAborted(Aborted, dist.DistBackendError):
    """The group was aborted or destroyed while the operation ran."""


_OUT_OF_STEP_ADVICE = _core.comm.OUT_OF_STEP_ADVICE
_TWINS: dict[type[Error], type[Error]] = {
    Error: BackendError,
    CommTimeout: BackendTimeout,
    PeerLost: BackendLost,
    Mismatch: BackendMismatch,
    Aborted: BackendAborted,
}


def translate(error: Error) -> Error:
    """The error that torch's user sees: the same fields, and a message with advice for that user.

    InvalidUsage stays, it is a ValueError already.
    """
    twin = _TWINS.get(type(error))
    if twin is None:
        return error
    text = str(error).replace(_OUT_OF_STEP_ADVICE, "destroy the process group on all ranks and make a new one")
    return twin(text, rank=error.rank, peer=error.peer, op=error.op, ranks=error.ranks, seq=error.seq).with_traceback(
        error.__traceback__
    )
