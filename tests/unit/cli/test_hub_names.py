"""``--model`` with a name on the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.run import model_path

NAME = Path("Qwen/Qwen3-0.6B")


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A huggingface_hub that reaches one model."""
    fake = ModuleType("huggingface_hub")

    def snapshot_download(name: str, **_: Any) -> str:
        if name != str(NAME):
            raise ConnectionError("no route to\n the hub")
        return str(tmp_path / "snapshot")

    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_hub")
def test_names_are_fetched_and_folders_are_not(tmp_path: Path) -> None:
    assert model_path(NAME) == tmp_path / "snapshot"
    for path in (tmp_path / "folder", Path("folder"), Path("a/b/c"), Path("../a")):
        assert model_path(path) == path
    NAME.mkdir(parents=True)
    assert model_path(NAME) == NAME


@pytest.mark.usefixtures("_hub")
def test_the_refusal_names_the_command_that_fetches(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "Qwen/Other", "--steps", "1"]) != 0
    told = " ".join(capfd.readouterr().err.split())
    assert "model Qwen/Other is no folder here" in told
    assert "ConnectionError: no route to the hub" in told
    assert "`hf download Qwen/Other --local-dir Other`" in told
    assert "then give Other" in told


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        InvalidUsage, match=r"needs huggingface_hub: pip install 'hdpcomm\[huggingface\]'; `hf download"
    ):
        model_path(NAME)
