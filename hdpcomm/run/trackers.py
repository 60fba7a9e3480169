"""TensorBoard and Weights & Biases, where they are installed.

Not by accelerate's trackers, which join torch.distributed wherever RANK is set, nor by transformers' callbacks, which
need the state of its Trainer.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hdpcomm.errors import InvalidUsage

__all__ = ["TRACKERS", "Tracker", "open_trackers", "tracker_names"]


class Tracker(Protocol):
    """Takes the figures of steps."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step, by name."""

    def close(self) -> None:
        """Writes what is left."""


class _TensorBoard:
    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"), flush_secs=10)
        self._writer.add_text("config", "    " + str(config).replace(", ", "\n    "))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Offline unless ``WANDB_MODE`` says otherwise: nothing leaves the machine until ``wandb sync`` is called."""

    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(project="hdpcomm", name=out.name, dir=str(out), mode=mode, config=config)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


def tracker_names(wanted: str) -> list[str]:
    """The trackers of a run, see :func:`open_trackers`. Raises: InvalidUsage if the one that is wanted is missing."""
    if wanted == "none":
        return []
    if wanted != "auto" and importlib.util.find_spec(wanted) is None:
        raise InvalidUsage(f"--trackers {wanted} was given and {wanted} is not installed; pip install {wanted}")
    return [name for name in TRACKERS if wanted == name or (wanted == "auto" and importlib.util.find_spec(name))]


def open_trackers(wanted: str, out: Path, config: dict[str, Any]) -> list[Tracker]:
    """The trackers of a run, which write below ``out``.

    Args:
        wanted: ``auto``: those that are installed; ``none``; or the name of one, which must be installed.
    """
    return [TRACKERS[name](out, config) for name in tracker_names(wanted)]
