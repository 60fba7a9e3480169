"""Training runs: configuration, checkpoints, metrics; everything that makes steps a run."""

from hdpcomm.run.calibrate import calibrate
from hdpcomm.run.checkpoints import Checkpoint, CheckpointFolder, open_checkpoint
from hdpcomm.run.config import RunConfig, Schedule, learning_rate
from hdpcomm.run.dry_run import DryRun, dry_run
from hdpcomm.run.evaluation import Evaluation, evaluate
from hdpcomm.run.files import RunFiles
from hdpcomm.run.limits import check_limits
from hdpcomm.run.loop import train
from hdpcomm.run.metrics_log import MetricsLog, read_lines, read_metrics
from hdpcomm.run.model import FolderModel, export_model, folder_model, model_path
from hdpcomm.run.options import RunResult, Saving, Watching

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "DryRun",
    "Evaluation",
    "FolderModel",
    "MetricsLog",
    "RunConfig",
    "RunFiles",
    "RunResult",
    "Saving",
    "Schedule",
    "Watching",
    "calibrate",
    "check_limits",
    "dry_run",
    "evaluate",
    "export_model",
    "folder_model",
    "model_path",
    "learning_rate",
    "open_checkpoint",
    "read_lines",
    "read_metrics",
    "train",
]
