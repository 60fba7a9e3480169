"""KV that arrives where the attention kernel reads it: two buffers in the landing zone of a device world, in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hdpcomm.attention.routes import RingPlan

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.landing import LandingZone

__all__ = ["Landing", "landing_of"]

_ALIGNMENT = 4096


class Landing:
    """The buffers of one pass; that of step ``t`` is free again when the work of step ``t`` is done.

    Both sides compute a message's place from the plan: no word is exchanged about it.
    """

    __slots__ = ("_bytes", "_row", "_type", "_zone")

    def __init__(self, zone: LandingZone, plan: RingPlan, k: torch.Tensor) -> None:
        self._row = (2, *k.shape[1:])
        self._type = k.dtype
        self._bytes = _buffer_bytes(plan, k)
        self._zone = zone
        zone.enter()

    def offset(self, step: int) -> int:
        """Of the buffer of a step, in bytes."""
        return step % 2 * self._bytes

    def buffer(self, step: int, rows: int) -> torch.Tensor:
        """[rows, 2, kv_heads, head_dim]"""
        shape = (rows, *self._row)
        size = torch.Size(shape).numel() * self._type.itemsize
        start = self.offset(step)
        return self._zone.memory[start : start + size].view(self._type).view(shape)

    def close(self) -> None:
        """What reads the buffers has been enqueued."""
        self._zone.leave()


def _buffer_bytes(plan: RingPlan, k: torch.Tensor) -> int:
    used = plan.most_rows * 2 * torch.Size(k.shape[1:]).numel() * k.element_size()
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def landing_of(plan: RingPlan, comm: Communicator | None, k: torch.Tensor) -> Landing | None:
    """The landing buffers of a pass, if the transport of ``k`` has a zone and both fit into it; so on all ranks."""
    if comm is None or not plan.neighbours_only:
        return None
    zone = comm.landing_zone(k)
    if zone is None or 2 * _buffer_bytes(plan, k) > zone.memory.numel():
        return None
    return Landing(zone, plan, k)
