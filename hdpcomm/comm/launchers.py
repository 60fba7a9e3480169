"""Who started this rank, and where its world meets: torchrun, srun or mpirun, by their environment variables.

torchrun's variables win: whoever sets ``WORLD_SIZE`` has decided. Sources: torchrun's documentation; Slurm's manual
page of srun ("output environment variables"); Open MPI's "environment variables set by mpirun"; MPICH's Hydra (PMI).
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from hdpcomm.errors import InvalidUsage

__all__ = ["agent_restarts", "first_host", "joined", "local_place", "master", "place", "rank_and_size", "tasks_on_node"]

_PORTS = range(20_000, 30_000)  # for jobs whose launcher names none


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in its job, by the variables of its launcher.

    Attributes:
        local_rank: its number among the ranks of its host; ``None`` if the launcher does not say.
        local_size: ranks on its host; ``None`` if the launcher does not say.
        address: of rank 0's host; ``None`` if the launcher does not say.
        job: the job's name, equal on all of its ranks and on no other job of the host; empty if it has none.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    job: str


def place() -> Place | None:
    """Where this process stands, by srun's or mpirun's variables (not torchrun's); ``None`` if alone.

    mpirun comes first: in a Slurm allocation it starts its daemons by srun, and ranks inherit the daemon's place. The
    ``PMI_`` variables alone are also those of ``srun --mpi=pmi2``, whose own variables say more.

    Raises: InvalidUsage for a variable that is no integer, or a rank outside its world.
    """
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        job = os.environ.get("PMIX_NAMESPACE", os.environ.get("OMPI_MCA_ess_base_jobid", ""))  # noqa: SIM112
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        return _of_mpi("mpirun", names, job)
    hydra = "PMI_RANK" in os.environ and "PMI_SIZE" in os.environ
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    if hydra and "MPI_LOCALNRANKS" in os.environ:
        return _of_mpi("mpiexec", names, "")
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:  # a batch script without srun has no step
        return _of_slurm()
    return _of_mpi("mpiexec", names, "") if hydra else None


def _of_slurm() -> Place:
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
    node = _integer_or_none("SLURM_NODEID") or 0
    local_size = tasks_on_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
    rank, size = _integer("SLURM_PROCID"), _integer("SLURM_STEP_NUM_TASKS")
    address = "127.0.0.1" if local_size == size else first_host(nodes) or None
    job = f"slurm {os.environ.get('SLURM_JOB_ID', '')}.{os.environ['SLURM_STEP_ID']}"
    found = Place("srun", rank, size, _integer_or_none("SLURM_LOCALID"), local_size, address, job)
    return _checked(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), found)


def _of_mpi(launcher: str, names: list[str], job: str) -> Place:
    """A place by MPI's variables; ``names``: those with rank, size, local rank and local size."""
    rank, size = _integer(names[0]), _integer(names[1])
    local_rank, local_size = _integer_or_none(names[2]), _integer_or_none(names[3])
    one_host = local_size == size
    address = "127.0.0.1" if one_host else None
    job = job or (_starter() if one_host else "")
    return _checked((names[0], names[1]), Place(launcher, rank, size, local_rank, local_size, address, job))


def _starter() -> str:
    """The process that started the ranks of this host: Hydra's proxy, also where a script lies between, or the parent.

    MPICH names the job nowhere in the environment.
    """
    process = os.getppid()
    try:
        while process > 1:
            if "pmi_proxy" in Path(f"/proc/{process}/comm").read_text():
                return f"process {process}"
            # The second field, the name, may hold blanks and brackets; the parent is the second one after it.
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it ended, or is not ours to see
        pass
    return f"process {os.getppid()}"


def joined() -> bool:
    """Whether a launcher has started this process as a rank of a world.

    One process of srun or mpirun alone is none: an interactive shell (``srun --pty bash``) is such a one, and what runs
    in it is free to start ranks. torchrun's variables make a world of one too.
    """
    if "WORLD_SIZE" in os.environ:
        return True
    found = place()
    return found is not None and found.size > 1


def agent_restarts() -> int | None:
    """How often torchrun's agent has started the ranks of this job anew; ``None`` without such an agent.

    It ends all ranks when one dies, and starts all of them again (``--max-restarts``).
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return _integer_or_none("TORCHELASTIC_RESTART_COUNT") or 0


def local_place(rank: int, size: int) -> tuple[int, int]:
    """The number of this rank among the ranks of its host, and how many those are. Local.

    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``; else what srun or mpirun says of a world of ``size`` ranks; else as if all
    ranks were on this host. Raises: InvalidUsage for a variable that is no such number.
    """
    local_rank, local_size = _integer_or_none("LOCAL_RANK"), _integer_or_none("LOCAL_WORLD_SIZE")
    if local_rank is not None and local_rank < 0:
        raise InvalidUsage(f"LOCAL_RANK={local_rank}; give 0 or more")
    if local_size is not None and local_size < 1:
        raise InvalidUsage(f"LOCAL_WORLD_SIZE={local_size}; give at least 1")
    if local_rank is None or local_size is None:
        found = place()
        if found is not None and found.size == size:
            local_rank = found.local_rank if local_rank is None else local_rank
            local_size = found.local_size if local_size is None else local_size
    local_size = size if local_size is None else local_size
    return (rank % local_size if local_rank is None else local_rank), local_size


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
    """Address and port of the job's store: ``MASTER_ADDR`` and ``MASTER_PORT``, else what the launcher says.

    Raises: InvalidUsage, saying what to set.
    """
    found = None if "WORLD_SIZE" in os.environ else place()
    address = os.environ.get("MASTER_ADDR") or (found.address if found else "127.0.0.1")
    if address is None:
        assert found is not None
        raise InvalidUsage(
            f"{found.launcher} started ranks on several hosts and does not tell where rank 0 is; set MASTER_ADDR to "
            "its host on all ranks (mpirun -x MASTER_ADDR=..., with MPICH mpiexec -genv MASTER_ADDR ...)"
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
    """The first host of a Slurm node list: of ``gpu[007-009,12],login1`` that is ``gpu007``."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    assert match is not None
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def tasks_on_node(counts: str, node: int) -> int | None:
    """How many ranks run on a node, by Slurm's task counts: ``4(x2),3`` are 4, 4 and 3. ``None`` if it is not there."""
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _checked(names: tuple[str, str], found: Place) -> Place:
    """The place, if its rank is inside its world; ``names``: the variables with rank and size."""
    if found.size < 1 or not 0 <= found.rank < found.size:
        raise InvalidUsage(f"{names[0]}={found.rank} is not in 0..{found.size - 1} ({names[1]}={found.size})")
    return found


def _integer_or_none(name: str) -> int | None:
    return _integer(name) if name in os.environ else None


def _integer(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError as error:
        raise InvalidUsage(f"{name}={text!r} is not an integer; the launcher sets it right") from error
