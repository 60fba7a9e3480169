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
    assert main(["doctor", "--json", str(path)]) == 0
    told = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["healthy"] is True
    names = {(row["topic"], row["name"]) for row in report["checks"]}
    assert {("versions", "torch"), ("core", "hdpcomm._core"), ("core", "CUDA code"), ("cuda", "driver")} <= names
    assert {("transports", "memfd"), ("transports", "process_vm_readv")} <= names
    for row in report["checks"]:
        assert row["state"] in ("ok", "off", "bad")
        assert f"{row['name']:<18}{row['detail']}" in told
    for variable in report["environment"]:
        assert f"{variable['name']}={variable['value']} (default {variable['default']})" in told
        assert variable["name"].startswith("HDPCOMM_")
        assert variable["meaning"]


def test_environment_shows_the_value_in_force(monkeypatch):
    monkeypatch.setenv("HDPCOMM_DEBUG", "1")
    assert doctor.environment()[0]["value"] == "1"


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


def test_what_the_system_forbids(monkeypatch, capsys):
    """Messages can do without process_vm_readv; the ranks of a host cannot do without memfd_create."""

    def forbidden(*_, **__):
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr("subprocess.run", forbidden)
    assert main(["doctor"]) == 0
    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert main(["doctor"]) == 1
    assert "bad memfd             memfd_create is not allowed (Operation not permitted); " in capsys.readouterr().out
    rows = {row.name: row for row in doctor.checks()}
    for name, state in (("memfd", "bad"), ("process_vm_readv", "off")):
        assert rows[name].state == state
        assert "not permitted" in rows[name].detail.lower()
    assert "allow the call" in rows["memfd"].detail


@pytest.mark.parametrize("command", [["doctor", "--topology"], ["perf", "all_reduce"], ["train"]])
def test_a_launcher_with_another_number_of_ranks(command, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main([*command, "--ranks", "2"]) == 6
    told = capsys.readouterr()
    assert "--ranks 2 was given, but the launcher started 3 ranks; leave --ranks out or make them equal" in told.err
    assert told.out == ""


@pytest.mark.parametrize("option", [["--ranks", "2"], ["--cluster", "c.json"], ["--device", "h100"]])
def test_options_of_the_topology_alone_are_refused(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *option]) == 6
    told = capsys.readouterr()
    assert f"{option[0]} without --topology" in told.err
    assert told.out == ""
    assert not list(tmp_path.iterdir())
