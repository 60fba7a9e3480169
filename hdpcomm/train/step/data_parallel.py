"""The baseline: torch's DistributedDataParallel over gloo, on whole sequences."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hdpcomm.comm import Communicator
from hdpcomm.comm.bootstrap import open_store
from hdpcomm.comm.machine import interface_of, own_address
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.topology import nodes_of
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.parallel.program import WHOLE, Action, StepProgram
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, Planner, SequenceInfo, StepPlan, Tree
from hdpcomm.plan.waves import Pass
from hdpcomm.train.losses.shards import PackedShard, no_tokens
from hdpcomm.train.state.layout import layout_of
from hdpcomm.train.step.passes import Passes, StepInputs
from hdpcomm.train.step.runner import Runner, StepSettings
from hdpcomm.train.step.trainer import Trainer
from hdpcomm.train.zero.gradients import Gradients

__all__ = ["DataParallelTrainer", "DistributedPasses", "WholeSequencePlanner", "torch_group"]

_STORE_TIMEOUT_S = 60.0
_groups = itertools.count()
"""Groups that this process has made, each with keys of its own in the job's store."""


class WholeSequencePlanner(Planner):
    """Data parallelism without padding: each sequence whole on one rank, about as many tokens on each, packed up to
    the capacity.

    A sequence above the capacity is a pack of its own: there is no other way, so the rank has to have the memory.
    """

    def __init__(self, cluster: ClusterSpec, cost_model: CostModel) -> None:
        super().__init__(None, cluster, "naive", cost_model)
        self.policy = "ddp"

    def plan(self, lengths: Sequence[int | Tree]) -> StepPlan:
        """Longest first, each to the rank with the fewest tokens. Local. Raises InvalidUsage for a tree."""
        started = time.perf_counter()
        ranks = self.cluster.ranks
        sizes = [item for item in lengths if not isinstance(item, Tree)]
        if len(sizes) < len(lengths):
            raise InvalidUsage("a tree was given to plain data parallelism, which runs whole sequences only")
        packs: list[list[list[SequenceInfo]]] = [[] for _ in range(ranks)]
        totals = [0] * ranks
        for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            sequence = SequenceInfo(place, int(sizes[place]))
            rank = totals.index(min(totals))
            totals[rank] += sequence.length
            for pack in packs[rank]:
                if sum(s.length for s in pack) + sequence.length <= self.memory.capacity:
                    pack.append(sequence)
                    break
            else:
                packs[rank].append([sequence])
        seconds = [[self.cost_model.seconds([s.length for s in pack]) for pack in own] for own in packs]
        busy = [sum(own) for own in seconds]
        placed = [(rank, tuple(pack)) for rank, own in enumerate(packs) for pack in own]
        return StepPlan(
            policy=self.policy,
            num_ranks=ranks,
            micro_batches=tuple(
                MicroBatch(index, (rank,), pack, 0.0, cost)
                for index, ((rank, pack), cost) in enumerate(zip(placed, itertools.chain(*seconds), strict=True))
            ),
            makespan_s=max(busy),
            lower_bound_s=max(busy),
            planning_s=time.perf_counter() - started,
            idle_share=1 - sum(busy) / (ranks * max(busy)) if max(busy) else 0.0,
        )


@contextlib.contextmanager
def torch_group(comm: Communicator, backend: str = "gloo", timeout: float | None = None) -> Iterator[None]:
    """Context in which torch.distributed is initialised over the ranks of ``comm``, which are all ranks of the job.
    Collective over it, at both ends.

    gloo on several hosts listens where those can reach this one, also if its own name has no address.

    Args:
        timeout: seconds of an operation of the group; default: torch's.
    """
    store = PrefixStore(f"torch group {next(_groups)}", open_store(comm.rank, _STORE_TIMEOUT_S))
    interface = interface_of(own_address(store)) if len(set(nodes_of(comm))) > 1 else None
    chosen = interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ
    if chosen:
        os.environ["GLOO_SOCKET_IFNAME"] = str(interface)
    limit = None if timeout is None else timedelta(seconds=timeout)
    try:
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, timeout=limit)
        try:
            yield
        finally:
            with contextlib.suppress(Error):  # which the caller has met, or will
                comm.barrier()  # rank 0 may serve the store
            dist.destroy_process_group()
    finally:
        if chosen:
            del os.environ["GLOO_SOCKET_IFNAME"]


class _Wrapped(DistributedDataParallel):
    """A model that is called as the one inside."""

    @property
    def takes_labels(self) -> bool:
        return getattr(self.module, "takes_labels", False)


class DistributedPasses(Passes):
    """The passes of torch's DistributedDataParallel: each sequence on one rank, and the gradients averaged by DDP while
    the rank's last backward pass runs.

    Args:
        gradient_bytes: bytes of the gradients that DDP reduces in a step.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, gradient_bytes: int) -> None:
        super().__init__([model], mesh)
        self._plain, self._wrapped = model, _Wrapped(model)
        size = mesh.comm.size
        self.bytes_elsewhere = 2 * (size - 1) * gradient_bytes // size  # a ring sends 2 (n - 1) / n of it
        self._is_last = False
        self._computed = self._waited_s = 0.0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        register_multi_grad_hook(trained, self._first_gradient, mode="any")

    def _first_gradient(self, _: Tensor) -> None:
        """Has the engine call back at the end of the backward pass. What DDP calls then, to wait for the sums of the
        gradients, comes after it: DDP asks for that at the last gradient."""
        torch.autograd.Variable._execution_engine.queue_callback(self._note_computed)

    def _note_computed(self) -> None:
        if self._is_last and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._computed = time.perf_counter()

    def waited_s(self) -> tuple[float, float]:
        """See :class:`hdpcomm.train.step.passes.Passes`: seconds after the last backward pass of each step, until DDP
        had the gradients of the ranks that had more to do, and their sums."""
        return 0.0, self._waited_s

    def run(self, step: StepInputs) -> Tensor:
        """See :class:`hdpcomm.train.step.passes.Passes`."""
        self.chunks = [self._plain if step.gradients is None else self._wrapped]
        return super().run(replace(step, scale=step.scale * self.mesh.comm.size))  # DDP takes the mean over the ranks

    def program(self, plan: StepPlan, *, training: bool) -> StepProgram:
        """This rank's micro-batches; without any, a pass over nothing, behind which DDP reduces. Local."""
        own = super().program(plan, training=training)
        if own.actions:
            return replace(own, alone=False, overlap=lambda: 0.0)  # DDP reduces
        return replace(own, actions=[Action(WHOLE, Pass(-1, 0, True))], batches={-1: None})

    def shard_without_tokens(self) -> PackedShard:
        """One token without a loss, since DDP waits for a gradient of each parameter. Local."""
        return no_tokens(self.device)

    def run_whole(
        self,
        packed: PackedShard,
        comm: Communicator,
        step: StepInputs,
        context: AbstractContextManager[None],
        *,
        last: bool,
    ) -> Tensor:
        """See :class:`hdpcomm.train.step.passes.Passes`."""
        self._is_last = last
        with nullcontext() if last else self._wrapped.no_sync():
            total = super().run_whole(packed, comm, step, context, last=last)
        if step.gradients is not None and last:
            self._waited_s += time.perf_counter() - self._computed
        return total


class DataParallelTrainer(Trainer):
    """A trainer whose passes and gradients are those of DDP: the same model, loss, clipping and optimizer, on plans of
    a :class:`WholeSequencePlanner`. Made inside of :func:`torch_group`. Collective over ``comm``, which counts tokens
    and times, and by torch over the same ranks."""

    def make_runner(self, optimizer: torch.optim.Optimizer, _: StepSettings) -> Runner:
        alone = Mesh(cast("Communicator", self.comm.subset([self.comm.rank])))
        # DDP adds up, in place: each rank has all sums
        gradients = Gradients.whole(self.model.parameters(), layout_of(self.model, alone), alone)
        passes = DistributedPasses(self.model, self.mesh, sum(p.nbytes for p in gradients.parameters))
        return Runner(passes, optimizer, gradients=gradients)
