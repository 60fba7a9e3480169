"""ZeRO and mixed precision: wide weights that the optimizer updates in place of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hdpcomm.comm import Work
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.tensors import wraps_tensors
from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel.stages import share_values
from hdpcomm.train.state.layout import Layout
from hdpcomm.train.zero.buckets import Bucket, Sharding, SharedShards, Units, make_buckets, unit_buckets
from hdpcomm.train.zero.gradients import Gradients, WholeSums, memory_of, trained_parameters, wide_type
from hdpcomm.train.zero.matrix_owners import MatrixOwners, check_elementwise
from hdpcomm.train.zero.shared_parts import PulledWeights, PushedSums, side_work

__all__ = ["Masters", "LocalShard", "MasterShard"]

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
