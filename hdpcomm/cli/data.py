"""``hdpcomm data``: turns text into memory maps of tokens, and checks them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdpcomm.cli.output import new_bar, ranks_here
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.options import count

__all__ = ["add_parser", "data_progress"]

_LINE_S = 15.0
_BUILD = """Turns text, JSONL, Parquet and Hugging Face datasets into a folder of tokens that hdpcomm train --data reads
in place. Several processes share the work; under torchrun, srun or mpirun the ranks of the given world do."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("data", help="turn text into memory maps of tokens")
    kinds = parser.add_subparsers(title="what to do", metavar="WHAT", required=True, parser_class=type(parser))
    build = kinds.add_parser(
        "build",
        help="turn files into tokens",
        description=_BUILD,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    build.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, URLs of these, Hugging Face datasets")
    build.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the tokens go; must be new")
    build.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="folder of a model; without it, tokens are bytes"
    )
    build.add_argument("--text-field", default="text", metavar="NAME", help="field or column that holds the text")
    build.add_argument(
        "--messages-field", default="messages", metavar="NAME", help="field or column with the messages of a chat"
    )
    build.add_argument("--ranks", type=count, default=None, metavar="N", help="processes that share the work (1)")
    build.set_defaults(func=_build)
    check = kinds.add_parser("check", help="read all tokens of a folder and check them")
    check.add_argument("path", type=Path, metavar="FOLDER", help="folder of hdpcomm data build")
    check.set_defaults(func=_check)


def run_rank(tokenizer: Path | None, job: Mapping[str, Any]) -> str:
    """Builds this rank's part; what was built, in words. Collective over the world.

    job: arguments of :func:`hdpcomm.data.build_data`.
    """
    from hdpcomm.comm import init
    from hdpcomm.data import build_data, encoder_of

    encoder = encoder_of(tokenizer)
    with init() as comm, data_progress(comm.rank == 0) as on_progress:
        store = build_data(**job, encoder=encoder, comm=comm, on_progress=on_progress)
    return (
        f"{store.path}: {len(store):,} documents, {int(store.lengths.sum()):,} tokens of {store.encoder_name}, longest "
        f"{int(store.lengths.max()):,}" + f", {len(store.images):,} images" * bool(len(store.images))
    )


@contextmanager
def data_progress(wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A function for ``on_progress`` that shows how far a build is on stderr: a bar on a terminal, elsewhere a line
    every quarter of a minute. ``None`` unless wanted."""
    if not wanted:
        yield None
        return
    from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn

    bar = new_bar("tokenizing", BarColumn(), TaskProgressColumn(), "ETA", TimeRemainingColumn())
    task, last_line_s = bar.add_task("tokens", total=None), time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last_line_s
        bar.update(task, completed=done, total=total)
        if bar.disable and time.monotonic() - last_line_s > _LINE_S:
            last_line_s = time.monotonic()
            LOG.info(f"tokenizing: {done / max(1, total):.0%}")

    with bar:
        yield show


def _build(options: argparse.Namespace) -> int:
    job = {name: getattr(options, name) for name in ("paths", "out", "text_field", "messages_field")}
    rank, ranks = ranks_here(options.ranks, default=1)
    if rank is None and ranks > 1:
        from hdpcomm.comm.launch import run_ranks

        told = run_ranks(run_rank, ranks, options.tokenizer, job)[0]
    else:
        told = run_rank(options.tokenizer, job)
    if not rank:
        print(told)
    return 0


def _check(options: argparse.Namespace) -> int:
    from hdpcomm.data import open_store
    from hdpcomm.data.token_store import is_store

    if options.path.is_dir() and not is_store(options.path) and not (options.path / "meta.json").exists():
        raise InvalidUsage(
            f"{options.path}: no folder of hdpcomm data build; make one of these files by hdpcomm data build "
            f"{options.path} --out FOLDER, and check that, or train on them as they are"
        )
    store = open_store(options.path)
    images = f" and {len(store.images):,} images" * bool(len(store.images))
    print(f"{options.path}: {store.check():,} bytes{images} are as they were written")
    return 0
