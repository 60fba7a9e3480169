"""The stages of a model on one device of a pipeline as one module, to measure what they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hdpcomm.attention.packs import CuSeqlens
    from hdpcomm.comm import Communicator
    from hdpcomm.parallel.stages import Stage

__all__ = ["DeviceStages"]


class DeviceStages(nn.Module):
    """Runs one micro-batch through the stages of a device, one after the other. What other stages give is made up.

    Called like a model with labels. Its loss is the model's if the last stage is here; else one whose gradient is as
    large as what comes from the next stage.

    Args:
        stages: of one device, in order, cut for its tensor and expert ranks.

    Attributes:
        layers: of all stages, in order.
    """

    takes_labels = True

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.stages = tuple(stages)
        for place, stage in enumerate(stages):
            self.add_module(f"stage{place}", stage)
        self.layers = nn.ModuleList(block for stage in stages for block in stage.blocks)
        self.tensor, self.expert = stages[0].tensor, stages[0].expert
        if stages[0].first:
            self.embedding = stages[0].embedding
        if stages[-1].last:  # as models tell how their loss is computed
            self.chunk_tokens = stages[-1].chunk_tokens
            self.last_layer = stages[-1].last_layer

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        cu_seqlens: CuSeqlens,
        comm: Communicator,
        labels: Tensor,
    ) -> Tensor:
        """The loss of ``tokens: [local tokens]``. Collective over ``comm``, and the ranks that share layers."""
        x: Any = tokens
        where: dict[str, Any] = {"positions": positions, "cu_seqlens": cu_seqlens, "comm": comm}
        for stage in self.stages:
            if not stage.first and x is tokens:
                x = self._given(stage, tokens.shape[0])
            if stage.last:
                stage.chunk_tokens = self.chunk_tokens
            x = stage(x, **where, labels=labels if stage.last or stage.has_added_losses else None)
        x, carried = x if isinstance(x, tuple) else (x, None)
        total: Tensor = x if self.stages[-1].last else (x * x.detach()).sum()
        return total if carried is None else total + carried.sum()

    def _given(self, stage: Stage, tokens: int) -> Tensor:
        """Rows that differ, since routers send equal ones to the same experts."""
        x = stage.boundary(tokens)
        if not x.is_meta:
            x.normal_(generator=torch.Generator(x.device).manual_seed(0))
        return x.requires_grad_()
