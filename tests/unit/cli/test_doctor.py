"""``hdpcomm doctor``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys

import pytest

from hdpcomm.cli import doctor
from hdpcomm.cli.main import main


def test_report_and_json_say_the_same(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["doctor", "--all", "--json", str(path)]) == 0
    told = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["healthy"] is True
    names = {(row["topic"], row["name"]) for row in report["checks"]}
    assert {("versions", "torch"), ("core", "hdpcomm._core"), ("core", "CUDA code"), ("cuda", "driver")} <= names
    for row in report["checks"]:
        assert row["state"] in ("ok", "off", "bad")
        assert f"{row['name']:<18}{row['detail']}" in told
    for variable in report["environment"]:
        assert f"{variable['name']}={variable['value']} (default {variable['default']})" in told
        assert variable["name"].startswith("HDPCOMM_")
        assert variable["meaning"]


def test_environment_shows_the_value_in_force(monkeypatch):
    monkeypatch.setenv("HDPCOMM_TIMEOUT", "7")
    assert doctor.environment()[0]["value"] == "7"


def test_only_what_differs_from_its_default_is_shown(monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith("HDPCOMM_"):
            monkeypatch.delenv(name)
    assert main(["doctor"]) == 0
    number = len(doctor.environment())
    assert f"environment\n  all at their defaults ({number}; --all shows them)\n" in capsys.readouterr().out
    monkeypatch.setenv("HDPCOMM_SPIN_US", "2.5")
    monkeypatch.setenv("HDPCOMM_NCCL_CONNECT", "1")  # its default
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "  HDPCOMM_SPIN_US=2.5 (default 1)\n      microseconds of busy waiting" in told
    assert "HDPCOMM_NCCL_CONNECT" not in told
    assert f"  the others at their defaults ({number - 1}; --all shows them)" in told
    assert main(["doctor", "--all"]) == 0
    assert capsys.readouterr().out.count(" (default ") == number


def test_a_value_that_is_refused_is_bad(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HDPCOMM_LIVENESS_S", "often")
    assert main(["doctor", "--json", str(tmp_path / "report.json")]) == 1
    told = capsys.readouterr().out
    assert "  bad HDPCOMM_LIVENESS_S=often (default 0.2)" in told
    assert "HDPCOMM_LIVENESS_S='often'; give a number from 0.01 to 1, or unset it (seconds between" in told
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["healthy"] is False
    assert [row["name"] for row in report["environment"] if row["error"]] == ["HDPCOMM_LIVENESS_S"]


def test_unknown_variables_are_marked_with_the_name_that_was_meant(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HDPCOMM_TIMOUT", "3")
    monkeypatch.setenv("HDPCOMM_XYZ", "")
    monkeypatch.setenv("HDPCOMM_BUILD_TYPE", "Debug")  # setup.py reads it
    assert main(["doctor", "--json", str(tmp_path / "report.json")]) == 0
    told = capsys.readouterr().out
    assert "  HDPCOMM_TIMOUT=3 is unknown, nothing reads it; did you mean HDPCOMM_TIMEOUT?" in told
    assert "  HDPCOMM_XYZ= is unknown, nothing reads it; --all shows the known ones" in told
    assert "HDPCOMM_BUILD_TYPE" not in told
    unknown = json.loads((tmp_path / "report.json").read_text())["unknown_variables"]
    assert [(row["name"], row["suggestion"]) for row in unknown] == [
        ("HDPCOMM_TIMOUT", "HDPCOMM_TIMEOUT"),
        ("HDPCOMM_XYZ", None),
    ]


def test_a_missing_package_is_bad(monkeypatch, capsys):
    real = importlib.metadata.version

    def version(name):
        if name == "rich":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor"]) == 1
    assert "bad rich              not installed; pip install rich" in capsys.readouterr().out


def test_a_missing_core_is_bad(monkeypatch):
    monkeypatch.setitem(sys.modules, "hdpcomm._core", None)
    monkeypatch.delattr("hdpcomm._core", raising=False)
    rows = {row.name: row for row in doctor.checks()}
    assert rows["hdpcomm._core"].state == "bad"
    assert "install hdpcomm again" in rows["hdpcomm._core"].detail
    assert doctor.environment() == doctor.unknown_variables() == []


@pytest.mark.parametrize("command", [["acceptance"], ["perf", "all_reduce"], ["train"]])
def test_a_launcher_with_another_number_of_ranks(command, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main([*command, "--ranks", "2"]) == 6
    told = capsys.readouterr()
    assert "--ranks 2 was given, but the launcher started 3 ranks; leave --ranks out or make them equal" in told.err
    assert told.out == ""
