"""The command line: exit codes, messages, and a quick --help."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from hdpcomm import __version__, errors
from hdpcomm.cli import main as cli
from hdpcomm.cli.output import check_writable, write_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.options import count, num_bytes, positive


def run_with(monkeypatch, error, *options):
    """Runs ``hdpcomm doctor`` with its work replaced by raising ``error``."""

    def fail(_):
        raise error

    def add_parser(subparsers):
        subparsers.add_parser("doctor").set_defaults(func=fail)

    monkeypatch.setattr("hdpcomm.cli.doctor.add_parser", add_parser)
    return cli.main(["doctor", *options])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Error("e"), 1),
        (RuntimeError("e"), 1),
        (errors.DeviceError("e"), 2),
        (errors.PeerLost("e", peer=2), 3),
        (errors.Aborted("e"), 3),
        (errors.Mismatch("e"), 3),
        (errors.CommTimeout("e"), 4),
        (errors.InvalidUsage("e"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code):
    assert run_with(monkeypatch, error) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "Traceback" not in told.err


def test_an_error_of_ours_is_told_as_it_is(monkeypatch, capsys):
    run_with(monkeypatch, errors.PeerLost("rank 2 died"))
    assert capsys.readouterr().err == "hdpcomm: error: rank 2 died\n"


def test_other_errors_name_their_type_and_verbose_shows_the_traceback(monkeypatch, capsys):
    run_with(monkeypatch, KeyError("x"), "--verbose")
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "hdpcomm: error: internal error: KeyError: 'x'\n" in told
    run_with(monkeypatch, KeyError("x"))
    assert capsys.readouterr().err == "hdpcomm: error: internal error: KeyError: 'x'\n"


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["--nonsense"], ["doctor", "--nonsense"], ["plan", "--ranks", "x"]]
)
def test_bad_usage_is_6(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 6
    told = capsys.readouterr().err
    assert told.startswith("usage: hdpcomm")
    assert len(told.splitlines()) == 2  # however many options there are
    assert "error: " in told


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["doctor", "--help"], ["--version"]])
def test_help_is_0_and_the_commands_import_no_torch(arguments):
    code = (
        "import sys, hdpcomm; before = 'torch' in sys.modules\n"
        "from hdpcomm.cli.main import main\n"
        f"try: main({arguments})\nfinally: assert ('torch' in sys.modules) == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"hdpcomm {__version__}" if arguments == ["--version"] else "usage: hdpcomm")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_planning_imports_no_torch(command):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hdpcomm.cli.main import main\n"
        f"sys.exit(main(['{command}', '--ranks', '4', '--model', 'llama-7b', '--tokens', '100K']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "balanced" in done.stdout


def test_commands_that_are_there_are_listed_and_others_are_not(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert "train a model" in told
    assert "exit codes:" in told
    parser = cli.build_parser()
    choices = next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert set(choices) <= set(cli.COMMANDS)
    assert {"train", "doctor"} <= set(choices)


def test_a_missing_command_module_is_left_out(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", ("doctor", "not_there"))
    parser = cli.build_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["not_there"])


def test_a_reader_that_leaves_is_no_error():
    code = (
        "import importlib.util, sys; from hdpcomm.cli import main as m\n"
        "def work(_):\n"
        "    for _ in range(100000): print('x' * 100)\n"
        "    return 0\n"
        "command = importlib.util.module_from_spec(importlib.util.spec_from_loader('hdpcomm.cli.endless', None))\n"
        "command.add_parser = lambda parsers: parsers.add_parser('endless').set_defaults(func=work)\n"
        "sys.modules[command.__name__], m.COMMANDS = command, ('endless',)\n"
        "sys.exit(m.main(['endless']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(30) == 141
    assert told == b""


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("8,192", 8192), ("8_192", 8192), ("8k", 8192), ("2M", 1 << 21), ("1e3", 1000), ("1T", 1 << 40)],
)
def test_count(text, value):
    assert count(text) == value


@pytest.mark.parametrize("text", ["0", "-3", "x", "", "1.5", "k"])
def test_count_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_positive_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError):
        positive(text)


def test_positive():
    assert positive("1e-3") == 0.001


def test_num_bytes():
    assert (num_bytes("0"), num_bytes("512M"), num_bytes("1.5k"), num_bytes("2GiB")) == (0, 512 << 20, 1536, 2 << 30)
    for text in ("8x", "8iB", "iB", "KiB"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no size"):
            num_bytes(text)


def test_check_writable(tmp_path):
    check_writable(None)
    check_writable(tmp_path / "new.json")
    with pytest.raises(InvalidUsage, match="this is a folder"):
        check_writable(tmp_path)
    with pytest.raises(InvalidUsage, match=r"the folder .* does not exist"):
        check_writable(tmp_path / "no" / "new.json")


def test_write_json_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text().startswith("{")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
