"""Every bad argument of the public API and of the commands: one error of ours that names it, and the ranks go on.

The tables are in bad_calls.py (communicators), bad_local_calls.py (all that needs no other rank) and below (commands).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.cli.main import BAD_USAGE, main
from tests.harness import bad_calls, bad_local_calls

COMMANDS: list[tuple[str, str]] = [
    ("plan --ranks 0", "0"),
    ("plan --ranks -4", "-4"),
    ("plan --ranks 1.5", "'1.5'"),
    ("plan --ranks many", "'many'"),
    ("plan --ranks", "--ranks"),
    ("plan --ranks nan", "'nan'"),
    (f"plan --ranks {1 << 80}", str(1 << 80)),
    ("plan --tokens 8x", "'8x'"),
    ("plan --tokens ''", "''"),
    ("plan --tokens inf", "'inf'"),
    ("plan --seed -1", "-1"),
    ("plan --seed 1e3", "'1e3'"),
    ("plan --model gpt-9", "'gpt-9'"),
    ("plan --cluster abacus", "'abacus'"),
    ("plan --cluster /nowhere/c.json", "/nowhere/c.json"),
    ("plan --policy best", "'best'"),
    ("plan --compare best --ranks 8 --tokens 64k", "'best'"),
    ("plan --distribution normal --ranks 8", "normal"),
    ("plan --distribution lognormal:nan:nan --ranks 8", "nan"),
    ("plan --distribution file:/nowhere/lengths --ranks 8", "/nowhere/lengths"),
    ("plan --lengths /nowhere/lengths", "/nowhere/lengths"),
    ("plan --slow-ranks 9:0.5 --ranks 8", "'9:0.5'"),
    ("plan --slow-ranks 0:2 --ranks 8", "2"),
    ("plan --slow-ranks x --ranks 8", "'x'"),
    ("plan --chunks 2", "chunks is 2"),
    ("plan --json /nowhere/plan.json --ranks 8", "/nowhere/plan.json"),
    ("plan --plot /nowhere/plan.png --ranks 8", "/nowhere/plan.png"),
    ("plan --rows 0", "0"),
    ("plan --ronks 8", "--ronks"),
    ("plan 8", "8"),
    ("plam", "'plam'"),
    ("simulate --steps 0", "0"),
    ("simulate --steps two", "'two'"),
    ("simulate --policy balanced,best --ranks 8 --tokens 64k", "'best'"),
    ("simulate --trace /nowhere/t.json", "/nowhere/t.json"),
    ("simulate --capacity -1", "-1"),
    ("simulate --pipeline x", "'x'"),
    ("perf all_mess", "'all_mess'"),
    ("perf", "required: OP"),
    ("perf all_reduce -b 8q", "'8q'"),
    ("perf all_reduce -b -8", "-8"),
    ("perf all_reduce -b 8M -e 4M", "8"),
    ("perf all_reduce -n 0", "0"),
    ("perf all_reduce -n x", "'x'"),
    ("perf all_reduce -w -1", "-1"),
    ("perf all_reduce -f 0 -b 8 -e 16", "0"),
    ("perf all_reduce -o median --ranks 2", "median"),
    ("perf all_reduce -d int7 --ranks 2", "int7"),
    ("perf broadcast -r 7 --ranks 2", "7"),
    ("perf broadcast -r x", "'x'"),
    ("perf all_reduce -z 9 --ranks 2", "9"),
    ("perf all_reduce -a 7 --ranks 2", "7"),
    ("perf all_reduce -T 0", "0"),
    ("perf all_reduce -T nan", "nan"),
    ("perf all_reduce -g 2", "'2'"),
    ("perf all_reduce -G 1", "'1'"),
    ("perf all_reduce --subset 0,x", "'0,x'"),
    ("perf all_reduce --subset 0,0 --ranks 2", "0"),
    ("perf all_reduce --subset 0,5 --ranks 2", "5"),
    ("perf all_reduce --algorithm magic --ranks 2", "magic"),
    ("perf all_reduce --transport pigeon --ranks 2", "'pigeon'"),
    ("perf all_reduce --compare smoke --ranks 2", "smoke"),
    ("perf all_reduce --ranks 0", "0"),
    ("perf all_reduce --ranks 9999 -b 8 -e 8", "9999"),
    ("perf all_reduce -J /nowhere/out.json --ranks 2", "/nowhere/out.json"),
    ("train --steps 0", "0"),
    ("train --steps x", "'x'"),
    ("train --lr 0", "0"),
    ("train --lr nan", "nan"),
    ("train --lr fast", "'fast'"),
    ("train --ranks -1", "-1"),
    ("train --ranks 99999", "99999"),
    ("train --context 0", "0"),
    ("train --context 8k --tokens-per-step 4k", "4,096"),
    ("train --data /nowhere/text", "/nowhere/text"),
    ("train --model /nowhere/model", "/nowhere/model"),
    ("train --tokenizer /nowhere/tokenizer", "/nowhere/tokenizer"),
    ("train --config /nowhere/config.yaml", "/nowhere/config.yaml"),
    ("train --policy best", "'best'"),
    ("train --compare best", "'best'"),
    ("train --schedule stairs", "'stairs'"),
    ("train --dtype fp8", "'fp8'"),
    ("train --zero 4", "'4'"),
    ("train --decay 1.5", "1.5"),
    ("train --min-lr -0.1", "-0.1"),
    ("train --recompute some", "'some'"),
    ("train --recompute -1", "-1"),
    ("train --max-grad-norm 0", "0"),
    ("train --eval-fraction 2", "2"),
    ("train --heads 3", "3"),
    ("train --layers 0", "0"),
    ("train --kv-heads 5", "5"),
    ("train --transport pigeon", "'pigeon'"),
    ("train --offload 8q", "'8q'"),
    ("train --resume last", "--resume"),
    ("train --seed -5", "-5"),
    ("train --nonsense", "--nonsense"),
    ("report /nowhere/run", "/nowhere/run"),
    ("report", "RUN"),
    ("data build /nowhere/text --out /tmp/never", "/nowhere/text"),
    ("data build x", "--out"),
    ("data check /nowhere/store", "/nowhere/store"),
    ("data mend x", "'mend'"),
    ("doctor --json /nowhere/d.json", "/nowhere/d.json"),
    ("doctor --nonsense", "--nonsense"),
]  # fmt: skip


def refused(call: Callable[..., Any], told: str, *arguments: Any) -> str | None:
    """What is wrong with how a bad call was answered; None: nothing."""
    try:
        result = call(*arguments)
    except hdp.InvalidUsage as error:
        return None if told in str(error) else f"{told!r} is not in: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"it was taken and gave {result!r:.100}"


def complaints(cases: list[bad_calls.Case], name: str) -> list[str]:
    answers = [(place, refused(call, told)) for place, (call, told) in enumerate(cases)]
    return [f"{name}[{place}] (line {cases[place][0].__code__.co_firstlineno}): {bad}" for place, bad in answers if bad]


def calls_of_one_rank() -> list[str]:
    """One rank makes each bad call; after it an operation of all ranks is right, without a word between them."""
    found = []
    with hdp.init() as comm:
        for place, (call, told) in enumerate(bad_calls.ON_ONE_RANK):
            bad = refused(call, told, comm) if comm.rank == place % 2 else None
            if bad:
                found.append(f"ON_ONE_RANK[{place}] (line {call.__code__.co_firstlineno}): {bad}")
            x = torch.tensor([1.0 + place, comm.rank])
            comm.all_reduce(x)
            assert x.tolist() == [2.0 + 2 * place, 1.0], place
    return found


def test_calls_of_a_communicator(ranks: Any) -> None:
    first, second = ranks(2, calls_of_one_rank)
    assert not first + second, "\n".join(first + second)


def splits_that_wrap() -> None:
    """In 64 bits they sum up to the 4 elements that there are."""
    x, y, wraps = torch.zeros(4), torch.zeros(4), [2**63 - 1, 2**63 - 1, 6]
    with hdp.init() as comm:
        for splits in ((wraps, [2, 1, 1]), ([2, 1, 1], wraps)):
            with pytest.raises(hdp.InvalidUsage, match=f"{2**63 - 1}, 6"):
                comm.all_to_all(y, x, *splits)
        x = torch.tensor([1.0 + comm.rank])
        comm.all_reduce(x)
        assert x.item() == 6.0


def test_splits_whose_sum_wraps(ranks: Any) -> None:
    ranks(3, splits_that_wrap)


def attention_on_ranks() -> list[str]:
    """Ranks compare what they are given: the one with the bad argument and the others are told, and all go on."""
    found = []
    with hdp.init() as comm:
        for place, (options, told) in enumerate(bad_calls.ATTENTION_ON_RANKS):
            given = options if comm.rank == place % 2 else {}
            bad = refused(lambda given=given: bad_calls.attend_on_ranks(comm, **given), told)
            if bad:
                found.append(f"ATTENTION_ON_RANKS[{place}]: {bad}")
            x = torch.tensor([1.0 + place])
            comm.all_reduce(x)
            assert x.item() == 2.0 + 2 * place, place
    return found


def test_attention_among_ranks(ranks: Any) -> None:
    first, second = ranks(2, attention_on_ranks)
    assert not first + second, "\n".join(first + second)


@pytest.mark.parametrize("name", ["ATTENTION", "PLANS", "OTHERS"])
def test_calls_without_other_ranks(name: str) -> None:
    found = complaints(getattr(bad_local_calls, name), name)
    assert not found, "\n".join(found)


def test_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for line, told in COMMANDS:
        try:
            code = main(shlex.split(line))
        except SystemExit as end:  # argparse
            code = end.code
        said = capsys.readouterr().err
        message = said[said.find("error: ") :]
        if code != BAD_USAGE or told not in message or "Traceback" in said:
            found.append(f"hdpcomm {line}: exit code {code}, said {said[-300:]!r}")
    assert not found, "\n".join(found)
    assert list(tmp_path.iterdir()) == []


def test_the_tables_are_long() -> None:
    tables = (bad_calls.ON_ONE_RANK, bad_calls.ATTENTION_ON_RANKS, bad_local_calls.ATTENTION, bad_local_calls.PLANS)
    cases = sum(map(len, tables)) + len(bad_local_calls.OTHERS) + len(COMMANDS)
    assert cases >= 500
