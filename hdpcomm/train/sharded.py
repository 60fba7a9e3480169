"""ZeRO-1 and mixed precision: each rank keeps a part of the optimizer and the master weights; gradients in buckets."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.train.buckets import Bucket, make_buckets, trained_parameters
from hdpcomm.train.tensor_part import TensorPart
from hdpcomm.train.trainer_check import check_elementwise

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator, Work

__all__ = ["BUCKET_BYTES", "ShardedParameters"]

BUCKET_BYTES = 32 << 20
"""Long enough for the wire, short enough that the first bucket leaves early."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class ShardedParameters:
    """A model's parameters and gradients in flat memory, and the part of them that this rank's optimizer updates.

    The parameters become views of flat buckets, in ``dtype``. Gradients of all backward passes are summed in one flat
    buffer in fp32 (fp64 if any parameter is), 4 bytes a parameter. With ``zero=1`` each rank keeps 1 / ranks of each
    bucket: its master weights in fp32 and the optimizer's state; :meth:`reduce` scatters the sums there, and
    :meth:`publish` gathers the updated parameters (Rajbhandari et al., arXiv 1910.02054, stage 1). With ``zero=0``
    every rank keeps all of them. Parameters in the wide type are their own masters.

    A bucket is at least ``bucket_bytes`` of gradients; each is reduced by itself, so that the first ones may be under
    way while the last backward pass still runs (:meth:`reduce_early`).

    The optimizer's groups get the rank's parts in place of the parameters; learning rates and schedules go on as they
    are.

    Args:
        parameters: of the model, equal on all ranks of ``comm``; frozen ones only change their type.
        optimizer: over the model's trained parameters, before its first step; one that updates each element by itself.
        comm: the ranks that train together. Collective over it in :meth:`reduce` and :meth:`publish`.

    Raises:
        InvalidUsage: an optimizer that looks at whole matrices or has made steps, parameters that it does not hold,
            sharded ones (DTensor), ``bucket_bytes`` below 1, another ``dtype`` than float32, float64 and bfloat16.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        *,
        zero: int,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        everything = list(parameters)
        self.parameters = trained_parameters(everything)
        _check(self.parameters, optimizer, zero, dtype, bucket_bytes)
        for parameter in everything:
            if dtype is not None and not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        self.comm = comm
        double = dtype == torch.float64 or any(p.dtype == torch.float64 for p in self.parameters)
        wide = torch.float64 if double else torch.float32
        self.zero_stage = zero
        self.buckets = make_buckets(
            self.parameters, optimizer.param_groups, dtype=dtype, elements=bucket_bytes // wide.itemsize, zero=zero,
            kind_of=self._kind, comm_of=self._replicas,
        )  # fmt: skip
        device = self.parameters[0].device
        size = self.buckets[-1].start + self.buckets[-1].length
        self.flat = _memory(comm, size, wide, device).zero_()
        """The gradients: after the backward passes this rank's sums, after :meth:`reduce` those of all ranks, in this
        rank's part of each bucket."""
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._memories: list[Tensor] = []
        self.masters: list[nn.Parameter] = []
        """This rank's part of each bucket, in the wide type: what the optimizer updates."""
        for place, bucket in enumerate(self.buckets):
            self._take_over(place, bucket)
        for place, group in enumerate(optimizer.param_groups):
            group["params"] = [m for m, b in zip(self.masters, self.buckets, strict=True) if b.group == place]
        own = weakref.ref(self)  # the hooks stay with the parameters, and do nothing once this object is gone

        def arrived(parameter: Tensor) -> None:
            if (found := own()) is not None:
                found._arrived(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._early = False
        self._waiting: list[set[int]] = []
        self._works: list[Work] = []

    def _kind(self, _: nn.Parameter) -> Hashable:
        """What parameters of one bucket have in common."""
        return None

    def _replicas(self, _: Hashable) -> Communicator:
        """The ranks that hold the same parameters of a kind."""
        return self.comm

    def _take_over(self, place: int, bucket: Bucket) -> None:
        """Moves a bucket's parameters into flat memory and makes this rank's master of it."""
        memory = _memory(self.comm, bucket.length, bucket.dtype, self.flat.device)
        gradients = self._gradients(bucket)
        whole = torch.zeros(bucket.length, dtype=self.flat.dtype, device=self.flat.device)
        with torch.no_grad():
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                span = slice(offset, offset + parameter.numel())
                whole[span] = parameter.detach().flatten()
                self._views[id(parameter)] = gradients[span].view(parameter.shape)
                self._bucket_of[id(parameter)] = place
            memory.copy_(whole)
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                parameter.data = memory[offset : offset + parameter.numel()].view(parameter.shape)
        own = memory if bucket.dtype == self.flat.dtype else whole
        master = bucket.own_part(own)
        self.masters.append(nn.Parameter(master if own is memory else master.clone()))
        self._memories.append(memory)

    def _gradients(self, bucket: Bucket) -> Tensor:
        return self.flat[bucket.start : bucket.start + bucket.length]

    def _own_gradients(self, bucket: Bucket) -> Tensor:
        return bucket.own_part(self._gradients(bucket))

    @property
    def master_bytes(self) -> int:
        """Bytes of this rank's master weights beside the parameters."""
        pairs = zip(self.masters, self.buckets, strict=True)
        return sum(m.numel() * m.element_size() for m, b in pairs if b.dtype != self.flat.dtype)

    def gather(self, bucket: Bucket, part: Tensor) -> Tensor:
        """The whole of what each rank has a part of, for one bucket. Collective over its ranks."""
        whole = part.new_empty(part.numel() * bucket.parts)
        if bucket.parts == 1:
            return whole.copy_(part)
        bucket.comm.all_gather(whole, part.contiguous())
        return whole

    def part_of(self, bucket: Bucket, values: Iterable[Tensor]) -> Tensor:
        """This rank's part of a bucket's values, one for each of its parameters. Local."""
        whole = torch.cat([value.detach().flatten() for value in values])
        padding = whole.new_zeros(bucket.length - whole.numel())
        return bucket.own_part(torch.cat((whole, padding)))

    def live_part(self, bucket: Bucket, part: Tensor, parameter: nn.Parameter, offset: int) -> Tensor | TensorPart:
        """What of ``part``, this rank's part of a bucket, belongs to a parameter at ``offset`` there: a view. Local."""
        begin = bucket.own * bucket.part
        start = min(max(begin - offset, 0), parameter.numel())
        stop = min(max(begin + bucket.part - offset, 0), parameter.numel())
        values = part[offset + start - begin : offset + stop - begin] if start < stop else part[:0]
        return (
            values.view(parameter.shape) if bucket.parts == 1 else TensorPart.of_range(parameter.shape, start, values)
        )

    # --- one step, in this order -----------------------------------------------------------------------------------

    def zero(self) -> None:
        """Forgets all gradients. Call at the start of a step."""
        with contextlib.suppress(Error):  # of a step that failed, which has said so
            self._drain()
        self.flat.zero_()
        self._early = False
        self._waiting = [{id(p) for p in bucket.parameters} for bucket in self.buckets]
        for parameter in self.parameters:
            view = self._views[id(parameter)]
            parameter.grad = view if parameter.dtype == view.dtype else None

    def reduce_early(self) -> None:
        """The next backward pass is this rank's last, and communicates nothing: each bucket's reduction starts when its
        gradients are there, while the pass goes on. Call before it.

        All ranks start the buckets in one order, after all other operations of the step, whenever that is on each.
        """
        self._early = True

    def _arrived(self, parameter: Tensor) -> None:
        """Hook: a backward pass has added to the gradient of a parameter."""
        key = id(parameter)
        started, place = len(self._works), self._bucket_of[key]
        if place < started:
            raise Error(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient twice in one backward pass; activation "
                "checkpoints need use_reentrant=False",
                rank=self.comm.global_rank,
                op="backward",
            )
        view = self._views[key]
        if parameter.dtype != view.dtype and parameter.grad is not None:
            view += parameter.grad
            parameter.grad = None
        if self._early:
            self._waiting[place].discard(key)
            while started < len(self.buckets) and not self._waiting[started]:
                self._start(started)
                started += 1

    def start(self) -> None:
        """Starts the reductions of all buckets that have not started; after the rank's last backward pass."""
        for place in range(len(self._works), len(self.buckets)):
            self._start(place)

    def _start(self, place: int) -> None:
        bucket = self.buckets[place]
        gradients = self._gradients(bucket)
        if bucket.parts > 1:
            self._works.append(bucket.comm.reduce_scatter(bucket.own_part(gradients), gradients, async_op=True))
        else:
            self._works.append(bucket.comm.all_reduce(gradients, async_op=True))

    def reduce(self, factor: float) -> None:
        """Ends the reductions; this rank's part of each bucket then holds ``factor`` times the sum over all ranks.
        Collective."""
        self.start()
        self._drain()
        for bucket in self.buckets:
            self._own_gradients(bucket).mul_(factor)

    def clip_(self, max_norm: float | None) -> float:
        """Scales all gradients so that their global L2 norm is at most ``max_norm``; returns the norm before that.

        Collective; the same on all ranks.
        """
        total = self._squares(self.buckets)
        if self.zero_stage:
            self.comm.all_reduce(total)
        return self._clip(float(total.sqrt()), max_norm)

    def _squares(self, buckets: Iterable[Bucket]) -> Tensor:
        """The sum of the squares of this rank's parts, fp64 ``[1]`` on the host. Local."""
        norms = [torch.linalg.vector_norm(self._own_gradients(bucket), dtype=torch.float64) for bucket in buckets]
        return torch.stack(norms).square().sum().cpu().reshape(1) if norms else torch.zeros(1, dtype=torch.float64)

    def _clip(self, norm: float, max_norm: float | None) -> float:
        """Scales this rank's parts; returns the norm. Local."""
        if max_norm is not None and norm > max_norm:
            for bucket in self.buckets:
                self._own_gradients(bucket).mul_(max_norm / norm)
        return norm

    def finish(self) -> None:
        """Hands the gradients to the optimizer's parts. Call before the optimizer's step."""
        for master, bucket in zip(self.masters, self.buckets, strict=True):
            master.grad = self._own_gradients(bucket)

    def publish(self) -> None:
        """Gives the updated parameters to all ranks. Call after the optimizer's step."""
        works = []
        with torch.no_grad():
            for master, memory, bucket in zip(self.masters, self._memories, self.buckets, strict=True):
                own = bucket.own_part(memory)
                if bucket.dtype != self.flat.dtype:
                    own.copy_(master)
                if bucket.parts > 1:
                    works.append(bucket.comm.all_gather(memory, own, async_op=True))
        for work in works:
            work.wait()

    def _drain(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


def _memory(comm: Communicator, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From the communicator, whose messages leave it fastest, where that lies on the device."""
    memory = comm.empty(size, dtype=dtype)
    return memory if memory.device == device else torch.empty(size, dtype=dtype, device=device)


def _check(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    zero: int,
    dtype: torch.dtype | None,
    bucket_bytes: int,
) -> None:
    if zero not in (0, 1):
        raise InvalidUsage(f"zero is {zero}; give 0 (every rank keeps the whole optimizer) or 1 (each a part of it)")
    if bucket_bytes < 1:
        raise InvalidUsage(f"bucket_bytes is {bucket_bytes}; at least 1 was expected")
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidUsage(
            f"dtype is {dtype}; give torch.bfloat16 or torch.float32 (float16 needs loss scaling, which is not here)"
        )
    check_elementwise(optimizer, "with zero=1 or dtype=")
    if optimizer.state:
        raise InvalidUsage("the optimizer has made steps already; give the trainer a new one")
    if wrong := [type(p).__name__ for p in parameters if type(p.data) is not Tensor]:
        raise InvalidUsage(f"a parameter is a {wrong[0]}; the trainer shards plain tensors itself, without fully_shard")
