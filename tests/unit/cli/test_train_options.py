"""Options of ``hdpcomm train``: command line over file over default, and one line for what is wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from hdpcomm.cli.config_file import resolve_options
from hdpcomm.cli.main import build_parser
from hdpcomm.cli.train_options import TrainOptions, changed_options, dump_options
from hdpcomm.errors import InvalidUsage

NAMES = (
    *("data", "out", "model", "steps", "save_every", "keep", "resume", "export", "compare", "dtype", "zero", "ranks"),
    *("policy", "recompute", "json", "log", "trace", "dry_run", "schedule", "warmup", "eval_every", "eval_data"),
)


def read_options(arguments: list[str]) -> TrainOptions:
    """As the command reads them."""
    parsed = build_parser().parse_args(["train", *arguments])
    return resolve_options(vars(parsed), parsed.config)


def test_the_names_that_scripts_rely_on() -> None:
    assert set(NAMES) <= {each.name for each in fields(TrainOptions)}


def test_nothing_given_is_the_default() -> None:
    assert read_options([]) == TrainOptions()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("steps: 7\ncontext: 8k\ndata: [a, b]\nrecompute: 1\noffload: 64M\nlr: 3e-4\n")
    found = read_options(["--config", str(path), "--steps", "9", "--out", "run"])
    assert (found.steps, found.context, found.data, found.recompute) == (9, 8192, ("a", "b"), 1)
    assert (found.offload, found.lr, found.out) == (64 << 20, 3e-4, Path("run"))
    assert read_options(["--config", str(path), "--data", "c"]).data == ("c",)


def test_what_is_saved_gives_the_same_options_again(tmp_path: Path) -> None:
    arguments = [
        "--data",
        "ü",
        "model: ",
        "m",
        "--eval-fraction",
        "0.1",
        "--recompute",
        "full",
        "--seed",
        "5",
        "--warmup",
        "0",
    ]
    options = read_options([*arguments, "--out", "run", "--resume", "auto", "--json", "x", "--dry-run"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_options(options))
    assert read_options(["--config", str(path)]) == read_options(arguments)


BAD = {
    "--stpes 3": "unrecognized arguments: --stpes 3; did you mean --steps?",
    "--steps x": "argument --steps: 'x' is not a whole number (like 8192 or 8k)",
    "--steps 1e400": "is not a whole number",
    "--steps 99999999999999999999": "is above 2^53",
    "--seed -1": "seed is -1; it must be from 0 to 2^63 - 1",
    "--lr nan": "nan is not a finite number above 0",
    "--lr 0": "0 is not a finite number above 0",
    "--min-lr 2": "2 is not a number from 0 to 1",
    "--policy fast": "invalid choice: 'fast' (choose from",
    "--recompute half": "'half' is neither none, full, auto nor a number of layers",
    "--offload 1Q": "argument --offload",
}

BAD_FILES = {
    "stpes: 3": "Option 'stpes' is not accepted; did you mean steps?",
    "steps: many": "steps: 'many' is not a whole number",
    "steps: [1]": "steps: ",
    "policy: fast": "policy: 'fast' not among choices",
    "model: {layers: 2}": "model: ",
    "- a\n- b": "this file holds no options",
    "": "this file holds no options",
    "steps: 3\n  x: 5": "--config",
    "[" * 5000: "--config",
    "data: !!python/object:os.system []": "--config",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_options(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_options(given.split())
    assert caught.value.code == 6
    assert BAD[given] in capsys.readouterr().err


@pytest.mark.parametrize("content", BAD_FILES, ids=lambda text: text[:20])
def test_bad_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(InvalidUsage) as caught:
        read_options(["--config", str(path)])
    assert BAD_FILES[content] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_no_file(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidUsage, match=f"--config {path}: {told}"):
            read_options(["--config", str(path)])


def test_what_is_told_of_a_run() -> None:
    assert changed_options(TrainOptions(steps=3, data=("a b",), ranks=2)) == "{data: [a b], ranks: 2, steps: 3}"


def test_one_path_needs_no_list(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: some/path\neval_data: [b]\ncompare: static\n")
    found = read_options(["--config", str(path)])
    assert (found.data, found.eval_data, found.compare) == (("some/path",), ("b",), ("static",))
