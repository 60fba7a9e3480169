"""Point to point: torch's sends and receives, matched by pair of ranks in the order of the calls.

The rules that users see are in docs/torch-backend.md.
"""

from __future__ import annotations

import torch

from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.checks import Tensors, one
from hdpcomm.torch_backend.state import GroupState
from hdpcomm.torch_backend.work import BackendWork

__all__ = ["Messages"]


class Messages:
    """The point-to-point methods of a group. Ranks in arguments are positions in the group."""

    def __init__(self, state: GroupState) -> None:
        self._state = state

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
        tensor = one(tensors, "send", "tensors")
        comm, peer = self._way("send", tensor, dst, tag)
        operation = self._state.begin("send", None)
        operation.start(comm.send, operation.source(tensor), peer)
        return self._state.end(operation, [], in_order=False)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
        tensor = one(tensors, "recv", "tensors")
        comm, peer = self._way("recv", tensor, src, tag)
        operation = self._state.begin("recv", None)
        operation.source_rank = src
        operation.start(comm.recv, operation.target(tensor), peer)
        return self._state.end(operation, [tensor], in_order=False)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> BackendWork:
        raise NotImplementedError(
            "hdpcomm backend: recv() from any source; messages of a pair of ranks are matched in the order of the "
            "calls: name the source"
        )

    def _way(self, call: str, tensor: torch.Tensor, rank: int, tag: int) -> tuple[Communicator, int]:
        """The communicator that moves the message, and the peer's rank there."""
        state = self._state
        if not 0 <= rank < len(state.ranks):
            raise InvalidUsage(f"{call}() got rank {rank}; this group has ranks 0..{len(state.ranks) - 1}")
        if tag:
            raise NotImplementedError(
                f"hdpcomm backend: {call}() with tag {tag}; messages of a pair of ranks are matched in the order of "
                "the calls: leave the tag out"
            )
        if state.communicator._by_streams(tensor):
            return state.communicator, rank
        return state.engine.messages, state.ranks[rank]
