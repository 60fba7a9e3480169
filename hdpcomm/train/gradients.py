"""The gradients of all parameters on a rank: summed in flat buckets, reduced over the ranks that hold the same."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hdpcomm.errors import Error, InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator, Work
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.train.layout import Holders, Layout

__all__ = ["BUCKET_BYTES", "Bucket", "Gradients", "memory_of", "trained_parameters"]

BUCKET_BYTES = 32 << 20
"""Long enough for the wire, short enough that the first bucket leaves early."""

_ALIGNED = 16
"""Elements to whose multiple a rank's part is rounded up, so that parts begin at whole cache lines."""


@dataclass(slots=True)
class Bucket:
    """Parameters with the same holders, one after the other, cut into equal parts.

    Attributes:
        holders: the ranks that hold the same parameters.
        parts, own: into how many parts it is cut, and which one is this rank's.
        start: place of its first element in the flat buffer of all buckets.
        offsets: of each parameter, from ``start``.
        part: elements of one part; the last part ends with padding.
    """

    holders: Holders
    parts: int
    own: int
    start: int = 0
    part: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    elements: int = 0

    @property
    def length(self) -> int:
        """Elements, with the padding."""
        return self.part * self.parts

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's part of ``[length]``: a view."""
        return whole[self.own * self.part : (self.own + 1) * self.part]

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.offsets.append(self.elements)
        self.elements += parameter.numel()


class Gradients:
    """Sums the gradients of many backward passes in one flat tensor of fp32 (fp64 if any parameter is), and those of
    all ranks that hold the same parameters.

    A parameter of the buffer's dtype gets a view of it as ``.grad``, so autograd adds in place and nothing is copied.
    Gradients of narrower parameters (bf16, fp16) are added after each backward pass, in the wide type, and handed back
    by :meth:`finish`. A parameter that no pass of any rank has reached has no gradient, as on a single device.

    A bucket is at least ``bucket_bytes`` long and reduced by itself, so that the first ones may be under way while the
    last backward pass still runs (:meth:`reduce_early`). With ``zero=1`` its sum is cut among the replicas.

    Args:
        parameters: those with ``requires_grad`` are taken, each once; all on one device.
        layout: which ranks hold the same.
        mesh: all ranks; the norm is that of the whole model.
        zero: 1: each rank gets its part of the sums; 0: all of them.
        bucket_bytes: least bytes of a bucket, but of the last ones.
        group_of: parameters with other keys are never in one bucket.
        wide: the type of the sums; ``None``: fp64 if any parameter is, else fp32.

    Raises:
        InvalidUsage: nothing to train, several devices, or a complex parameter.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        layout: Layout,
        mesh: Mesh,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        zero: int = 0,
        group_of: Callable[[nn.Parameter], Hashable] = lambda _: None,
        wide: torch.dtype | None = None,
    ) -> None:
        self.parameters = trained_parameters(parameters)
        self._mesh, self._zero = mesh, zero
        wide = wide or (torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32)
        self.buckets = _buckets(self.parameters, layout, bucket_bytes // wide.itemsize, zero, group_of)
        size = self.buckets[-1].start + self.buckets[-1].length
        device = self.parameters[0].device
        self.flat = memory_of(mesh.comm if zero else None, size, wide, device).zero_()
        """This rank's sums after the backward passes; after :meth:`reduce` those of all ranks, in this rank's part of
        each bucket."""
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        for place, bucket in enumerate(self.buckets):
            gradients = self.of_bucket(bucket)
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                self._views[id(parameter)] = gradients[offset : offset + parameter.numel()].view(parameter.shape)
                self._bucket_of[id(parameter)] = place
        self._use = _Use(self.parameters, layout)
        self._open = self._early = False
        self._reached: set[int] = set()
        """Parameters that the backward passes of this step have reached."""
        self._times: dict[int, int] = {}
        """How often a backward pass gives a parameter its gradient, where it was seen: with reentrant checkpoints more
        than once, where several layers share it."""
        self._arrivals: dict[int, int] = {}
        self._left = [0] * len(self.buckets)
        self._works: list[Work] = []
        own = weakref.ref(self)  # the hooks stay with the parameters, and do nothing once this object is gone

        def arrived(parameter: Tensor) -> None:
            if (found := own()) is not None and found._open:
                found._arrived(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def of_bucket(self, bucket: Bucket) -> Tensor:
        """The gradients of a bucket: a view of :attr:`flat`."""
        return self.flat[bucket.start : bucket.start + bucket.length]

    def own(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket's gradients: a view."""
        return bucket.own_part(self.of_bucket(bucket))

    # --- one step, in this order -----------------------------------------------------------------------------------

    def zero(self) -> None:
        """Forgets all gradients and takes over ``.grad`` of every parameter. Call at the start of a step."""
        with contextlib.suppress(Error):  # of a step that failed, which has said so
            self.drain()
        self.flat.zero_()
        self._early = False
        self._reached.clear()
        self.begin_pass()
        for parameter in self.parameters:
            view = self._views[id(parameter)]
            parameter.grad = view if parameter.dtype == view.dtype else None

    @contextlib.contextmanager
    def passes(self, _: Callable[[], object]) -> Iterator[None]:
        """Round the passes of a step. Gradients that come outside of it are not taken: the parameters may have another
        trainer by then."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def begin_pass(self) -> None:
        """A backward pass begins. Call before each."""
        for key, count in self._arrivals.items():
            self._times[key] = max(count, self._times.get(key, 0))
        self._arrivals.clear()

    def reduce_early(self) -> None:
        """The next backward pass is this rank's last, and communicates nothing: each bucket's reduction starts when its
        gradients are there, while the pass goes on. Call before it; until a pass has been seen, it does nothing.

        All ranks start the buckets in one order, after all other operations of the step, whenever that is on each.
        """
        self.begin_pass()
        self._early = bool(self._times)
        self._left = [sum(self._times.get(id(p), 1) for p in bucket.parameters) for bucket in self.buckets]

    def _arrived(self, parameter: Tensor) -> None:
        """Hook: a backward pass has added to the gradient of a parameter."""
        key = id(parameter)
        started, place = len(self._works), self._bucket_of[key]
        if place < started:
            raise Error(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient more often in this backward pass than "
                "in those before; activation checkpoints need use_reentrant=False where they are not always on",
                rank=self._mesh.comm.global_rank,
                op="backward",
            )
        view = self._views[key]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            view += parameter.grad
            parameter.grad = view if parameter.dtype == view.dtype else None
        self._reached.add(key)
        self._arrivals[key] = self._arrivals.get(key, 0) + 1
        if self._early:
            self._left[place] -= 1
            while started < len(self.buckets) and self._left[started] <= 0:
                self._start(started)
                started += 1

    def start(self) -> None:
        """Starts the reductions of all buckets that have not started; after the rank's last backward pass."""
        for place in range(len(self._works), len(self.buckets)):
            self._start(place)
        self._use.start(self._reached)

    def _start(self, place: int) -> None:
        bucket = self.buckets[place]
        gradients, replicas = self.of_bucket(bucket), bucket.holders.replicas
        if bucket.parts > 1:
            self._works.append(replicas.reduce_scatter(bucket.own_part(gradients), gradients, async_op=True))
        else:
            self._works.append(replicas.all_reduce(gradients, async_op=True))

    def reduce(self, factor: float) -> None:
        """Ends the reductions: this rank's part of each bucket is ``factor`` times the sum over all ranks that hold the
        same parameters then. Collective over the mesh.

        The sum over tensor ranks starts when that over HDP ranks has ended, while those of later buckets go on.
        """
        self.start()
        works, self._works = self._works, []
        sums: list[Work] = []
        for work, bucket in zip(works, self.buckets, strict=True):
            work.wait()
            own = self.own(bucket).mul_(factor)
            if bucket.holders.alike is not None:
                sums.append(bucket.holders.alike.all_reduce(own, async_op=True))
        for work in sums:
            work.wait()
        for bucket in self.buckets:
            if bucket.holders.ends is not None:
                bucket.holders.ends.all_reduce(self.own(bucket))
        self._use.finish()

    def clip_(self, max_norm: float | None) -> float:
        """Scales all gradients so that the model's global L2 norm is at most ``max_norm``; returns it as it was.

        Collective over the ranks that hold one copy of the model, which get the same norm.
        """
        mesh = self._mesh
        counted = [bucket for bucket in self.buckets if self._counts(bucket.holders)]
        norms = [torch.linalg.vector_norm(self.own(bucket), dtype=torch.float64) for bucket in counted]
        squares = torch.zeros(1, dtype=torch.float64)
        if norms:
            squares += torch.stack(norms).square().sum().cpu()
        for comm in (mesh.hdp_comm if self._zero else mesh.expert_comm, mesh.tensor_comm, mesh.pipeline_comm):
            comm.all_reduce(squares)
        norm = math.sqrt(float(squares))
        if max_norm is not None and norm > max_norm:
            for bucket in self.buckets:
                self.own(bucket).mul_(max_norm / norm)
        return norm

    def _counts(self, holders: Holders) -> bool:
        """Without ZeRO every HDP rank has all that is on all of them: the first of an expert group counts it."""
        return holders.counts and (self._zero == 1 or holders.expert or self._mesh.expert_rank == 0)

    def finish(self) -> None:
        """Gives every parameter its gradient in the parameter's own dtype, and those that no rank has used none. Call
        before the optimizer's step."""
        for parameter in self.parameters:
            view = self._views[id(parameter)]
            parameter.grad = view.to(parameter.dtype) if self.used(parameter) else None

    def used(self, parameter: nn.Parameter) -> bool:
        """Whether a backward pass of any rank has reached a parameter in this step; known after :meth:`reduce`."""
        return self._use[parameter]

    def drain(self) -> None:
        """Waits for all reductions that are under way. Raises the error of the first that failed, as the operations
        after it tell no more than that there was one."""
        works, self._works = [*self._works, *(work for work, _ in self._use.take())], []
        errors = []
        for work in works:
            try:
                work.wait()
            except Error as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _Use:
    """Which parameters the passes of a step have used on any of the ranks that hold them; a few bytes a parameter, on
    their way beside the gradients."""

    def __init__(self, parameters: list[nn.Parameter], layout: Layout) -> None:
        groups: dict[int, tuple[Holders, list[int]]] = {}
        for parameter in parameters:
            holders = layout.of(parameter).holders
            groups.setdefault(id(holders), (holders, []))[1].append(id(parameter))
        self._groups = list(groups.values())
        self._works: list[tuple[Work, Tensor]] = []
        self._used: dict[int, bool] = {}

    def start(self, reached: set[int]) -> None:
        """``reached``: ids of the parameters that this rank has used. Once a step, on all ranks that hold the same."""
        if not self._works:
            for holders, keys in self._groups:
                flags = torch.tensor([key in reached for key in keys], dtype=torch.int32)
                self._works.append((holders.replicas.all_reduce(flags, "max", async_op=True), flags))

    def finish(self) -> None:
        """Ends what :meth:`start` began. Collective over the ends of a pipeline, where a weight is tied."""
        for (work, flags), (holders, keys) in zip(self.take(), self._groups, strict=True):
            work.wait()
            if holders.ends is not None:
                holders.ends.all_reduce(flags, "max")
            self._used.update(zip(keys, (flags != 0).tolist(), strict=True))

    def take(self) -> list[tuple[Work, Tensor]]:
        """What is under way, with the flags of each group of parameters, to be waited for by the caller."""
        works, self._works = self._works, []
        return works

    def __getitem__(self, parameter: nn.Parameter) -> bool:
        return self._used[id(parameter)]


def trained_parameters(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those with ``requires_grad``, each once.

    Raises:
        InvalidUsage: nothing to train, several devices, a parameter that is not a plain real floating-point tensor.
    """
    found = list({id(p): p for p in parameters if p.requires_grad}.values())
    if not found:
        raise InvalidUsage("the model has no parameter with requires_grad; there is nothing to train")
    devices = sorted({str(p.device) for p in found})
    if len(devices) > 1:
        raise InvalidUsage(f"the parameters are on {', '.join(devices)}; a rank's model must be on one device")
    if wrong := [p.dtype for p in found if not p.dtype.is_floating_point]:
        raise InvalidUsage(f"a parameter has dtype {wrong[0]}; real floating-point parameters were expected")
    return found


def _buckets(
    parameters: list[nn.Parameter],
    layout: Layout,
    elements: int,
    zero: int,
    group_of: Callable[[nn.Parameter], Hashable],
) -> list[Bucket]:
    """Buckets of about ``elements`` elements, in the order in which a backward pass ends them: from the last parameter.

    The same on all ranks that hold the same parameters.
    """
    open_buckets: dict[tuple[int, Hashable], Bucket] = {}
    buckets: list[Bucket] = []
    for parameter in reversed(parameters):
        holders = layout.of(parameter).holders
        key = id(holders), group_of(parameter)
        if key not in open_buckets:
            comm = holders.replicas
            open_buckets[key] = Bucket(holders, *((comm.size, comm.rank) if zero else (1, 0)))
        bucket = open_buckets[key]
        bucket.add(parameter)
        if bucket.elements >= elements:
            buckets.append(open_buckets.pop(key))
    buckets += open_buckets.values()
    start = 0
    for bucket in buckets:
        bucket.start = start
        bucket.part = -(-bucket.elements // (bucket.parts * _ALIGNED)) * _ALIGNED
        start += bucket.length
    return buckets


def memory_of(comm: Communicator | None, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From the communicator, whose messages leave it fastest, where that lies on the device."""
    memory = None if comm is None else comm.empty(size, dtype=dtype)
    return memory if memory is not None and memory.device == device else torch.empty(size, dtype=dtype, device=device)
