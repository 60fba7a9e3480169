"""Messages: records of the logger ``hdpcomm`` for programs; on stderr by commands and their ranks, as many as asked."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest

from hdpcomm.cli.main import main
from hdpcomm.log import LOG, shown

LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING)
LINES = ["hdpcomm: one\n", "hdpcomm: two\n", "hdpcomm: warning: 3%s\n"]


def messages() -> str:
    """On this rank's stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        LOG.debug("one")
        LOG.info("two")
        LOG.warning("3%s")
    return written.getvalue()


def test_ranks_show_what_their_command_shows(ranks: Callable[..., list[Any]]) -> None:
    for first, level in enumerate(LEVELS):
        with shown(level):
            assert ranks(2, messages) == ["".join(LINES[first:])] * 2
    assert ranks(2, messages) == ["3%s\n"] * 2  # Python's own, without any handler


def test_a_program_has_the_records_and_no_handler_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    handlers, level = list(logging.root.handlers), logging.root.level
    with caplog.at_level(logging.INFO):
        assert messages() == ""
    assert caplog.record_tuples == [("hdpcomm", logging.INFO, "two"), ("hdpcomm", logging.WARNING, "3%s")]
    assert (LOG.handlers, LOG.level) == ([], logging.NOTSET)
    assert main(["plan", "--ranks", "8", "--quiet", "--tokens", "64k"]) == 0
    assert (LOG.handlers, LOG.level) == ([], logging.NOTSET)
    assert (logging.root.handlers, logging.root.level) == (handlers, level)


@pytest.mark.parametrize(
    ("option", "missing"), [("--quiet", {"sequences are cut", "Traceback"}), ("", {"Traceback"}), ("--verbose", set())]
)
def test_commands_show_as_much_as_was_asked_for(option: str, missing: set[str], capsys: Any) -> None:
    assert main(["plan", "--ranks", "8", "--tensor", "3", "--distribution", "file:/nowhere", *option.split()]) == 6
    messages = capsys.readouterr().err
    texts = (
        "hdpcomm: warning: ranks of 3 x 1 devices",
        "sequences are cut",
        "Traceback",
        "hdpcomm: error: cannot read",
    )
    assert {text for text in texts if text not in messages} == missing
