"""The gradients of all parameters on a rank: summed in flat buckets, which are reduced one by one over the ranks that
hold the same.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator, Work
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.kernels.transfers import accumulate
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.train.state.layout import Holders, Layout
from hdpcomm.train.zero.buckets import BUCKET_BYTES, Bucket, Unit, Units, make_buckets
from hdpcomm.train.zero.shared_parts import PushedSums

__all__ = ["Gradients", "WholeSums", "memory_of", "trained_parameters", "wide_type"]


class WholeSums:
    """Sums the gradients of many backward passes in one flat tensor, and those of all ranks that hold the same.

    A parameter of the tensor's dtype gets a view of it as ``.grad``, so autograd adds in place and nothing is copied.
    Gradients of narrower parameters (bf16, fp16) are added after each backward pass, in the wide type.

    A bucket is reduced by itself, so that the first ones may be under way while the last backward pass still runs
    (:meth:`begin_pass`). Where it is cut among owners, each gets its part of the sum. All ranks start the buckets in
    one order; where the pass exchanges messages, its ranks start each at the same place among them: where the pass
    comes to a layer, whichever gradients a rank lacks (of experts without tokens, say).

    Args:
        comm: any of the rank's, from which memory comes that messages leave fastest.
        units: the layers; ``None``: no bucket starts beside a pass that exchanges messages.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        wide: torch.dtype,
        device: torch.device,
        units: Units | None = None,
    ) -> None:
        self._buckets, self._rank, self._units = buckets, comm.global_rank, units
        size = buckets[-1].start + buckets[-1].length
        cut = any(bucket.parts > 1 for bucket in buckets)
        self.flat = memory_of(comm if cut else None, size, wide, device).zero_()
        """This rank's sums after the backward passes; once reduced those of all ranks, in its part of each bucket."""
        self._parameters = [p for bucket in buckets for p in bucket.parameters]
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        for place, bucket in enumerate(buckets):
            gradients = self.whole(bucket)
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                self._views[id(parameter)] = gradients[offset : offset + parameter.numel()].view(parameter.shape)
                self._bucket_of[id(parameter)] = place
        self._numbers: dict[int, int] = {}
        """By unit: layers of the model's first chunk, counted from the last one, which is 1."""
        if units is not None:
            layers = [unit for unit in units.layers if not unit.chunk]
            self._numbers = {id(unit): number for number, unit in enumerate(reversed(layers), 1)}
            units.listen(self._on_layer_entered)
            for chunk in units.chunks:
                if isinstance(group := getattr(chunk, "expert", None), ExpertGroup):
                    group.listeners.append(weakref.WeakMethod(self._on_rows_exchanged))
        self._entered = 0
        """The layer to which the backward pass has come; 0: to none."""
        self._depths: set[int] = set()
        """The last layers that backward passes have come to; -1: one has left out layers."""
        self._latest: dict[int, int] = {}
        """By parameter: the layer to which a backward pass had come when its gradient came; the latest of all passes.
        """
        self._places: list[int] = []
        """For each bucket the latest of its parameters, as :meth:`order` has told it last."""
        self._exchanging: set[int] = set()
        """Layers whose backward passes exchange rows for experts, as far as passes have shown it."""
        self._waits: frozenset[int] = frozenset()
        """These layers, as :meth:`order` has told them last: there buckets start behind the exchanges, beside what else
        the layer computes."""
        self._agreed = self._alone = self._changed = False
        self._overlap = 0.0
        self._times: dict[int, int] = {}
        """How often a backward pass gives a parameter its gradient, where it was seen: with reentrant checkpoints more
        than once, where several layers share it."""
        self._arrivals: dict[int, int] = {}
        self._left = [0] * len(buckets)
        self._works: list[Work] = []

    def whole(self, bucket: Bucket) -> Tensor:
        """The gradients of a bucket: a view of :attr:`flat`."""
        return self.flat[bucket.start : bucket.start + bucket.length]

    def own(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket's gradients: a view."""
        return bucket.own_part(self.whole(bucket))

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of a parameter: a view."""
        return self._views[id(parameter)]

    def zero(self) -> None:
        """Forgets all sums and takes over ``.grad`` of every parameter. Local."""
        self.flat.zero_()
        self.begin_pass()
        for parameter in self._parameters:
            view = self._views[id(parameter)]
            parameter.grad = view if parameter.dtype == view.dtype else None

    def passes(self, _: Callable[[], Sequence[Sequence[int]]]) -> AbstractContextManager[None]:
        """Context of the passes of a step. Local."""
        return nullcontext() if self._units is None else self._units.open()

    def order(self) -> bytes:
        """The layers after which the buckets are complete, as far as passes have shown it: what the ranks of a backward
        pass must have alike to reduce beside it. Local, before a step's passes."""
        self._waits = frozenset(self._exchanging)
        if self._units is not None and self._changed:
            self._changed = False
            self._places = [max(map(self._place, bucket.parameters)) for bucket in self._buckets]
        return repr((self._places, sorted(self._depths), sorted(self._waits))).encode()

    def agree(self, alike: bool) -> None:
        """``alike``: all ranks of the stage have told the same :meth:`order`."""
        self._agreed = alike and bool(self._places) and len(self._depths) == 1

    def _place(self, parameter: nn.Parameter) -> int:
        assert self._units is not None
        unit = self._units.of[id(parameter)]
        if unit.chunk:  # whose passes have ended before the last one
            return 0
        inside = self._numbers.get(id(unit), 0)
        return max(inside, self._latest.get(id(parameter), inside or len(self._numbers)))

    def begin_pass(self, _: int = 0, overlap: float = 0.0, alone: bool = False) -> None:
        """A backward pass begins, over any part of the model. Call before each.

        Args:
            overlap: the share of it, counted from its end, beside which buckets are reduced, once a pass has been seen;
                0: it is not this rank's last one.
            alone: it exchanges no messages: each bucket's reduction starts as soon as its gradients are there.
        """
        for key, count in self._arrivals.items():
            self._times[key] = max(count, self._times.get(key, 0))
        self._arrivals.clear()
        self._entered, self._alone = 0, alone
        self._overlap = overlap if self._times and (alone or self._agreed) else 0.0
        if self._overlap:
            self._left = [sum(self._times.get(id(p), 1) for p in bucket.parameters) for bucket in self._buckets]

    def end_pass(self) -> None:
        """The backward pass has ended: its gradients stay here. Call after each."""
        if self._entered:
            self._depths.add(self._entered)
        self._entered = 0

    def _on_layer_entered(self, unit: Unit, backward: bool) -> None:
        number = self._numbers.get(id(unit), 0)
        if not backward or number <= self._entered:
            return
        if number != self._entered + 1:
            self._depths.add(-1)
        self._entered = number
        if number not in self._waits:
            self._start_complete()

    def _on_rows_exchanged(self) -> None:
        if self._entered:
            self._exchanging.add(self._entered)
            self._start_complete()

    def _start_complete(self) -> None:
        left = len(self._numbers) - max(1, self._entered) + 1
        if not self._overlap or left > self._overlap * len(self._numbers):
            return
        while (place := len(self._works)) < len(self._buckets):
            passed = bool(self._places) and self._places[place] < self._entered
            if not passed and not (self._alone and self._left[place] <= 0):
                return
            self._start(place)

    def arrived(self, parameter: nn.Parameter) -> None:
        """A backward pass has added to the gradient of a parameter."""
        key = id(parameter)
        place = self._bucket_of[key]
        if place < len(self._works):
            raise Error(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient later, or more often, in this backward "
                "pass than in those before; activation checkpoints need use_reentrant=False where they are not always "
                "on",
                rank=self._rank,
                op="backward",
            )
        self.measured(parameter)
        self._arrivals[key] = self._arrivals.get(key, 0) + 1
        if self._entered > self._latest.get(key, -1):
            self._latest[key], self._changed = self._entered, True
        if self._overlap and self._alone:
            self._left[place] -= 1
            self._start_complete()

    def measured(self, parameter: nn.Parameter) -> None:
        """As :meth:`arrived` in a pass that is only measured."""
        view = self._views[id(parameter)]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            accumulate(view, parameter.grad.contiguous())
            parameter.grad = view if parameter.dtype == view.dtype else None

    def start(self) -> None:
        """Starts the reductions of all buckets that have not started; after the rank's last backward pass."""
        for place in range(len(self._works), len(self._buckets)):
            self._start(place)

    def _start(self, place: int) -> None:
        bucket = self._buckets[place]
        gradients, sharding = self.whole(bucket), bucket.sharding
        if sharding.owners is not None:
            self._works.append(sharding.owners.reduce_scatter(bucket.own_part(gradients), gradients, async_op=True))
        else:
            assert sharding.across is not None
            self._works.append(sharding.across.all_reduce(gradients, async_op=True))

    def take(self) -> list[Work]:
        """The reductions that are under way, bucket after bucket, to be waited for by the caller."""
        works, self._works = self._works, []
        return works

    def check(self) -> None:
        """Raises what has failed outside of the reductions: nothing can."""


def memory_of(comm: Communicator | None, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From the communicator, whose messages leave it fastest, where that lies on the device."""
    memory = None if comm is None else comm.empty(size, dtype=dtype)
    return memory if memory is not None and memory.device == device else torch.empty(size, dtype=dtype, device=device)


_PIECE = 1 << 22
"""Elements whose norm is taken at a time: torch makes a copy of them in fp64 on CPUs."""


class Gradients:
    """The gradients of all parameters on a rank, and of all ranks that hold the same parameters: summed in fp32 (fp64
    if any parameter is) in flat buckets.

    The sums are whole on each rank until they are reduced (:class:`hdpcomm.train.zero.gradients.WholeSums`), or, with
    ZeRO-2 and 3, parts at their owners from the beginning (:class:`hdpcomm.train.zero.shared_parts.PushedSums`). A
    parameter that no pass of any rank has reached has no gradient, as on a single device.

    Args:
        buckets: of the trained parameters, of :func:`hdpcomm.train.zero.buckets.make_buckets`.
        layout: which ranks hold the same.
        mesh: all ranks; the norm is that of the whole model.
    """

    def __init__(self, buckets: Sequence[Bucket], layout: Layout, mesh: Mesh, sums: WholeSums | PushedSums) -> None:
        self.buckets = buckets
        self.parameters = [p for bucket in buckets for p in bucket.parameters]
        self._mesh = mesh
        self.sums = sums
        self.begin_pass, self.end_pass = self.sums.begin_pass, self.sums.end_pass
        self._cut = any(bucket.sharding.owners is not None for bucket in buckets)
        self._use = _UsedFlags(self.parameters, layout)
        self._open = self._measures = False
        self._reached: set[int] = set()
        """Parameters that the backward passes of this step have reached."""
        own = weakref.ref(self)  # the hooks stay with the parameters, and do nothing once this object is gone

        def arrived(parameter: nn.Parameter) -> None:
            if (found := own()) is not None and found._open:
                found._reached.add(id(parameter))
                found.sums.arrived(parameter)
            elif found is not None and found._measures:
                found.sums.measured(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    @classmethod
    def whole(
        cls,
        parameters: Iterable[nn.Parameter],
        layout: Layout,
        mesh: Mesh,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        units: Units | None = None,
    ) -> Gradients:
        """Gradients of the parameters with ``requires_grad``, each once, whole on each rank, in buckets of at least so
        many bytes, but for the last ones. Local.

        Args:
            units: the model's layers; ``None``: reductions begin beside a backward pass only where that exchanges
                nothing.

        Raises: InvalidUsage: of :func:`trained_parameters`.
        """
        trained = trained_parameters(parameters)
        wide = wide_type(trained)
        buckets = make_buckets(trained, layout, elements=bucket_bytes // wide.itemsize)
        return cls(buckets, layout, mesh, WholeSums(buckets, mesh.comm, wide, trained[0].device, units))

    def own(self, bucket: Bucket) -> Tensor:
        """The gradients of a bucket that this rank has after :meth:`reduce`, of what it updates: a view."""
        return bucket.own_piece(self.sums.own(bucket))

    # --- one step, in this order -----------------------------------------------------------------------------------

    def zero(self) -> None:
        """Forgets all gradients. Call at the start of a step, before the ranks agree on it."""
        with contextlib.suppress(Error):  # of a step that failed, which has said so
            self.drain()
        self._reached.clear()
        self.sums.zero()

    @contextlib.contextmanager
    def passes(self, order: Callable[[], Sequence[Sequence[int]]]) -> Iterator[None]:
        """Context of the passes of a step. Gradients that come outside of it are not taken: the parameters may have
        another trainer by then.

        Args:
            order: for each chunk of the model on this rank, the HDP ranks in the order in which their backward passes
                are to end.
        """
        self._open = True
        try:
            with self.sums.passes(order):
                yield
        finally:
            self._open = False

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Context of passes that take as long as those of a step, and whose gradients nobody needs: they take no memory
        of their own. Call :meth:`zero` afterwards."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def start(self) -> None:
        """Starts the reductions that have not started; after the rank's last backward pass."""
        if isinstance(self.sums, WholeSums):
            self.sums.start()
        self._use.start(self._reached)

    def reduce(self, factor: float) -> None:
        """Ends the reductions: this rank's part of each bucket is ``factor`` times the sum over all ranks that hold the
        same parameters then. Collective over the mesh.

        The sum over tensor ranks starts when that over HDP ranks has ended, while those of later buckets go on.
        """
        self.start()
        works: Sequence[Work | None]
        if isinstance(self.sums, WholeSums):
            works = self.sums.take()
        else:
            shardings = [(bucket, bucket.sharding.across) for bucket in self.buckets]
            works = [
                None if comm is None else comm.reduce_scatter(self.own(each), self.sums.own(each), async_op=True)
                for each, comm in shardings
            ]
        alike: list[tuple[Work, Tensor, list[Tensor]]] = []
        for work, bucket in zip(works, self.buckets, strict=True):
            if work is not None:
                work.wait()
            own = self.own(bucket).mul_(factor)
            if bucket.holders.alike is not None and (views := bucket.split_shared(own)[0]):
                joined = views[0] if len(views) == 1 else torch.cat(views)
                alike.append((bucket.holders.alike.all_reduce(joined, async_op=True), joined, views))
        for work, joined, views in alike:
            work.wait()
            for view, total in zip(views, torch.split(joined, [view.numel() for view in views]), strict=True):
                if view.data_ptr() != total.data_ptr():
                    view.copy_(total)
        for bucket in self.buckets:
            if bucket.holders.ends is not None:
                bucket.holders.ends.all_reduce(self.own(bucket))
        self._use.finish()

    def clip_(self, max_norm: float | None) -> float:
        """Scales all gradients so that the model's global L2 norm is at most ``max_norm``; returns it as it was.

        Collective over the ranks that hold one copy of the model, which get the same norm.
        """
        mesh = self._mesh
        counted = [view for bucket in self.buckets for view in self._counted(bucket)]
        pieces = [piece for view in counted for piece in torch.split(view, _PIECE)]
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        squares = torch.zeros(1, dtype=torch.float64)
        if norms:
            squares += torch.stack(norms).square().sum().cpu()
        for comm in (mesh.hdp_comm if self._cut else mesh.expert_comm, mesh.tensor_comm, mesh.pipeline_comm):
            comm.all_reduce(squares)
        norm = math.sqrt(float(squares))
        if max_norm is not None and norm > max_norm:
            for bucket in self.buckets:
                self.own(bucket).mul_(max_norm / norm)
        return norm

    def _counted(self, bucket: Bucket) -> list[Tensor]:
        """Views of this rank's part of a bucket that count in the norm. Without ZeRO every HDP rank has all that is on
        all of them: the first of an expert group counts it."""
        if not (self._cut or bucket.holders.expert or self._mesh.expert_rank == 0):
            return []
        shared, alone = bucket.split_shared(self.own(bucket))
        return alone + shared if bucket.holders.counts else alone

    def finish(self) -> None:
        """Gives every parameter its gradient in the parameter's own dtype, and those that no rank has used none. Call
        before the optimizer's step, where no :class:`hdpcomm.train.zero.masters.Masters` take the sums."""
        assert isinstance(self.sums, WholeSums)
        for parameter in self.parameters:
            parameter.grad = self.sums.of(parameter).to(parameter.dtype) if self.used(parameter) else None

    def used(self, parameter: nn.Parameter) -> bool:
        """Whether a backward pass of any rank has reached a parameter in this step; known after :meth:`reduce`."""
        return self._use[parameter]

    def drain(self) -> None:
        """Waits for all reductions that are under way. Raises the error of the first that failed, as the operations
        after it tell no more than that there was one."""
        works = [*self.sums.take(), *(work for work, _ in self._use.take())]
        errors = []
        try:
            self.sums.check()
        except Error as error:
            errors.append(error)
        for work in works:
            try:
                work.wait()
            except Error as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _UsedFlags:
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
        """Reductions under way, with the flags of each group of parameters, to be waited for by the caller."""
        works, self._works = self._works, []
        return works

    def __getitem__(self, parameter: nn.Parameter) -> bool:
        return self._used[id(parameter)]


def trained_parameters(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters with ``requires_grad``, each once.

    Raises:
        InvalidUsage: nothing to train, several devices, a parameter that is sharded by others or no real floating-point
            tensor.
    """
    found = list({id(p): p for p in parameters if p.requires_grad}.values())
    if not found:
        raise InvalidUsage("the model has no parameter with requires_grad; there is nothing to train")
    if any(type(p).__name__ == "DTensor" for p in found):
        raise InvalidUsage(
            "parameters are sharded already (DTensor, as after fully_shard), and ranks of a plan run other numbers of "
            "passes; give the model as it was before, and zero=3, which shards parameters, gradients and the "
            "optimizer's state"
        )
    devices = sorted({str(p.device) for p in found})
    if len(devices) > 1:
        raise InvalidUsage(f"the parameters are on {', '.join(devices)}; a rank's model must be on one device")
    if wrong := [p.dtype for p in found if not p.dtype.is_floating_point]:
        raise InvalidUsage(f"a parameter has dtype {wrong[0]}; real floating-point parameters were expected")
    return found


def wide_type(parameters: Iterable[Tensor], dtype: torch.dtype | None = None) -> torch.dtype:
    """The type in which gradients are summed, and that of master weights: fp64 if any parameter is, or is to be."""
    double = dtype == torch.float64 or any(p.dtype == torch.float64 for p in parameters)
    return torch.float64 if double else torch.float32
