"""Near names of commands, operations and options; the options of nccl-tests; completion; python -m hdpcomm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hdpcomm.cli import main as cli
from hdpcomm.cli import output
from hdpcomm.cli.perf import OPS
from hdpcomm.comm import bootstrap
from hdpcomm.perf.ops import OPERATIONS

TOP = Path(__file__).resolve().parents[3]
PAGE = (TOP / "docs/perf.md").read_text()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what is printed for arguments that are refused."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 6
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["tran"], "train"),
        (["simulat"], "simulate"),
        (["perf", "allredcue"], "all_reduce"),
        (["perf", "all_reduce", "--rank", "3"], "--ranks"),
        (["perf", "--jsn", "x"], "--json"),
        (["perf", "--jsn=x", "allredcue"], "--json"),
        (["plan", "--rannks", "3"], "--ranks"),
        (["train", "--tokens-pr-step=5"], "--tokens-per-step"),
        (["perf", "all_reduce", "--transport", "cdua"], "cuda"),
    ],
    ids=" ".join,
)
def test_a_near_name_is_suggested(arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(arguments, capsys).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("arguments", [["xyzzy"], ["perf", "xyzzy"], ["plan", "--xyzzy"], ["perf", "-q"]], ids=" ".join)
def test_nothing_is_suggested_for_what_is_far(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("allreduce", "all_reduce"),
        ("all-gather", "all_gather"),
        ("AllReduce", "all_reduce"),
        ("reduce_scatter_perf", "reduce_scatter"),
        ("all_to_all", "alltoall"),
        ("alltoallv_perf", "alltoallv"),
        ("send-recv", "sendrecv"),
    ],
)
def test_spellings_of_operations(spelling: str, name: str) -> None:
    assert cli.build_parser().parse_args(["perf", spelling]).op == name


def test_every_operation_is_listed() -> None:
    assert {name for name, _ in OPS} == set(OPERATIONS)
    listed = PAGE[PAGE.index("Operations: ") : PAGE.index("A name is also")]
    assert set(re.findall(r"\w+", listed)) >= {name for name, _ in OPS}


# nccl-tests 2.19: the letters that its getopt string takes, but -h.
LETTERS = "tgbeifnmwNpIKcodrzyTGCaRxDVJSMu"
DEFAULTS = {
    "t": "1",
    "g": "1",
    "o": "sum",
    "d": "float",
    "J": "FILE",
    "T": "30",
    "b": "8",
    "e": "8",
    "i": "8",
    "f": "2",
}


@pytest.mark.parametrize("letter", LETTERS)
def test_every_option_of_nccl_tests_is_taken_with_its_default_and_documented(letter: str) -> None:
    value = DEFAULTS.get(letter, "1" if letter in "nmwNca" else "0")
    cli.build_parser().parse_args(["perf", "all_reduce", f"-{letter}", value])
    assert re.search(rf"^\| .*`-{letter} --\w+`.* \|", PAGE, re.MULTILINE)


def test_the_table_names_no_other_option() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `-")]
    named = re.findall(r"`-(\w) --(\w+)`", " ".join(rows))
    assert sorted(letter for letter, _ in named) == sorted(LETTERS)
    parser = cli.build_parser()
    for letter, name in named:
        value = DEFAULTS.get(letter, "1" if letter in "nmwNca" else "0")
        short = vars(parser.parse_args(["perf", "all_reduce", f"-{letter}", value]))
        assert {**short, "func": 0} == {
            **vars(parser.parse_args(["perf", "all_reduce", f"--{name}", value])),
            "func": 0,
        }


@pytest.mark.parametrize("letter", "pyGxDVmzCaKMS")
def test_what_has_no_meaning_here_is_explained(letter: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["perf", "all_reduce", f"-{letter}", "2"], capsys)
    assert "'2': " in said
    assert said.endswith(f"; give {1 if letter in 'ma' else 0}, or leave it out")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--print-completion", shell])
    assert caught.value.code == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("--tokens-per-step", "all_reduce", "doctor"))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_as_a_module_also_beside_a_folder_of_that_name(tmp_path: Path, elsewhere: bool) -> None:
    if elsewhere:
        (tmp_path / "hdpcomm").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "hdpcomm", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hdpcomm ")
    code = "import hdpcomm; hdpcomm.init; print(hdpcomm.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert done.stdout.startswith(str(TOP)), done.stderr


def test_the_transports_of_the_options_are_those_of_init() -> None:
    assert output.TRANSPORTS == bootstrap.TRANSPORTS
