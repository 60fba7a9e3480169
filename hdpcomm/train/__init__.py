"""Training: the step of Hybrid Data Parallelism."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hdpcomm.train.gradients import Gradients
from hdpcomm.train.loss import IGNORE, next_token_labels, summed_loss
from hdpcomm.train.losses import GroupLoss, TokenLoss, rollout
from hdpcomm.train.materialize import materialize
from hdpcomm.train.matrix_owners import MatrixOwners
from hdpcomm.train.metrics import StepMetrics, Totals, totals
from hdpcomm.train.reshard import Reshard
from hdpcomm.train.shards import Fetch, FetchParts, PackedShard, pack_shard
from hdpcomm.train.timeline import Span, Timeline
from hdpcomm.train.trainer import Trainer

if TYPE_CHECKING:
    from torch import nn

    from hdpcomm.comm import Communicator
    from hdpcomm.plan import CostModel

__all__ = [
    "IGNORE",
    "Fetch",
    "FetchParts",
    "Gradients",
    "GroupLoss",
    "MatrixOwners",
    "PackedShard",
    "Reshard",
    "Span",
    "StepMetrics",
    "Timeline",
    "TokenLoss",
    "Totals",
    "Trainer",
    "materialize",
    "next_token_labels",
    "pack_shard",
    "profile_cost_model",
    "rollout",
    "summed_loss",
    "totals",
]


def profile_cost_model(
    model: nn.Module, comm: Communicator, *, longest: int, everyone: Communicator | None = None
) -> CostModel:
    """See :func:`hdpcomm.measure.profile_cost_model`."""
    measure: Any = importlib.import_module("hdpcomm.measure")  # a room above this one, since it runs steps
    costs: CostModel = measure.profile_cost_model(model, comm, longest=longest, everyone=everyone)
    return costs
