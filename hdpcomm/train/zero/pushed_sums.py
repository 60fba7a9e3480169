"""ZeRO-2 and ZeRO-3: each layer's gradients go to the owners of their parts as soon as a backward pass has them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hdpcomm.errors import Aborted, Error
from hdpcomm.kernels.buffers import accumulate

if TYPE_CHECKING:
    from hdpcomm.comm import Work
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.train.zero.buckets import Bucket, BucketShards, SharedShards, Unit, Units
    from hdpcomm.train.zero.side_work import SideWork

__all__ = ["PushedSums"]

_AHEAD = 2
"""Units whose gradients may wait to be added; then the backward pass waits."""
_POLL_S = 0.5


@dataclass(slots=True)
class _Turns:
    """When the ranks that share a bucket add to it: in the order in which the plan's backward passes end.

    Attributes:
        ranks: the owner that adds, turn by turn.
        own: turns of this rank, one for each of its passes.
    """

    ranks: list[int]
    own: list[int]


@dataclass(slots=True)
class _Pass:
    """A backward pass of this rank.

    Attributes:
        number: of those of its chunk.
        gradients: that have come, by parameter, until they are pushed.
        made: by unit, the mark after its last gradient so far. One that is made later would come after what the rank
            has begun since, which may wait for others.
        pushed: units whose gradients have left.
    """

    chunk: int
    number: int
    gradients: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    pushed: set[int] = field(default_factory=set)


class _Job(NamedTuple):
    """Gradients of a unit to be added.

    Attributes:
        made: the mark after which they are there; ``None`` where there are none.
    """

    unit: Unit
    its_pass: _Pass
    gradients: dict[int, Tensor]
    made: Any


class PushedSums:
    """The sums of gradients, of which each rank keeps its part only.

    No rank takes part in the passes of another one: a rank adds each layer's gradients to the parts of their owners,
    in memory that all ranks of the host map, from a thread of its own (and a stream, on a GPU). The additions to a
    bucket have one order, the plan's: that in which its backward passes are to end. So sums have the same bits whatever
    the timing, and no rank waits in a circle: an order of ends is one in which every pass of every rank comes after
    those that it needs. Whoever is early has at most ``_AHEAD`` units of gradients waiting; then its backward pass
    waits, too. A pass that has ended leaves none behind (:meth:`end_pass`).

    Args:
        units: the layers, and the units of parameters.
        buckets: each of one unit.
    """

    def __init__(
        self,
        units: Units,
        buckets: Sequence[Bucket],
        mesh: Mesh,
        memory: SharedShards,
        side: SideWork,
        wide: torch.dtype,
    ) -> None:
        self._units, self._mesh, self._memory, self._side = units, mesh, memory, side
        self._parts = {id(bucket): memory.reserve(bucket, wide) for bucket in buckets}
        self._by_unit: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            self._by_unit.setdefault(id(units.of[id(bucket.parameters[0])]), []).append(bucket)
        self._trained = {id(p) for bucket in buckets for p in bucket.parameters}
        self._order: Sequence[Sequence[int]] = ()
        self._turns: dict[tuple[int, tuple[int, ...]], _Turns] = {}
        self._passes: Counter[int] = Counter()
        self._now: _Pass | None = None
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        units.listen(self._on_layer_entered)

    def own(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket's sums, a view."""
        return self._parts[id(bucket)].own

    def zero(self) -> None:
        """Forgets all sums, and ``.grad`` of every parameter. Local; before the agreement on a step, after which others
        may add."""
        self._stop()
        for bucket in (bucket for buckets in self._by_unit.values() for bucket in buckets):
            for parameter in bucket.parameters:
                parameter.grad = None
        for parts in self._parts.values():
            parts.own.zero_()  # on a GPU before the agreement, too: the trainer waits for its streams
            assert parts.window is not None
            parts.window.set(parts.owners.rank, parts.word, 0)
        self._error, self._now, self._order = None, None, ()
        self._passes.clear()

    # --- passes ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def passes(self, order: Callable[[], Sequence[Sequence[int]]]) -> Iterator[None]:
        """Context of the passes of a plan, after which all gradients of this rank are in their sums; a step may have
        several plans, one after the other. Local. Raises: what kept a gradient from its sum.

        Args:
            order: for each chunk on this rank, the HDP ranks in the order in which their backward passes are to end.
        """
        own = order()
        self._order = [[*earlier, *now] for earlier, now in zip(self._order or [[]] * len(own), own, strict=True)]
        self._turns.clear()
        for window in self._memory.windows:
            window.start()
        self._thread = threading.Thread(target=self._push_all, name="hdpcomm-gradients", daemon=True)
        self._thread.start()
        try:
            yield
            self._put(None)
            thread, self._thread = self._thread, None
            thread.join()
            self.check()
        except BaseException:
            self._stop()
            self._now = None
            raise

    def begin_pass(self, chunk: int = 0, _overlap: float = 0.0, _alone: bool = False) -> None:
        """A backward pass begins, over a chunk of the model. Call before each."""
        self._now = _Pass(chunk, self._passes[chunk])
        self._passes[chunk] += 1

    def end_pass(self) -> None:
        """The backward pass has ended: the gradients of the layers that it ended with leave. Without this they would
        wait for the next pass, before which the rank may wait for one whose own gradients come after these. Call after
        each."""
        now = self._now
        if now is None:
            return
        for unit in (*reversed(self._units.layers), *self._units.roots):
            if unit.chunk == now.chunk and id(unit) not in now.pushed:
                self._push(unit)
        self._now = None

    def arrived(self, parameter: nn.Parameter) -> None:
        """A backward pass has made a gradient."""
        gradient, parameter.grad = parameter.grad, None
        key = id(parameter)
        unit, now = self._units.of[key], self._now
        if gradient is None:
            return
        if now is None or now.chunk != unit.chunk or id(unit) in now.pushed:
            raise Error(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient after its layer's backward pass; with "
                "zero=2 or 3 a layer's parameters must be used in its forward pass only: give zero=1",
                rank=self._mesh.comm.global_rank,
                op="backward",
            )
        before = now.gradients.get(key)
        now.gradients[key] = gradient if before is None else before.add_(gradient)
        now.made[id(unit)] = self._side.mark()

    def measured(self, parameter: nn.Parameter) -> None:
        """As :meth:`arrived` in a pass that is only measured: the gradient goes nowhere."""
        parameter.grad = None

    def take(self) -> list[Work]:
        """No reduction is under way."""
        return []

    def check(self) -> None:
        """Raises the error of a push that failed."""
        if self._error is not None:
            raise self._error

    def _on_layer_entered(self, unit: Unit, backward: bool) -> None:
        """A pass has come to a layer: a backward pass has ended those after it."""
        now = self._now
        if not backward or now is None:
            return
        later = unit.after
        while later is not None and id(later) not in now.pushed:
            if all(id(p) in now.gradients for p in later.parameters if id(p) in self._trained):
                self._push(later)
            later = later.after

    def _push(self, unit: Unit) -> None:
        now = self._now
        assert now is not None
        now.pushed.add(id(unit))
        if id(unit) in self._by_unit:
            own = {id(p): now.gradients.pop(id(p)) for p in unit.parameters if id(p) in now.gradients}
            self._put(_Job(unit, now, own, now.made.pop(id(unit), None)))

    def _put(self, job: _Job | None) -> None:
        while True:
            self.check()
            try:
                return self._jobs.put(job, timeout=_POLL_S)
            except queue.Full:  # the thread has a deadline
                continue

    # --- the thread --------------------------------------------------------------------------------------------------

    def _push_all(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                for bucket in self._by_unit[id(job.unit)]:
                    self._add(bucket, job)
                del job
        except BaseException as error:
            self._error = error

    def _add(self, bucket: Bucket, job: _Job) -> None:
        parts = self._parts[id(bucket)]
        turns = self._turns_of(parts, job.its_pass.chunk)
        turn = turns.own[job.its_pass.number]
        before = turns.ranks[turn - 1] if turn else parts.owners.rank
        assert parts.window is not None
        for owner in range(parts.owners.size):
            parts.window.wait(owner, parts.word, turn, before)
            if job.gradients:
                self._side.run_after(job.made, partial(_add_to, parts.part(owner), owner, bucket, job.gradients))
                self._side.finish()
            parts.window.set(owner, parts.word, turn + 1)

    def _turns_of(self, parts: BucketShards, chunk: int) -> _Turns:
        key = chunk, parts.owners.ranks
        found = self._turns.get(key)
        if found is None:
            places = {rank: place for place, rank in enumerate(parts.owners.ranks)}
            hdp = self._mesh.hdp_comm.ranks
            ranks = [places[hdp[rank]] for rank in self._order[chunk] if hdp[rank] in places]
            own = [turn for turn, place in enumerate(ranks) if place == parts.owners.rank]
            found = self._turns[key] = _Turns(ranks, own)
        return found

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        for window in self._memory.windows:
            window.stop()
        while thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._jobs.put_nowait(None)
            thread.join(0.01)
        self._jobs = queue.Queue(_AHEAD)
        if isinstance(self._error, Aborted):
            self._error = None


@torch.no_grad()
def _add_to(sums: Tensor, owner: int, bucket: Bucket, gradients: dict[int, Tensor]) -> None:
    """Adds what an owner has of a bucket."""
    for parameter, start, stop, span in bucket.spans(owner):
        if id(parameter) in gradients and start < stop:
            accumulate(sums[span], gradients[id(parameter)].reshape(-1)[start:stop])
