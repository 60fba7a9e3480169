"""Memory and values for a rank's part of a model that was made on the meta device: :func:`materialize`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel.stages import Stage
from hdpcomm.train.layout import layout_of, plain_name
from hdpcomm.train.pulled_weights import set_part, without_values
from hdpcomm.train.units import Units, unit_buckets

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.models.weights import Weights

__all__ = ["materialize"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part begins in the whole tensor, and its shape."""


@torch.no_grad()
def materialize(model: nn.Module, mesh: Mesh, weights: Weights, *, zero: int = 0) -> None:
    """Gives the parameters and buffers of a rank's part of a model memory, on the communicator's device, and values.
    Collective over the mesh.

    A tensor that a host holds is read or drawn by one of its ranks, which passes the others' parts on, while those read
    the next ones: a host reads each byte of the files once, and a rank needs no more memory than its part and one
    tensor.

    Args:
        model: on the meta device and cut for this mesh by :func:`hdpcomm.parallel.split_model`, ``tensor_parallel`` and
            ``expert_parallel``; or the ``nn.ModuleList`` of the stages on this rank. Parameters become other objects:
            make optimizers and trainers afterwards. Tied ones stay tied.
        weights: of the whole model: :class:`hdpcomm.models.NewWeights` or :class:`hdpcomm.models.FolderWeights`.
        zero: 3: a parameter gets no memory, but the values of this rank's part of it, for a trainer with ``zero=3``. It
            has to be told what is frozen before. Others: the parameters are whole, as the trainer needs them.

    Raises: InvalidUsage: a parameter has values already; what ``weights`` raises, on the rank that reads; the others
        get PeerLost or Aborted.
    """
    device = mesh.comm.device
    layout = layout_of(model, mesh)
    boxes: dict[str, tuple[Box, list[Tensor]]] = {}  # several with one name: both ends of a pipeline on one rank
    cut = zero == 3
    made: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and isinstance(tensor, nn.Parameter):
            raise InvalidUsage(
                f"{name} has values already, on {tensor.device}; make the model under torch.device('meta'), or train "
                "it as it is"
            )
        if not tensor.is_meta:  # a table that its module has computed in spite of torch.device("meta")
            made[id(tensor)] = tensor.to(device)
            continue
        placement = layout.by_name[plain_name(name)]
        trained = isinstance(tensor, nn.Parameter)
        hollow = cut and trained
        fresh = (
            without_values(tensor.shape, tensor.dtype, device) if hollow else torch.empty_like(tensor, device=device)
        )
        made[id(tensor)] = fresh = nn.Parameter(fresh, tensor.requires_grad) if trained else fresh
        box = (placement.offsets, tuple(tensor.shape))
        boxes.setdefault(placement.trained, (box, []))[1].append(fresh)
    _replace(model, made)
    own_ranges = _own_ranges(model, mesh) if cut else {}
    host = _on_this_host(mesh.comm)
    tasks = list(_tasks(host, {name: box for name, (box, _) in boxes.items()}))
    own = [name for name, reader, _ in tasks if reader == host.rank]
    with ThreadPoolExecutor(1, thread_name_prefix="hdpcomm-weights") as pool, host.liveness_deadlines():
        next_read = _read_next(pool, weights, own)
        for name, reader, holders in tasks:
            whole: Tensor | None = None
            if reader == host.rank and next_read is not None:
                with host.busy("reads a model's weights"):
                    whole = next_read.result()
            if reader == host.rank or name in boxes:
                _share(host, reader, holders, whole, *boxes[name], own_ranges)
            if whole is not None:
                next_read, whole = None, None  # before the next one is read
                next_read = _read_next(pool, weights, own)


def _replace(model: nn.Module, made: dict[int, Tensor]) -> None:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) in made:
                    tensors[key] = made[id(tensor)]  # type: ignore[assignment]


def _on_this_host(comm: Communicator) -> Communicator:
    nodes = nodes_of(comm)
    own = nodes[comm.ranks[comm.rank]]
    host = comm.subset([place for place, rank in enumerate(comm.ranks) if nodes[rank] == own])
    assert host is not None  # this rank is one of them
    return host


def _tasks(host: Communicator, own: dict[str, Box]) -> Iterator[tuple[str, int, list[tuple[Box, list[int]]]]]:
    """Each tensor of which a rank of the host holds a part: its name, the rank that reads it, and by box its holders.

    The same on all ranks of the host. The reader is one that holds a part, and has read least before.
    """
    rows = gather_json(host, [[name, list(offsets), list(shape)] for name, (offsets, shape) in own.items()])
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, row in enumerate(rows):
        for name, offsets, shape in row:
            holders.setdefault(name, {}).setdefault((tuple(offsets), tuple(shape)), []).append(rank)
    load = [0] * host.size
    for name, by_box in holders.items():
        candidates = {rank for ranks in by_box.values() for rank in ranks}
        reader = min(candidates, key=lambda rank: (load[rank], rank))
        load[reader] += sum(math.prod(shape) for _, shape in by_box)
        yield name, reader, list(by_box.items())


def _read_next(pool: ThreadPoolExecutor, weights: Weights, names: list[str]) -> Future[Tensor] | None:
    return pool.submit(weights.whole, names.pop(0)) if names else None


def _share(
    host: Communicator,
    reader: int,
    holders: list[tuple[Box, list[int]]],
    whole: Tensor | None,
    own: Box,
    targets: list[Tensor],
    own_ranges: dict[int, tuple[int, int]],
) -> None:
    """From the reader, which has the whole tensor, to all that hold a part of it. Collective over them.

    Args:
        targets: this rank's tensors that get the values of its box.
        own_ranges: of those that get a range of its elements only.
    """
    first = targets[0]
    for box, ranks in holders:
        everyone = sorted({reader, *ranks})
        if host.rank not in everyone:
            continue
        ranges = own_ranges if box == own else {}
        inside = None if whole is None else whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
        if box == own and id(first) not in ranges:
            part = first.detach()
        elif (
            inside is not None
            and inside.is_contiguous()
            and (inside.dtype, inside.device) == (first.dtype, first.device)
        ):
            part = inside
        else:
            part = torch.empty(box[1], dtype=first.dtype, device=first.device)
        if inside is not None and inside is not part:
            part.copy_(inside)
        if len(everyone) > 1:
            among = host.subset(everyone)
            assert among is not None
            among.broadcast(part, everyone.index(reader))
        if box == own:
            for target in targets:
                if id(target) in ranges:
                    start, stop = ranges[id(target)]
                    set_part(target, start, part.flatten()[start:stop].clone())
                elif target is not first:
                    target.copy_(part)


def _own_ranges(model: nn.Module, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """By the id of each parameter, first and last (exclusive) element of this rank's part with ZeRO-3."""
    several = isinstance(model, nn.ModuleList) and all(isinstance(each, Stage) for each in model)
    units, layout = Units(list(model) if several else [model]), layout_of(model, mesh)  # type: ignore[call-overload]
    found = {}
    for trained in (True, False):
        parameters = [p for p in model.parameters() if p.requires_grad == trained]
        for bucket in unit_buckets(units, parameters, layout, 3):
            for place, parameter in enumerate(bucket.parameters):
                found[id(parameter)] = bucket.overlap(place, bucket.sharding.own)
    return found
