"""One step for every door: passes of a plan, the sum of their gradients, the update of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hdpcomm.train.plan_check import check_same_plan
from hdpcomm.train.replicas import ChangedBuffers

if TYPE_CHECKING:
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.plan import StepPlan
    from hdpcomm.train.fsdp import FullyShardedParameters
    from hdpcomm.train.gradients import Gradients
    from hdpcomm.train.masters import Masters
    from hdpcomm.train.passes import Passes, StepInputs

__all__ = ["Runner"]


class Runner:
    """Carries out the steps of :class:`hdpcomm.train.Trainer`, of transformers' and TRL's trainers and of verl's
    engine. All ranks of the mesh call it alike.

    A step: :meth:`zero`, :meth:`agree`, :meth:`train` (several times where batches accumulate), :meth:`reduce`,
    :meth:`clip`, :meth:`update`.

    Args:
        model: what this rank has of it, one module.
        gradients: of the backward passes; ``None``: there are none.
        masters: what the optimizer updates in place of the parameters; ``None``: the parameters.
        within: around all passes.

    Attributes:
        ran: the plan of the last passes as they ran: micro-batches of its queue with the ranks that have taken them.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        passes: Passes,
        gradients: Gradients | FullyShardedParameters | None,
        masters: Masters | None = None,
        *,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.passes, self.gradients, self.masters = passes, gradients, masters
        self.ran: StepPlan | None = None
        self._mesh, self._within, self._buffers = mesh, within, ChangedBuffers(model)
        self._device = next(model.parameters()).device
        self._alike = mesh.positions.flatten(1).tolist()  # stages may have other groups of parameters
        self._compiled = False
        """Whether a step has made what kernels and compilers make at their first call."""
        self._reduced = False

    def zero(self) -> None:
        """A step begins: forgets all gradients. Local; before the agreement, after which others may add to the sums."""
        assert self.gradients is not None
        self.gradients.zero()
        self._buffers.begin()
        self._reduced = False

    def agree(self, plan: StepPlan, settings: str) -> None:
        """Raises unless all ranks are about to run the same plan and update alike. Collective.

        Args:
            settings: what ranks of the same stage must have alike (:func:`hdpcomm.train.replicas.settings_of`).

        Raises: Mismatch: of :func:`hdpcomm.train.plan_check.check_same_plan`.
        """
        if self.masters is not None and self.masters.shared:
            self.synchronize()  # from the agreement on, others pull this rank's parts and add to them
        more = self.passes.prepare(plan)
        check_same_plan(plan, self._mesh.comm, more=more, settings=settings, alike=self._alike)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Forward passes only; (summed loss, labels) of those whose last layers are here, fp64 ``[2]``. Collective."""
        plan = inputs.planned.plan
        with self.passes.open(plan), self._first(), self.weights():
            total = self.passes.run(inputs)
            self.passes.executed_plan(plan)
        if self.masters is not None and self.masters.pulled:
            self.synchronize()
            self._mesh.comm.barrier()  # others may change their parts then
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
            with beside or nullcontext(), self._first(), self.weights():
                loss = self.passes.run(inputs)
            self._compiled = True
            if inputs.ends:
                self.gradients.start()
            self.synchronize()
            told = torch.cat((loss, torch.tensor([float(len(self._buffers.changed()))])))
            told[:2] += 0.0 if known is None else known
            comm.all_reduce(told)  # also the point at which ranks that had less to do wait for the others
            self.ran = self.passes.executed_plan(plan)
        total, labels, changed = told.tolist()
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

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer's step with the gradients of :meth:`reduce`. Collective."""
        self.finish()
        optimizer.step()
        if self.masters is not None:
            self.masters.publish()

    def finish(self) -> None:
        """Hands the gradients to the optimizer; :meth:`update` does so. Local."""
        holder = self.masters or self.gradients
        assert holder is not None
        holder.finish()

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Around passes: the weights are there. Local."""
        with self._within(), nullcontext() if self.masters is None else self.masters.open():
            yield

    def synchronize(self) -> None:
        """Waits for this rank's device. Local."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _first(self) -> AbstractContextManager[object]:
        return nullcontext() if self._compiled else self._mesh.comm.busy("runs its first micro-batches")
