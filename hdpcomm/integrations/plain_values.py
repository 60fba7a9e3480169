"""Files of tensors and plain values, as other trainers write them beside a model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from hdpcomm.errors import InvalidUsage, first_line

__all__ = ["read_plain_values"]


def read_plain_values(path: Path, expected: str) -> Any:
    """Reads a file of ``torch.save`` without running code of it; tensors stay in the file until they are used. Local.

    Args:
        expected: the content, and what to do without it, for the error.

    Raises: InvalidUsage: it is damaged, cannot be read, or holds more than plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        # torch's own text says how to let such a file run code.
        told = "no plain values" if isinstance(error, pickle.UnpicklingError) else first_line(error)
        raise InvalidUsage(f"{path}: {told}; expected {expected}") from None
