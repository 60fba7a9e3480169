"""``hdpcomm train``: trains a Llama on text over dynamic communicators, and compares with a static mesh."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.cli.output import check_writable, count, num_bytes, positive, ranks_here, write_json
from hdpcomm.cli.train_data import TrainData
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm.launch import RankPool
    from hdpcomm.data import Corpus, CorpusSummary
    from hdpcomm.run import RunConfig, RunResult

__all__ = ["add_parser"]

_DESCRIPTION = """Trains a Llama-style model on byte-level text with Hybrid Data Parallelism: every step plans how many
ranks each sequence takes, from its length. Starts the ranks on this machine; under torchrun, srun or mpirun it joins
the given world instead. With --out it saves as it goes, also on Ctrl-C and SIGTERM, and --resume goes on from there."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model on text over dynamic communicators",
        description=_DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_data_options(parser.add_argument_group("data").add_argument)
    _add_ranks_options(parser.add_argument_group("ranks").add_argument)
    _add_model_options(parser.add_argument_group("model").add_argument)
    _add_training_options(parser.add_argument_group("training").add_argument)
    _add_saving_options(parser.add_argument_group("saving").add_argument)
    _add_output_options(parser.add_argument_group("output").add_argument)
    parser.set_defaults(func=_train)


def _add_data_options(add: Callable[..., object]) -> None:
    add(
        "--data",
        nargs="+",
        metavar="PATH",
        help="text, JSONL, Parquet, folders of these, Hugging Face datasets, folders of hdpcomm data build; "
        "without it, Python's standard library",
    )
    add("--text-field", default="text", metavar="NAME", help="field or column that holds the text")
    add(
        "--messages-field",
        default="messages",
        metavar="NAME",
        help="field or column with the messages of a chat; the assistant's tokens alone are trained",
    )
    add("--tokenizer", type=Path, metavar="FOLDER", help="folder of a model; without it, tokens are bytes")
    add(
        "--data-cache",
        type=Path,
        metavar="FOLDER",
        help="folder for tokens that are made once (hdpcomm/data in the user's cache)",
    )
    add(
        "--context",
        type=count,
        default=4096,
        metavar="TOKENS",
        help="longest sequence; longer documents are cut into pieces",
    )
    add("--tokens-per-step", type=count, default=65536, metavar="TOKENS", help="most tokens of a step over all ranks")
    add("--seed", type=int, default=0, help="seed of the shuffle and of the weights")


def _add_ranks_options(add: Callable[..., object]) -> None:
    add(
        "--ranks",
        type=count,
        default=None,
        metavar="N",
        help="ranks to start here (one a core, 2 to 8; under torchrun: its world)",
    )
    add("--transport", default="auto", metavar="NAME", help="how the ranks exchange tensors; see hdpcomm.init")
    add(
        "--capacity",
        type=count,
        default=None,
        metavar="TOKENS",
        help="tokens that a rank holds at once (so many that the longest sequences need all ranks)",
    )
    add("--policy", choices=("balanced", "naive", "static"), default="balanced", help="how ranks get their sequences")
    add(
        "--compare",
        nargs="+",
        choices=("static", "naive", "balanced", "ddp"),
        default=[],
        help="train more models on the same batches, by these policies or by torch's DDP over gloo with packs of whole "
        "sequences, and show them side by side",
    )
    add(
        "--offload",
        type=num_bytes,
        default=0,
        metavar="SIZE",
        help="pinned host memory of each rank for activations of long sequences, like 512M or 64G; 0: none",
    )


def _add_model_options(add: Callable[..., object]) -> None:
    add("--layers", type=count, default=4, help="transformer blocks")
    add("--hidden", type=count, default=32, help="width of the residual stream")
    add("--heads", type=count, default=2, help="query heads")
    add("--kv-heads", type=count, default=1, help="key and value heads")
    add("--ffn", type=count, default=96, help="width of the feed-forward block")


def _add_training_options(add: Callable[..., object]) -> None:
    add("--steps", type=count, default=10, help="optimizer steps")
    add("--lr", type=positive, default=1e-2, help="highest learning rate")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the parameters; bf16 keeps fp32 master weights")
    add("--zero", type=int, choices=(0, 1), default=0, help="1: each rank keeps a part of the optimizer's state")
    add(
        "--recompute",
        type=_recompute,
        default="none",
        metavar="none|full|N",
        help="layers that are computed again in the backward pass instead of kept",
    )
    add("--max-grad-norm", type=positive, default=1.0, help="gradients are clipped to this global norm")


def _add_saving_options(add: Callable[..., object]) -> None:
    add(
        "--out",
        type=Path,
        metavar="RUN",
        help="folder of the run: checkpoints/step-N, metrics.jsonl, config.yaml; made if need be",
    )
    add("--save-every", type=count, default=None, metavar="N", help="steps between checkpoints (only at the end)")
    add("--keep", type=count, default=3, metavar="N", help="checkpoints that stay, the newest")
    add(
        "--resume",
        metavar="auto|PATH",
        help="go on from the newest checkpoint of --out, if there is any, or from the one at PATH",
    )
    add("--export", type=Path, metavar="FOLDER", help="write the model for transformers' from_pretrained at the end")


def _recompute(text: str) -> str | int:
    if text in ("none", "full"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither none, full nor a number of layers")
    return int(text)


def _add_output_options(add: Callable[..., object]) -> None:
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--log", type=Path, metavar="FILE", help="write a JSON line after each step")


@dataclass(frozen=True, slots=True)
class _Job:
    """The arguments of :func:`run_rank`."""

    data: TrainData
    config: RunConfig
    log: Path | None
    transport: str
    out: Path | None = None
    save_every: int = 0
    keep: int = 3
    resume: str | None = None

    @property
    def logs(self) -> list[Path]:
        """Files that get a line for each step."""
        return [path for path in (self.log, self.out and self.out / "metrics.jsonl") if path is not None]


def _train(options: argparse.Namespace) -> int:
    check_writable(options.json)
    check_writable(options.log)
    _check_saving(options)
    rank, ranks = ranks_here(options.ranks, default=min(8, max(2, len(os.sched_getaffinity(0)))))
    job = _job(options, ranks)
    if rank is not None:
        result, corpus = run_rank(job)
        if rank != 0:
            return 0
    else:
        result, corpus = _start_ranks(job, ranks)
    _report(options, job, result, corpus)
    return 128 + result.stopped_by if result.stopped_by else 0


def _check_saving(options: argparse.Namespace) -> None:
    if options.out is None:
        for name in ("save_every", "resume"):
            if getattr(options, name) is not None:
                raise InvalidUsage(f"--{name.replace('_', '-')} was given without --out; name the folder of the run")
    elif options.out.exists() and not options.out.is_dir():
        raise InvalidUsage(f"--out {options.out}: this is a file; give a folder")
    elif options.resume is None and any((options.out / "checkpoints").glob("step-*")):
        raise InvalidUsage(
            f"--out {options.out} holds the checkpoints of a run; go on with it by --resume auto, or give another "
            "folder"
        )
    if options.export is not None:
        from hdpcomm.models.export import check_export

        check_export(options.export)


def _job(options: argparse.Namespace, ranks: int) -> _Job:
    """Looks at the data and checks all limits, so that a bad path or value is reported once, before any rank starts."""
    from hdpcomm.models import LlamaConfig
    from hdpcomm.run import RunConfig, check_limits

    context = options.context
    capacity = options.capacity or -(-context // ranks)
    if options.policy in options.compare:
        raise InvalidUsage(f"--compare {options.policy} is the policy of the run itself; give another one")
    policies = dict.fromkeys([options.policy, *options.compare])
    data = TrainData(
        paths=tuple(options.data or ()),
        context=context,
        text_field=options.text_field,
        messages_field=options.messages_field,
        tokenizer=options.tokenizer,
        cache=options.data_cache,
    )
    config = RunConfig(
        model=LlamaConfig(
            vocabulary=data.encoder().vocabulary,
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            kv_heads=options.kv_heads,
            ffn=options.ffn,
        ),
        policies=tuple(policies),
        steps=options.steps,
        capacity=capacity,
        tokens_per_step=options.tokens_per_step,
        seed=options.seed,
        learning_rate=options.lr,
        max_grad_norm=options.max_grad_norm,
        offload_bytes=options.offload,
        dtype=options.dtype,
        zero=options.zero,
        recompute=options.recompute,
    )
    if data.in_place():
        check_limits(data.open(), config, ranks=ranks)
    return _Job(
        data=data,
        config=config,
        log=options.log,
        transport=options.transport,
        out=options.out,
        save_every=options.save_every or 0,
        keep=options.keep,
        resume=options.resume,
    )


def run_rank(job: _Job) -> tuple[RunResult, CorpusSummary]:
    """Runs one rank of the job; rank 0 shows the progress on stderr and writes the log. Collective over the world."""
    import torch

    from hdpcomm.cli.data import data_progress
    from hdpcomm.cli.train_report import Progress
    from hdpcomm.comm import init
    from hdpcomm.comm.topology import cores_of_rank
    from hdpcomm.run import Saving, train

    saving = None
    if job.out is not None:
        saving = Saving(job.out / "checkpoints", every=job.save_every, keep=job.keep, resume=job.resume)
    with init(transport=job.transport) as comm:
        torch.set_num_threads(cores_of_rank(comm))
        with data_progress(comm.rank == 0) as on_progress:
            corpus = job.data.open(comm, on_progress)
        if comm.rank != 0:
            return train(comm, corpus, job.config, saving=saving), corpus.summary()
        if job.out is not None:
            save_config(job.out, job.config, corpus)
        with Progress(job.config, logs=job.logs) as progress:
            return train(comm, corpus, job.config, saving=saving, on_step=progress.step), corpus.summary()


def save_config(out: Path, config: RunConfig, corpus: Corpus) -> None:
    """``config.yaml`` of a run: the configuration as resolved, and what the data was."""
    from dataclasses import asdict

    import yaml

    out.mkdir(parents=True, exist_ok=True)
    content = asdict(config) | {"policies": list(config.policies)}
    content["data"] = {"name": corpus.name, "context": corpus.context, "files": len(corpus.files)}
    (out / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def _start_ranks(job: _Job, ranks: int) -> tuple[RunResult, CorpusSummary]:
    """Runs the job on new processes of this host; raises what a rank raised, or PeerLost when one died."""
    from hdpcomm.comm.launch import RankPool

    try:
        with RankPool(ranks, preload=("torch._dynamo",)) as pool, _handing_on_signals(pool, job):  # AdamW needs it
            result: tuple[RunResult, CorpusSummary] = pool.run(run_rank, job)[0]
            return result
    except BaseException:
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:  # rank 0 may have died inside its progress bar
            console.show_cursor()
            console.print()
        raise


@contextmanager
def _handing_on_signals(pool: RankPool, job: _Job) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C lets the ranks finish their step and save; a second Ctrl-C ends them at once."""
    if job.out is None:
        yield
        return
    asked = False

    def hand_on(number: int, _: object) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        print("hdpcomm: saving after this step; Ctrl-C again ends at once", file=sys.stderr, flush=True)
        pool.signal(signal.SIGTERM if number == signal.SIGTERM else signal.SIGINT)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(options: argparse.Namespace, job: _Job, result: RunResult, corpus: CorpusSummary) -> None:
    from hdpcomm.cli.train_report import print_report, to_json

    trained = bool(result.steps[job.config.policies[0]])
    if trained:
        print_report(corpus, job.config, result)
    else:
        print(f"nothing was left to do: {result.saved} is of step {result.first_step}")
    if result.saved is not None:
        print(f"saved: {result.saved}")
    if options.export:
        from hdpcomm.models.export import export_llama

        export_llama(job.config.model, result.state, options.export)
        print(f"exported: {options.export} (transformers.AutoModelForCausalLM.from_pretrained opens it)")
    if options.json and trained:
        write_json(options.json, to_json(corpus, job.config, result))
