"""Plans as files: both forms hold the same, a bad file gives one clear error."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import StepPlan
from hdpcomm.plan.table import COLUMNS
from tests.harness.plan_cases import CASES, large_plan, no_objects, random_plan

Change = Callable[[dict[str, Any], bytearray], None]


@settings(max_examples=CASES, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_both_forms_hold_the_same(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    plan = random_plan(seed)
    for suffix in ("json", "safetensors"):
        path = tmp_path_factory.getbasetemp() / f"plan.{suffix}"
        plan.save(path)
        read = StepPlan.load(path)
        assert no_objects(read)
        assert read.hash == plan.hash
        assert read.to_json() == plan.to_json()
        assert read == plan


def test_a_file_of_many_micro_batches(tmp_path: Path) -> None:
    plan = large_plan()
    path = tmp_path / "plan.safetensors"
    plan.save(str(path))
    assert path.stat().st_size < len(plan.to_json()) * 0.6
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    read = StepPlan.load(str(path))
    assert [batch.ranks for batch in read.for_rank(7)] == [batch.ranks for batch in plan.for_rank(7)]
    other = random_plan(3)
    other.save(path)
    assert read == plan
    assert StepPlan.load(path) == other


def test_the_package_safetensors_reads_it(tmp_path: Path) -> None:
    plan = large_plan()
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    found = load_file(path)
    assert found["ranks"].dtype == np.int32
    np.testing.assert_array_equal(found["ranks"], plan.table.ranks)
    np.testing.assert_array_equal(found["predicted_s"], plan.table.predicted_s)


def written(tmp_path: Path) -> Path:
    path = tmp_path / "plan.safetensors"
    random_plan(11).save(path)
    return path


@pytest.mark.parametrize("seed", range(3))
def test_no_changed_byte_goes_unseen(tmp_path: Path, seed: int) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    rng = random.Random(seed)
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for place in [*range(8), *(rng.randrange(len(content)) for _ in range(60)), len(content) - 1]:
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        if place < header and changed[place : place + 1].isspace():
            continue  # another blank around the header's texts means the same
        path.write_bytes(changed)
        with pytest.raises(InvalidUsage, match="holds no step plan"):
            StepPlan.load(path)
    for length in [0, 1, 7, 8, 9, header - 1, header, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(InvalidUsage, match="holds no step plan"):
            StepPlan.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(InvalidUsage, match="holds no step plan"):
        StepPlan.load(path)


def change(path: Path, how: Change) -> None:
    """Changes a file and makes its checksum fit again."""
    content = path.read_bytes()
    first = 8 + struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:first]), bytearray(content[first:])
    metadata = header["__metadata__"]
    metadata.pop("sha256")
    how(header, data)
    if header.keys() == {*COLUMNS, "__metadata__"}:
        try:
            places = [slice(*header[name]["data_offsets"]) for name in COLUMNS]
            lengths = [header[name]["shape"][0] for name in COLUMNS]
            told = json.dumps([metadata, lengths], sort_keys=True).encode()
            metadata["sha256"] = hashlib.sha256(told + b"".join(data[place] for place in places)).hexdigest()
        except TypeError:
            metadata["sha256"] = "offsets or a shape that are none"
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def put(name: str, place: int, value: float) -> Change:
    """Another number in a column."""
    kinds = {"I64": "<i8", "I32": "<i4", "F64": "<f8"}

    def how(header: dict[str, Any], data: bytearray) -> None:
        begin, end = header[name]["data_offsets"]
        column = np.frombuffer(data, kinds[header[name]["dtype"]], offset=begin, count=header[name]["shape"][0])
        assert begin < end
        column[place] = value

    return how


def tell(name: str, value: Any) -> Change:
    return lambda header, _: header["__metadata__"].update({name: value})


def entry(name: str, key: str, value: Any) -> Change:
    return lambda header, _: header[name].update({key: value})


def swap(header: dict[str, Any], _: bytearray) -> None:
    header["ids"], header["ranks"] = header["ranks"], header["ids"]


def overlap(header: dict[str, Any], _: bytearray) -> None:
    header["lengths"] = dict(header["ids"])


REFUSED = "holds no step plan"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (tell("version", "1"), r"its format and version are \('hdpcomm.plan', '1'\), this release reads .*'2'"),
        (tell("format", "pt"), r"its format and version are \('pt', '2'\)"),
        (tell("more", "x"), "its __metadata__ has"),
        (tell("policy", 5), REFUSED),
        (tell("num_ranks", "-1"), "the plan is for -1 ranks"),
        (tell("num_ranks", "999999999999"), "the plan is for 999999999999 ranks, expected 1 to"),
        (tell("num_ranks", "two"), "invalid literal"),
        (tell("num_ranks", "9" * 5000), "holds no step plan"),
        (tell("makespan_s", "nan"), "makespan_s is nan"),
        (tell("lower_bound_s", "-1"), "lower_bound_s is -1"),
        (tell("idle_share", "inf"), "idle_share is inf"),
        (tell("fragments", "{}x"), "holds no step plan"),
        (tell("fragments", "[[0, [1], []]]"), "its fragments of trees"),
        (tell("fragments", "[[0, [true], [1]]]"), "its fragments of trees"),
        (tell("fragments", "[" * 100_000), "holds no step plan"),
        (lambda header, _: header.update(more=header.pop("ids")), r"it has the columns \['index', 'lengths', 'more'"),
        (
            lambda header, _: header.update(more={"dtype": "I64", "shape": [0], "data_offsets": [0, 0]}),
            "it has the columns",
        ),
        (lambda header, _: header.pop("ids"), REFUSED),
        (lambda header, _: header.update(more=header["ids"]), REFUSED),
        (lambda header, _: header.update(__metadata__=[1]), REFUSED),
        (entry("ids", "dtype", "F64"), r"ids is F64 \[\d+\], expected I64 \[entries\]"),
        (
            lambda header, _: header["ids"].update(shape=[1, header["ids"]["shape"][0]]),
            r"ids is I64 \[1, \d+\], expected",
        ),
        (entry("ids", "dtype", ["I64"]), REFUSED),
        (entry("ids", "shape", [10**30]), REFUSED),
        (entry("ids", "shape", [2.0]), REFUSED),
        (entry("ids", "shape", [True]), REFUSED),
        (entry("ids", "shape", [1, 1]), REFUSED),
        (entry("ids", "shape", None), REFUSED),
        (entry("ids", "data_offsets", [-8, 0]), REFUSED),
        (entry("ids", "data_offsets", [0, 10**20]), REFUSED),
        (entry("ids", "data_offsets", "ab"), REFUSED),
        (swap, "ids is I32|ranks is I64"),
        (overlap, REFUSED),
        (put("index", 0, -1), "micro-batch -1 follows -1"),
        (put("rank_bounds", 1, -1), "rank_bounds of a plan's table do not rise"),
        (put("rank_bounds", -1, 10**9), "rank_bounds of a plan's table do not rise"),
        (put("sequence_bounds", 0, 1), "sequence_bounds of a plan's table do not rise"),
        (put("ranks", 0, 2**31 - 1), "has ranks"),
        (put("ranks", 0, -(2**31)), "has ranks"),
        (put("ids", 0, -1), "ids of the plan's table has -1"),
        (put("lengths", 0, 0), "lengths of the plan's table has 0"),
        (put("lengths", 0, 2**62), "lengths of the plan's table has"),
        (put("offload_ratio", 0, np.nan), "has offload ratio nan"),
        (put("offload_ratio", 0, 1.5), "has offload ratio 1.5"),
        (put("predicted_s", 0, np.inf), "predicted_s of the plan's table has inf"),
        (put("predicted_s", 0, -1.0), "predicted_s of the plan's table has -1"),
    ],
)
def test_every_field_is_checked(tmp_path: Path, how: Change, message: str) -> None:
    path = written(tmp_path)
    change(path, lambda *_: None)
    StepPlan.load(path)
    change(path, how)
    with pytest.raises(InvalidUsage, match=message):
        StepPlan.load(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100, struct.pack("<Q", 50) + b"[" * 50, b"\0" * 64])
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_files_that_nobody_wrote(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    path.write_bytes(content)
    with pytest.raises(InvalidUsage, match=r"no step plan|cannot read"):
        StepPlan.load(path)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_files_that_cannot_be_read_or_written(tmp_path: Path, suffix: str) -> None:
    plan = random_plan(2)
    with pytest.raises(InvalidUsage, match="cannot read the plan"):
        StepPlan.load(tmp_path / f"none.{suffix}")
    (tmp_path / f"folder.{suffix}").mkdir()
    with pytest.raises(InvalidUsage, match=r"cannot read the plan|no plain file"):
        StepPlan.load(tmp_path / f"folder.{suffix}")
    with pytest.raises(InvalidUsage, match="cannot write the plan"):
        plan.save(tmp_path / f"folder.{suffix}")
    with pytest.raises(InvalidUsage, match="cannot write the plan"):
        plan.save(tmp_path / "none" / f"plan.{suffix}")
    for call in (plan.save, StepPlan.load):
        with pytest.raises(InvalidUsage, match=r"a plan is a file that ends in \.json or \.safetensors"):
            call(tmp_path / "plan.bin")


def test_a_pipe_is_no_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.safetensors")
    with pytest.raises(InvalidUsage, match="a folder, pipe, socket or device"):
        StepPlan.load(tmp_path / "plan.safetensors")
