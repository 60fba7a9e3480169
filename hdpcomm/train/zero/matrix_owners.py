"""Optimizers that look at whole matrices, on ranks that hold parts of them: :class:`MatrixOwners`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.tensor_group import TensorShard
from hdpcomm.offload import MemoryMeter
from hdpcomm.train.state.layout import Placement, layout_of

__all__ = ["MatrixMemory", "MatrixOwners", "check_elementwise", "matrix_memory"]

_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False, slots=True)
class _Matrix:
    """A matrix of the whole model of which this rank has a part.

    Attributes:
        shard: this rank's part of it; ``None``: it is whole on every tensor rank.
        replica, tensor: the place of its owner among the HDP ranks and the tensor ranks that hold it.
        master: the whole of it, on the owner.
    """

    parameter: nn.Parameter
    placement: Placement
    shard: TensorShard | None
    replica: int
    tensor: int
    master: nn.Parameter | None


class MatrixOwners(torch.optim.Optimizer):
    """An optimizer for matrices (Muon) beside one for all other parameters, on any mesh.

    Each matrix has one owner among the HDP ranks and tensor ranks that hold it, chosen so that all have equal work
    (elements times the shorter side). A step puts the owner's gradient together from the tensor ranks' parts, the owner
    updates the whole matrix, and the ranks that hold it get their parts of the result; so the update is that of one
    process, and each rank keeps the optimizer's state of its own matrices only. Among the
    tensor ranks of a replica a step sends each gradient once and each matrix twice, there and back, as others may have
    changed it; to the other replicas each matrix once.

    Matrices are the parameters with two dimensions but for embeddings and the layer that makes logits, which Muon
    leaves to another optimizer (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/), and experts, whose
    parameters have three.

    Args:
        model: cut for the mesh, or the stages on this rank; give it to the trainer, too.
        mesh: that of the trainer; with a plain communicator ``Mesh(comm, placement=range(comm.size))``.
        matrices, others: make the optimizers over lists of parameters. A learning rate that is set on the groups of
            this optimizer is theirs.

    Every rank of the mesh makes one, which is collective over pipelines, and calls :meth:`step` alike;
    :class:`hdpcomm.train.Trainer` does.

    Raises: InvalidUsage: no stage of the model has matrices.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        mesh: Mesh,
        *,
        matrices: MakeOptimizer,
        others: MakeOptimizer,
    ) -> None:
        module = model if isinstance(model, nn.Module) else model[0] if len(model) == 1 else nn.ModuleList(model)
        chosen, rest = _chosen(module)
        anywhere = torch.tensor([bool(chosen)], dtype=torch.int32)
        mesh.pipeline_comm.all_reduce(anywhere, "max")  # a stage may have none
        if not anywhere:
            raise InvalidUsage(
                f"{type(module).__name__} has no trained matrices but embeddings and head; use an optimizer that "
                "updates each element by itself"
            )
        self.mesh = mesh
        self._matrices = _owned(chosen, module, mesh)
        self._owns = {id(matrix.parameter): matrix.master is not None for matrix in self._matrices}
        masters = [matrix.master for matrix in self._matrices if matrix.master is not None]
        sample = nn.Parameter(next(module.parameters()).new_zeros(1, 1))
        options = {k: v for k, v in matrices([sample]).param_groups[0].items() if k != "params"}
        self._inner = matrices(masters) if masters else None
        self._others = others(rest) if rest else None
        # Not torch's own __init__, which copies groups: these are those of the others, so that rates reach them.
        self.defaults = options
        self.param_groups = [{"params": chosen, **options}, *(self._others.param_groups if self._others else ())]
        self.state = self._others.state if self._others else defaultdict(dict)
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self.link()

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The optimizers that do the work on this rank."""
        return [each for each in (self._inner, self._others) if each is not None]

    @property
    def others(self) -> torch.optim.Optimizer | None:
        """Optimizer of the other parameters, of which each rank updates its own."""
        return self._others

    def owns(self, parameter: Tensor) -> bool | None:
        """Whether this rank has the state of a matrix, as a whole; ``None``: it is no matrix."""
        return self._owns.get(id(parameter))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if set_to_none or parameter.grad is None else parameter.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters. Collective over the mesh."""
        if closure is not None:
            raise InvalidUsage("MatrixOwners.step() got a closure; it computes no loss: leave it out")
        with_gradient = [matrix for matrix in self._matrices if matrix.parameter.grad is not None]
        for matrix in with_gradient:
            self._gather(matrix)
        if self._inner is not None:
            for group in self._inner.param_groups:
                group.update({k: v for k, v in self.param_groups[0].items() if k != "params"})
            self._inner.step()
        for matrix in with_gradient:
            self._publish(matrix)
        if self._others is not None:
            self._others.step()
        self.link()

    def link(self) -> None:
        """Shows the state of this rank's matrices under their parameters. Local."""
        for matrix in self._matrices:
            if self._inner is not None and matrix.master is not None and matrix.master in self._inner.state:
                self.state[matrix.parameter] = self._inner.state[matrix.master]

    def _in_row(self, matrix: _Matrix) -> bool:
        return matrix.placement.holders.replicas.rank == matrix.replica

    def _gather(self, matrix: _Matrix) -> None:
        """Gives the owner the gradient and the values. Collective over the tensor ranks of its replica."""
        parameter, master = matrix.parameter, matrix.master
        if not self._in_row(matrix):
            return
        if matrix.shard is None:
            if master is not None:
                master.grad = parameter.grad
            return
        assert parameter.grad is not None
        for part, whole in ((parameter.grad, None), (parameter.data, master)):
            every = None if master is None else part.new_empty(self.mesh.tensor, *part.shape)
            self.mesh.tensor_comm.gather(every, part.contiguous(), matrix.tensor)
            if every is not None:
                joined = matrix.shard.join(list(every))
                if whole is None:
                    assert master is not None
                    master.grad = joined
                else:
                    whole.copy_(joined)

    def _publish(self, matrix: _Matrix) -> None:
        """Gives all that hold a part of a matrix its new values. Collective over them."""
        parameter, tensor_comm = matrix.parameter, self.mesh.tensor_comm
        if self._in_row(matrix) and self.mesh.tensor > 1:
            if matrix.shard is None:
                tensor_comm.broadcast(parameter.data, matrix.tensor)
            else:
                every = None
                if matrix.master is not None:
                    shards = [replace(matrix.shard, part=part) for part in range(self.mesh.tensor)]
                    every = torch.stack([shard.take(matrix.master.data) for shard in shards])
                own = torch.empty_like(parameter.data, memory_format=torch.contiguous_format)
                tensor_comm.scatter(own, every, matrix.tensor)
                parameter.data.copy_(own)
        if matrix.master is not None:
            matrix.master.grad = matrix.master.grad if matrix.shard is None else None
        replicas = matrix.placement.holders.replicas
        if replicas.size > 1:
            replicas.broadcast(parameter.data, matrix.replica)


@dataclass(frozen=True, slots=True)
class MatrixMemory:
    """Memory of :class:`MatrixOwners` for matrices, on the rank that owns most.

    Attributes:
        parameters: by their ids, those matrices; the other optimizer has no state of them.
        kept: bytes of the optimizer's state, and of the whole of matrices that tensor ranks have parts of.
        added: bytes that a step adds for a while.
    """

    parameters: frozenset[int]
    kept: float
    added: float


@torch.no_grad()
def matrix_memory(model: nn.Module, mesh: Mesh, matrices: MakeOptimizer, *, replicas: int) -> MatrixMemory:
    """Predicts the memory of :class:`MatrixOwners`. Local.

    Args:
        model: cut for the mesh, on any device.
        replicas: HDP ranks that hold each matrix; the mesh may have fewer.
    """
    chosen, _ = _chosen(model)
    layout = layout_of(model, mesh)
    shapes = [layout.of(parameter).shape for parameter in chosen]
    kept: dict[tuple[int, int], float] = {}
    gradients: dict[tuple[int, int], float] = {}
    working = 0.0
    needs: dict[tuple[int, ...], tuple[int, int]] = {}
    for parameter, shape, owner in zip(
        chosen, shapes, _assigned(shapes, [replicas] * len(shapes), mesh.tensor), strict=True
    ):
        if shape not in needs:
            needs[shape] = _needs(matrices, shape, parameter.dtype)
        state, added = needs[shape]
        whole = math.prod(shape) * parameter.element_size()
        cut = shape != tuple(parameter.shape)
        each = mesh.tensor * parameter.numel() * parameter.element_size()  # what all tensor ranks send, or get
        kept[owner] = kept.get(owner, 0.0) + state + cut * whole
        gradients[owner] = gradients.get(owner, 0.0) + cut * whole
        working = max(working, added, cut * (each + parameter.nbytes))
    return MatrixMemory(
        frozenset(map(id, chosen)), max(kept.values(), default=0.0), max(gradients.values(), default=0.0) + working
    )


def _needs(matrices: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that the optimizer keeps of a matrix, and that its step adds, of storages that have none."""
    sample = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    made = matrices([sample])
    for _ in range(2):  # the state is made in the first step
        sample.grad = torch.empty_like(sample)
        with MemoryMeter("cpu") as meter:
            made.step()
    kept = [t for t in made.state[sample].values() if isinstance(t, Tensor) and t.numel() > 1]
    return sum(t.nbytes for t in kept), meter.peak


def _chosen(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained matrices, and the other trained parameters."""
    trained = [p for p in module.parameters() if p.requires_grad]
    ends = _embeddings_and_heads(module)
    chosen = [p for p in trained if p.dim() == 2 and id(p) not in ends]
    return chosen, [p for p in trained if p.dim() != 2 or id(p) in ends]


def _assigned(shapes: Sequence[Sequence[int]], replicas: Sequence[int], tensor: int) -> list[tuple[int, int]]:
    """For each matrix the places of its owner among its HDP ranks and the tensor ranks: the costliest first, each to
    who has least."""
    costs = [shape[0] * shape[1] * min(shape) for shape in shapes]
    load: dict[tuple[int, int], int] = {}
    owners: dict[int, tuple[int, int]] = {}
    for place in sorted(range(len(shapes)), key=lambda place: (-costs[place], place)):
        places = [(replica, part) for part in range(tensor) for replica in range(replicas[place])]
        owners[place] = min(places, key=lambda each: (load.get(each, 0), places.index(each)))
        load[owners[place]] = load.get(owners[place], 0) + costs[place]
    return [owners[place] for place in range(len(shapes))]


def _embeddings_and_heads(module: nn.Module) -> set[int]:
    ends = {id(p) for each in module.modules() if isinstance(each, nn.Embedding) for p in each.parameters()}
    for each in module.modules():
        for name in ("last_layer", "head"):
            if isinstance(layer := getattr(each, name, None), nn.Module):
                ends |= {id(p) for p in layer.parameters()}
    return ends


def _owned(chosen: Sequence[nn.Parameter], module: nn.Module, mesh: Mesh) -> list[_Matrix]:
    """The matrices in the order of the model, with their owners."""
    layout = layout_of(module, mesh)
    placements = [layout.of(parameter) for parameter in chosen]
    sizes = [placement.holders.replicas.size for placement in placements]
    owners = _assigned([placement.shape for placement in placements], sizes, mesh.tensor)
    found = []
    for place, (parameter, placement) in enumerate(zip(chosen, placements, strict=True)):
        shard = None if placement.shape == tuple(parameter.shape) else placement.shard
        replica, tensor = owners[place]
        here = placement.holders.replicas.rank == replica and mesh.tensor_rank == tensor
        whole = parameter if shard is None else nn.Parameter(parameter.new_zeros(placement.shape))
        found.append(_Matrix(parameter, placement, shard, replica, tensor, whole if here else None))
    return found


def check_elementwise(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raises InvalidUsage unless the optimizer is known to update each element of a parameter by itself: ranks that
    hold parts of a tensor would otherwise make other updates than one that holds the whole, without a word.

    Args:
        where: how parameters came to be cut, for the message.
    """
    if isinstance(optimizer, MatrixOwners):
        if optimizer.others is not None:
            check_elementwise(optimizer.others, where)
        return
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None) or kind.__name__ not in _ELEMENTWISE:
        raise InvalidUsage(
            f"{kind.__name__} may look at more than one element of a parameter, and a part of it is all that a rank "
            f"has; {where} use one of torch.optim's {', '.join(_ELEMENTWISE)}, or MatrixOwners for one that looks at "
            "matrices"
        )
