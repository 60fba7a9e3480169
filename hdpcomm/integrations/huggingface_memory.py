"""The least stage of ZeRO that fits a model of transformers' trainers into the memory that there is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.options import LoraOptions
from hdpcomm.run import RunConfig
from hdpcomm.run.memory import fit_zero
from hdpcomm.run.model import folder_model, model_path

if TYPE_CHECKING:
    from hdpcomm.comm.mesh import Mesh

__all__ = ["least_zero"]

_ROOM = 0.9
"""Share of the memory for a step; the rest is for fragments and for what else lives there."""


def least_zero(
    model: Any,
    given: Iterable[Any],
    mesh: Mesh,
    *,
    capacity: int | None,
    dtype: torch.dtype | None,
) -> int:
    """The least stage with which a step fits, as ``hdpcomm train --zero auto`` finds it. Collective; the first rank
    predicts, which takes some seconds.

    Args:
        model: the trainer's, or its folder.
        mesh: on which it will be trained.
        given: arguments of the trainer; adapters, and whether layers are computed again, are looked for in them.

    Raises: InvalidUsage: no capacity, or no stage fits. On all ranks alike.
    """
    if capacity is None:
        raise InvalidUsage(
            "Trainer: zero='auto' without capacity=; give the most tokens of a rank at once, with which memory grows"
        )
    comm = mesh.comm
    found: list[Any] = [None, None]
    with comm.liveness_deadlines():
        if comm.rank == 0:
            with comm.busy("predicts the memory of a step"):
                try:
                    found = [_least_zero(model, list(given), mesh, capacity, dtype), None]
                except InvalidUsage as error:
                    found = [None, str(error)]
        (zero, problem), *_ = gather_json(comm, found)
    if problem is not None:
        raise InvalidUsage(problem)
    return int(zero)


def _least_zero(model: Any, given: list[Any], mesh: Mesh, capacity: int, dtype: torch.dtype | None) -> int:
    comm, nodes = mesh.comm, nodes_of(mesh.comm)
    on_host = nodes.count(nodes[0])
    arguments = [each for each in given if isinstance(each, transformers.TrainingArguments)]
    again = any(each.gradient_checkpointing for each in arguments)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        if isinstance(model, torch.nn.Module):
            model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        else:
            where = model_path(Path(model))
        kind, adapters = folder_model(where), [*given, *getattr(model, "peft_config", {}).values()]
        config = RunConfig(
            model=kind, lora=_adapters(adapters), capacity=capacity, zero="auto",
            dtype="bf16" if dtype == torch.bfloat16 else "fp32", recompute="full" if again else "none",
            memory=int(_ROOM * _memory_bytes(comm.device, on_host)), tensor=mesh.tensor, expert=mesh.expert,
        )  # fmt: skip
        return fit_zero(None, config, comm.size, max(1, on_host // mesh.tensor))


def _adapters(given: list[Any]) -> str | None:
    """Adapters of LoRA among the arguments, as far as they take memory."""
    for each in given:
        if type(each).__name__ == "LoraConfig":
            targets = each.target_modules
            names = (targets,) if isinstance(targets, str) else tuple(sorted(targets or ("q_proj", "v_proj")))
            return str(LoraOptions(rank=each.r, alpha=int(each.lora_alpha), targets=names))
    return None


def _memory_bytes(device: torch.device, ranks_on_host: int) -> float:
    """Memory for one rank: of its device, or its share of what the host has available."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024.0 * int(rows["MemAvailable"].split()[0]) / ranks_on_host
