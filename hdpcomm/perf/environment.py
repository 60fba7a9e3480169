"""Environment variables of a run: which are recorded, and which are hidden from an mpirun that is started here."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["recorded", "without_launcher"]

_RECORDED_PREFIXES = ("HDPCOMM_", "NCCL_")
_RECORDED_NAMES = ("CUDA_VISIBLE_DEVICES",)


def recorded(environment: Mapping[str, str]) -> list[str]:
    """``NAME=value`` for each variable that may be written to a file; all others stay private."""
    names = [name for name in environment if name.startswith(_RECORDED_PREFIXES) or name in _RECORDED_NAMES]
    return [f"{name}={environment[name]}" for name in sorted(names)]


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for an mpirun that is started here: without the variables of an outer launcher."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_", "SLURM_", "TORCHELASTIC_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes) and name not in names}
