"""Checkpoints of transformers' trainer where ranks have parts of the weights or of the optimizer's state."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from hdpcomm.errors import InvalidUsage, first_line

if TYPE_CHECKING:
    from hdpcomm.train.state import State

__all__ = ["file_copy", "load_optimizer", "load_scheduler", "read_plain_values", "save_optimizer"]

_MASTERS = "hdpcomm_masters"
"""In the file of the optimizer's state, which torch's optimizers leave alone: wide weights by name."""
_INSTEAD = "resume from another checkpoint"
_IN_MEMORY = 1 << 20
"""Bytes up to which a tensor is copied into memory."""


def file_copy(folder: str) -> Callable[[Tensor], Tensor]:
    """A function that copies a tensor into a file of the folder that has no name and is gone with the copy: of what is
    whole nowhere, a rank that saves keeps no more in memory than the system likes to. Local.

    Raises (the function): OSError: the disk has no room.
    """

    def copy(tensor: Tensor) -> Tensor:
        if tensor.nbytes < _IN_MEMORY:
            return tensor.to("cpu", copy=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hdpcomm-") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a page without room would be a SIGBUS later
            made = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return made.view(tensor.shape).copy_(tensor)

    return copy


def save_optimizer(state: State, names: Sequence[Sequence[str]], scheduler: Any, folder: str, *, writes: bool) -> None:
    """Writes the state of the whole optimizer as torch's ``state_dict()`` numbers it, and that of the schedule.
    Collective.

    Args:
        names: of the parameters of each group, in the order in which the optimizer was made.
        writes: this rank does.
    """
    whole = state.whole(("optimizer", "masters"), keep=file_copy(folder) if writes else None)
    if not writes:
        return
    optimizer = whole["optimizer"]
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    options = {name: group for group in optimizer["param_groups"] for name in group["params"]}
    groups = [
        {**options[group[0]], "params": [numbers[name] for name in group]} if group else {"params": []}
        for group in names
    ]
    numbered = {numbers[name]: value for name, value in optimizer["state"].items()}
    saved = {"state": numbered, "param_groups": groups, _MASTERS: whole.get("masters", {})}
    torch.save(saved, Path(folder) / OPTIMIZER_NAME)
    torch.save(scheduler.state_dict(), Path(folder) / SCHEDULER_NAME)


def load_scheduler(scheduler: Any, folder: str) -> None:
    """Reads the state of the schedule, if the checkpoint has one. Local."""
    if (path := Path(folder) / SCHEDULER_NAME).exists():
        scheduler.load_state_dict(read_plain_values(path, f"the state of a schedule: {_INSTEAD}"))


def load_optimizer(state: State, names: Sequence[Sequence[str]], folder: str) -> None:
    """Takes this rank's parts of what :func:`save_optimizer`, or transformers' own trainer, has written, if the
    checkpoint has it. Collective.

    Raises: InvalidUsage: it is damaged, or of an optimizer of other groups.
    """
    path = Path(folder) / OPTIMIZER_NAME
    if not path.exists():
        return
    saved = read_plain_values(path, f"the state of an optimizer: {_INSTEAD}")
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise InvalidUsage(f"{path}: no state and param_groups; expected the state of an optimizer: {_INSTEAD}")
    found, expected = ([len(group) for group in each] for each in ((g["params"] for g in saved["param_groups"]), names))
    if found != expected:
        raise InvalidUsage(
            f"{path}: groups of {found} parameters, and the trainer's optimizer has {expected}; resume with the model "
            "and the optimizer that were saved"
        )
    by_number = {
        number: name
        for group, own in zip(saved["param_groups"], names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    optimizer = {
        "state": {by_number[number]: value for number, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(saved["param_groups"], names, strict=True)
        ],
    }
    given = {"optimizer": optimizer}
    if masters := saved.get(_MASTERS):
        given["masters"] = masters
    state.load({**state.parts(), **given})


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
