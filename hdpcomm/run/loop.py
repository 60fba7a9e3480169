"""A whole training run on a corpus: what ``hdpcomm train`` does on every rank."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.comm.topology import by_host, domains_of
from hdpcomm.data import BatchReader, Corpus
from hdpcomm.data.agree import from_rank, raise_together
from hdpcomm.errors import Error, InvalidUsage, NotFinite
from hdpcomm.log import LOG
from hdpcomm.measure.step_times import PlanLearning
from hdpcomm.plan import PlanAhead, PlannedStep, Planner
from hdpcomm.run.checkpoints import Checkpoint, CheckpointFolder
from hdpcomm.run.config import RunConfig, learning_rate
from hdpcomm.run.costs import (
    calibration_of_run,
    make_planner,
    measure_costs,
    same_mesh,
)
from hdpcomm.run.evaluation import Evaluation, evaluate
from hdpcomm.run.first_weights import FirstWeights, keep_optimizer
from hdpcomm.run.limits import batch_sampler, check_limits
from hdpcomm.run.memory import free_models, within_memory
from hdpcomm.run.model import export_model, model_spec
from hdpcomm.run.optimizers import is_for_matrices, new_optimizer
from hdpcomm.run.options import RunResult, Saving, Watching
from hdpcomm.run.peer_saves import KeptCheckpoint
from hdpcomm.run.pipelines import mesh_of, new_trainer, trained_part
from hdpcomm.run.readers_ahead import ReadersAhead
from hdpcomm.run.resuming import (
    agreed_checkpoint,
    check_same_data,
    check_same_run,
    config_facts,
    data_facts,
    gather_generators,
)
from hdpcomm.run.step_record import other_policies, step_costs, timeline_row
from hdpcomm.run.stopping import StopRequest
from hdpcomm.run.watch import GarbageClock, StepWatch, TimedReader
from hdpcomm.train import StepMetrics, Trainer
from hdpcomm.train.step.data_parallel import DataParallelTrainer, WholeSequencePlanner, torch_group

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["train"]

_TRACED_STEPS = 50  # at most, with Watching.trace: a trace of more is too large to look at
_NAMED = 5  # sequences of a step that is left out
_WATCHED_STEPS = 10  # steps of a whole run of which the timeline is kept


def train(
    comm: Communicator,
    corpus: Corpus,
    config: RunConfig,
    *,
    saving: Saving | None = None,
    held_out: Corpus | None = None,
    watching: Watching | None = None,
    export: Path | None = None,
    stop_after: int | None = None,
) -> RunResult:
    """Trains up to ``config.steps`` steps with each policy. Collective over ``comm``: equal arguments on every rank,
    but for the functions of ``watching``.

    Plans are made in the background, while the steps before run; ranks of one host, and hosts of one domain, are
    neighbours in them (:func:`hdpcomm.comm.topology.by_host`). The policies take turns, step by step, each with
    weights of its own: what else the machine does slows all alike. With ``saving`` the run writes checkpoints, goes on
    from one, and on SIGTERM or Ctrl-C ends after the step, saved. On as many ranks as before, a resumed run computes
    the very bits that it would have computed without the interruption: the checkpoint holds the measured costs, which
    the plans follow. With ``config.learn_costs`` plans follow the clock, and with ``config.queue`` ranks do, so no two
    runs are the same to the bit.

    Args:
        corpus: every rank reads only the tokens of its own shards.
        held_out: text for evaluation, every ``config.eval_every`` steps and at the end.
        export: a folder in which rank 0 writes the first policy's model at the end, a layer in memory at a time
            (:func:`export_model`).
        stop_after: the run ends after so many steps of ``config.steps``, to which its schedules still belong.

    Raises:
        InvalidUsage: of :func:`check_limits`; no checkpoint where ``saving.resume`` says, or one of another run.
        Error: of the step, see :meth:`hdpcomm.train.Trainer.step`; a checkpoint cannot be written.
    """
    comm = by_host(comm, domains_of(comm))
    config = replace(config, lr=config.highest_lr)
    check_limits(corpus, config, ranks=comm.size)
    if held_out is not None:
        check_limits(held_out, config, ranks=comm.size)
    with ExitStack() as stack:
        stopping = stack.enter_context(StopRequest()) if saving is not None and saving.writes else None
        run = _begun(comm, corpus, config, saving, held_out, watching or Watching(), stack)
        run.accept()
        run.advance(stopping, config.steps if stop_after is None else min(stop_after, config.steps))
        if export is not None:
            run.export(export)
        return run.result()


def _begun(
    comm: Communicator,
    corpus: Corpus,
    config: RunConfig,
    saving: Saving | None,
    held_out: Corpus | None,
    watching: Watching,
    stack: ExitStack,
) -> _Run:
    """A run with the state of the newest checkpoint that fits, which shows when models and optimizers are there."""
    before: int | None = None
    refused: list[str] = []
    while True:
        found = None if saving is None else _found(comm, saving, before)
        if refused and found is None:
            raise InvalidUsage(refused[0])
        check_same_data(comm, corpus, found)
        if found is not None:
            check_same_run(found, corpus, config)
        with ExitStack() as attempt:
            run = _Run(comm, corpus, config, saving, found, held_out, watching, attempt)
            try:
                run.load()
            except InvalidUsage as error:
                if found is None:
                    raise
                before = found.step
                refused.append(error.args[0])
                if comm.rank == 0:
                    LOG.warning(error)
            else:
                stack.push(attempt.pop_all())
                return run


def _found(comm: Communicator, saving: Saving, before: int | None) -> Checkpoint | KeptCheckpoint | None:
    """Checkpoint to go on from; ``before``: of fewer steps than what did not fit."""
    if not isinstance(saving.resume, KeptCheckpoint):
        return agreed_checkpoint(comm, saving.folder, saving.resume, before=before)
    return saving.resume if before is None else agreed_checkpoint(comm, saving.folder, "auto", before=before)


class _Run:
    """One rank's state of a run."""

    def __init__(
        self,
        comm: Communicator,
        corpus: Corpus,
        config: RunConfig,
        saving: Saving | None,
        found: Checkpoint | KeptCheckpoint | None,
        held_out: Corpus | None,
        watching: Watching,
        stack: ExitStack,
    ) -> None:
        self.comm, self.corpus, self.config = comm, corpus, config
        self.saving, self.held_out, self.watching = saving, held_out, watching
        self.folder = None
        if saving is not None and saving.writes:
            self.folder = _checkpoint_folder(comm, saving, config, self._on_saved, stack)
        self.found = found
        self.best = None if found is None else found.facts.get("best")
        self.saved_at, self.step_s = time.monotonic(), 0.0
        self.save_s = 0.0 if saving is None or saving.until is None else 0.05 * max(0.0, saving.until - time.time())
        self.first_step = self.done = 0 if found is None else found.step
        if self.first_step > config.steps:
            raise InvalidUsage(
                f"{found.path if found else ''} was saved after step {self.first_step} and --steps is {config.steps}; "
                "give more steps, or an earlier checkpoint"
            )
        self.saved: Path | None = found.path if isinstance(found, Checkpoint) else None
        self.stopped_by = 0
        begins = config if found is None else replace(config, init_from=None, keep_optimizer=False)
        self.weights = FirstWeights(comm, begins)
        config, capacity, self.step_memory = within_memory(comm, config)
        self.config = config
        self.costs = measure_costs(comm, config, longest=corpus.longest, capacity=capacity, found=found)
        free_models()  # that were measured
        planners = {policy: make_planner(comm, corpus, config, self.costs, policy) for policy in config.policies}
        self.batches = batch_sampler(corpus, config)
        self.readers = stack.enter_context(ReadersAhead(corpus, self.batches, config.steps))
        # From here on, so that the first step's plan is made while the models are.
        self.plans = {
            policy: stack.enter_context(PlanAhead(planner, self._lengths())) for policy, planner in planners.items()
        }
        self.trainers = {policy: self._trainer(planner, stack) for policy, planner in planners.items()}
        self.steps: dict[str, list[StepMetrics]] = {policy: [] for policy in planners}
        self.evaluations: dict[str, list[Evaluation]] = {policy: [] for policy in planners}
        self.left_out: dict[str, list[int]] = {policy: [] for policy in planners}
        self.spec = model_spec(config.model)
        self.stalled = dict.fromkeys(planners, 0.0)
        self.garbage = stack.enter_context(GarbageClock())
        self.watches = {policy: StepWatch(config.highest_lr) for policy in planners}
        self.learning = self._learning(found) if config.learn_costs else {}

    def accept(self) -> None:
        """Tells what the plans are made from: nothing speaks against the run, which may write from here on."""
        if self.watching.on_costs is not None:
            planner = self.trainers[self.config.policies[0]].planner
            self.watching.on_costs(calibration_of_run(self.config, planner, self.comm.transport))
        begins = "" if self.found is None else str(self.found.path)
        self._tell("start", step=self.first_step, ranks=self.comm.size, transport=self.comm.transport, resumed=begins)

    def _tell(self, kind: str, **facts: Any) -> None:
        if self.watching.on_event is not None:
            self.watching.on_event(kind, facts)

    def _on_saved(self, step: int, seconds: float) -> None:
        """Called by the thread that writes checkpoints."""
        self.save_s = seconds
        self._tell("save", step=step, seconds=seconds)

    def load(self) -> None:
        """Reads the checkpoint to go on from, if there is one. Raises: InvalidUsage, on all ranks: it does not fit."""
        if self.found is None:
            if self.config.keep_optimizer and self.weights.run is not None:
                for trainer in self.trainers.values():
                    keep_optimizer(self.weights.run, trainer, self.config.optimizer)
            return
        error: InvalidUsage | None = None
        try:
            state = self._read(self.found)
        except InvalidUsage as failure:
            error = failure
        raise_together(self.comm, error, order=self.comm.rank)
        for policy, trainer in self.trainers.items():
            groups = trainer.optimizer.param_groups
            decays = [group["weight_decay"] for group in groups]
            trainer.load_state_dict(state["policies"][policy])
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay  # as this run is told, whatever the saved one was

    def _lengths(self) -> Iterator[Sequence[int]]:
        """Lengths of each step's sequences, for the thread of a policy's plans, which has a sampler of its own."""
        sampler = batch_sampler(self.corpus, self.config)
        return (sampler.batch(step).lengths for step in range(self.first_step, self.config.steps))

    def _trainer(self, planner: Planner, stack: ExitStack) -> Trainer:
        config, comm = self.config, self.comm
        if isinstance(planner, WholeSequencePlanner):
            mesh = mesh_of(comm, config)
            (model,) = trained_part(config, mesh, self.weights)
            stack.enter_context(torch_group(comm))
            optimizer = new_optimizer(config, model, mesh)
            return DataParallelTrainer(model, optimizer, planner, comm, max_grad_norm=config.max_grad_norm)
        return new_trainer(comm, config, planner, self.costs.pool, self.weights)

    def _learning(self, found: Checkpoint | KeptCheckpoint | None) -> dict[str, PlanLearning]:
        known = {} if found is None or not same_mesh(found, self.config) else found.facts.get("learned") or {}
        return {
            policy: PlanLearning(trainer, self.plans[policy], known.get(policy))
            for policy, trainer in self.trainers.items()
            if not isinstance(trainer.planner, WholeSequencePlanner)
        }

    def advance(self, stopping: StopRequest | None, steps: int) -> None:
        """Runs the steps before ``steps`` that are left, and saves and evaluates on the way. Ranks wait for those that
        read, plan or save (:meth:`hdpcomm.comm.Communicator.liveness_deadlines`)."""
        with self.comm.liveness_deadlines():
            if self.saving is not None and self.saving.peers is not None:
                self.saving.peers.begin(self.comm, self.trainers)
            self._keep()
            self._advance(stopping, steps)

    def _advance(self, stopping: StopRequest | None, steps: int) -> None:
        saving = self.saving
        for step in range(self.first_step, steps):
            begun = time.monotonic()
            for policy in self.trainers:
                self._step(policy, step)
            self.done = step + 1
            self._keep()
            if saving is not None and stopping is not None:
                late = saving.until is not None and time.time() + 1.5 * self.step_s + 2 * self.save_s > saving.until
                due = saving.every_s > 0 and time.monotonic() - self.saved_at >= saving.every_s
                self.stopped_by, due = stopping.agreed(self.comm, late=late, save=due)
                if self.stopped_by:
                    break
                if self.done < steps and (due or (saving.every and self.done % saving.every == 0)):
                    self._save()
            if self.config.eval_every and self.done % self.config.eval_every == 0:
                self._evaluate()
            self.step_s = max(self.step_s, time.monotonic() - begun)
        self._save_last()
        if not self.stopped_by and self.first_step < self.done == self.config.steps:
            self._evaluate()
        self._tell("end", step=self.done, stopped_by=self.stopped_by)

    def _step(self, policy: str, step: int) -> None:
        trainer, watching = self.trainers[policy], self.watching
        for group in trainer.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        with self.comm.busy("waits for the plan of a step, and for its data"):
            planned = next(self.plans[policy])
        try:
            reader = self.readers.take(step, trainer)
            timed = TimedReader(reader, self.garbage)
            metrics = trainer.step(planned, timed, items=reader.items)
        except NotFinite as error:
            trainer.check_replicas()  # it may be one rank whose memory is broken
            self._leave_out(policy, step, error)
            return
        if self.config.check_replicas and metrics.step % self.config.check_replicas == 0:
            trainer.check_replicas()
        self.steps[policy].append(metrics)
        ran = trainer.ran or planned.plan
        waited = 0.0 if trainer.offload is None else trainer.offload.stats().host_wait_s
        beside = {"stall": waited - self.stalled[policy], "plan": planned.waited_s, "data": timed.seconds}
        self.stalled[policy], self.garbage.seconds, beside["garbage"] = waited, 0.0, self.garbage.seconds
        costs, times, by_rank = step_costs(
            trainer.timeline.spans, ran, self.comm, seconds=metrics.seconds, spec=self.spec,
            beside=beside, cost_model=trainer.planner.cost_model, passes=trainer.runner.passes,
            mesh=trainer.mesh if self.config.on_mesh else None,
        )  # fmt: skip
        if policy in self.learning:
            self.learning[policy].add(ran, times)
            costs["slowest_rank"], costs["slowest_speed"] = self.learning[policy].slowest()
        if watching.on_step is not None:
            watching.on_step(policy, metrics, costs)
        self._look_at(policy, metrics, by_rank, reader)
        if self._is_watched(step):
            self._report_timeline(metrics, planned, trainer)

    def _look_at(
        self, policy: str, metrics: StepMetrics, by_rank: Mapping[str, Sequence[float]], reader: BatchReader
    ) -> None:
        """Tells of what is out of the ordinary. Collective where a loss has jumped, with ``note_spikes``."""
        watch, trainer, about = self.watches[policy], self.trainers[policy], {"step": metrics.step, "policy": policy}
        if (found := watch.slow(metrics, by_rank)) is not None:
            if found.pop("new") and self.comm.rank == 0:
                LOG.warning(found["told"])
            self._tell("slow", **about, **found)
        if (odd := watch.odd_loss(metrics)) is not None:
            kind, told = odd["kind"], odd["told"]
            if kind == "spike" and self.config.note_spikes and not isinstance(trainer, DataParallelTrainer):
                told += f"; {self._worst(trainer, reader)}"
            if self.comm.rank == 0:
                LOG.warning(told)
            self._tell(kind, **about, told=told)

    def _worst(self, trainer: Trainer, reader: BatchReader) -> str:
        """The sequences of a step with the largest loss, in words. Collective."""
        lengths = [int(self.corpus.lengths[each]) for each in reader.ids]
        try:
            logs, _ = trainer.log_probs(lengths, reader, root=0, items=reader.items)
        except InvalidUsage as error:  # on all ranks, of a model that has none; no reason to end a run
            return f"losses of its sequences are not to be had ({error})"
        losses = [-float(each.double().sum()) / max(1, int((each != 0).sum())) for each in logs]
        worst = sorted(range(len(losses)), key=lambda place: -losses[place])[:_NAMED]
        names = (f"{self.corpus.place_of(reader.ids[place])} ({losses[place]:.4g})" for place in worst)
        return f"after the step, most of {', '.join(names)}"

    def _leave_out(self, policy: str, step: int, error: NotFinite) -> None:
        """The policy's step was not taken. Raises: Error, if there were too many; the run is saved before."""
        self.left_out[policy].append(step)
        ids = self.batches.batch(step).ids
        names = [self.corpus.place_of(ids[number]) for number in error.sequences or range(len(ids))]
        what = error.args[0].partition(": ")[2]  # the terminal counts steps from 1
        told = f"step {step + 1}: {what}; of {', '.join(names[:_NAMED])}{', ...' * (len(names) > _NAMED)}"
        trainer = self.trainers[policy]
        if len(self.left_out[policy]) <= self.config.skip_bad_steps:
            trainer.num_steps += 1
            self._tell("skip", step=step, policy=policy, told=told)
            if self.comm.rank == 0:
                LOG.warning(f"left out {told}")
            return
        saved = ""
        if self.saving is not None and policy == self.config.policies[0]:  # the others have not gone on either
            self._save_last()
            saved = f"; saved: {self.saved}"
        raise Error(f"{told}; --skip-bad-steps N leaves out N such steps{saved}", rank=self.comm.global_rank, op="step")

    def _is_watched(self, step: int) -> bool:
        if self.watching.trace:
            return step - self.first_step < _TRACED_STEPS
        every = max(1, self.config.steps // _WATCHED_STEPS)
        return self.watching.timelines and step % every == min(1, every - 1)  # the very first step is no example

    def _report_timeline(self, metrics: StepMetrics, planned: PlannedStep, trainer: Trainer) -> None:
        facts = {"step": metrics.step, "seconds": metrics.seconds, "predicted_s": metrics.predicted_s}
        row = timeline_row(facts, planned.plan, trainer.timeline.spans, self.comm, origin=trainer.timeline.origin)
        if self.watching.on_timeline is not None:
            others = other_policies(trainer.planner, planned.lengths)
            self.watching.on_timeline(row | {"policies": others})

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        for policy, trainer in self.trainers.items():
            if self.evaluations[policy] and self.evaluations[policy][-1].step == self.done:
                continue
            with trainer.averaged() if self.config.ema is not None else nullcontext():
                found = evaluate(trainer, self.held_out, tokens_per_step=self.config.tokens_per_step, step=self.done)
            self.evaluations[policy].append(found)
            if self.watching.on_evaluation is not None:
                self.watching.on_evaluation(policy, found)
            if policy == self.config.policies[0] and self.saving is not None and self.saving.keep_best:
                self._keep_best(found.loss)

    def _keep_best(self, loss: float) -> None:
        if self.best is not None and self.best[1] <= loss:
            return
        self.best = [self.done, loss]
        if self.folder is not None and self.comm.rank == 0:
            self.folder.mark_best(self.done)
        self._save_last(wait=False)

    def _state(self) -> dict[str, Any]:
        return {policy: trainer.checkpoint_state() for policy, trainer in self.trainers.items()}

    def _save(self, *, copy: bool = True) -> None:
        assert self.saving is not None
        self.saved_at = time.monotonic()
        state = self._state()
        generators = gather_generators(self.comm)
        self.saved = self.saving.folder / f"step-{self.done}"
        if self.folder is None:
            return
        with self.comm.busy("saves a checkpoint"):
            if self.saving.peers is not None:
                _warn_of_disk(self.folder)
            self.folder.save(self.done, {"policies": state, "generators": generators}, self._facts(), copy=copy)

    def _save_last(self, *, wait: bool = True) -> None:
        """Saves the state of now, unless that is done. ``wait``: the run ends here, and it is on the disk on return."""
        saving = self.saving
        if saving is not None and saving.writes and (self.saved is None or self.saved.name != f"step-{self.done}"):
            self._save(copy=not wait)
        if self.folder is not None and wait:
            with self.comm.busy("saves a checkpoint"):
                self.folder.wait()

    def _keep(self) -> None:
        """Copies the state of now to where another rank finds it."""
        if self.saving is not None and self.saving.peers is not None:
            self.saving.peers.take(self.comm, self.done, self.trainers, self._facts())

    def _facts(self) -> dict[str, Any]:
        """Facts beside the tensors of a checkpoint."""
        memory = self.costs.memory
        return {
            "ranks": self.comm.size,
            "config": config_facts(self.config),
            "data": data_facts(self.corpus),
            "cost_model": asdict(self.costs.cost_model),
            "memory_model": None if memory is None else asdict(memory),
            "nics": self.costs.nics,
            "best": self.best,
            "learned": {policy: learning.to_dict() for policy, learning in self.learning.items()},
        }

    def _read(self, found: Checkpoint | KeptCheckpoint) -> dict[str, Any]:
        """The checkpoint's state, the generator of random numbers set."""
        same_ranks = found.facts["ranks"] == self.comm.size
        state: dict[str, Any] = {"policies": self._state()}
        if same_ranks:
            state["generators"] = gather_generators(self.comm)
        found.load_into(state)
        if same_ranks:
            try:
                torch.set_rng_state(
                    state["generators"][self.comm.rank].clone()
                )  # torch wants one that starts its memory
            except RuntimeError as error:
                raise InvalidUsage(f"{found.path}: damaged (generators: {error}); use another checkpoint") from None
        return state

    def export(self, folder: Path) -> None:
        trainer = self.trainers[self.config.policies[0]]
        averaged = trainer.averaged() if self.config.ema is not None else nullcontext()
        with self.comm.liveness_deadlines(), self.comm.busy("exports the model"), averaged:
            if self.comm.rank == 0:
                export_model(self.config.model, trainer.whole_tensors(), folder)
            else:
                deque(trainer.whole_tensors(), maxlen=0)

    def result(self) -> RunResult:
        return RunResult(
            ranks=self.comm.size,
            transport=self.comm.transport,
            parameters=self.trainers[self.config.policies[0]].num_parameters(),
            steps=self.steps,
            first_step=self.first_step,
            stopped_by=self.stopped_by,
            saved=self.saved,
            evaluations=self.evaluations,
            left_out=self.left_out,
            recompute=self.config.recompute,
            step_memory=self.step_memory,
        )


def _checkpoint_folder(
    comm: Communicator,
    saving: Saving,
    config: RunConfig,
    on_saved: Callable[[int, float], None],
    stack: ExitStack,
) -> CheckpointFolder | None:
    """Where this rank writes, if it does: rank 0, and every rank that has its own part of a sharded optimizer's state,
    or of the model. Collective."""
    parts = config.zero or config.on_mesh or is_for_matrices(config)
    session, folder, writers = secrets.token_hex(8), None, comm.size if parts else 1
    opened = partial(CheckpointFolder, saving.folder, keep=saving.keep, writers=writers)
    if comm.rank == 0:
        folder = opened(session=session, keep_every=saving.keep_every, on_saved=on_saved)
    session = from_rank(comm, session)
    if 0 < comm.rank < writers:
        folder = opened(rank=comm.rank, session=session)
    if folder is not None:
        stack.push(partial(_end_of_saving, folder))
    return folder


def _end_of_saving(folder: CheckpointFolder, error: object, *_: object) -> None:
    if error is None:
        folder.wait()
    else:
        folder.give_up()
        with suppress(OSError):  # of a run that was refused nothing stays
            folder.path.rmdir()


def _warn_of_disk(folder: CheckpointFolder) -> None:
    """Waits for the checkpoint before. A full disk is no reason to end a run whose ranks keep its state in memory."""
    try:
        folder.wait()
    except Error as error:
        LOG.warning(f"{error}; the run goes on")
