"""``hdpcomm data``: what it builds, what it says, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from hdpcomm.data import open_corpus


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": "x" * (i + 1)}) + "\n" for i in range(10)))
    return path


def test_builds_and_checks(lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["data", "build", str(lines), "--text-field", "body", "--out", str(out), "--ranks", "2"]) == 0
    assert capfd.readouterr().out == f"{out}: 10 documents, 55 tokens of byte, longest 10\n"
    assert open_corpus([out], context=100).lengths.tolist() == list(range(1, 11))
    assert main(["data", "check", str(out)]) == 0
    assert "55 bytes are as they were written" in capfd.readouterr().out
    tokens = out / "tokens-0.bin"
    tokens.write_bytes(b"y" + tokens.read_bytes()[1:])
    assert main(["data", "check", str(out)]) == 6
    assert f"{tokens}: damaged between bytes 0 and" in capfd.readouterr().err


BAD = {
    "build {lines}": "the following arguments are required: --out",
    "build {lines} --out {out}": "there is no field 'text' or 'messages' (fields: 'body')",
    "build {lines} --out {lines}": "is there already; give another folder",
    "build /no/such --out {out}": "/no/such: no such file or folder",
    "build {lines} --out {out} --tokenizer /no/such": "/no/such: no such folder",
    "check {lines.parent}": "no folder of hdpcomm data build; make one of these files by hdpcomm data build",
    "check {lines}": "damaged (meta.json: [Errno 20] Not a directory",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments(arguments: str, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["data", *arguments.format(lines=lines, out=tmp_path / "out").split()]
    try:
        code = main(given)
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 6
    assert BAD[arguments] in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_log_file_sees_how_far_it_is(
    lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdpcomm.cli.data._LINE_S", -1.0)
    assert main(["data", "build", str(lines), "--text-field", "body", "--out", str(tmp_path / "out")]) == 0
    assert "tokenizing: 100%\n" in capfd.readouterr().err
