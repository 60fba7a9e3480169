"""The table of settings: types, ranges, messages, when a variable is read, and its document."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hdpcomm import _core
from hdpcomm.comm.bootstrap import default_timeout
from hdpcomm.errors import InvalidUsage

TABLE = {row.field: row for row in _core.settings_table()}
TYPES = {"0 or 1": bool, "a whole number": int, "a number": float}


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HDPCOMM_"):
            monkeypatch.delenv(name)


def test_every_row_has_a_typed_field_with_its_default() -> None:
    settings = _core.settings()
    fields = {name for name in dir(settings) if not name.startswith("_")}
    assert fields == set(TABLE)
    for field, row in TABLE.items():
        assert row.variable.startswith("HDPCOMM_")
        assert row.meaning
        assert row.error is None
        value = getattr(settings, field)
        kind = next((kind for text, kind in TYPES.items() if row.range.startswith(text)), str)
        assert type(value) is kind, field
        if field != "yield_us":  # tests/conftest.py has another
            assert value == (bool(int(row.default)) if kind is bool else kind(row.default))


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        _core.settings().timeout_s = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HDPCOMM_TIMEOUT", "soon", r"HDPCOMM_TIMEOUT='soon'; give a number from 0.001 to 10000000, or unset it \(sec"),
        ("HDPCOMM_TIMEOUT", "0", "HDPCOMM_TIMEOUT='0'; give a number"),
        ("HDPCOMM_TIMEOUT", "nan", "HDPCOMM_TIMEOUT='nan'; give a number"),
        ("HDPCOMM_DEVICE_SLOTS", "2.5", "HDPCOMM_DEVICE_SLOTS='2.5'; give a whole number from 1 to 1000000, or unset"),
        ("HDPCOMM_DEVICE_SLOTS", "4 slots", "HDPCOMM_DEVICE_SLOTS='4 slots'; give a whole number"),
        ("HDPCOMM_DEVICE_LANES", "-1", "HDPCOMM_DEVICE_LANES='-1'; give a whole number from 1"),
        ("HDPCOMM_SHM_CMA", "no", "HDPCOMM_SHM_CMA='no'; give 0 or 1, or unset it"),
    ],
)
def test_a_wrong_value_is_named_with_its_range(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidUsage, match=message):
        _core.settings()
    with pytest.raises(InvalidUsage, match=message):
        default_timeout()
    assert [row.variable for row in _core.settings_table() if row.error] == [variable]
    monkeypatch.setenv(variable, "")  # as if unset
    assert _core.settings().timeout_s == 60


def test_fixed_settings_are_read_once_and_the_others_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _core.settings()
    assert {field for field, row in TABLE.items() if row.fixed} == {
        *(
            "shm_eager_bytes",
            "shm_payload_bytes",
            "shm_cma",
            "deadlocks",
            "spin_us",
            "yield_us",
            "liveness_s",
            "silence_s",
        )
    }
    monkeypatch.setenv("HDPCOMM_SPIN_US", str(before.spin_us + 1))
    monkeypatch.setenv("HDPCOMM_TIMEOUT", "1e3")
    monkeypatch.setenv("HDPCOMM_DEVICE_SLOT_BYTES", "4096")
    now = _core.settings()
    assert (now.spin_us, now.timeout_s, now.device_slot_bytes) == (before.spin_us, 1000.0, 4096)
    assert before.timeout_s == 60
    program = "from hdpcomm import _core; print(_core.settings().spin_us)"
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float(fresh) == before.spin_us + 1


def test_the_document_has_every_variable_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(HDPCOMM_\w+)` \| (.*?) \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    assert {row[0]: (row[1], row[2]) for row in rows} == {
        row.variable: (f"`{row.default}`" if row.default else "", row.range) for row in TABLE.values()
    }
    for name, _, _, meaning in rows:
        fixed = next(row.fixed for row in TABLE.values() if row.variable == name)
        assert meaning.endswith(" *") == fixed, name
