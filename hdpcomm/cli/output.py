"""Code shared by the commands: checks of options, and writing ``--json`` files."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.arguments import size_text
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import write_whole
from hdpcomm.log import LOG

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

TRANSPORTS = ("auto", "shm", "tcp", "sim", "cuda", "nccl", "cuda+nccl")
"""Transports of :func:`hdpcomm.init`, for parsers, which import no torch."""

__all__ = [
    "TRANSPORTS",
    "check_drawing",
    "check_writable",
    "new_bar",
    "new_table",
    "ranks_here",
    "stdout_console",
    "write_json",
]


def ranks_here(asked: int | None, *, default: int) -> tuple[int | None, int]:
    """(rank of this process in a launcher's job, number of ranks); the rank is ``None`` without a launcher.

    asked: the value of ``--ranks``. Raises: InvalidUsage if a launcher has started another number of ranks.
    """
    from hdpcomm.comm.launchers import joined, rank_and_size

    if not joined():
        if asked is not None:
            _check_room(asked)
        return None, asked or default
    rank, size = rank_and_size()
    if asked not in (None, size):
        raise InvalidUsage(
            f"--ranks {asked} was given, but the launcher started {size} ranks; leave --ranks out or make them equal"
        )
    return rank, size


_RANK_BYTES = 200 << 20
"""Least memory of a process with torch."""


def _check_room(ranks: int) -> None:
    """Raises InvalidUsage where this machine has no memory for the processes of so many ranks and their messages."""
    from hdpcomm._core.transport import segment_bytes

    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = ranks * _RANK_BYTES + segment_bytes(ranks)
    if needed > room:
        raise InvalidUsage(
            f"--ranks {ranks} take {size_text(needed)} at least, and this machine has {size_text(room)}; give fewer, "
            "or ask hdpcomm fit about devices that are not here"
        )


def check_writable(path: Path | None) -> None:
    """Raises InvalidUsage if ``path`` cannot be written, so that a long run does not fail at its end."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidUsage(f"{path}: this is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise InvalidUsage(f"{path}: the folder {path.parent} does not exist; make it or give another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidUsage(f"{path}: may not be written by this user; give another file")


def check_drawing(what: str) -> None:
    """Raises InvalidUsage where matplotlib is missing. what: that draws with it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidUsage(f"{what} draws with matplotlib; pip install 'hdpcomm[plot]'")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes JSON so that a reader sees either the old file or the complete new one."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def stdout_console() -> Console:
    """For tables on stdout, 100 columns wide where that is no terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    return console if console.is_terminal else Console(file=sys.stdout, highlight=False, width=100)


def new_bar(*columns: ProgressColumn | str) -> Progress:
    """A progress bar on stderr; disabled where that is no terminal, and with ``--quiet``."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    shown = console.is_terminal and LOG.isEnabledFor(logging.INFO)
    return Progress(*columns, console=console, disable=not shown, transient=True)


def new_table(title: str, *names: str, left: Sequence[str] = ()) -> Table:
    """A table without rows; ``left``: the columns that are no numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table
