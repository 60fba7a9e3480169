"""Ring attention for the check mode: tells the simulated device which keys the attention kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, ring
from hdpcomm.attention import ring_attention as attend

__all__ = ["annotated", "ring_attention"]

LENGTHS = [37, 1, 12, 6]


@contextmanager
def annotated() -> Iterator[None]:
    """Tells the device that the host reads KV after the exchange of the next block is posted (as backends do), and that
    the host writes the rank's own block in the landing zone before the first exchange."""
    kv, post = ring._RingBuffers.kv, ring._RingBuffers.post

    def streams_of(buffers: Any) -> Any:
        on_sim = buffers._comm is not None and buffers._comm.device.type == "cpu"
        return getattr(buffers._comm, "streams", None) if on_sim else None

    def writing(self: Any, due: int, *, grads: bool) -> Any:
        if due == 0 and self._landing is not None and streams_of(self) is not None:
            own = self._kv[0]
            streams_of(self).device.annotate_write(own.data_ptr(), own.numel() * own.element_size())
        return post(self, due, grads=grads)

    def reading(self: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step > 0 and streams_of(self) is not None:
            buffer = self._kv[step]
            streams_of(self).device.annotate_read(buffer.data_ptr(), buffer.numel() * buffer.element_size())
        return kv(self, step)

    with mock.patch.object(ring._RingBuffers, "kv", reading), mock.patch.object(ring._RingBuffers, "post", writing):
        yield


def ring_attention() -> None:
    """Forward and backward, causal and with a window (whose blocks go through slots)."""
    with hdp.init() as comm:
        cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        generator = torch.Generator().manual_seed(7)
        for window in (None, 9):
            q, k, v = (
                hdp.attention.shard(
                    torch.randn(sum(LENGTHS), 2, 8, generator=generator), cu, rank=comm.rank, size=comm.size
                ).requires_grad_()
                for _ in range(3)
            )
            options = AttentionOptions(variant="ring", check=False)
            out = attend(q, k, v, comm=comm, cu_seqlens=cu, window=window, options=options)
            assert isinstance(out, torch.Tensor)
            out.sum().backward()
