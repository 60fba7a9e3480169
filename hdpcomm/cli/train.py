"""``hdpcomm train``: trains a Llama on text over dynamic communicators, and shows what they are worth."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.cli.output import check_writable, count, num_bytes, positive, ranks_here, write_json

if TYPE_CHECKING:
    from hdpcomm.data import Corpus
    from hdpcomm.train import RunConfig, RunResult

__all__ = ["add_parser"]

_DESCRIPTION = """Trains a Llama-style model on byte-level text with Hybrid Data Parallelism: every step plans how many
ranks each sequence takes, from its length. Starts the ranks on this machine; under torchrun, srun or mpirun it joins
the given world instead. Then it does the same on the same batches with a static DP x CP mesh, unless --no-compare."""


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
    _add_output_options(parser.add_argument_group("output").add_argument)
    parser.set_defaults(func=_train)


def _add_data_options(add: Callable[..., object]) -> None:
    add(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files or folders of text or JSONL; without it, Python's standard library",
    )
    add("--text-field", default="text", metavar="NAME", help="field of a JSONL line that holds the text")
    add(
        "--context",
        type=count,
        default=16384,
        metavar="TOKENS",
        help="longest sequence; longer documents are cut into pieces",
    )
    add("--tokens-per-step", type=count, default=24576, metavar="TOKENS", help="most tokens of a step over all ranks")
    add("--seed", type=int, default=0, help="of the shuffle and of the weights")


def _add_ranks_options(add: Callable[..., object]) -> None:
    add("--ranks", type=count, default=None, metavar="N", help="ranks to start here (4; under torchrun: its world)")
    add("--transport", default="auto", metavar="NAME", help="how the ranks exchange tensors; see hdpcomm.init")
    add(
        "--capacity",
        type=count,
        default=None,
        metavar="TOKENS",
        help="tokens that a rank holds at once (half of the context, so that the longest sequences need two ranks)",
    )
    add(
        "--policy", choices=("balanced", "naive", "static"), default="balanced", help="how sequences are given to ranks"
    )
    add("--no-compare", action="store_true", help="do not repeat the run with the static mesh")
    add(
        "--offload",
        type=num_bytes,
        default=0,
        metavar="SIZE",
        help="pinned host memory of each rank for activations of long sequences, like 512M or 64G; 0: none",
    )


def _add_model_options(add: Callable[..., object]) -> None:
    add("--layers", type=count, default=2, help="transformer blocks")
    add("--hidden", type=count, default=64, help="width of the residual stream")
    add("--heads", type=count, default=2, help="query heads")
    add("--kv-heads", type=count, default=1, help="key and value heads")
    add("--ffn", type=count, default=192, help="width of the feed-forward block")


def _add_training_options(add: Callable[..., object]) -> None:
    add("--steps", type=count, default=14, help="optimizer steps")
    add("--lr", type=positive, default=1e-2, help="highest learning rate")
    add("--max-grad-norm", type=positive, default=1.0, help="gradients are clipped to this global norm")


def _add_output_options(add: Callable[..., object]) -> None:
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--log", type=Path, metavar="FILE", help="write one JSON line a step, as the steps are done")


@dataclass(frozen=True, slots=True)
class _Job:
    """What every rank needs."""

    corpus: Corpus
    config: RunConfig
    log: Path | None
    transport: str


def _train(options: argparse.Namespace) -> int:
    check_writable(options.json)
    check_writable(options.log)
    rank, ranks = ranks_here(options.ranks, default=4)
    job = _job(options, ranks)
    if rank is not None:
        result = run_rank(job)
        if rank != 0:
            return 0
    else:
        result = _start_ranks(job, ranks)
    _report(options, job, result)
    return 0


def _job(options: argparse.Namespace, ranks: int) -> _Job:
    """Indexes the data and checks all limits, so that a bad path or value is told once, before any rank starts."""
    from hdpcomm.data import open_corpus, standard_library
    from hdpcomm.models import LlamaConfig
    from hdpcomm.train import RunConfig, check_limits

    context = options.context
    capacity = options.capacity or -(-context // min(2, ranks))
    policies = [options.policy] if options.policy == "static" or options.no_compare else [options.policy, "static"]
    config = RunConfig(
        model=LlamaConfig(
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
    )
    if options.data:
        corpus = open_corpus(options.data, context=context, text_field=options.text_field)
    else:
        corpus = standard_library(context=context)
    check_limits(corpus, config, ranks=ranks)
    return _Job(corpus=corpus, config=config, log=options.log, transport=options.transport)


def run_rank(job: _Job) -> RunResult:
    """One rank of the run; rank 0 shows the progress on stderr and writes the log."""
    import torch

    from hdpcomm.cli.train_report import Progress
    from hdpcomm.comm import init
    from hdpcomm.comm.topology import cores_of_rank
    from hdpcomm.train import run

    with init(transport=job.transport) as comm:
        torch.set_num_threads(cores_of_rank(comm))
        if comm.rank != 0:
            return run(comm, job.corpus, job.config)
        with Progress(job.config, log=job.log) as progress:
            return run(comm, job.corpus, job.config, on_step=progress.step)


def _start_ranks(job: _Job, ranks: int) -> RunResult:
    """Runs the job on new processes of this host; raises what a rank raised, or PeerLost when one died."""
    from rich.console import Console

    from hdpcomm.comm.launch import run_ranks

    try:
        result: RunResult = run_ranks(run_rank, ranks, job, preload=("torch._dynamo",))[0]  # AdamW needs it
        return result
    except BaseException:
        console = Console(stderr=True)
        if console.is_terminal:  # rank 0 may have died inside its progress bar
            console.show_cursor()
            console.print()
        raise


def _report(options: argparse.Namespace, job: _Job, result: RunResult) -> None:
    from hdpcomm.cli.train_report import print_report, to_json

    print_report(job.corpus, job.config, result)
    if options.json:
        write_json(options.json, to_json(job.corpus, job.config, result))
