"""The fuzzers of tests/fuzz.py: the cases that are kept, some new ones, and what becomes of a case that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import fuzz

SECONDS = 2.0  # of each, for new cases; `make fuzz` runs them for longer, from another seed each time
SEED = 1


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_what_a_hostile_peer_writes(target: str) -> None:
    cases, ended = fuzz.fuzz(target, SECONDS, SEED)
    assert ended is None, f"python -m tests.fuzz {target} --seconds 0 shows what the case in {ended} does"
    assert cases > len(fuzz.corpus_of(target))


def test_each_target_has_cases_of_every_kind() -> None:
    for target in fuzz.TARGETS:
        assert len(fuzz.corpus_of(target)) >= 20, target


def test_a_case_that_ends_the_process_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path)
    monkeypatch.setattr(fuzz, "_run", dies)
    cases, ended = fuzz.fuzz("frames", 1.0, 0)
    assert cases == 0
    assert ended is not None
    assert ended.read_bytes() == b"bad"
    assert fuzz.corpus_of("frames") == [b"bad"]


def dies(target: str, seconds: float, seed: int, running: str, answer: object) -> None:
    del target, seconds, seed, answer
    Path(running).write_bytes(b"\x03\0\0\0\0\0\0\0bad")
    os._exit(1)
