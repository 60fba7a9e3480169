"""hdpcomm: communication and scheduling for training on very short and very long sequences at once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hdpcomm.errors import Aborted, CommTimeout, DeviceError, Error, InvalidUsage, Mismatch, PeerLost

if TYPE_CHECKING:
    from hdpcomm import (
        attention,
        comm,
        data,
        kernels,
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
    from hdpcomm.comm import Communicator, Work, init

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "CommTimeout",
    "Communicator",
    "DeviceError",
    "Error",
    "InvalidUsage",
    "Mismatch",
    "PeerLost",
    "Work",
    "__version__",
    "attention",
    "comm",
    "data",
    "init",
    "kernels",
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
]

# Loaded on first use: planning and the command line do without torch, whose import takes seconds.
_ROOMS = (
    "attention",
    "comm",
    "data",
    "kernels",
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
_FROM_COMM = ("Communicator", "Work", "init")


def __getattr__(name: str) -> Any:
    if name in _FROM_COMM:
        return getattr(importlib.import_module("hdpcomm.comm"), name)
    if name in _ROOMS:
        return importlib.import_module(f"hdpcomm.{name}")
    raise AttributeError(f"module 'hdpcomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
