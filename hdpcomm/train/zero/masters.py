"""The weights of a rank: wide ones that the optimizer updates in place of the parameters, with ZeRO and mixed
precision; and memory and values for its part of a model that was made on the meta device (:func:`materialize`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator, Work
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.tensors import wraps_tensors
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.weights import Weights, own_pages
from hdpcomm.parallel.stages import Stage, share_values
from hdpcomm.train.state.layout import Layout, Placement, layout_of, plain_name
from hdpcomm.train.zero.buckets import Bucket, Sharding, SharedShards, Units, make_buckets, unit_buckets
from hdpcomm.train.zero.gradients import Gradients, WholeSums, memory_of, trained_parameters, wide_type
from hdpcomm.train.zero.matrix_owners import MatrixOwners, check_elementwise
from hdpcomm.train.zero.shared_parts import PulledWeights, PushedSums, set_part, side_work, without_values

__all__ = ["LocalShard", "MasterShard", "Masters", "materialize"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False, slots=True)
class MasterShard:
    """A shard of a parameter's master weights: what this rank's optimizer updates.

    Attributes:
        start: its first element in the parameter, in row-major order.
        master: its values in the wide type: what the optimizer has in place of the parameter.
        gradient: of these, a view of the flat gradients.
        first: whether this rank is the first of those that update it.
    """

    parameter: nn.Parameter
    start: int
    master: nn.Parameter
    gradient: Tensor
    first: bool


@dataclass(frozen=True, eq=False, slots=True)
class LocalShard:
    """A rank's shard of a parameter that has no values between its uses.

    Attributes:
        start: its first element in the parameter, in row-major order.
        values: ``[elements]``, those that passes use; live.
    """

    parameter: nn.Parameter
    start: int
    values: Tensor
    sharding: Sharding


class Masters:
    """A model's parameters in flat memory, and the part of them that this rank's optimizer updates.

    The parameters become views of flat buckets, in ``dtype``. With ``zero=1`` each rank keeps 1 / replicas of each
    bucket: its master weights in fp32 (fp64 if any parameter is) and the optimizer's state; :meth:`publish` gathers the
    updated parameters (Rajbhandari et al., arXiv 1910.02054, stage 1). With ``zero=0`` every rank keeps all of them.
    Parameters in the wide type are their own masters. With ``zero=2`` the sums of gradients are cut, too
    (:class:`hdpcomm.train.zero.shared_parts.PushedSums`), and with ``zero=3`` the parameters
    (:class:`hdpcomm.train.zero.shared_parts.PulledWeights`), both among the replicas of a host; those of other hosts
    that have the same part share its master weights and state.

    Tensor ranks that hold the same parameters have the same part of them, and so have both ends of a pipeline of a tied
    one.

    With ``on_host`` master weights and the optimizer's state are in (pinned) host memory, and the optimizer computes on
    the CPU (Ren et al., arXiv 2101.06840): a step copies its gradients there and the parameters back. Those in the wide
    type have masters of their own then.

    The optimizer's groups get the rank's pieces in place of the parameters; learning rates and schedules go on as they
    are.

    Args:
        chunks: the model, or its stages, on this rank, with equal parameters on all replicas; frozen ones only change
            their type, and are cut with ``zero=3`` unless they are quantised.
        optimizer: over the trained parameters; one that updates each element by itself. State that it has already goes
            on, each element's with the element.
        layout, mesh, bucket_bytes: of :class:`hdpcomm.train.Gradients`.

    Attributes:
        gradients: of these parameters, summed where the pieces are.
        windows: what ranks of a host share.

    Raises:
        InvalidUsage: an optimizer that looks at whole matrices, parameters that it does not hold, sharded ones
            (DTensor), another ``dtype`` than float32, float64 and bfloat16.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        mesh: Mesh,
        *,
        zero: int,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        on_host: bool = False,
    ) -> None:
        everything = list({id(p): p for chunk in chunks for p in chunk.parameters()}.values())
        trained = trained_parameters(everything)
        _check(trained, optimizer, dtype, zero, mesh.comm.device)
        wide = wide_type(trained, dtype)
        self._weights: PulledWeights | None = None
        self._units: Units | None = None
        self._frozen: list[Bucket] = []
        self.windows = memory = SharedShards()
        if zero < 2:
            elements = bucket_bytes // wide.itemsize
            buckets = make_buckets(trained, layout, zero=zero, elements=elements, group_of=lambda p: dtype or p.dtype)
            sums: WholeSums | PushedSums = WholeSums(
                buckets, mesh.comm, wide, trained[0].device, Units(chunks) if mesh.comm.size > 1 else None
            )
        else:
            self._units = units = Units(chunks)
            buckets = unit_buckets(units, trained, layout, zero)
            if mesh.hdp > 1 and all(bucket.parts == 1 for bucket in buckets):
                raise InvalidUsage(
                    f"zero={zero} cuts weights and gradients among the replicas of a host, and each of the {mesh.hdp} "
                    "HDP ranks is on a host of its own; place several on a host, or give zero=1"
                )
            if zero == 3:
                frozen = [p for p in everything if not (p.requires_grad or wraps_tensors(p))]
                self._frozen = unit_buckets(units, frozen, layout, zero)
                self._weights = PulledWeights(units, [*buckets, *self._frozen], memory, side_work(mesh.comm), dtype)
            sums = PushedSums(units, buckets, mesh, memory, side_work(mesh.comm), wide)
            memory.make()
        self.gradients = Gradients(buckets, layout, mesh, sums)
        if self._weights is None:
            for parameter in everything:
                if dtype is not None and not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        else:
            for bucket in self._frozen:
                self._weights.take_over(bucket)
        self.pieces: list[MasterShard] = []
        self.on_host = on_host
        self._host_gradients: list[Tensor] = []
        """For each bucket, those that this rank updates, where that is on the host."""
        self._is_open = False
        self._memories = [self._take_over(bucket, dtype, wide, mesh) for bucket in buckets]
        """The parameters of each bucket, or the part that others pull, and in the wide type what this rank updates."""
        _cut_state(optimizer, self.pieces)
        by_parameter = {id(piece.parameter): piece.master for piece in self.pieces}
        for group in optimizer.param_groups:
            group["params"] = [by_parameter[id(p)] for p in group["params"] if id(p) in by_parameter]

    def _take_over(
        self, bucket: Bucket, dtype: torch.dtype | None, wide_dtype: torch.dtype, mesh: Mesh
    ) -> tuple[Tensor, Tensor]:
        if self._weights is not None:
            wide = bucket.own_piece(self._weights.take_over(bucket)).to(wide_dtype).detach()
            memory = self._weights.own(bucket)
            if bucket.piece < bucket.part and memory.dtype != wide_dtype:
                wide = wide.clone()  # the rest of the part may go
        else:
            memory, wide = self._flatten(bucket, dtype, wide_dtype, mesh)
        gradients, sharding = self.gradients.own(bucket), bucket.sharding
        if self.on_host:
            wide, gradients = _host_memory(wide).copy_(wide), _host_memory(gradients)
            self._host_gradients.append(gradients)
        # Views that know others, as all do that are not detached, would keep a window's memory that is given back.
        for parameter, start, stop, span in bucket.piece_spans():
            if start < stop or (parameter.numel() == 0 and sharding.own == 0 and sharding.first):
                shape = parameter.shape if bucket.length == bucket.piece else (stop - start,)
                master = nn.Parameter(wide[span].view(shape))
                gradient = gradients[span].view(shape).detach()
                self.pieces.append(MasterShard(parameter, start, master, gradient, sharding.updates_alone))
        return memory, wide

    @staticmethod
    @torch.no_grad()
    def _flatten(
        bucket: Bucket, dtype: torch.dtype | None, wide_dtype: torch.dtype, mesh: Mesh
    ) -> tuple[Tensor, Tensor]:
        """Makes the parameters of a bucket views of its memory; that, and in the wide type what this rank updates."""
        first = bucket.parameters[0]
        narrow = dtype or first.dtype
        memory = memory_of(mesh.comm, bucket.length, narrow, first.device)
        whole = torch.zeros(bucket.length, dtype=wide_dtype, device=first.device)
        spans = [slice(o, o + p.numel()) for p, o in zip(bucket.parameters, bucket.offsets, strict=True)]
        for parameter, span in zip(bucket.parameters, spans, strict=True):
            whole[span] = parameter.detach().flatten()
        memory.copy_(whole)
        for parameter, span in zip(bucket.parameters, spans, strict=True):
            parameter.data = memory[span].view(parameter.shape)
        wide = bucket.own_piece(bucket.own_part(memory if narrow == wide_dtype else whole))
        return memory, wide if narrow == wide_dtype else wide.clone()

    @property
    def shared(self) -> bool:
        """Whether others read or write this rank's parts in their passes (ZeRO-2 and 3)."""
        return self._units is not None

    @property
    def pulled(self) -> bool:
        """Whether parameters have no values between their uses (ZeRO-3)."""
        return self._weights is not None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context of the passes of a step, or of an evaluation, which find the weights there; one inside of another
        does nothing. Local; as :meth:`hdpcomm.train.zero.shared_parts.PulledWeights.open`."""
        with ExitStack() as stack:
            if not self._is_open:
                self._is_open = True
                stack.callback(setattr, self, "_is_open", False)
                for each in (self._units, self._weights):
                    if each is not None:
                        stack.enter_context(each.open())
            yield

    def parts(self) -> Iterator[LocalShard]:
        """This rank's shards of the parameters that have no values between their uses."""
        if self._weights is None:
            return
        for bucket in (*self.gradients.buckets, *self._frozen):
            own, sharding = self._weights.own(bucket), bucket.sharding
            for parameter, start, _, span in bucket.spans(sharding.own):
                yield LocalShard(parameter, start, own[span], sharding)

    def tensors(self) -> Iterator[Tensor]:
        """Parameters, masters and gradients of this rank, as flat memory and as views of it; of the host's none."""
        for (memory, wide), bucket in zip(self._memories, self.gradients.buckets, strict=True):
            yield from (memory, self.gradients.own(bucket) if self.on_host else wide)
        for piece in () if self.on_host else self.pieces:
            yield from (piece.master, piece.gradient)

    @torch.no_grad()
    def same_start(self) -> None:
        """Gives all ranks that have the same parts the values of one: of the first, or of that which updates them.
        Collective over the mesh."""
        if self._weights is None:
            return
        for bucket in self._frozen:
            for comm in (bucket.sharding.across, bucket.holders.ends):
                if comm is not None:
                    share_values(comm, [self._weights.own(bucket)])
        for (_, wide), bucket in zip(self._memories, self.gradients.buckets, strict=True):
            if bucket.holders.ends is not None:
                share_values(bucket.holders.ends, [wide])
        self.publish()

    def finish(self) -> None:
        """Hands the gradients to the optimizer; parameters that no rank has used have none. Call before its step."""
        for host, bucket in zip(self._host_gradients, self.gradients.buckets, strict=self.on_host):
            host.copy_(self.gradients.own(bucket), non_blocking=True)
        self._wait_for_copies()
        for piece in self.pieces:
            piece.master.grad = piece.gradient if self.gradients.used(piece.parameter) else None

    def _wait_for_copies(self) -> None:
        """Until copies between the device and the host have ended."""
        device = self._memories[0][0].device
        if self.on_host and device.type == "cuda":
            torch.cuda.synchronize(device)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Takes over parameters that were loaded, where masters of the same type are apart from them. Local."""
        self._wait_for_copies()
        for (memory, wide), bucket in zip(self._memories, self.gradients.buckets, strict=True):
            if self.on_host and memory.dtype == wide.dtype:
                wide.copy_(bucket.own_piece(memory if self._weights else bucket.own_part(memory)))

    def publish(self) -> None:
        """Gives the updated parameters to all ranks. Call after the optimizer's step. Collective."""
        among_hosts: list[Work | None] = []
        in_hosts: list[Work] = []
        buckets = self.gradients.buckets
        parts = [m if self._weights else b.own_part(m) for (m, _), b in zip(self._memories, buckets, strict=True)]
        with torch.no_grad():
            for part, (_, wide), bucket in zip(parts, self._memories, buckets, strict=True):
                piece, across = bucket.own_piece(part), bucket.sharding.across
                if part.dtype != wide.dtype or self.on_host:
                    piece.copy_(wide, non_blocking=True)
                cut = across is not None and bucket.sharding.pieces > 1
                among_hosts.append(across.all_gather(part, piece, async_op=True) if cut else None)  # type: ignore[union-attr]
        for work, part, (memory, _), bucket in zip(among_hosts, parts, self._memories, buckets, strict=True):
            if work is not None:
                work.wait()
            if bucket.parts > 1 and not self._weights:
                owners = bucket.sharding.owners
                assert owners is not None
                in_hosts.append(owners.all_gather(memory, part, async_op=True))
        for each in in_hosts:
            each.wait()


def _host_memory(like: Tensor) -> Tensor:
    """Host memory of the same size; pinned for a GPU's copies."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _cut_state(optimizer: torch.optim.Optimizer, pieces: Sequence[MasterShard]) -> None:
    """Gives the pieces what the optimizer has for their parameters: Adagrad makes its state when it is made."""
    taken = {piece.parameter: optimizer.state.pop(piece.parameter, {}) for piece in pieces}
    optimizer.state.clear()  # of parameters of which other ranks have all pieces
    for piece in pieces:
        state = {}
        for key, value in taken[piece.parameter].items():
            if isinstance(value, Tensor) and value.shape == piece.parameter.shape and value.dim():
                own = value.flatten()[piece.start : piece.start + piece.master.numel()].view(piece.master.shape)
                kind = piece.master.dtype if own.is_floating_point() else own.dtype
                state[key] = own.to(piece.master.device, kind, copy=True)
            else:
                state[key] = value
        if state:
            optimizer.state[piece.master] = state


def _check(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype | None,
    zero: int,
    device: torch.device,
) -> None:
    if zero > 1 and parameters[0].device != device:
        raise InvalidUsage(
            f"zero={zero} shares {device} memory between the ranks of a host, and the model is on "
            f"{parameters[0].device}; move it there, or join with a transport of its device"
        )
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidUsage(
            f"dtype is {dtype}; give torch.bfloat16 or torch.float32 (float16 needs loss scaling, which is not here)"
        )
    if isinstance(optimizer, MatrixOwners):
        raise InvalidUsage(
            "MatrixOwners has shared the matrices and their state among the ranks already; give zero=0 and dtype=None"
        )
    check_elementwise(optimizer, f"with zero={max(zero, 1)} or dtype=")
    if wrong := [type(p).__name__ for p in parameters if type(p.data) is not Tensor]:
        raise InvalidUsage(f"a parameter is a {wrong[0]}; zero= and dtype= are of plain tensors")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = sum(id(p) not in held for p in parameters)
    others = len(held) + missing - len(parameters)
    if missing or others:
        raise InvalidUsage(
            f"the optimizer lacks {missing} of the model's {len(parameters)} parameters with requires_grad, and holds "
            f"{others} others (frozen, or not the model's); make it over exactly those with requires_grad"
        )


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
