"""The sums of a step's gradients on a rank that has all of them, and their reduction bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hdpcomm.errors import Error
from hdpcomm.kernels.buffers import accumulate

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator, Work
    from hdpcomm.train.zero.buckets import Bucket

__all__ = ["WholeSums", "memory_of"]


class WholeSums:
    """Sums the gradients of many backward passes in one flat tensor, and those of all ranks that hold the same.

    A parameter of the tensor's dtype gets a view of it as ``.grad``, so autograd adds in place and nothing is copied.
    Gradients of narrower parameters (bf16, fp16) are added after each backward pass, in the wide type.

    A bucket is reduced by itself, so that the first ones may be under way while the last backward pass still runs
    (:meth:`reduce_early`). Where it is cut among owners, each gets its part of the sum.

    Args:
        comm: any of the rank's, from which memory comes that messages leave fastest.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, wide: torch.dtype, device: torch.device) -> None:
        self._buckets, self._rank = buckets, comm.global_rank
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
        self._early = False
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
        self._early = False
        self.begin_pass()
        for parameter in self._parameters:
            view = self._views[id(parameter)]
            parameter.grad = view if parameter.dtype == view.dtype else None

    def begin_pass(self, _: int = 0) -> None:
        """A backward pass begins, over any part of the model. Call before each."""
        for key, count in self._arrivals.items():
            self._times[key] = max(count, self._times.get(key, 0))
        self._arrivals.clear()

    def end_pass(self) -> None:
        """The backward pass has ended: its gradients stay here."""

    def reduce_early(self) -> None:
        """The next backward pass is this rank's last, and communicates nothing: each bucket's reduction starts when its
        gradients are there, while the pass goes on. Call before it; until a pass has been seen, it does nothing.

        All ranks start the buckets in one order, after all other operations of the step, whenever that is on each.
        """
        self.begin_pass()
        self._early = bool(self._times)
        self._left = [sum(self._times.get(id(p), 1) for p in bucket.parameters) for bucket in self._buckets]

    def arrived(self, parameter: nn.Parameter) -> None:
        """A backward pass has added to the gradient of a parameter."""
        key = id(parameter)
        started, place = len(self._works), self._bucket_of[key]
        if place < started:
            raise Error(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient more often in this backward pass than "
                "in those before; activation checkpoints need use_reentrant=False where they are not always on",
                rank=self._rank,
                op="backward",
            )
        self.measured(parameter)
        self._arrivals[key] = self._arrivals.get(key, 0) + 1
        if self._early:
            self._left[place] -= 1
            while started < len(self._buckets) and self._left[started] <= 0:
                self._start(started)
                started += 1

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
