"""``dist.init_process_group("hdpcomm")``: torch.distributed over hdpcomm's one world of ranks, on one host or several.

Importing this module registers the backend; where hdpcomm is installed, ``import torch`` has done so
(hdpcomm/torch_autoload.py). DDP, FSDP2, DeviceMesh and torch's own tools then run on it::

    import torch.distributed as dist
    import hdpcomm.torch_backend

    dist.init_process_group("hdpcomm")      # for CPU and CUDA tensors; under torchrun or hdpcomm.testing.spawn
    group = dist.new_group([3, 0, 1])       # a subset of the world: nothing is created

docs/torch-backend.md says what differs from gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.group import HdpProcessGroup
from hdpcomm.torch_backend.work import BackendError, BackendLost, BackendMismatch, BackendTimeout, Engine

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "BACKEND",
    "BackendError",
    "BackendLost",
    "BackendMismatch",
    "BackendTimeout",
    "HdpProcessGroup",
    "communicator",
    "create_group",
    "device_mesh",
    "register",
]

#: The name that ``init_process_group`` and ``new_group`` take.
BACKEND = "hdpcomm"


def register() -> None:
    """Makes the backend known to torch.distributed; importing this module has done it. Local, idempotent."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu", "cuda"])


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator under a process group (default: the default group), for what torch has no call for. Local.

    Its operations take their places in the order of the group's collectives: all ranks must mix them alike.
    Raises: InvalidUsage for a group of another backend.
    """
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, HdpProcessGroup):
        raise InvalidUsage(
            f"communicator() got {group!r}; give a group of init_process_group('hdpcomm') or new_group()"
        )
    return group.communicator


def device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """The ranks of a mesh as a torch DeviceMesh with the dimensions ``pp``, ``hdp`` and ``tp``, for DTensor and FSDP2.

    With experts ``hdp`` is the two dimensions ``ep_replicas`` and ``ep``. Collective over all ranks of
    torch.distributed, whose default group is of this backend; its groups are subsets, too.

    Raises: InvalidUsage: torch.distributed is not initialised with this backend, or numbers its ranks in another way.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_initialized() or not isinstance(dist.group.WORLD, HdpProcessGroup):
        raise InvalidUsage(
            f"torch.distributed does not run on hdpcomm; call dist.init_process_group({BACKEND!r}) first"
        )
    if dist.get_world_size() != mesh.comm.size or dist.get_rank() != mesh.comm.global_rank:
        raise InvalidUsage(
            f"this is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed, and rank "
            f"{mesh.comm.global_rank} of a mesh of {mesh.comm.size}; make both over all ranks of one launcher"
        )
    ranks = torch.tensor(mesh.comm.ranks)[mesh.positions]
    names: tuple[str, ...] = ("pp", "hdp", "tp")
    if mesh.expert > 1:
        names = ("pp", "ep_replicas", "ep", "tp")
        ranks = ranks.view(mesh.pipeline, mesh.hdp // mesh.expert, mesh.expert, mesh.tensor)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names)


def create_group(options: Any, _backend_options: Any) -> HdpProcessGroup:
    """Makes the backend of a new group; torch.distributed calls it on every member."""
    seconds = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group)
    world = dist.group.WORLD
    if ranks and isinstance(world, HdpProcessGroup):
        engine = world.engine
        comm = engine.world.subset(ranks)
        if comm is None:
            raise InvalidUsage(f"new_group() called rank {engine.world.rank} a member of {ranks}; it is not")
        return HdpProcessGroup(engine, comm, options.store, name=options.group_id, timeout=seconds)
    # The default group, or a group beside a default group of another backend: a world of its own.
    engine = Engine.join(options.store, options.group_rank, options.group_size, timeout=seconds)
    return HdpProcessGroup(engine, engine.world, options.store, name=options.group_id, timeout=seconds, owner=True)


register()
