"""Where the parameters on a rank are in the whole model, and which ranks hold the same: :func:`layout_of`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.models.tensor_group import TensorGroup, TensorShard
from hdpcomm.parallel.stages import Stage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = [
    "Holders",
    "Layout",
    "Placement",
    "TensorPart",
    "box_slices",
    "boxes",
    "layout_of",
    "num_parameters",
    "plain_name",
]


class TensorPart:
    """Some boxes of a tensor of which other ranks have the rest; a file with the boxes of all ranks holds the whole
    tensor, of which any other boxes can be read.

    Args:
        shape: of the whole tensor.
        parts: where each box begins in it, and its elements, which reading writes into. There may be none.
        written: False: another rank has the same elements and writes them; this one only reads them. One for each box,
            or one for all.

    Attributes:
        boxes: where each begins, and its elements.
        written: those that this rank writes.
    """

    def __init__(
        self,
        shape: Sequence[int],
        parts: Iterable[tuple[Sequence[int], Tensor]],
        *,
        written: bool | Sequence[bool] = True,
    ) -> None:
        self._shape = torch.Size(shape)
        self.boxes = [(torch.Size(offsets), tensor) for offsets, tensor in parts]
        flags = [written] * len(self.boxes) if isinstance(written, bool) else written
        self.written = list(itertools.compress(self.boxes, flags))

    @classmethod
    def of_range(cls, shape: Sequence[int], start: int, values: Tensor) -> TensorPart:
        """The elements ``start`` to ``start + n`` in row-major order, as a few boxes.

        Args:
            values: ``[n]`` contiguous; may be empty.
        """
        parts, place = [], 0
        for offsets, sizes in boxes(shape, start, start + values.numel()):
            count = math.prod(sizes)
            parts.append((offsets, values[place : place + count].view(sizes)))
            place += count
        return cls(shape, parts)

    def size(self) -> torch.Size:
        """The shape of the whole tensor, not of this part."""
        return self._shape

    def copy(self) -> TensorPart:
        """A copy in host memory of the boxes that this rank writes."""
        return TensorPart(self._shape, ((at, tensor.detach().to("cpu", copy=True)) for at, tensor in self.written))

    def box(self, offsets: Sequence[int] | None) -> Tensor:
        """The box that begins at ``offsets``."""
        return next(tensor for place, tensor in self.boxes if place == offsets)

    # What torch.distributed.checkpoint asks of an object that is sharded. It takes a second to import, so only it does.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, place),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(place, tensor.size()),
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=self._shape,
                ),
            )
            for place, tensor in self.written
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(place, tensor.size()) for place, tensor in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.box(index.offset)


def box_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The place of a box in a tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that the elements ``start`` to ``stop`` of a tensor are, in row-major order: the
    end of a row, whole rows, the beginning of one."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    found = []
    if head:
        found += _in_row(shape, first, head, inner)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + (_in_row(shape, last, 0, tail) if tail else [])


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start, stop)]


@dataclass(frozen=True, eq=False, slots=True)
class Holders:
    """The ranks that hold the same part of some parameters; parameters with the same holders share one object.

    Attributes:
        replicas: the HDP ranks, which have gradients of other sequences.
        alike: the tensor ranks, which have parts of the same gradients; ``None``: this one alone.
        ends: the stages that have copies, or ``None``: both ends of the pipeline, of a tied weight; all, of an encoder.
        counts: whether this rank is the one among ``alike`` and ``ends`` whose part counts in a norm.
        first: whether it is the first among ``alike``, which writes what the replicas have parts of.
        expert: the part is that of the experts on this rank.
        mixed: ``alike`` have only some elements of each parameter (:attr:`Placement.shared`), and no other rank the
            rest, which this one counts and writes.
    """

    replicas: Communicator
    alike: Communicator | None
    ends: Communicator | None
    counts: bool
    first: bool
    expert: bool
    mixed: bool


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """A tensor of this rank's module: all or a part of one of the whole model.

    Attributes:
        name: in the whole model.
        trained: the name under which an optimizer of the whole model has its state.
        shape: of the whole tensor.
        shard: which part of it is here; ``None``: all.
        shared: (first element, element after the last) of this rank's tensor that ``holders.alike`` have, too.
        holders: the ranks that hold the same.
        copy: it stands for a tensor of another stage.
    """

    name: str
    trained: str
    shape: tuple[int, ...]
    shard: TensorShard | None
    shared: tuple[tuple[int, int], ...]
    holders: Holders
    copy: bool

    @property
    def writes(self) -> bool:
        """Whether this rank writes what belongs to the parameter as a whole, as a count of steps, if it is the first of
        its replicas."""
        return self.holders.first and (self.shard is None or self.shard.ranges[0][0] == 0)

    def part(self, boxes: Iterable[tuple[Sequence[int], Tensor]], *, written: bool) -> TensorPart:
        """Boxes of this rank's tensor as boxes of the whole one.

        Args:
            written: no other replica writes them.
        """
        written = written and not (self.copy and self.name == self.trained)  # an encoder's, which the first stage has
        if self.shard is None:
            return TensorPart(self.shape, boxes, written=written and self.holders.first)
        found = [each for place, box in boxes for each in self.shard.spread(place, box)]
        flags = [written and (self.holders.first or (self.holders.mixed and ranks == 1)) for *_, ranks in found]
        return TensorPart(self.shape, ((place, box) for place, box, _ in found), written=flags)


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The placements of a module's tensors; made by :func:`layout_of`.

    Attributes:
        by_name: of its parameters and buffers, by all names that they have there (:func:`plain_name`).
    """

    by_name: Mapping[str, Placement]
    _by_parameter: Mapping[int, Placement]

    def of(self, parameter: Tensor) -> Placement:
        """The placement of a parameter: that of its first name, if it has several."""
        return self._by_parameter[id(parameter)]


def layout_of(model: nn.Module, mesh: Mesh) -> Layout:
    """The layout of what a rank holds of a model. Local.

    Args:
        model: cut for this mesh, or a stage of one, or the ``nn.ModuleList`` of the stages on this rank.
    """
    several = isinstance(model, nn.ModuleList) and all(isinstance(each, Stage) for each in model)
    modules = {f"{place}.": each for place, each in enumerate(cast("Iterable[nn.Module]", model))} if several else {}
    holders: dict[tuple[bool, int, bool, int], Holders] = {}
    placements: dict[str, Placement] = {}
    for prefix, module in (modules or {"": model}).items():
        for name, tensor in _tensors(module):
            placements[prefix + name] = _placement(module, name, tensor, mesh, holders)
    return Layout(placements, {id(p): placements[plain_name(name)] for name, p in model.named_parameters()})


def plain_name(name: str) -> str:
    """The name of a tensor without what torch.compile and checkpoint wrappers put into it, as torch's own
    ``get_model_state_dict`` gives it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def num_parameters(model: nn.Module, layout: Layout, mesh: Mesh) -> int:
    """Parameters of the whole model, tied ones counted once. Collective over the ranks that hold one copy of it."""
    own = 0
    for parameter in model.parameters():
        placement = layout.of(parameter)
        if placement.holders.expert or mesh.expert_rank == 0:
            shared = sum(stop - start for start, stop in placement.shared)
            own += parameter.numel() - (0 if placement.holders.counts else shared)
    count = torch.tensor([own], dtype=torch.int64)
    for comm in (mesh.expert_comm, mesh.tensor_comm, mesh.pipeline_comm):
        comm.all_reduce(count)
    return int(count)


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield plain_name(name), buffer


def _placement(
    module: nn.Module, name: str, tensor: Tensor, mesh: Mesh, holders: dict[tuple[bool, int, bool, int], Holders]
) -> Placement:
    group: TensorGroup | None = getattr(module, "tensor", None)
    experts: Any = getattr(module, "expert", None)
    shard: TensorShard | None = None if group is None else group.shards.get(name)
    ranks = [mesh.tensor] if shard is None else [ranks for *_, ranks in shard.ranges]
    expert = isinstance(experts, ExpertGroup) and name in experts.shards
    if expert:
        shard = experts.shards[name]
    stage = module if isinstance(module, Stage) else None
    tied = stage is not None and stage.tied is tensor
    copies = 2 if tied else mesh.pipeline if stage is not None and stage.is_everywhere(tensor) else 1
    key = expert, max(ranks), min(ranks) < max(ranks), copies
    if key not in holders:
        holders[key] = _holders(mesh, *key)
    shape = list(tensor.shape)
    shared: tuple[tuple[int, int], ...] = ((0, tensor.numel()),)
    if shard is not None:
        shape[shard.dim] = shard.size
        if holders[key].mixed:
            shared = _shared(shard, tensor.shape)
    whole = name if stage is None else stage.name_in_model(name)
    trained = whole
    if stage is not None and stage.tied_names is not None and tied:
        trained = stage.tied_names[1]  # under which an optimizer of the whole model has the state of both
    copy = copies > 1 and mesh.stage > 0
    return Placement(whole, trained, tuple(shape), shard, shared, holders[key], copy)


def _shared(shard: TensorShard, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Elements of a part of that shape that several ranks hold."""
    assert math.prod(shape[: shard.dim]) == 1  # what heads share are rows of projections to them
    inner = math.prod(shape[shard.dim + 1 :])
    ends = [0, *itertools.accumulate((last - first) * inner for first, last, _ in shard.ranges)]
    spans = zip(itertools.pairwise(ends), shard.ranges, strict=True)
    return tuple(span for span, (*_, ranks) in spans if ranks > 1)


def _holders(mesh: Mesh, expert: bool, each: int, mixed: bool, copies: int) -> Holders:
    """``copies``: stages that have it: this one, both ends or all."""
    stages = [0, mesh.pipeline - 1] if copies == 2 else range(mesh.pipeline)
    first = mesh.tensor_rank // each * each
    return Holders(
        replicas=mesh.expert_replica_comm if expert else mesh.hdp_comm,
        alike=mesh.tensor_comm.subset(range(first, first + each)) if each > 1 else None,
        ends=mesh.pipeline_comm.subset(stages) if copies > 1 else None,
        counts=mesh.tensor_rank == first and not (copies > 1 and mesh.stage > 0),
        first=mesh.tensor_rank == first,
        expert=expert,
        mixed=mixed,
    )
