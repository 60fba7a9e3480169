"""Point to point: torch's sends and receives over the core's mailbox, which matches by group, tag and source.

The rules that users see are in docs/torch-backend.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist

from hdpcomm import _core
from hdpcomm.comm.profiling import event, operands, profiler
from hdpcomm.comm.tensors import describe
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.torch_backend.checks import Tensors, one
from hdpcomm.torch_backend.errors import translate
from hdpcomm.torch_backend.staging import Operation
from hdpcomm.torch_backend.state import GroupState
from hdpcomm.torch_backend.work import BackendWork, seconds_of

__all__ = ["MessageWork", "Messages"]

_NOT_GIVEN = datetime.timedelta(0)
_mail_send = _core.comm.mail_send
_mail_receive = _core.comm.mail_receive
_mail_wait = _core.comm.mail_wait
_new_work = dist.Work.__init__


class MessageWork(BackendWork):
    """A send or a receive that was started."""

    def __init__(self, mail: _core.comm.Mail, group: GroupState, tensor: torch.Tensor) -> None:
        _new_work(self)
        self._parts = ()
        self._mail = mail
        self._group = group
        self._timeout = group.seconds
        self._tensor = tensor

    def wait(self, timeout: datetime.timedelta = _NOT_GIVEN) -> bool:
        if not self._over:
            self.join(self._timeout if timeout is _NOT_GIVEN else seconds_of(timeout, self._timeout))
        if self._error is not None:
            raise self._error
        return True

    def join(self, seconds: float) -> None:
        told = operands(self._group.ranks, self._tensor) if profiler._is_profiler_enabled else {}
        try:
            with event("wait recv" if self._mail.receives else "wait send", told):
                _mail_wait(self._mail, seconds)
        except Error as error:
            self._set_ended(translate(error))
        else:
            if self._finish is None:
                self._over = True
            else:
                self._set_ended(None)

    def is_completed(self) -> bool:
        if not self._over and self._mail.done():
            self.join(self._timeout)
        return self._over

    def result(self) -> list[torch.Tensor]:
        return [self._tensor] if self._mail.receives else []

    def source_rank(self) -> int:
        if not self._mail.receives:
            return super().source_rank()
        return self._group.ranks.index(self._mail.source)

    _source_rank = source_rank

    def _complete_later(self) -> None:
        if self._over:
            self.complete_future()
        else:
            self._group.engine.complete_alone(self)

    def finish_with(self, finish: Callable[[], None]) -> None:
        """Has the receive copied to where it belongs at the end."""
        self._finish = finish


class Messages:
    """The point-to-point methods of a group. Ranks in arguments and results are positions in the group."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._by_streams = state.communicator._by_streams
        self._mailbox = state.engine.mailbox

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
        tensor = one(tensors, "send", "tensors")
        if self._by_streams(tensor):
            return self._send_by_stream(tensor, dst, tag)
        peer = self._world_rank(dst, "send")
        try:
            mail = _mail_send(self._mailbox, tensor, peer, tag, self._state.context, tensor)
            if mail is None:
                buffer = self._state.begin("send", None).source(tensor)
                mail = _mail_send(self._mailbox, describe(buffer, "tensor"), peer, tag, self._state.context, buffer)
        except Error as error:
            raise translate(error) from error.__cause__
        assert mail is not None
        return MessageWork(mail, self._state, tensor)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
        tensor = one(tensors, "recv", "tensors")
        if self._by_streams(tensor):
            return self._receive_by_stream(tensor, src, tag)
        return self._receive(tensors, self._world_rank(src, "recv"), tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> BackendWork:
        if self._by_streams(one(tensors, "recv", "tensors")):
            raise NotImplementedError("hdpcomm backend: recv() of a device tensor from any source; name the source")
        others = tuple(rank for rank in self._state.ranks if rank != self._state.communicator.global_rank)
        if not others:
            raise InvalidUsage("recv() from any source in a group of one rank would wait for ever")
        return self._receive(tensors, others, tag)

    def _receive(self, tensors: Tensors, sources: int | tuple[int, ...], tag: int) -> BackendWork:
        tensor = one(tensors, "recv", "tensors")
        operation: Operation | None = None
        try:
            mail = _mail_receive(self._mailbox, tensor, sources, tag, self._state.context, tensor)
            if mail is None:
                operation = self._state.begin("recv", None)
                buffer = operation.target(tensor)
                described, context = describe(buffer, "tensor"), self._state.context
                mail = _mail_receive(self._mailbox, described, sources, tag, context, buffer)
        except Error as error:
            raise translate(error) from error.__cause__
        assert mail is not None
        work = MessageWork(mail, self._state, tensor)
        if operation is not None:
            work.finish_with(operation.finish)
        return work

    # Messages of device tensors: the streams match those of a pair of ranks in the order of the calls.

    def _send_by_stream(self, tensor: torch.Tensor, dst: int, tag: int) -> BackendWork:
        self._world_rank(dst, "send")
        _refuse_tag("send", tag)
        operation = self._state.begin("send", None)
        operation.start(self._state.communicator.send, operation.source(tensor), dst)
        return self._state.end(operation, [])

    def _receive_by_stream(self, tensor: torch.Tensor, src: int, tag: int) -> BackendWork:
        self._world_rank(src, "recv")
        _refuse_tag("recv", tag)
        operation = self._state.begin("recv", None)
        operation.source_rank = src
        operation.start(self._state.communicator.recv, operation.target(tensor), src)
        return self._state.end(operation, [tensor])

    def _world_rank(self, rank: int, call: str) -> int:
        ranks = self._state.ranks
        if not 0 <= rank < len(ranks):
            raise InvalidUsage(f"{call}() got rank {rank}; this group has ranks 0..{len(ranks) - 1}")
        return ranks[rank]


def _refuse_tag(call: str, tag: int) -> None:
    if tag:
        raise NotImplementedError(
            f"hdpcomm backend: {call}() of a device tensor with tag {tag}; device messages of a pair of ranks are "
            "matched in the order of the calls: leave the tag out"
        )
