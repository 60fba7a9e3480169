"""``hdpcomm``: registers the commands, runs one, and turns each error into a message and a documented exit code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import shtab

from hdpcomm import __version__
from hdpcomm.errors import (
    Aborted,
    CommTimeout,
    DeviceError,
    Error,
    InvalidUsage,
    Mismatch,
    PeerLost,
    first_line,
    out_of_memory,
)
from hdpcomm.files import NO_ROOM, NOT_WRITABLE, file_error
from hdpcomm.log import LOG, shown

__all__ = ["COMMANDS", "build_parser", "exit_code", "main"]

COMMANDS = (
    "train", "fit", "report", "top", "replay", "data", "calibrate", "plan", "simulate", "perf", "doctor", "acceptance",
)  # fmt: skip
"""Modules of this package with ``add_parser(subparsers)``; the parser leaves out those that are not installed."""

BAD_USAGE = 6
INTERRUPTED = 130  # 128 + SIGINT, as shells count
PIPE_CLOSED = 141  # 128 + SIGPIPE

_EPILOG = """exit codes:
  0  done
  1  an error inside hdpcomm or the operating system
  2  a device or its driver
  3  a rank died, gave up, or disagreed with the others (PeerLost, Aborted, Mismatch)
  4  an operation did not end in time (CommTimeout)
  6  bad usage: an option, a path or a value
  7  wrong data (perf)
  130, 143  ended by Ctrl-C or SIGTERM (train --out: saved)
  142  ended before --time-limit (train --out: saved)
"""


class _Parser(argparse.ArgumentParser):
    """Exits with 6 for a bad option, since argparse's own exit code, 2, means a device here. Suggests near names.
    Every command has the options of messages, and takes no beginnings of options for them."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **(more | {"allow_abbrev": False}))
        messages = self.add_mutually_exclusive_group()
        for name, level, help in (
            ("--quiet", logging.WARNING, "show only warnings and errors, no progress"),
            ("--verbose", logging.DEBUG, "show also what the ranks do, and the traceback of an error"),
        ):
            messages.add_argument(
                name, dest="level", action="store_const", const=level, default=argparse.SUPPRESS, help=help
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse lets the outer parser refuse what a command does not know, which knows none of the command's options.
        self._given = list(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        if re.match(r"argument [^-]\S*: invalid choice", message) and (strange := self._unknown_option()):
            message = f"unrecognized arguments: {strange}"  # whose value was taken for the name of an operation
        told = f"{self.prog}: error: {message}{self._suggestion(message)}\n"
        self.exit(BAD_USAGE, f"usage: {self.prog} ... ({self.prog} --help lists all options)\n{told}")

    def _unknown_option(self) -> str | None:
        """The first option that was given to a command and that it does not have."""
        if self._subparsers is not None:
            return None
        names = (text.partition("=")[0] for text in self._given if text.startswith("--") and text != "--")
        known = list(self._option_string_actions)
        return next((name for name in names if not any(each.startswith(name) for each in known)), None)

    def _suggestion(self, message: str) -> str:
        unknown, known = "", list[str]()
        if found := re.search(r"unrecognized arguments: (--?[\w-]+)", message):
            unknown, known = found[1], list(self._option_string_actions)
        elif found := re.search(r"argument (\S+): invalid choice: '([^']*)'", message):
            unknown = found[2]
            names = (action.choices for action in self._actions if found[1] in _names(action))
            known = [str(choice) for choices in names for choice in choices or ()]
        near = difflib.get_close_matches(unknown, known, n=1) if unknown else []
        return f"; did you mean {near[0]}?" if near else ""


def _names(action: argparse.Action) -> list[str]:
    """The names by which argparse's messages call an option or a place."""
    metavar = action.metavar if isinstance(action.metavar, str) else None
    return [name for name in (metavar, action.dest, "/".join(action.option_strings)) if name]


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands that are installed; imports neither torch nor the core."""
    parser = _Parser(
        prog="hdpcomm",
        description="Hybrid data parallelism for training on batches that mix very short and very long sequences.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hdpcomm {__version__}")
    shtab.add_argument_to(
        parser, ["--print-completion"], help="print the completion of a shell (docs/install.md says where it goes)"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in COMMANDS:
        module = f"hdpcomm.cli.{command}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).add_parser(subparsers)
    return parser


def exit_code(error: BaseException) -> int:
    """The documented exit code of an error."""
    if isinstance(error, InvalidUsage):
        return BAD_USAGE
    if isinstance(error, DeviceError):
        return 2
    if isinstance(error, (PeerLost, Aborted, Mismatch)):
        return 3
    if isinstance(error, CommTimeout):
        return 4
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors become one message on stderr."""
    with shown(logging.INFO):
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = build_parser().parse_args(arguments)
        LOG.setLevel(vars(options).pop("level", logging.INFO))
        code = int(options.func(options))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        LOG.info("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has ended, as in `hdpcomm ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return PIPE_CLOSED
    except Exception as error:
        LOG.debug("the error below comes from here", exc_info=True)
        LOG.error(_message(error))
        return exit_code(error)


def _message(error: Exception) -> str:
    if isinstance(error, Error):
        return f"{error}"
    if out_of_memory(error):
        return f"this machine's memory is used up ({first_line(error)})"
    if isinstance(error, OSError) and error.errno in NO_ROOM | NOT_WRITABLE:
        return str(file_error(error))
    return f"internal error: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
