"""The sums of a step's gradients on a rank that has all of them, and their reduction bucket by bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hdpcomm.errors import Error
from hdpcomm.kernels.buffers import accumulate
from hdpcomm.models.expert_group import ExpertGroup

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator, Work
    from hdpcomm.train.zero.buckets import Bucket, Unit, Units

__all__ = ["WholeSums", "memory_of"]


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
