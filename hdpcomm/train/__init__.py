"""Training: the step of Hybrid Data Parallelism."""

from hdpcomm.train.gradients import Gradients
from hdpcomm.train.loss import IGNORE, next_token_labels, summed_loss
from hdpcomm.train.losses import GroupLoss, TokenLoss, rollout
from hdpcomm.train.materialize import materialize
from hdpcomm.train.matrix_owners import MatrixOwners
from hdpcomm.train.metrics import Span, StepMetrics, Timeline, Totals, totals
from hdpcomm.train.reshard import Reshard
from hdpcomm.train.shards import Fetch, FetchParts, PackedShard, pack_shard
from hdpcomm.train.trainer import Trainer

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
    "rollout",
    "summed_loss",
    "totals",
]
