"""``hdpcomm report``: a training run as one HTML page."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

from hdpcomm.cli.output import check_drawing, check_writable
from hdpcomm.files import write_whole

__all__ = ["add_parser"]

_FOLLOWED_S = 10.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "report",
        help="show a training run as one HTML page",
        description="Writes RUN/report.html: curves, a step as planned and as measured, the lengths, where the time "
        "went, policies side by side. It needs no other file, and a run that is still going on can be looked at, too.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of hdpcomm train --out")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="where the page goes (RUN/report.html)")
    parser.add_argument("--follow", action="store_true", help="write it again every 10 s, until the run has ended")
    parser.set_defaults(func=_report)


def _report(options: argparse.Namespace) -> int:
    from hdpcomm.run.files import is_running
    from hdpcomm.trace.run_report import run_report

    check_writable(options.out)
    check_drawing("hdpcomm report")
    path = options.out or options.run / "report.html"
    for times in itertools.count():
        ends = not (options.follow and is_running(options.run))
        again = "" if ends else '<meta http-equiv="refresh" content="10">'  # a browser loads it anew
        write_whole(path, run_report(options.run).replace("<head>", "<head>" + again, 1).encode())
        if not times:
            print(path, flush=True)
        if ends:
            break
        time.sleep(_FOLLOWED_S)
    return 0
