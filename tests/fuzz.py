"""Fuzzers of what a hostile peer writes: frames, the shared segment, values of the job's store.

    python -m tests.fuzz [--seconds S] [--seed N] [--keep] [frames] [slots] [texts] [store]

Each runs for S seconds, in a process of its own. frames, slots: one rank is given what no rank writes
(csrc/testing/fuzz*.cpp); it may fail its requests, but no byte beside their buffers may change, and the text of every
error must be one that a terminal may show. texts: the functions that see to that. store: a rank joins a
world with a store whose values were changed; nothing but an ``hdpcomm.Error`` may come of it, soon. The cases of
tests/corpus run first; ``--keep`` adds those that showed something new. ``make fuzz SECONDS=600`` runs all of them with
AddressSanitizer.

Exit code 1: a case failed, or ended its process; it is written to tests/corpus, where the tests run it again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import struct
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm import bootstrap
from tests.harness.native import _testing

__all__ = ["CORPUS", "TARGETS", "corpus_of", "fuzz", "main"]

CORPUS = Path(__file__).resolve().with_name("corpus")  # of the sources, also where a tree of links is run
MOST_KEPT = 64
"""Cases of a target in the corpus."""


def corpus_of(target: str) -> list[bytes]:
    """The cases that are kept, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def keep(target: str, case: bytes) -> Path:
    path = CORPUS / target / hashlib.sha256(case).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case)
    return path


# --- the core: frames and slots


def fuzz_core(target: str, seconds: float, seed: int, running: str) -> tuple[int, list[bytes]]:
    cases, corpus = _testing.fuzz(target, corpus_of(target), seconds=seconds, seed=seed, running=running)
    return cases, corpus


# --- the store

ODD = [
    "",
    "0",
    "-1",
    "1",
    "99999999999999999999",
    "nan",
    "null",
    "[]",
    "{}",
    "\x00",
    "yes",
    "no",
    "1 2",
    "1 2 3",
    "é" * 9,
]
ODD += ['{"peer": 0, "by": "x", "text": 1}', '{"peer": 1e999}', "[" * 5000, '"' * 50, "1:2", "0:0", "-5:-5", "a:b"]
ODD += ["1:99999999999", f"{2**31}:3", '[{"alpha_s": "x"}]', '[{"alpha_s": NaN}]', '["x"]', "[1, 2]", "9" * 4000]
ODD += ['{"peer": 0, "by": 2, "text": "\\u001b[31m\\ud800\\u0000"}']
ODD += ['{"0": "\\u001b[2J"}', "0 1 \x1b[31m\u202e", "\x9b"]
SIZE = 3


class HostileStore:
    """A store in which the values of the other ranks are what a case says. ``set`` of rank 1 is never read."""

    def __init__(self, case: bytes) -> None:
        self.random = random.Random(case)
        self.own: dict[str, bytes] = {}
        self.told: dict[str, bytes] = {}
        self.deadline = None

    def set(self, key: str, value: str | bytes) -> None:
        self.own[key] = value.encode() if isinstance(value, str) else value

    def _value(self, key: str) -> bytes:
        if key in self.own and not key.endswith(("/0", "/2")):
            return self.own[key]
        if key not in self.told:
            self.told[key] = self._made(key)
        return self.told[key]

    def _made(self, key: str) -> bytes:
        honest = next(
            (value for name, value in self.own.items() if name.rsplit("/", 1)[0] == key.rsplit("/", 1)[0]), b""
        )
        way = self.random.randrange(6)
        if way <= 1:
            return honest
        if way == 2 and honest:
            changed = bytearray(honest)
            for _ in range(self.random.randint(1, 3)):
                changed[self.random.randrange(len(changed))] = self.random.randrange(256)
            return bytes(changed)
        if way == 3:
            return self.random.randbytes(self.random.randrange(40))
        return self.random.choice(ODD).encode()

    def get(self, key: str) -> bytes:
        return self._value(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._value(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return not any(key.endswith(("/lost", "/died")) for key in keys) or self.random.randrange(4) == 0

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """All keys are there."""

    def add(self, key: str, amount: int) -> int:
        del key
        return amount


def run_store(case: bytes) -> str:
    """Joins with a hostile store; what came of it. Raises what is no hdpcomm.Error."""
    chosen = random.Random(case + b"how")
    store = HostileStore(case)
    way = chosen.randrange(4)
    told = ""
    try:
        if way == 0:
            _core.transport.open_segment(
                chosen.choice(ODD) if chosen.randrange(2) else f"{chosen.getrandbits(33)}:{chosen.getrandbits(8)}", SIZE
            )
        else:
            deadline = time.monotonic() + 0.2
            joining = bootstrap.Joining(store, "fuzz/1", 1, SIZE, 0.2, deadline)
            bootstrap._join_all(joining, ("shm", "auto")[way % 2]).close("the case is over")  # type: ignore[attr-defined]
    except hdp.Error as error:
        told = f"{type(error).__name__}: {error}"
        kinds = {unicodedata.category(each) for each in str(error).translate({10: None, 9: None})}
        if kinds & {"Cc", "Cs"}:
            raise AssertionError(f"the text of an error is no plain text: {str(error)!r}") from error
    return "".join(each for each in told if not each.isdigit())[:80]


def fuzz_store(target: str, seconds: float, seed: int, running: str) -> tuple[int, list[bytes]]:
    del target
    chosen = random.Random(seed)
    seen: set[str] = set()
    corpus: list[bytes] = []
    cases = 0
    given = corpus_of("store")
    until = time.monotonic() + seconds
    while given or time.monotonic() < until:
        case = given.pop(0) if given else chosen.randbytes(8)
        Path(running).write_bytes(struct.pack("<Q", len(case)) + case)
        shown = run_store(case)
        cases += 1
        if shown not in seen:
            seen.add(shown)
            corpus.append(case)
    return cases, corpus


TARGETS: dict[str, Callable[[str, float, int, str], tuple[int, list[bytes]]]] = {
    "frames": fuzz_core,
    "slots": fuzz_core,
    "texts": fuzz_core,
    "store": fuzz_store,
}


def _run(target: str, seconds: float, seed: int, running: str, answer: Any) -> None:
    answer.send(TARGETS[target](target, seconds, seed, running))


def fuzz(target: str, seconds: float, seed: int, *, keeps: bool = False) -> tuple[int, Path | None]:
    """Runs a target in a process of its own; (cases, the file of the case that ended it, if one did)."""
    with tempfile.TemporaryDirectory() as folder:
        running = str(Path(folder, "running"))
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(target, seconds, seed, running, theirs)
        )
        process.start()
        theirs.close()
        try:
            cases, corpus = ours.recv()
        except EOFError:
            process.join()
            data = Path(running).read_bytes()
            (size,) = struct.unpack_from("<Q", data)
            return 0, keep(target, data[8 : 8 + size])
        process.join()
    if keeps:
        for case in corpus[:MOST_KEPT]:
            keep(target, case)
    return cases, None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    parser.add_argument("--keep", action="store_true", help="add cases that showed something new to tests/corpus")
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else random.SystemRandom().getrandbits(32)
    worst = 0
    for target in args.targets or TARGETS:
        began = time.monotonic()
        cases, ended = fuzz(target, args.seconds, seed, keeps=args.keep)
        told = f"{cases} cases" if ended is None else f"ended by the case in {ended}"
        print(
            json.dumps({"target": target, "seed": seed, "seconds": round(time.monotonic() - began), "told": told}),
            flush=True,
        )
        worst |= ended is not None
    return worst


if __name__ == "__main__":
    sys.exit(main())
