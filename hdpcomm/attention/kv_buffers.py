"""Two alternating buffers in the landing zone of a device world: KV arrives where the attention kernel reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hdpcomm.attention.payload import Payload
from hdpcomm.attention.routes import RingPlan

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.device.landing_zone import LandingZone

__all__ = ["LandingBuffers", "landing_of"]

_ALIGNMENT = 4096


class LandingBuffers:
    """The two buffers of one pass; that of step ``t`` is free again when the work of step ``t`` is done.

    Both sides compute a message's offset from the plan, so they need not exchange it.
    """

    __slots__ = ("_bytes", "_lands", "_rows", "_type", "_width", "_zone")

    def __init__(self, zone: LandingZone, plan: RingPlan, comm: Communicator, payload: Payload) -> None:
        self._width, self._rows = payload.width, payload.rows
        self._type = payload.like.dtype
        self._bytes = _buffer_bytes(plan, payload)
        self._zone = zone
        self._lands = {
            message.peer: comm.lands(message.peer)
            for step in plan.steps
            for message in (*step.kv_sends, *step.kv_recvs)
        }
        zone.enter()

    def place(self, peer: int, step: int) -> tuple[int, ...]:
        """The offset argument of a KV message that is due at ``step``: where the step's buffer begins, in bytes.

        Empty if the peer is on another host, where messages take no offset: the receiver's buffer is the same, and the
        message goes there as to any other memory.
        """
        return (self._offset(step),) if self._lands[peer] else ()

    def _offset(self, step: int) -> int:
        return step % 2 * self._bytes

    def buffer(self, step: int, rows: int) -> torch.Tensor:
        """[rows, width]"""
        size = rows * self._width * self._type.itemsize
        start = self._offset(step)
        return self._zone.memory[start : start + size].view(self._type).view(rows, self._width)

    def own(self) -> torch.Tensor:
        """The buffer of step 0, for this rank's own KV, which is sent from the zone like that of later steps."""
        return self.buffer(0, self._rows)

    def close(self) -> None:
        """Releases the landing zone; call it when all work that reads the buffers is enqueued."""
        self._zone.leave()


def _buffer_bytes(plan: RingPlan, payload: Payload) -> int:
    used = plan.most_rows * payload.width * payload.like.element_size()
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def landing_of(plan: RingPlan, comm: Communicator | None, payload: Payload) -> LandingBuffers | None:
    """The landing buffers of a pass, or None if the transport has no zone for the payload or both do not fit into it.

    Ranks that can send to each other's zone have zones of one size, so both ends of a message decide alike.
    """
    if comm is None or not plan.neighbours_only:
        return None
    source = next((message.peer for step in plan.steps for message in step.kv_recvs), None)
    zone = comm.landing_zone(payload.like, source if source is not None and comm.lands(source) else None)
    if zone is None or 2 * _buffer_bytes(plan, payload) > zone.memory.numel():
        return None
    return LandingBuffers(zone, plan, comm, payload)
