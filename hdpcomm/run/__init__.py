"""Training runs: configuration, checkpoints, metrics; everything that makes steps a run."""

from hdpcomm.run.checkpoints import Checkpoint, CheckpointFolder, open_checkpoint
from hdpcomm.run.config import RunConfig, learning_rate
from hdpcomm.run.loop import RunResult, Saving, check_limits, train
from hdpcomm.run.metrics_log import MetricsLog, read_metrics

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "MetricsLog",
    "RunConfig",
    "RunResult",
    "Saving",
    "check_limits",
    "learning_rate",
    "open_checkpoint",
    "read_metrics",
    "train",
]
