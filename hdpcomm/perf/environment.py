"""The environment of a run: what is recorded of it, and how ranks that a launcher started find each other."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hdpcomm.errors import InvalidUsage

__all__ = ["adopt_launcher", "recorded", "without_launcher"]

_RECORDED_PREFIXES = ("HDPCOMM_", "NCCL_")
_RECORDED_NAMES = ("CUDA_VISIBLE_DEVICES",)


def recorded(environment: Mapping[str, str]) -> list[str]:
    """``NAME=value`` of the variables that may be written to a file; all others stay private."""
    names = [name for name in environment if name.startswith(_RECORDED_PREFIXES) or name in _RECORDED_NAMES]
    return [f"{name}={environment[name]}" for name in sorted(names)]


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables in which a launcher tells a rank its place; the first ``size`` that is set counts."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_rank: str
    local_sizes: tuple[str, ...]
    jobs: tuple[str, ...]  # equal on all ranks of a job, different between jobs
    option: str  # how a variable is given to all ranks


_LAUNCHERS = (
    _Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT",
    ),
    _Launcher(
        "mpirun (MPICH)",
        "PMI_RANK",
        ("PMI_SIZE",),
        "MPI_LOCALRANKID",
        ("MPI_LOCALNRANKS",),
        (),
        "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT PORT",
    ),
    _Launcher(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        ("SLURM_JOB_ID",),
        "MASTER_ADDR=HOST MASTER_PORT=PORT srun",
    ),
)


def adopt_launcher(environment: MutableMapping[str, str]) -> bool:
    """Sets RANK, WORLD_SIZE and their like from what mpirun or srun gave; returns whether this is a rank of a job.

    torchrun's variables win and are left alone. MASTER_ADDR and MASTER_PORT are left alone where they are given. On
    one host they are chosen otherwise: 127.0.0.1, and a port by the job's number. Local.

    Raises: InvalidUsage for a job on several hosts without MASTER_ADDR and MASTER_PORT.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return True
    for launcher in _LAUNCHERS:
        size = next((environment[name] for name in launcher.sizes if name in environment), None)
        if launcher.rank not in environment or size is None:
            continue
        if launcher.name == "srun" and "SLURM_STEP_ID" not in environment:
            continue  # the batch script of a job, which is no rank
        local_size = next((environment[name] for name in launcher.local_sizes if name in environment), size)
        environment["RANK"], environment["WORLD_SIZE"] = environment[launcher.rank], size
        environment["LOCAL_RANK"] = environment.get(launcher.local_rank, environment[launcher.rank])
        environment["LOCAL_WORLD_SIZE"] = local_size.split("(")[0].split(",")[0]  # srun writes 4(x2),3
        _choose_store(environment, launcher)
        return True
    return False


def _choose_store(environment: MutableMapping[str, str], launcher: _Launcher) -> None:
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:
        raise InvalidUsage(
            f"{launcher.name} started {environment['WORLD_SIZE']} ranks on several hosts; say where rank 0 is: "
            f"{launcher.option} ..."
        )
    job = "/".join(environment[name] for name in (*launcher.jobs, "SLURM_STEP_ID") if name in environment)
    job = job or str(os.getppid())  # the launcher's process on this host
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 12000))


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for an mpirun of our own: without what an outer launcher gave."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_", "SLURM_", "TORCHELASTIC_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes) and name not in names}
