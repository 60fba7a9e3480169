"""Checkpoints on the disk: there whole or not at all, kept by number, and every kind of damage recognised."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _nested_dict, _version, default_planner

from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.run import CheckpointFolder, MetricsLog, open_checkpoint, read_metrics
from hdpcomm.run.checkpoints import newest_checkpoint
from hdpcomm.train import StepMetrics


def state(value: float) -> dict[str, Any]:
    nested = {"step": 7, "list": [torch.arange(4.0) * value], "groups": [{"lr": value, "params": ["weights"]}]}
    return {"weights": torch.full((3, 5), value), "nested": nested}


def saved(folder: Path, *steps: int, keep: int = 10) -> CheckpointFolder:
    made = CheckpointFolder(folder, keep=keep)
    for step in steps:
        made.save(step, state(float(step)), {"note": f"at {step}"})
    made.wait()
    return made


def load(path: Path) -> dict[str, Any]:
    into = state(-1.0)
    open_checkpoint(path).load_into(into)
    return into


def test_what_was_saved_comes_back_and_the_newest_stay(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoints", 1, 2, 5, 11, keep=3)
    assert folder.steps() == [11, 5, 2]
    found, damaged = folder.newest()
    assert found is not None
    assert (found.step, found.facts["note"], damaged) == (11, "at 11", [])
    for step in (2, 5, 11):
        into = load(folder.path / f"step-{step}")
        assert torch.equal(into["weights"], torch.full((3, 5), float(step)))
        assert torch.equal(into["nested"]["list"][0], torch.arange(4.0) * step)
        assert into["nested"]["step"] == 7
    assert sorted(path.name for path in folder.path.iterdir()) == ["step-11", "step-2", "step-5"]


def test_the_state_is_that_of_the_moment_of_saving(tmp_path: Path) -> None:
    folder, live = CheckpointFolder(tmp_path, keep=2), state(1.0)
    folder.save(1, live, {})
    live["weights"].fill_(9.0)  # the next step runs while it is written
    live["nested"]["list"][0].zero_()
    folder.wait()
    assert torch.equal(load(tmp_path / "step-1")["weights"], torch.ones(3, 5))
    assert torch.equal(load(tmp_path / "step-1")["nested"]["list"][0], torch.arange(4.0))


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3)
    folder.save(3, state(8.0), {})
    folder.wait()
    assert torch.equal(load(tmp_path / "step-3")["weights"], torch.full((3, 5), 8.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_some_stay_for_good(tmp_path: Path) -> None:
    told: list[int] = []
    folder = CheckpointFolder(tmp_path, keep=1, keep_every=4, on_saved=lambda step, _: told.append(step))
    for step in range(1, 11):
        if step == 3:
            folder.mark_best(3)  # before it is there
        folder.save(step, state(float(step)), {})
        folder.wait()
        if step == 6:
            folder.mark_best(6)  # as it is there
    assert told == [*range(1, 11)]
    assert folder.steps() == [10, 8, 6, 4]
    assert torch.equal(load(tmp_path / "best")["weights"], torch.full((3, 5), 6.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-10", "step-4", "step-6", "step-8"]
    again = CheckpointFolder(tmp_path, keep=1)  # another process, which has other rules, keeps the best one
    again.save(11, state(1.0), {})
    again.wait()
    assert again.steps() == [11, 6]


def test_what_does_not_come_back_from_the_disk_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, 1)
    written = CheckpointFolder._check

    def broken(self: CheckpointFolder, unfinished: Path) -> None:
        flip(unfinished)
        written(self, unfinished)

    monkeypatch.setattr(CheckpointFolder, "_check", broken)
    folder.save(2, state(2.0), {})
    with pytest.raises(Error, match=r"does not come back as it was .*checksum"):
        folder.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def cut(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-7])


def flip(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def drop(path: Path) -> None:
    next(path.glob("*.distcp")).unlink()


def no_meta(path: Path) -> None:
    (path / "meta.json").unlink()


def cut_meta(path: Path) -> None:
    (path / "meta.json").write_text((path / "meta.json").read_text()[:20])


def deep_meta(path: Path) -> None:
    (path / "meta.json").write_text("[" * 100_000)


def list_meta(path: Path) -> None:
    (path / "meta.json").write_text("[]")


def other_format(path: Path) -> None:
    facts = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(facts | {"format": 99}))


DAMAGE = {
    cut: "damaged (__0_0.distcp has ",
    flip: "damaged (__0_0.distcp has ",
    drop: "No such file or directory",
    no_meta: "no checkpoint of hdpcomm (meta.json is missing)",
    cut_meta: "damaged (meta.json: ",
    deep_meta: "damaged (meta.json: ",
    list_meta: "has no step or files",
    other_format: "has format 99, and this hdpcomm reads format 2",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, damage: Any) -> None:
    folder = saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-3")
    with pytest.raises(InvalidUsage) as raised:
        open_checkpoint(tmp_path / "step-3")
    assert DAMAGE[damage] in str(raised.value)
    assert str(tmp_path / "step-3") in str(raised.value)
    found, damaged = folder.newest()
    assert found is not None
    assert found.step == 2
    assert damaged == [str(raised.value)]


def test_a_folder_of_another_tool_is_no_checkpoint(tmp_path: Path) -> None:
    dcp.save(state(1.0), checkpoint_id=tmp_path / "step-4", no_dist=True)
    with pytest.raises(InvalidUsage, match=r"no checkpoint of hdpcomm \(meta.json is missing\)"):
        open_checkpoint(tmp_path / "step-4")
    with pytest.raises(InvalidUsage, match="no such checkpoint; give a folder step-N"):
        open_checkpoint(tmp_path / "step-5")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [({"others": torch.zeros(2)}, "others"), ({"weights": torch.zeros(4, 4)}, "weights")],
)
def test_another_model_does_not_fit(tmp_path: Path, wanted: dict[str, Any], told: str) -> None:
    saved(tmp_path, 1)
    with pytest.raises(InvalidUsage, match=f"step-1: does not fit this run .*{told}"):
        open_checkpoint(tmp_path / "step-1").load_into(wanted)


@pytest.mark.parametrize("other", ["reads", "writes"])
def test_threads_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """torch's reader of a part of a checkpoint turns on names of an older version, for the whole process."""
    folder = saved(tmp_path, 1)
    original, old_names = _nested_dict.flatten_state_dict, threading.Event()

    def slow(given: dict[str, Any]) -> Any:
        if _version._derived_version is not None and not old_names.is_set():
            old_names.set()
            time.sleep(0.2)
        return original(given)

    for module in (_nested_dict, default_planner):
        monkeypatch.setattr(module, "flatten_state_dict", slow)
    part = {"weights": torch.zeros(3, 5)}
    thread = threading.Thread(target=lambda: open_checkpoint(tmp_path / "step-1").load_into(part))
    thread.start()
    assert old_names.wait(20)
    if other == "writes":
        folder.save(2, state(2.0), {})
        folder.wait()
    read = load(tmp_path / ("step-2" if other == "writes" else "step-1"))
    thread.join(20)
    assert torch.equal(read["nested"]["list"][0], torch.arange(4.0) * (2 if other == "writes" else 1))
    assert torch.equal(part["weights"], torch.ones(3, 5))


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / ".step-2.partial").mkdir()
    (tmp_path / ".step-2.partial" / "__0_0.distcp").write_bytes(b"half")
    found, _ = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert (tmp_path / ".step-2.partial").exists()  # who only reads leaves what another run may be writing
    assert CheckpointFolder(tmp_path, keep=3).steps() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_full_disk_is_told_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hdpcomm.run.tensor_files.save", full)
    folder.save(2, state(2.0), {})
    with pytest.raises(Error, match=r"could not be written to .*: No space left on device; make room there"):
        folder.wait()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    folder.save(3, state(3.0), {})  # there is room again
    folder.wait()
    assert folder.steps() == [3, 1]


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="keep is 0; at least 1 checkpoint has to stay"):
        CheckpointFolder(tmp_path, keep=0)


def metrics(step: int, loss: float) -> StepMetrics:
    return StepMetrics(step, loss, 10, 0.5, 0, 0.0, 1.0, 10, 1, 1, 0.1, 0.0, 0.0)


def test_metrics_are_appended_and_the_later_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write("balanced", metrics(0, 3.0))
        log.write("balanced", metrics(1, 2.0))
    path.write_text(path.read_text() + '{"policy": "balanced", "step": 2, "lo')  # killed in the middle of a line
    with MetricsLog(path) as log:
        log.write("balanced", metrics(1, 2.5))
        log.write("balanced", metrics(2, 1.0))
    assert len(path.read_text().splitlines()) == 5
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(0, 3.0), (1, 2.5), (2, 1.0)]
