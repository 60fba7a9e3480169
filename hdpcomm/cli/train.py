"""``hdpcomm train``: trains a model over dynamic communicators, and compares with a static mesh."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from hdpcomm.cli.output import check_writable, ranks_here, write_json
from hdpcomm.cli.train_data import TrainData, train_data
from hdpcomm.cli.train_options import (
    DESCRIPTION,
    TrainOptions,
    add_options,
    changed_options,
    dump_options,
    resolve_options,
)
from hdpcomm.errors import Error, InvalidUsage, first_line, out_of_memory
from hdpcomm.files import write_own
from hdpcomm.log import LOG
from hdpcomm.options import TrainingOptions, seconds_of

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.launch import RankPool
    from hdpcomm.data import Corpus, CorpusSummary
    from hdpcomm.models import LlamaConfig
    from hdpcomm.plan import Calibration
    from hdpcomm.run import DryRun, FolderModel, RunConfig, RunResult
    from hdpcomm.run.peer_saves import KeptCheckpoint, PeerSaves

__all__ = ["add_parser", "job_of", "ranks_of_job", "run_rank"]

P = ParamSpec("P")
_PRELOAD = ("torch._dynamo", "hdpcomm.run", "hdpcomm.run.tensor_files")
"""Modules that every rank needs and that take seconds to import; AdamW wants the first."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model on text over dynamic communicators",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with options, named as here with _ for -"
    )
    add_options(parser)
    parser.set_defaults(func=_train)


@dataclass(frozen=True, slots=True)
class _Job:
    """The arguments of :func:`run_rank`.

    Attributes:
        shrinks: when ranks die, the others go on.
        attempt: how often they have.
        gone: numbers of the ranks that died or left before this attempt.
        begins, stop_after: of a replay: the checkpoint to go on from, and the steps after which it ends.
        until: moment of ``time.time()`` by --time-limit.
    """

    options: TrainOptions
    config: RunConfig
    data: TrainData
    held_out: TrainData | None
    shrinks: bool = False
    attempt: int = 0
    gone: tuple[int, ...] = ()
    begins: Path | None = None
    stop_after: int | None = None
    until: float | None = None

    def on(self, ranks: int, capacity: int | None = None) -> _Job:
        """The job of those that are there, as if it were started by hand on so many ranks."""
        config = replace(self.config, capacity=capacity or _capacity(self.options, ranks))
        return replace(self, config=config, attempt=self.attempt + 1)


def _capacity(options: TrainOptions, ranks: int) -> int:
    return options.capacity or -(-options.context // max(1, ranks // (options.pipeline * options.tensor)))


def _train(parsed: argparse.Namespace) -> int:
    started = time.time()
    names = {each.name for each in fields(TrainOptions)}
    given = {name: value for name, value in vars(parsed).items() if name in names}
    options = resolve_options(given, parsed.config)
    for path in (options.json, options.trace):
        check_writable(path)
    options = _resumed_after_restart(_with_model_folder(options))
    until = None if options.time_limit is None else started + seconds_of(options.time_limit)
    cores = min(8, max(2, len(os.sched_getaffinity(0))))
    devices = options.pipeline * options.tensor * options.expert
    rank, ranks = ranks_here(options.ranks, default=-(-cores // devices) * devices)
    job = replace(_job(options, ranks), until=until)
    if rank is not None:
        outcome = run_rank(job)
        if rank != 0 or outcome is None:
            return 0
    else:
        outcome = ranks_of_job(job, ranks)
    return _report(job, outcome)


def _with_model_folder(options: TrainOptions) -> TrainOptions:
    """With the folder of a model that --model names on a hub."""
    if options.model is None:
        return options
    from hdpcomm.run import model_path

    return replace(options, model=model_path(options.model))


def _resumed_after_restart(options: TrainOptions) -> TrainOptions:
    """With --elastic, ranks that torchrun has started anew go on from the last checkpoint."""
    from hdpcomm.comm.launchers import agent_restarts

    if options.elastic and options.resume is None and agent_restarts():
        return replace(options, resume="auto")
    return options


def _check_saving(options: TrainOptions) -> None:
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise InvalidUsage(f"--out {options.out}: this is a file; give a folder")
    new = options.resume is None and not options.dry_run
    if options.out is not None and new and any((options.out / "checkpoints").glob("step-*")):
        raise InvalidUsage(
            f"--out {options.out} holds the checkpoints of a run; go on with it by --resume auto, or give another "
            "folder"
        )
    if options.eval_data and options.eval_fraction is not None:
        raise InvalidUsage("--eval-data and --eval-fraction were given; held-out text comes from one of them")
    if options.export is not None:
        from hdpcomm.run.model import check_export

        check_export(options.export)


def _job(options: TrainOptions, ranks: int) -> _Job:
    """Looks at the data and checks all limits, so that a bad path or value is reported once, before any rank starts."""
    from hdpcomm.run import check_limits

    job = job_of(options, ranks)
    for each in (job.data, job.held_out):
        if each is not None and each.in_place():
            check_limits(each.open(), job.config, ranks=ranks)
    return job


def job_of(options: TrainOptions, ranks: int) -> _Job:
    """The job that the options describe, without a look at the data. Raises: InvalidUsage if they contradict each
    other."""
    from hdpcomm.comm.launchers import agent_restarts
    from hdpcomm.plan import Calibration
    from hdpcomm.run import RunConfig, Schedule

    if options.elastic and "ddp" in options.compare:
        raise InvalidUsage(
            "--elastic was given with --compare ddp, which cannot go on with other ranks; leave out either"
        )
    if options.policy in options.compare:
        raise InvalidUsage(f"--compare {options.policy} is the policy of the run itself; give another one")
    _check_saving(options)
    data = train_data(options, options.data)
    shared = {each.name: getattr(options, each.name) for each in fields(TrainingOptions)}
    config = RunConfig(
        model=_model(options, data),
        policies=tuple(dict.fromkeys((options.policy, *options.compare))),
        capacity=_capacity(options, ranks),
        schedule=Schedule(options.schedule, options.warmup, options.min_lr, options.decay),
        calibration=None if options.calibration is None else Calibration.load(options.calibration),
        **shared | {"dtype": parameter_type(options)},
    )
    held_out = train_data(options, options.eval_data) if options.eval_data else None
    if held_out is not None and held_out.weights:
        raise InvalidUsage("--eval-data has weights, and held-out text is read once as it is; leave them out")
    return _Job(options, config, data, held_out, shrinks=options.elastic and agent_restarts() is None)


def parameter_type(options: TrainOptions) -> str:
    """The given type, or for ``auto`` the one that suits the devices of the ranks and the optimizer. Local."""
    from hdpcomm.comm.bootstrap import uses_gpus
    from hdpcomm.run.optimizers import is_for_matrices

    if options.dtype != "auto":
        return options.dtype
    wide = "ddp" in (options.policy, *options.compare) or is_for_matrices(options)
    return "bf16" if uses_gpus(options.transport) and not wide else "fp32"


def _model(options: TrainOptions, data: TrainData) -> LlamaConfig | FolderModel:
    from hdpcomm.models import LlamaConfig, RouterLosses
    from hdpcomm.run import folder_model

    balance, z = options.router_aux_loss, options.router_z_loss
    if options.model is not None:
        losses = None if balance is None and not z else RouterLosses(balance or 0.0, z)
        return replace(folder_model(options.model), router_losses=losses)
    return LlamaConfig(
        vocabulary=data.encoder().vocabulary,
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        experts=options.experts,
        top_k=options.top_k,
        router_aux_loss=0.01 if balance is None else balance,
        router_z_loss=z,
    )


def run_rank(job: _Job) -> tuple[RunResult | DryRun, CorpusSummary] | None:
    """Runs one rank of the job; rank 0 shows the progress on stderr and writes the files. Collective over the world.
    ``None`` on a spare rank of an elastic job."""
    from hdpcomm.comm import init

    with init(transport=job.options.transport) as comm, _told_of_memory(comm):
        return _run_elastic(comm, job) if job.shrinks else _run(comm, job, job.options.resume)


@contextmanager
def _told_of_memory(comm: Communicator) -> Iterator[None]:
    """A rank that finds no memory ends with a sentence that says whose memory it was, and what takes less."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise Error(
            f"rank {comm.rank} is out of memory ({first_line(error)}); give a smaller --capacity or more --ranks, "
            "--recompute full, --zero 3 or --offload, or a smaller model",
            rank=comm.rank,
        ) from error


def _run_elastic(comm: Communicator, job: _Job) -> tuple[RunResult | DryRun, CorpusSummary] | None:
    """Runs the job again on the ranks that live, whenever some die; ``None`` on a rank that is a spare at the end, or
    that had to leave."""
    from hdpcomm.data.agree import from_rank
    from hdpcomm.run.elastic import Elastic

    options, out = job.options, job.options.out
    assert out is not None  # checked
    elastic = Elastic(out, options.pipeline, options.tensor, options.expert, options.resume)
    before = {*comm.ranks}

    def on_change(living: Communicator, active: Sequence[int]) -> None:
        nonlocal job, before
        capacity = int(from_rank(living, str(job.on(len(active)).config.capacity), active[0]))
        gone = tuple(sorted(before - {*living.ranks}))
        job, before = replace(job.on(len(active), capacity), gone=gone), {*living.ranks}

    return elastic.run(comm, lambda comm, resume, peers: _run(comm, job, resume, peers), on_change)


def _run(
    comm: Communicator, job: _Job, resume: str | KeptCheckpoint | None = None, peers: PeerSaves | None = None
) -> tuple[RunResult | DryRun, CorpusSummary]:
    """One attempt of an elastic job, which has ``peers``, or the whole of another one."""
    import torch

    from hdpcomm.cli.data import data_progress
    from hdpcomm.comm.topology import cores_of_rank
    from hdpcomm.run import dry_run

    torch.set_num_threads(cores_of_rank(comm))
    with data_progress(comm.rank == 0) as on_progress:
        corpus = job.data.open(comm, on_progress)
        held_out = None if job.held_out is None else job.held_out.open(comm, on_progress)
    if job.options.eval_fraction is not None:
        corpus, held_out = corpus.split(job.options.eval_fraction, seed=job.config.seed)
    if job.options.dry_run:
        return dry_run(comm, corpus, job.config, elastic=job.shrinks), corpus.summary()
    return _trained(comm, job, corpus, held_out, resume, peers), corpus.summary()


def _trained(
    comm: Communicator,
    job: _Job,
    corpus: Corpus,
    held_out: Corpus | None,
    resume: str | KeptCheckpoint | None,
    peers: PeerSaves | None,
) -> RunResult:
    from hdpcomm.cli.train_report import Progress
    from hdpcomm.data.agree import on_rank_0
    from hdpcomm.run import RunFiles, Saving, Watching, train
    from hdpcomm.trace import TraceFile

    options, out = job.options, job.options.out
    resolved = replace(options, capacity=job.config.capacity, ranks=comm.size, lr=job.config.highest_lr)
    saving = None
    if job.begins is not None:
        saving = Saving(job.begins.parent, resume=str(job.begins), writes=False)
    if out is not None:
        every = options.save_every or 0
        saving = Saving(
            out / "checkpoints", keep=options.keep, keep_every=options.keep_every or 0, keep_best=options.keep_best,
            until=job.until, resume=resume, peers=peers,
            **{"every": every} if isinstance(every, int) else {"every_s": seconds_of(every)},
        )  # fmt: skip
    watching = Watching(timelines=out is not None, trace=options.trace is not None)
    opened: list[RunFiles] = []  # on rank 0

    def accepted(costs: Calibration) -> None:
        if out is not None and not job.attempt:
            save_config(out, resolved)
        opened[0].started(corpus)
        opened[0].costs(costs)
        if job.gone:
            opened[0].event("death", {"step": getattr(resume, "step", 0), "ranks": list(job.gone)})

    with ExitStack() as stack:
        files = partial(RunFiles, out, trackers=options.trackers, config=_plain(resolved), metrics=options.metrics_port)
        on_rank_0(comm, lambda: opened.append(stack.enter_context(files())))
        if opened:
            if not job.attempt:
                LOG.info(f"train: {changed_options(resolved)}")
            trace = stack.enter_context(TraceFile(options.trace))
            progress = stack.enter_context(Progress(job.config))
            watching = replace(
                watching,
                on_costs=accepted,
                on_event=opened[0].event,
                on_step=_both(opened[0].step, progress.step),
                on_evaluation=_both(opened[0].evaluation, progress.evaluation),
                on_timeline=_both(opened[0].timeline, trace.add),
            )
        return train(
            comm, corpus, job.config, saving=saving, held_out=held_out, watching=watching, export=options.export,
            stop_after=job.stop_after,
        )  # fmt: skip


def _both(first: Callable[P, None], second: Callable[P, None]) -> Callable[P, None]:
    def call(*told: P.args, **more: P.kwargs) -> None:
        first(*told, **more)
        second(*told, **more)

    return call


def _plain(options: TrainOptions) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}


def save_config(out: Path, options: TrainOptions) -> None:
    """``config.yaml`` of a run: its options as resolved, as ``--config`` takes them."""
    write_own(out / "config.yaml", dump_options(options))


def ranks_of_job(job: _Job, ranks: int) -> tuple[RunResult | DryRun, CorpusSummary]:
    """Runs the job on new processes of this host; raises what a rank raised, or PeerLost when one died."""
    from hdpcomm.comm.launch import RankPool

    try:
        with (
            RankPool(ranks, preload=_PRELOAD) as pool,
            _handing_on_signals(pool, job),
        ):
            outcomes = pool.run(run_rank, job, survivors=job.shrinks)
            outcome: tuple[RunResult | DryRun, CorpusSummary] = next(each for each in outcomes if each is not None)
            return outcome
    except BaseException:
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:  # rank 0 may have died inside its progress bar
            console.show_cursor()
            console.print()
        raise


def _handing_on_signals(pool: RankPool, job: _Job) -> AbstractContextManager[object]:
    """The first SIGTERM or Ctrl-C lets the ranks finish their step and save; a second Ctrl-C ends them at once."""
    from hdpcomm.run.stopping import StopRequest

    if job.options.out is None or job.options.dry_run:
        return nullcontext()

    def hand_on(number: int) -> None:
        LOG.info("saving after this step; Ctrl-C again ends at once")
        pool.signal(signal.Signals(number))

    return StopRequest(hand_on)


def _report(job: _Job, outcome: tuple[RunResult | DryRun, CorpusSummary]) -> int:
    from hdpcomm.cli.train_report import print_dry_run, print_report, to_json
    from hdpcomm.run import DryRun

    (result, corpus), options = outcome, job.options
    if isinstance(result, DryRun):
        print_dry_run(corpus, job.config, result)
        return 0
    trained = all(result.steps.values())
    if trained:
        print_report(corpus, job.config, result)
    elif any(result.left_out.values()):
        none = ", ".join(policy for policy, steps in result.steps.items() if not steps)
        print(f"{none} took no step: loss or gradient were no finite numbers in any")
    else:
        print(f"nothing was left to do: {result.saved} is of step {result.first_step}")
    if result.saved is not None:
        print(f"saved: {result.saved}")
    if options.export is not None:
        print(f"exported: {options.export} (transformers' from_pretrained opens it)")
    if options.json and trained:
        write_json(options.json, to_json(corpus, job.config, result))
    if result.stopped_by == signal.SIGALRM:
        print(f"ended before --time-limit {options.time_limit}; go on by --resume auto")
    return 128 + result.stopped_by if result.stopped_by else 0
