"""One step for every door: passes of a plan, the sum of their gradients, the update of the weights. And device memory
that is given back while others need it, its bytes in host memory meanwhile (:class:`HostCopies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.comm.tensors import plain_tensors, wraps_tensors
from hdpcomm.comm.window import Window
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.moe import loads_on_mesh, settle_loads
from hdpcomm.offload.records import flat_bytes
from hdpcomm.parallel.stages import share_values
from hdpcomm.plan import StepPlan
from hdpcomm.train.state.layout import layout_of, plain_name
from hdpcomm.train.step.averages import swap_averages
from hdpcomm.train.step.metrics import uncounted
from hdpcomm.train.step.passes import Passes, StepInputs
from hdpcomm.train.step.replicas import ChangedBuffers, check_same_plan
from hdpcomm.train.step.state import State
from hdpcomm.train.zero.buckets import BUCKET_BYTES, BucketShards, SharedShards, Units
from hdpcomm.train.zero.gradients import Gradients, WholeSums
from hdpcomm.train.zero.masters import Masters
from hdpcomm.train.zero.matrix_owners import check_elementwise
from hdpcomm.train.zero.shared_parts import has_part

__all__ = ["HostCopies", "Runner", "StepSettings", "WHOLE"]

_SMALLEST = 4096
"""Bytes of a storage below which it stays."""
_CHUNK = 64 << 20
"""Bytes of a pinned block: torch rounds each up to a power of two."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes in host memory; ``chunks`` is None where all of them are 0."""

    chunks: Sequence[Tensor] | None

    @classmethod
    def begin(cls, values: Tensor) -> _Copy:
        """Begins to copy the bytes of a tensor ``[n]``, on the current stream."""
        whole = values.view(torch.uint8)
        if not bool(whole.any()):
            return cls(None)
        chunks = []
        for part in torch.split(whole, _CHUNK):
            chunk = torch.empty(len(part), dtype=torch.uint8, pin_memory=not part.is_cpu)
            chunks.append(chunk.copy_(part, non_blocking=True))
        return cls(chunks)

    def fill(self, values: Tensor) -> None:
        """Begins to write them into a tensor, on the current stream."""
        whole = values.view(torch.uint8)
        if self.chunks is None:
            whole.zero_()
            return
        for part, chunk in zip(torch.split(whole, _CHUNK), self.chunks, strict=True):
            part.copy_(chunk, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in a window's memory, and where it is there."""

    tensor: Tensor
    window: Window
    offset: int
    shape: torch.Size

    def leave(self) -> None:
        self.tensor.data = self.tensor.new_empty(0)

    def come_back(self) -> None:
        window, count = self.window, self.shape.numel()
        values = window.tensor(window.comm.rank, self.offset, count, self.tensor.dtype)
        self.tensor.data = values.view(self.shape)


class HostCopies:
    """Tensors whose device memory is given back, and taken again with the same bytes.

    A tensor stays the object that it is, and has no memory meanwhile: storages of torch's are resized to nothing, and
    windows, which other ranks map, are given back by all ranks. What ranks share in host memory stays there, and so do
    storages of a few bytes. Bytes that are all 0 are not copied.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.away = False
        """Whether the tensors have no memory now."""
        self._device = device
        self._storages: list[tuple[torch.UntypedStorage, int, _Copy]] = []
        self._windows: list[Window] = []
        self._parts: list[tuple[BucketShards, _Copy]] = []
        self._views: list[_View] = []

    @torch.no_grad()
    def store(
        self, tensors: Iterable[Tensor], *, but: Iterable[Tensor] = (), windows: SharedShards | None = None
    ) -> None:
        """Copies what tensors view to pinned host memory, and gives the device's back. Collective, where there are
        windows.

        Args:
            but: tensors whose storages stay.
            windows: whose memory goes with the tensors that view it.
        """
        tensors = list(tensors)
        stay = _storages(but)
        self._storages = [
            (storage, storage.nbytes(), _Copy.begin(flat_bytes(storage)))
            for key, storage in _storages(tensors).items()
            if key not in stay
        ]
        if windows is not None:
            self._windows = [window for window in windows.windows if window.on_device]
            self._parts = [(parts, _Copy.begin(parts.own)) for parts in windows.made if parts.window in self._windows]
            self._views = [view for window in self._windows for view in _views(window, tensors)]
        self._synchronize()
        for storage, _, _ in self._storages:
            storage.resize_(0)
        for view in self._views:
            view.leave()
        for window in self._windows:
            window.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.away = True

    @torch.no_grad()
    def bring_back(self) -> None:
        """Gives the tensors memory and their bytes again. Collective, where there are windows; others read this rank's
        after the next operation of all."""
        if self._windows and self._device.type == "cuda":
            torch.cuda.empty_cache()  # windows are made by another allocator
        while self._windows:  # what does not fit is tried again by the next call, here and below
            self._windows[-1].restore()
            self._windows.pop()
        for parts, copy in self._parts:
            copy.fill(parts.own)
        for view in self._views:
            view.come_back()
        self._parts, self._views = [], []
        while self._storages:
            storage, size, copy = self._storages[-1]
            storage.resize_(size)
            copy.fill(flat_bytes(storage))
            self._storages.pop()
        self._synchronize()
        self.away = False

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages whose memory can be given back, each once."""
    found = (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor))
    return {each._cdata: each for each in found if each.nbytes() >= _SMALLEST and each.resizable()}


def _views(window: Window, tensors: Iterable[Tensor]) -> Iterator[_View]:
    first = window.tensor(window.comm.rank, 0, window.nbytes, torch.uint8).data_ptr()
    for tensor in tensors:
        offset = tensor.data_ptr() - first
        if tensor.numel() and 0 <= offset < window.nbytes:
            yield _View(tensor, window, offset, tensor.shape)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How weights, gradients and the optimizer's state are kept; see :class:`hdpcomm.train.Trainer` for each."""

    zero: int = 0
    dtype: torch.dtype | None = None
    bucket_bytes: int = BUCKET_BYTES
    optimizer_offload: bool = False

    @property
    def masters(self) -> bool:
        """Whether the optimizer updates others than the parameters."""
        return bool(self.zero) or self.dtype is not None or self.optimizer_offload


WHOLE = StepSettings()
"""Each rank keeps all of them, and the optimizer updates the parameters as they are."""


class Runner:
    """Carries out the steps of :class:`hdpcomm.train.Trainer`, of transformers' and TRL's trainers and of verl's
    engine. All ranks of the mesh make it and call it alike.

    A step: :meth:`zero`, :meth:`agree`, :meth:`train` (several times where batches accumulate), :meth:`reduce`,
    :meth:`clip`, :meth:`update`.

    Args:
        passes: of the model on this rank, whose parameters and buffers all ranks get from the first one at once.
        optimizer: over the trained parameters; ``None``: nothing is trained.
        gradients: of other reductions than the runner's own.
        within: around all passes.

    Attributes:
        optimizer: takes the step; another one over the same parameters may replace it where there are no masters.
        layout: where the parameters are in the whole model.
        counts_rows: whether layers of any stage count the rows of their experts.
        ran: the plan of the last passes as they ran: micro-batches of its queue with the ranks that have taken them.
        ahead: (losses, labels) of multi-token prediction in the last passes, of all ranks.

    Raises: InvalidUsage: of :class:`hdpcomm.train.zero.masters.Masters`.
    """

    def __init__(
        self,
        passes: Passes,
        optimizer: torch.optim.Optimizer | None = None,
        settings: StepSettings = WHOLE,
        *,
        gradients: Gradients | None = None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        chunks, mesh = passes.chunks, passes.mesh
        self.passes, self.model = passes, chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
        self.layout = layout_of(self.model, mesh)
        self.masters: Masters | None = None
        self.gradients = gradients
        self.ran: StepPlan | None = None
        self.ahead = (0.0, 0.0)
        self._mesh, self.optimizer, self._within = mesh, optimizer, within
        self._device = next(self.model.parameters()).device
        self._same_start()
        self.counts_rows = any(gather_json(mesh.comm, bool(passes.loads)) if mesh.pipeline > 1 else passes.loads)
        if optimizer is not None and gradients is None:
            self._keep_gradients(optimizer, settings)
        self._buffers = ChangedBuffers(self.model)
        self._alike = mesh.positions.flatten(1).tolist()  # stages may have other groups of parameters
        self._warm: set[bool] = set()
        """Passes, with gradients or without, that have made what kernels and compilers make at their first call."""
        self._reduced = False
        self._rows: Tensor | None = None
        self._model_copies, self._optimizer_copies = HostCopies(self._device), HostCopies(self._device)

    def _same_start(self) -> None:
        """Gives all ranks that hold the same part of the model the values of the first one. Collective."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if has_part(tensor):  # of its own
                continue
            holders = self.layout.by_name[plain_name(name)].holders
            share_values(holders.replicas, [tensor])
            if holders.ends is not None:
                share_values(holders.ends, [tensor])

    def _keep_gradients(self, optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
        """Makes the sums of gradients, and master weights if the settings ask for them. Collective."""
        if self._mesh.tensor * self._mesh.expert > 1:
            check_elementwise(optimizer, "on a mesh with tensor or expert ranks")
        if settings.masters:
            self.masters = Masters(
                self.passes.chunks, optimizer, self.layout, self._mesh,
                zero=settings.zero, dtype=settings.dtype, bucket_bytes=settings.bucket_bytes,
                on_host=settings.optimizer_offload,
            )  # fmt: skip
            self.masters.same_start()
            self._wait_for_parts()  # passes may follow that no agreement precedes
            self.gradients = self.masters.gradients
        else:
            self.gradients = Gradients.whole(
                self.model.parameters(), self.layout, self._mesh,
                bucket_bytes=settings.bucket_bytes,
                units=Units(self.passes.chunks) if self._mesh.comm.size > 1 else None,
            )  # fmt: skip

    @property
    def state(self) -> State:
        """Weights and the optimizer's state, for checkpoints."""
        self._check_here(self._model_copies, self._optimizer_copies)
        return self._state()

    def _state(self) -> State:
        assert self.optimizer is not None
        return State(self.model, self.optimizer, self.layout, self._mesh, self.masters)

    # --- memory for others -------------------------------------------------------------------------------------------

    def store(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Moves what is on the device to pinned host memory, for others to have the device's: the parameters, buffers
        and sums of gradients, the master weights and the optimizer's state. Nothing for what is stored already.
        Collective, with the same arguments on all ranks."""
        self.drain()
        masters = self.masters
        own = [*self.model.parameters(), *self.model.buffers()]
        if self.gradients is not None and isinstance(self.gradients.sums, WholeSums):
            own.append(self.gradients.sums.flat)
        if model and not self._model_copies.away:
            own += masters.tensors() if masters is not None and masters.shared else ()
            self._model_copies.store(own, windows=None if masters is None else masters.windows)
        if optimizer and self.optimizer is not None and not self._optimizer_copies.away:
            state = [each for values in self.optimizer.state.values() for each in values.values()]
            on_host = masters is not None and masters.on_host
            kept = [each for each in state if isinstance(each, Tensor) and not on_host]
            kept += masters.tensors() if masters is not None else ()
            self._optimizer_copies.store(kept, but=own)

    def bring_back(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Moves what :meth:`store` has stored to the device again. Collective, with the same arguments on all ranks."""
        for wanted, copies in ((model, self._model_copies), (optimizer, self._optimizer_copies)):
            if wanted and copies.away:
                copies.bring_back()

    @property
    def stored(self) -> tuple[bool, bool]:
        """Whether the model, and what the optimizer has, are in host memory."""
        return self._model_copies.away, self._optimizer_copies.away

    def _check_here(self, *copies: HostCopies) -> None:
        if any(each.away for each in copies):
            what = "weights" if self._model_copies.away else "the optimizer's state"
            raise InvalidUsage(
                f"{what} are in host memory, so that others have the device's; bring them back to {self._device} first"
            )

    def whole_weights(self, named: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
        """A state dict with whole weights in the place of this rank's parts: (names, tensor), one at a time, with the
        names of tied weights together; copy what is to stay. Collective: every rank goes through all of them.

        Args:
            named: of the model or a module in it, as ``state_dict(keep_vars=True)`` gives it.
        """
        names: dict[int, list[str]] = {}
        for name, value in named.items():
            names.setdefault(id(value), []).append(name)
        parameters = {plain_name(name): id(p) for name, p in self.model.named_parameters(remove_duplicate=False)}
        self._check_here(self._model_copies)
        for name, tensor in self._state().whole_tensors({name for name, key in parameters.items() if key in names}):
            if found := names.pop(parameters.get(name, 0), None):
                yield found, tensor
        yield from ((others, named[others[0]].detach()) for others in names.values())

    def copied_weights(
        self,
        named: Mapping[str, Tensor],
        *,
        keep: bool,
        copy: Callable[[Tensor], Tensor] = lambda each: each.to("cpu", copy=True),
    ) -> dict[str, Tensor]:
        """All of :meth:`whole_weights`, copied to the CPU, but for quantised ones, which never change; nothing unless
        this rank keeps them. Collective."""
        copies: dict[str, Tensor] = {}
        for names, tensor in self.whole_weights(named):
            if keep:
                copies.update(dict.fromkeys(names, tensor if wraps_tensors(tensor) else copy(tensor)))
        return copies

    def zero(self) -> None:
        """A step begins: forgets all gradients. Local; before the agreement, after which others may add to the sums."""
        assert self.gradients is not None
        self._check_here(self._model_copies)
        self.gradients.zero()
        self._buffers.begin()
        for load in self.passes.loads:
            load.reset()
        self._reduced, self._rows = False, None

    def agree(self, plan: StepPlan, settings: str) -> None:
        """Raises unless all ranks are about to run the same plan and update alike. Collective.

        Args:
            settings: what ranks of the same stage must have alike (:func:`hdpcomm.train.step.replicas.settings_of`).

        Raises: Mismatch: of :func:`hdpcomm.train.step.replicas.check_same_plan`.
        """
        self._check_here(self._model_copies)
        if self.masters is not None and self.masters.shared:
            self.synchronize()  # from the agreement on, others pull this rank's parts and add to them
        more, sums = self.passes.prepare(plan), None if self.gradients is None else self.gradients.sums
        whole = sums if isinstance(sums, WholeSums) else None
        order = b"" if whole is None else whole.order()
        alike = check_same_plan(
            plan, self._mesh.comm, more=more, settings=settings, alike=self._alike, order=order
        )  # fmt: skip
        if whole is not None:
            whole.agree(alike)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Forward passes only; (summed loss, labels) of those whose last layers are here, fp64 ``[2]``. Collective."""
        plan = inputs.planned.plan
        with self.passes.open(plan), self._first(False), self._within(), self.weights(), uncounted(self.passes.loads):
            total = self.passes.run(inputs)
            self.passes.executed_plan(plan)
        self._wait_for_parts()  # others may change theirs then
        return total

    def train(
        self, inputs: StepInputs, known: Tensor | None = None, beside: AbstractContextManager[object] | None = None
    ) -> tuple[float, float]:
        """Forward and backward passes, whose gradients are added to those that there are; (summed loss, labels) of all
        ranks. Where they end the step, the reduction of its gradients begins. Collective.

        Args:
            known: fp64 ``[2]``, what this rank adds to these two; ``None``: nothing.
            beside: entered around the passes.

        Raises: InvalidUsage: passes have changed buffers of the model.
        """
        assert self.gradients is not None
        comm, plan = self._mesh.comm, inputs.planned.plan
        with self.passes.open(plan):
            with beside or nullcontext(), self._first(True), self._within(), self.weights():
                loss = self.passes.run(inputs)
            if inputs.ends:
                self.gradients.start()
            self.synchronize()
            told = torch.cat((loss, torch.tensor([float(len(self._buffers.changed()))]), self.passes.take_ahead()))
            told[:2] += 0.0 if known is None else known
            comm.all_reduce(told)  # also the point at which ranks that had less to do wait for the others
            self.ran = self.passes.executed_plan(plan)
        total, labels, changed, *ahead = told.tolist()
        self.ahead = (ahead[0], ahead[1])
        if changed and comm.size > 1:
            self._buffers.refuse(comm)
        return total, labels

    def reduce(self, factor: float = 1.0) -> None:
        """Makes the gradients of the step ``factor`` times their sum over the ranks; once a step, later calls do
        nothing. Collective."""
        assert self.gradients is not None
        if not self._reduced:
            self.gradients.reduce(factor)
        self._reduced = True

    def clip(self, max_norm: float | None) -> float:
        """Scales the gradients to a global L2 norm of at most ``max_norm``; returns it as it was. Collective."""
        assert self.gradients is not None
        return self.gradients.clip_(max_norm)

    def drain(self) -> None:
        """Ends reductions that are under way. Raises the error of the first that failed."""
        if self.gradients is not None:
            self.gradients.drain()

    def update(self) -> None:
        """Takes the optimizer's step with the gradients of :meth:`reduce`. Collective."""
        assert self.optimizer is not None
        self.finish()
        self.optimizer.step()
        self.publish()

    def replicated(self) -> list[tuple[Communicator, dict[str, Tensor]]]:
        """(ranks, the tensors of this rank that all of them should have alike, by name). Local."""
        parts = {} if self.masters is None else {id(each.parameter): each for each in self.masters.parts()}
        found: dict[tuple[int, ...], tuple[Communicator, dict[str, Tensor]]] = {
            self._mesh.hdp_comm.ranks: (self._mesh.hdp_comm, {})
        }
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            comm: Communicator | None = self.layout.by_name[plain_name(name)].holders.replicas
            if (part := parts.get(id(tensor))) is not None:
                comm, tensor = part.sharding.across, part.values
            if comm is not None:
                found.setdefault(comm.ranks, (comm, {}))[1][name] = tensor
        return list(found.values())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See :meth:`hdpcomm.train.Trainer.averaged`."""
        assert self.optimizer is not None
        self._swap_averages(self.optimizer)
        try:
            yield
        finally:
            self._swap_averages(self.optimizer)

    def _swap_averages(self, optimizer: torch.optim.Optimizer) -> None:
        self._wait_for_parts()
        swap_averages(optimizer)
        if self.masters is not None:
            self.masters.publish()
        self._wait_for_parts()

    def publish(self) -> None:
        """Gives the updated parameters to all ranks, moves routers' biases, and chooses replicas of experts, after the
        optimizer's step; :meth:`update` does so. Collective."""
        if self.masters is not None:
            self.masters.publish()
        if any(load.follows_rows for load in self.passes.loads) and (rows := self.expert_rows()) is not None:
            settle_loads(self.passes.loads, rows)

    def expert_rows(self) -> Tensor | None:
        """Rows of each expert in the passes of this step, as of :func:`hdpcomm.models.moe.loads_on_mesh`; ``None``
        where this stage has no experts. Collective over the ranks of a stage, once a step."""
        if self._rows is None and self.passes.loads:
            self._rows = loads_on_mesh(self.passes.loads, self._mesh)
        return self._rows

    def _wait_for_parts(self) -> None:
        """Waits until all ranks have read, or changed, the parts of weights that others pull. Collective."""
        if self.masters is not None and self.masters.pulled:
            self.synchronize()
            self._mesh.comm.barrier()

    def finish(self) -> None:
        """Hands the gradients to the optimizer; :meth:`update` does so. Local."""
        holder = self.masters or self.gradients
        assert holder is not None
        self._check_here(self._model_copies, self._optimizer_copies)
        holder.finish()

    def publish_after_steps(self) -> None:
        """For a loop that takes the optimizer's step itself: master weights get their gradients before each, and other
        ranks the updated parameters after it. Local; from then on the step is collective."""

        def published(*_: object) -> None:
            self.publish()
            self._wait_for_parts()  # passes may follow that no agreement precedes

        if self.optimizer is not None:
            if self.masters is not None:
                self.optimizer.register_step_pre_hook(lambda *_: self.finish())
            self.optimizer.register_step_post_hook(published)

    def weights(self) -> AbstractContextManager[None]:
        """Context of forward passes of the model: the weights are there. Local, after an update or a step."""
        self._check_here(self._model_copies)
        return nullcontext() if self.masters is None else self.masters.open()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Context of passes that are only measured: the weights are there, and gradients are forgotten. Local."""
        gradients = self.gradients
        own = nullcontext() if gradients is None else gradients.measuring()
        with self.weights(), torch.enable_grad(), own:
            yield
        if gradients is not None:
            gradients.zero()

    def synchronize(self) -> None:
        """Waits for this rank's device. Local."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _first(self, training: bool) -> AbstractContextManager[object]:
        if training in self._warm:
            return nullcontext()
        self._warm.add(training)
        return self._mesh.comm.busy("runs its first micro-batches")
