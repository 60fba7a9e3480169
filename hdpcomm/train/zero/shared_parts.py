"""ZeRO-2 and ZeRO-3 in memory that the ranks of a host map: each layer's gradients go to the owners of their parts as
soon as a backward pass has them, and each rank pulls the weights of a layer when its passes come to it.

Both happen beside a rank's passes: by a thread where the host computes, by a stream where a GPU does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdpcomm._core import settings
from hdpcomm.comm import Communicator, Work
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import Aborted, Error, InvalidUsage
from hdpcomm.kernels.transfers import accumulate
from hdpcomm.train.zero.buckets import Bucket, BucketShards, SharedShards, Unit, Units

__all__ = [
    "PulledWeights",
    "PushedSums",
    "SideStream",
    "SideWork",
    "has_part",
    "names_only",
    "set_part",
    "side_work",
    "without_values",
]

Move = Callable[[], None]


class SideThread:
    """Runs work beside what its caller computes, where the host computes."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, work: Move) -> Callable[[], object]:
        """Begins work that comes after all that the caller has computed so far. Returns a function that orders what
        the caller computes from its call on after the work, and raises what that has raised."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hdpcomm-weights")
        return self._pool.submit(work).result

    def mark(self) -> None:
        """Marks what the caller has computed so far, for :meth:`run_after`: all of it is there."""

    def run_after(self, _: Any, work: Move) -> None:
        """Work that comes after a mark, on the calling thread: any other than the one that computes."""
        work()

    def finish(self) -> None:
        """The calling thread waits until all of its :meth:`run_after` has ended; here it has. Raises: CommTimeout."""

    def close(self) -> None:
        """Ends what :meth:`start` needs, until it is called again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


class SideStream:
    """As :class:`SideThread`, where a GPU computes: a stream beside the caller's current one. Memory that work of
    :meth:`start` allocates is this stream's, and the caller may free it while it still computes with it: the next work
    that takes its place comes after that. So who starts work on a stream gives it no :meth:`run_after`."""

    def __init__(self, comm: DeviceCommunicator) -> None:
        self._comm = comm
        self._stream = torch.cuda.Stream(comm.device)  # type: ignore[no-untyped-call]

    def start(self, work: Move) -> Callable[[], object]:
        begun = self.mark()
        with torch.cuda.stream(self._stream):
            begun.wait()
            work()
            wait: Callable[[], object] = self._comm.mark().wait
            return wait

    def mark(self) -> Any:
        return self._comm.mark()

    def run_after(self, mark: Any, work: Move) -> None:
        with torch.cuda.stream(self._stream):
            mark.wait()
            work()

    def finish(self) -> None:
        # What it waits for are passes: their operations have deadlines of their own.
        with torch.cuda.stream(self._stream):
            self._comm.mark().wait(settings().longest_wait_s)

    def close(self) -> None:
        """There is nothing to end."""


SideWork = SideThread | SideStream


def side_work(comm: Communicator) -> SideWork:
    """Side work for the device of a communicator. Local."""
    if isinstance(comm, DeviceCommunicator) and comm.device.type == "cuda":
        return SideStream(comm)
    return SideThread()


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


class PulledWeights:
    """Weights of which each rank keeps its part only, in memory that all ranks of the host map.

    A pass that comes to a layer finds it pulled: that began when the pass came to the layer before, on a thread or
    stream of its own. Nobody else takes part in that, so ranks may run any numbers of passes. The layer's memory is
    given back when the pass has come to the next one; so at most two layers are there at a time, and the root, what is
    in no layer, as long as the passes of a step last. The backward pass finds the last layer of the forward pass still
    there, and the next forward pass the first one.

    Outside of that a parameter has its shape and no values: what reads it gets NaN, what writes into it an error, and
    ``state_dict()`` is refused.

    Args:
        units: the layers, and the units of parameters.
        buckets: of trained and frozen parameters, each of one unit.
        dtype: in which floating-point parameters are pulled; ``None``: their own.
    """

    def __init__(
        self,
        units: Units,
        buckets: Sequence[Bucket],
        memory: SharedShards,
        side: SideWork,
        dtype: torch.dtype | None,
    ) -> None:
        self._units, self._side = units, side
        self._parts: dict[int, BucketShards] = {}
        self._by_unit: dict[int, list[Bucket]] = {}
        self._whole: dict[int, Tensor] = {}
        """By bucket: its parameters, in a storage that has no memory while its unit is not here."""
        for bucket in buckets:
            first = bucket.parameters[0]
            narrow = dtype if dtype is not None and first.is_floating_point() else first.dtype
            self._parts[id(bucket)] = memory.reserve(bucket, narrow)
            self._by_unit.setdefault(id(units.of[id(bucket.parameters[0])]), []).append(bucket)
            self._whole[id(bucket)] = whole = torch.empty(
                bucket.length, dtype=narrow, device=bucket.parameters[0].device
            )
            whole.untyped_storage().resize_(0)
        self._here: dict[int, Unit] = {}
        self._coming: dict[int, tuple[Unit, Callable[[], object]]] = {}
        self._open = False
        units.listen(self._on_layer_entered)
        for module in (each for chunk in units.chunks for each in chunk.modules()):
            module.register_state_dict_post_hook(_refuse_no_values)  # type: ignore[no-untyped-call]

    def own(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket, as others pull it; a view."""
        return self._parts[id(bucket)].own

    @torch.no_grad()
    def take_over(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket in the parameters' own type; the parameters have no values from then on. Local.

        Others see it after the next operation of all of them.
        """
        first = bucket.parameters[0]
        wide = torch.zeros(bucket.part, dtype=first.dtype, device=first.device)
        narrow = self.own(bucket)
        for parameter, start, stop, span in bucket.spans(bucket.sharding.own):
            if has_part(parameter):
                values = _taken_part(parameter, start, stop)
            else:
                values = parameter.detach().flatten()[start:stop]
            if start < stop:
                wide[span] = values
            parameter.data = without_values(parameter.shape, narrow.dtype, narrow.device)
        narrow.copy_(wide)
        return narrow if narrow.dtype == wide.dtype else wide

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context of the passes of a step, or of an evaluation. Local; all ranks must have agreed on what they run
        since the weights have last changed, and must be through before they change."""
        self._open = True
        try:
            for root in self._units.roots:
                self._ensure_resident(root)
            yield
        finally:
            self._open = False
            for unit in [*self._here.values(), *(unit for unit, _ in self._coming.values())]:
                self._drop(unit)
            self._side.close()

    def _on_layer_entered(self, unit: Unit, backward: bool) -> None:
        """A pass has come to a layer."""
        if not self._open:
            return
        beside = unit.before if backward else unit.after
        self._ensure_resident(unit)
        kept = {id(unit), id(beside), *map(id, self._units.roots)}
        for other in [*self._here.values(), *(each for each, _ in self._coming.values())]:
            if id(other) not in kept:
                self._drop(other)
        if beside is not None and id(beside) not in self._here and id(beside) not in self._coming:
            self._coming[id(beside)] = beside, self._side.start(partial(self._pull, beside))

    def _ensure_resident(self, unit: Unit) -> None:
        if id(unit) in self._here:
            return
        if id(unit) in self._coming:
            self._coming.pop(id(unit))[1]()
        else:
            self._side.start(partial(self._pull, unit))()
        self._here[id(unit)] = unit
        for bucket in self._by_unit.get(id(unit), ()):
            whole = self._whole[id(bucket)]
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                parameter.data = whole[offset : offset + parameter.numel()].view(parameter.shape)

    @torch.no_grad()
    def _pull(self, unit: Unit) -> None:
        for bucket in self._by_unit.get(id(unit), ()):
            parts, whole = self._parts[id(bucket)], self._whole[id(bucket)]
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            for owner in range(bucket.parts):
                whole[owner * bucket.part : (owner + 1) * bucket.part].copy_(parts.part(owner))

    def _drop(self, unit: Unit) -> None:
        if id(unit) in self._coming:
            with suppress(Exception):  # nobody needs what it brings
                self._coming.pop(id(unit))[1]()
        self._here.pop(id(unit), None)
        for bucket in self._by_unit.get(id(unit), ()):
            whole = self._whole[id(bucket)]
            for parameter in bucket.parameters:
                parameter.data = without_values(parameter.shape, whole.dtype, whole.device)
            whole.untyped_storage().resize_(0)


def without_values(shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of a shape without the memory for it: each element is the same NaN. Local."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


_names_only: ContextVar[bool] = ContextVar("names_only", default=False)


@contextmanager
def names_only() -> Iterator[None]:
    """Context in which ``state_dict()`` of a model is not refused, as its values are not used. Local."""
    token = _names_only.set(True)
    try:
        yield
    finally:
        _names_only.reset(token)


def _refuse_no_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of ``state_dict()``, after it: a file of its values would hold NaN. Not with ``keep_vars=True``."""
    for name in () if _names_only.get() else module._parameters:
        value = state.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter) and value.numel() > 1 and not any(value.stride()):
            raise InvalidUsage(
                f"{prefix}{name} has no values between steps, since zero=3 keeps a part of it on each rank: save with "
                "all ranks by the trainer, save_model() of transformers' or whole_tensors() of hdpcomm's"
            )


def set_part(parameter: Tensor, start: int, values: Tensor) -> None:
    """Gives a parameter :func:`without_values` this rank's part of it, from the element ``start`` on, for
    :meth:`PulledWeights.take_over`. Local."""
    parameter._hdpcomm_part = (start, values)  # type: ignore[attr-defined]


def has_part(parameter: Tensor) -> bool:
    """Whether :func:`set_part` has given it one."""
    return hasattr(parameter, "_hdpcomm_part")


def _taken_part(parameter: nn.Parameter, start: int, stop: int) -> Tensor:
    begin: int
    values: Tensor
    begin, values = parameter.__dict__.pop("_hdpcomm_part")
    if (begin, begin + values.numel()) != (start, stop):
        raise InvalidUsage(
            f"a parameter of shape {tuple(parameter.shape)} was made with the elements {begin} to "
            f"{begin + values.numel()} on this rank, and the trainer needs {start} to {stop}: freeze parameters, and "
            "cut the model, before materialize()"
        )
    return values
