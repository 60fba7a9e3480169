"""State that the operations of one group share: its ranks, its time limit, and how an operation begins and ends."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.engine import Engine
from hdpcomm.torch_backend.staging import Operation
from hdpcomm.torch_backend.work import BackendWork, chain, seconds_of

__all__ = ["GroupState"]


def _context_of(name: str) -> int:
    """The number of a group in messages, from its name, which is equal on all its ranks. Signed, 64 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class GroupState:
    """A group's state.

    Attributes:
        ranks: the members, as ranks of the engine's world.
        seconds: that an operation may take.
        context: the number of the group in its messages.
    """

    __slots__ = ("_coalesced", "_name", "_world_seconds", "communicator", "context", "engine", "ranks", "seconds")

    def __init__(self, engine: Engine, communicator: Communicator, *, name: str, timeout: float) -> None:
        self.engine = engine
        self.communicator = communicator
        self.ranks = communicator.ranks
        self.seconds = timeout
        self.name = name
        self._world_seconds = communicator.timeout
        self._coalesced: list[BackendWork] | None = None

    @property
    def name(self) -> str:
        """The group's name in torch."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        self.context = _context_of(name)

    # Where torch has several signatures, `options` is its options object or, in those without one, what stands there.
    def begin(self, call: str, options: Any, timeout: datetime.timedelta | None = None) -> Operation:
        """An operation whose parts can be started."""
        given = options if isinstance(options, datetime.timedelta) else getattr(options, "timeout", None)
        seconds = seconds_of(given if timeout is None else timeout, self.seconds)
        # A deadline of its own can be given to wait() only.
        background = getattr(options, "asyncOp", True) or seconds != self._world_seconds
        return Operation(call, self.communicator, timeout=seconds, background=background)

    def end(self, operation: Operation, outputs: Sequence[torch.Tensor]) -> BackendWork:
        """The work of an operation whose parts have all been started."""
        if operation.over:
            work = BackendWork.ended(outputs)
        else:
            work = operation.work(outputs, self.engine.complete_in_order)
            if operation.parts and operation.copies:
                self.engine.hold(work, operation.parts)
        return work if self._coalesced is None else self.started(work)

    def started(self, work: BackendWork) -> BackendWork:
        """The work, noted where operations are coalesced."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self) -> None:
        """From now on works are collected. Raises: InvalidUsage where they are already."""
        if self._coalesced is not None:
            raise InvalidUsage("this group coalesces operations already; coalescing cannot be nested")
        self._coalesced = []

    def end_coalescing(self) -> BackendWork:
        """One work of all that were collected."""
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise InvalidUsage("_end_coalescing() without _start_coalescing()")
        return chain(works, self.seconds)
