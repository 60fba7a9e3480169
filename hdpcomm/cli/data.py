"""``hdpcomm data``: turns text into memory maps of tokens, and checks them."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hdpcomm.cli.output import ranks_here
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
    build.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files, folders, Hugging Face datasets")
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
        f"{int(store.lengths.max()):,}"
    )


def data_progress(wanted: bool) -> AbstractContextManager[Callable[[int, int], None] | None]:
    """A function for ``on_progress`` while it is entered; ``None`` unless wanted."""
    return DataProgress() if wanted else nullcontext()


class DataProgress:
    """Shows how far a build is on stderr: a bar on a terminal, elsewhere a line every quarter of a minute."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (
            TextColumn("tokenizing"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._shown = console.is_terminal and LOG.isEnabledFor(logging.INFO)
        self._bar = Progress(*columns, console=console, disable=not self._shown, transient=True)
        self._task = self._bar.add_task("tokens", total=None)
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.__enter__()
        return self._show

    def _show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if not self._shown and time.monotonic() - self._last_line_s > _LINE_S:
            self._last_line_s = time.monotonic()
            LOG.info(f"tokenizing: {done / max(1, total):.0%}")

    def __exit__(self, *failure: Any) -> None:
        self._bar.__exit__(*failure)


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
    print(f"{options.path}: {store.check():,} bytes are as they were written")
    return 0
