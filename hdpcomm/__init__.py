"""hdpcomm: communication and scheduling for training on very short and very long sequences at once.

What a training program needs is here by name (docs/api.md); the rest is importable by its path, one package a room.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hdpcomm.core_path import add_core
from hdpcomm.errors import Aborted, CommTimeout, DeviceError, Error, InvalidUsage, Mismatch, NotFinite, PeerLost

if TYPE_CHECKING:
    from hdpcomm import (
        attention,
        comm,
        data,
        kernels,
        measure,
        models,
        offload,
        parallel,
        perf,
        plan,
        run,
        sim,
        testing,
        trace,
        train,
    )
    from hdpcomm.attention import ring_attention
    from hdpcomm.comm import Communicator, Mesh, Work, init
    from hdpcomm.models.adapt import adapt
    from hdpcomm.offload import ActivationOffload
    from hdpcomm.plan import ClusterSpec, Planner
    from hdpcomm.train import Trainer

__version__ = "0.2.0"
add_core(__path__, __version__)

# Loaded on first use: planning and the command line do without torch, whose import takes seconds.
_ROOMS = (
    "attention",
    "comm",
    "data",
    "kernels",
    "measure",
    "models",
    "offload",
    "parallel",
    "perf",
    "plan",
    "run",
    "sim",
    "testing",
    "trace",
    "train",
)
_HOMES = {
    "ActivationOffload": "offload",
    "ClusterSpec": "plan",
    "Communicator": "comm",
    "Mesh": "comm",
    "Planner": "plan",
    "Trainer": "train",
    "Work": "comm",
    "adapt": "models",
    "init": "comm",
    "ring_attention": "attention",
}
"""The names of the front door beside the errors, and the rooms that have them."""

__all__ = [
    "Aborted",
    "ActivationOffload",
    "ClusterSpec",
    "CommTimeout",
    "Communicator",
    "DeviceError",
    "NotFinite",
    "Error",
    "InvalidUsage",
    "Mesh",
    "Mismatch",
    "PeerLost",
    "Planner",
    "Trainer",
    "Work",
    "__version__",
    "adapt",
    "attention",
    "comm",
    "data",
    "init",
    "kernels",
    "measure",
    "models",
    "offload",
    "parallel",
    "perf",
    "plan",
    "ring_attention",
    "run",
    "sim",
    "testing",
    "trace",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hdpcomm.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"hdpcomm.{name}")
    raise AttributeError(f"module 'hdpcomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
