"""The errors that hdpcomm raises.

Every error has attributes that say where it happened: ``rank`` (the global rank that raises), ``peer`` (the global rank
it concerns), ``op``, ``ranks`` (of the communicator) and ``seq`` (the operation's number on the raising rank). Each is
``None`` if it is not known.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

__all__ = [
    "Aborted",
    "CommTimeout",
    "DeviceError",
    "Error",
    "InvalidUsage",
    "Mismatch",
    "PeerLost",
    "first_line",
    "on_failure",
    "out_of_memory",
    "plain_text",
]

# As isControl() in csrc/base/text.cpp: control characters, and marks that turn the direction of what follows.
_LEFT_OUT = (*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_PLAIN = {code: None for code in _LEFT_OUT if chr(code) not in "\n\t"} | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def plain_text(text: str | bytes) -> str:
    """The text as a terminal may show it: no control characters but newlines and tabs, no halves of characters.

    What other processes wrote is passed through it; every :class:`Error` does that with its message.
    """
    return (text if isinstance(text, str) else text.decode("utf-8", "replace")).translate(_PLAIN)


def first_line(error: BaseException) -> str:
    """First line of an error's text, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left: of Python, the system, or torch's allocator of any device."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


class Error(Exception):
    """Base class of all errors of hdpcomm; raised itself for failures of the library or the operating system."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        op: str | None = None,
        ranks: Sequence[int] | None = None,
        seq: int | None = None,
    ) -> None:
        super().__init__(plain_text(message))
        self.rank = rank
        self.peer = peer
        self.op = op
        self.ranks = None if ranks is None else tuple(ranks)
        self.seq = seq

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args[0], self.rank, self.peer, self.op, self.ranks, self.seq)


class InvalidUsage(Error, ValueError):
    """An argument is wrong. Nothing was sent, and the communicator stays usable."""


class CommTimeout(Error, TimeoutError):
    """An operation did not end before its deadline."""


class PeerLost(Error, ConnectionError):
    """Another rank, ``peer``, died or left while this one depended on it."""


class Mismatch(Error):
    """Ranks called different operations, in another order, or with different sizes, types or roots.

    Attributes:
        unlike: of replicas that are not alike, the ranks that are not like most; empty where there is no majority.
    """

    unlike: tuple[int, ...] = ()


class Aborted(Error):
    """The operation was ended by ``abort()``, ``close()`` or Ctrl-C, or refused because of an earlier error.

    A refusal names that error; :meth:`hdpcomm.Communicator.resync` makes the ranks usable again.
    """


class NotFinite(Error):
    """The loss or the gradient of a training step is no finite number, on all ranks alike. The step was not taken:
    parameters and optimizer are as before, and the next one may follow.

    Attributes:
        sequences: numbers of those in whose micro-batches the loss became so; empty where only the gradient did.
    """

    sequences: tuple[int, ...] = ()


class DeviceError(Error):
    """The CUDA driver or a device library reported an error."""


_listeners: list[Callable[[Error], None]] = []


def on_failure(listener: Callable[[Error], None]) -> None:
    """Calls ``listener`` for each operation that fails, before its error is raised; once, if it is given again."""
    if listener not in _listeners:
        _listeners.append(listener)


def _raised(error: Error) -> None:
    """The core is about to raise ``error``."""
    if error.op is not None and not isinstance(error, InvalidUsage):
        for listener in _listeners:
            listener(error)


def _rebuild(
    cls: type[Error],
    message: str,
    rank: int | None,
    peer: int | None,
    op: str | None,
    ranks: tuple[int, ...] | None,
    seq: int | None,
) -> Error:
    return cls(message, rank=rank, peer=peer, op=op, ranks=ranks, seq=seq)
