"""Training: the step of Hybrid Data Parallelism."""

from hdpcomm.train.losses import GroupLoss, TokenLoss, rollout
from hdpcomm.train.losses.functions import IGNORE, next_token_labels, summed_loss
from hdpcomm.train.losses.shards import Fetch, FetchParts, PackedShard, pack_shard
from hdpcomm.train.state.reshard import Reshard
from hdpcomm.train.step.averages import average_weights
from hdpcomm.train.step.metrics import Span, StepMetrics, Timeline, Totals, totals
from hdpcomm.train.step.trainer import Trainer
from hdpcomm.train.zero.gradients import Gradients
from hdpcomm.train.zero.masters import materialize
from hdpcomm.train.zero.matrix_owners import MatrixOwners

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
    "average_weights",
    "materialize",
    "next_token_labels",
    "pack_shard",
    "rollout",
    "summed_loss",
    "totals",
]
