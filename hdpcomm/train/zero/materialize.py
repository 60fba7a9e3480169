"""Memory and values for a rank's part of a model that was made on the meta device: :func:`materialize`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.weights import Weights, own_pages
from hdpcomm.parallel.stages import Stage
from hdpcomm.train.state.layout import Placement, layout_of, plain_name
from hdpcomm.train.zero.buckets import Units, unit_buckets
from hdpcomm.train.zero.shared_parts import set_part, without_values

__all__ = ["materialize"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor of the whole model.

    Attributes:
        dim, ranges: the rows along ``dim`` that a rank's module has, (first, after the last); none: all.
        shape: of what the module has.
        start, stop: its elements there, in row-major order: all, or this rank's part of them with ZeRO-3.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the tensor that holds its elements: the module's if it is all of that."""
        return self.shape if self.stop - self.start == math.prod(self.shape) else (self.stop - self.start,)

    def of(self, whole: Tensor) -> Tensor:
        """Its elements; a view of them where they are one range, and all that the module has of it."""
        rows = [whole.narrow(self.dim, first, last - first) for first, last in self.ranges] or [whole]
        own = rows[0] if len(rows) == 1 else torch.cat(rows, self.dim)
        return own if self.sizes == self.shape else own.flatten()[self.start : self.stop]


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
            make optimizers and trainers afterwards. Tied ones stay tied. What has values, as adapters of LoRA may,
            keeps them.
        weights: of the whole model: :class:`hdpcomm.models.NewWeights` or :class:`hdpcomm.models.FolderWeights`.
        zero: 3: a parameter gets no memory, but the values of this rank's part of it, for a trainer with ``zero=3``. It
            has to be told what is frozen before. Others: the parameters are whole, as the trainer needs them.

    Raises: InvalidUsage: all parameters have values already; what ``weights`` raises, on the rank that reads; the
        others get PeerLost or Aborted.
    """
    device = mesh.comm.device
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidUsage(
            f"all parameters have values already, on {next(model.parameters()).device}; make the model under "
            "torch.device('meta'), or train it as it is"
        )
    layout = layout_of(model, mesh)
    placements: dict[int, Placement] = {}
    made: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        trained = isinstance(tensor, nn.Parameter)
        if not tensor.is_meta:  # adapters, or a table that its module has computed in spite of torch.device("meta")
            values = tensor.detach().to(device)
            made[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if trained else values
            continue
        fresh = (
            without_values(tensor.shape, tensor.dtype, device)
            if trained and zero == 3
            else torch.empty_like(tensor, device=device)
        )
        made[id(tensor)] = fresh = nn.Parameter(fresh, tensor.requires_grad) if trained else fresh
        placements[id(fresh)] = layout.by_name[plain_name(name)]
    _replace(model, made)
    spans = _own_spans(model, mesh) if zero == 3 else {}
    own: dict[str, dict[_Part, list[Tensor]]] = {}
    """Memory for this rank's parts of each tensor, which is there before any other memory comes and goes
    and would leave gaps."""
    for tensor in made.values():
        if (placement := placements.get(id(tensor))) is None:
            continue
        start, stop = spans.get(id(tensor), (0, tensor.numel()))
        shard = placement.shard
        ranges = () if shard is None else tuple((first, last) for first, last, _ in shard.ranges)
        part = _Part(0 if shard is None else shard.dim, ranges, tuple(tensor.shape), start, stop)
        values = tensor.detach()
        if id(tensor) in spans:
            values = torch.empty(part.sizes, dtype=tensor.dtype, device=device)
            set_part(tensor, start, values.view(-1))
        if start < stop:
            own.setdefault(placement.trained, {}).setdefault(part, []).append(values)
    host = _on_this_host(mesh.comm)
    tasks = list(_tasks(host, own))
    reads = [name for name, reader, _ in tasks if reader == host.rank]
    with ThreadPoolExecutor(1, thread_name_prefix="hdpcomm-weights") as pool, host.liveness_deadlines():
        next_read = _read_next(pool, weights, reads)
        for name, reader, holders in tasks:
            whole: Tensor | None = None
            if reader == host.rank and next_read is not None:
                with host.busy("reads a model's weights"):
                    whole = next_read.result()
            for part, ranks in holders.items():
                if host.rank == reader or host.rank in ranks:
                    _share(host, reader, ranks, part, whole, own[name])
            if whole is not None:
                next_read, whole = None, None  # before the next one is read
                next_read = _read_next(pool, weights, reads)


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


def _tasks(
    host: Communicator, own: dict[str, dict[_Part, list[Tensor]]]
) -> Iterator[tuple[str, int, dict[_Part, list[int]]]]:
    """Each tensor of which a rank of the host holds a part: its name, the rank that reads it, and by part its holders.

    The same on all ranks of the host. The reader is one that holds a part, and has read least before.
    """
    rows = gather_json(host, [[name, *astuple(part)] for name, parts in own.items() for part in parts])
    holders: dict[str, dict[_Part, list[int]]] = {}
    for rank, row in enumerate(rows):
        for name, dim, ranges, shape, start, stop in row:
            part = _Part(dim, tuple(map(tuple, ranges)), tuple(shape), start, stop)
            holders.setdefault(name, {}).setdefault(part, []).append(rank)
    load = [0] * host.size
    for name, by_part in holders.items():
        candidates = {rank for ranks in by_part.values() for rank in ranks}
        reader = min(candidates, key=lambda rank: (load[rank], rank))
        load[reader] += sum(part.stop - part.start for part in by_part)
        yield name, reader, by_part


def _read_next(pool: ThreadPoolExecutor, weights: Weights, names: list[str]) -> Future[Tensor] | None:
    return pool.submit(weights.whole, names.pop(0)) if names else None


def _share(
    host: Communicator,
    reader: int,
    ranks: list[int],
    part: _Part,
    whole: Tensor | None,
    own: dict[_Part, list[Tensor]],
) -> None:
    """A part from the reader, which has the whole tensor, to all that hold it. Collective over them.

    Args:
        own: by part of the tensor, the memory on this rank; the reader holds one, too.
    """
    targets = own.get(part, [])
    inside = None if whole is None else part.of(whole)
    like = next(iter(own.values()))[0]
    if targets:
        values = targets[0]
    elif inside is not None and inside.is_contiguous() and (inside.dtype, inside.device) == (like.dtype, like.device):
        values = inside
    elif like.device.type == "cpu":
        values = own_pages(part.sizes, like.dtype)
    else:
        values = torch.empty(part.sizes, dtype=like.dtype, device=like.device)
    if inside is not None and inside is not values:
        values.copy_(inside)
    everyone = sorted({reader, *ranks})
    if len(everyone) > 1:
        among = host.subset(everyone)
        assert among is not None
        among.broadcast(values, everyone.index(reader))
    for other in targets[1:]:
        other.copy_(values)


def _own_spans(model: nn.Module, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """By the id of each parameter, first and last (exclusive) element of this rank's part with ZeRO-3."""
    several = isinstance(model, nn.ModuleList) and all(isinstance(each, Stage) for each in model)
    units, layout = Units(list(model) if several else [model]), layout_of(model, mesh)  # type: ignore[call-overload]
    found = {}
    for trained in (True, False):
        parameters = [p for p in model.parameters() if p.requires_grad == trained]
        for bucket in unit_buckets(units, parameters, layout, 3):
            for parameter, start, stop, _ in bucket.spans(bucket.sharding.own):
                found[id(parameter)] = start, stop
    return found
