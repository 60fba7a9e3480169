"""Who started this rank, and where its world meets: torchrun, srun or mpirun, by their environment variables.

torchrun's variables win: whoever sets ``WORLD_SIZE`` has decided. Sources: torchrun's documentation; Slurm's manual
page of srun ("output environment variables"); Open MPI's "environment variables set by mpirun"; MPICH's Hydra (PMI).
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass

from hdpcomm.errors import InvalidUsage

__all__ = ["Place", "first_host", "joined", "master", "place", "rank_and_size"]

_PORTS = range(20_000, 30_000)  # for jobs whose launcher names none


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place, as its launcher tells.

    Attributes:
        address: of rank 0's host, where the launcher tells it.
        job: what names the job, equal on all of its ranks and on no other job of the host; empty if it is not told.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    address: str | None
    job: str


def place() -> Place | None:
    """Where this process stands, by srun's or mpirun's variables; ``None`` if it is alone (or torchrun's are set).

    Raises: InvalidUsage for a variable that is no integer, or a rank outside its world.
    """
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:  # a batch script without srun has no step
        nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
        job = f"slurm {os.environ.get('SLURM_JOB_ID', '')}.{os.environ['SLURM_STEP_ID']}"
        address = first_host(nodes) if nodes else None
        return _checked("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", address, job)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        one_host = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ.get("OMPI_COMM_WORLD_SIZE")
        job = os.environ.get("PMIX_NAMESPACE", os.environ.get("OMPI_MCA_ess_base_jobid", ""))  # noqa: SIM112
        return _checked(
            "mpirun",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "127.0.0.1" if one_host else None,
            job,
        )
    if "PMI_RANK" in os.environ and "PMI_SIZE" in os.environ:
        one_host = os.environ.get("MPI_LOCALNRANKS") == os.environ["PMI_SIZE"]
        return _checked("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "127.0.0.1" if one_host else None, "")
    return None


def joined() -> bool:
    """Whether a launcher has started this process as a rank of a world."""
    return "WORLD_SIZE" in os.environ or place() is not None


def rank_and_size() -> tuple[int, int]:
    """This rank and the size of its world, where :func:`joined`.

    Raises: InvalidUsage, saying which variable is wrong.
    """
    if "WORLD_SIZE" not in os.environ:
        found = place()
        assert found is not None
        return found.rank, found.size
    size = _integer("WORLD_SIZE")
    if size < 1:
        raise InvalidUsage(f"WORLD_SIZE={size}; give at least 1")
    if "RANK" not in os.environ:
        raise InvalidUsage("RANK is not set, but WORLD_SIZE is; start the ranks with torchrun, or set both")
    rank = _integer("RANK")
    if not 0 <= rank < size:
        raise InvalidUsage(f"RANK={rank} is not in 0..{size - 1} (WORLD_SIZE={size})")
    return rank, size


def master() -> tuple[str, int]:
    """Address and port of the job's store: ``MASTER_ADDR`` and ``MASTER_PORT``, else what the launcher tells.

    Raises: InvalidUsage, saying what to set.
    """
    found = None if "WORLD_SIZE" in os.environ else place()
    address = os.environ.get("MASTER_ADDR") or (found.address if found else "127.0.0.1")
    if address is None:
        assert found is not None
        raise InvalidUsage(
            f"{found.launcher} started ranks on several hosts and does not tell where rank 0 is; set MASTER_ADDR to "
            "its host on all ranks (mpirun -x MASTER_ADDR=...)"
        )
    if "MASTER_PORT" in os.environ:
        return address, _integer("MASTER_PORT")
    if found is not None and found.job:
        return address, _PORTS[zlib.crc32(found.job.encode()) % len(_PORTS)]
    raise InvalidUsage(
        "MASTER_PORT is not set, and nothing else says where the ranks meet; start them with torchrun, or set "
        "MASTER_PORT to a port that is free on rank 0's host"
    )


def first_host(nodes: str) -> str:
    """Of a Slurm node list: ``gpu[007-009,12],login1`` begins with ``gpu007``."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    assert match is not None
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _checked(launcher: str, rank: str, size: str, local: str, address: str | None, job: str) -> Place:
    found = Place(launcher, _integer(rank), _integer(size), _integer(local, 0), address, job)
    if found.size < 1 or not 0 <= found.rank < found.size:
        raise InvalidUsage(f"{rank}={found.rank} is not in 0..{found.size - 1} ({size}={found.size})")
    return found


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise InvalidUsage(f"{name}={text!r} is not an integer; the launcher sets it right") from error
