"""Checkpoints that somebody else has changed or made: none runs code, waits for ever, or is read with another meaning.

``HDPCOMM_CHECKPOINT_CASES``: how many changed ones.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hdpcomm.errors import InvalidUsage
from hdpcomm.run.checkpoints import CheckpointFolder, newest_checkpoint, open_checkpoint
from tests.signing import sign

CASES = int(os.environ.get("HDPCOMM_CHECKPOINT_CASES", "150"))
FACTS = {"ranks": 2, "config": {"seed": 1, "model": {"hidden": 32}}, "note": "sound"}


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3, 5), value), "groups": [{"lr": value, "betas": (0.9, 0.95), "fused": None}]}


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = CheckpointFolder(tmp_path_factory.mktemp("sound"), keep=9)
    for step in (1, 2):
        folder.save(step, state(float(step)), FACTS)
    folder.wait()
    return folder.path


def a_file(step: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(step.iterdir()))


def flip(step: Path, draw: random.Random, _: Path) -> None:
    file = a_file(step, draw)
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def flip_meta(step: Path, draw: random.Random, _: Path) -> None:
    data = bytearray((step / "meta.json").read_bytes())
    for _ in range(draw.randint(1, 3)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    (step / "meta.json").write_bytes(data)


def cut(step: Path, draw: random.Random, _: Path) -> None:
    file = a_file(step, draw)
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def swap(step: Path, draw: random.Random, _: Path) -> None:
    file = a_file(step, draw)
    shutil.copy(step.with_name("step-1") / file.name, file)


def pipe(step: Path, draw: random.Random, _: Path) -> None:
    file = a_file(step, draw)
    file.unlink()
    os.mkfifo(file)


def link_to_device(step: Path, draw: random.Random, _: Path) -> None:
    file = a_file(step, draw)
    file.unlink()
    file.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/proc", step]))


def planted_metadata(step: Path, draw: random.Random, marker: Path) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    holder = draw.choice(["all", "planner_data", "storage_meta", "state_dict_metadata", "version"])
    data: Any = Payload(marker)
    if holder != "all":
        setattr(metadata, holder, data)
        data = metadata
    (step / ".metadata").write_bytes(pickle.dumps(data, protocol=draw.randint(0, 5)))
    sign(step)


def planted_object(step: Path, draw: random.Random, marker: Path) -> None:
    """In the place of a leaf that is no tensor, or of a tensor: torch's own format around a call."""
    metadata: Metadata = pickle.loads((step / ".metadata").read_bytes())
    place = metadata.storage_data[draw.choice(sorted(metadata.storage_data, key=str))]
    file, told = step / place.relative_path, io.BytesIO()
    torch.save(Payload(marker), told)
    place.offset, place.length = file.stat().st_size, len(told.getvalue())
    file.write_bytes(file.read_bytes() + told.getvalue())
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(step)


def other_shape(step: Path, draw: random.Random, _: Path) -> None:
    metadata: Metadata = pickle.loads((step / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["w"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.size = torch.Size(draw.choice([(3, 6), (15,), (0,), (1 << 40, 1 << 20)]))
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(step)


def outside_file(step: Path, draw: random.Random, _: Path) -> None:
    metadata: Metadata = pickle.loads((step / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = draw.choice(["/dev/zero", "../step-1/__0_0.distcp", "..", ""])
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(step)


def older_format(step: Path, draw: random.Random, marker: Path) -> None:
    """A planted one in the format without a checksum of ``meta.json``."""
    facts = json.loads((step / "meta.json").read_text())
    (step / "meta.json").write_text(json.dumps(facts | {"format": 1}))
    draw.choice([planted_metadata, planted_object])(step, draw, marker)


CHANGES: tuple[Callable[[Path, random.Random, Path], None], ...] = (
    *(flip, flip_meta, cut, swap, pipe, link_to_device, planted_metadata, planted_object, other_shape, outside_file),
    older_format,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_checkpoints(change: Callable[..., None], sound: Path, tmp_path: Path) -> None:
    refused = 0
    for seed in range(-(-CASES // len(CHANGES))):
        folder, marker = tmp_path / f"{seed}", tmp_path / f"ran-{seed}"
        shutil.copytree(sound, folder)
        change(folder / "step-2", random.Random(f"{change.__name__} {seed}"), marker)
        into = state(-1.0)
        try:
            found = open_checkpoint(folder / "step-2")
            assert (found.step, {name: found.facts[name] for name in FACTS}) == (2, FACTS)
            found.load_into(into)
        except InvalidUsage as error:
            refused += 1
            told = str(error)
        else:
            told = ""
            assert torch.equal(into["w"], torch.full((3, 5), 2.0))
            assert into["groups"] == state(2.0)["groups"]
        assert not marker.exists(), f"{change.__name__} {seed}: the checkpoint ran code"
        assert "\n" not in told
        newest = newest_checkpoint(folder)[0]
        assert newest is not None
        shutil.rmtree(folder)
    assert refused


def test_checkpoints_without_a_checksum_of_meta_json_still_load(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "step-2", tmp_path / "step-2")
    facts = json.loads((tmp_path / "step-2" / "meta.json").read_text())
    (tmp_path / "step-2" / "meta.json").write_text(json.dumps(facts | {"format": 1}))
    sign(tmp_path / "step-2")
    into = state(-1.0)
    open_checkpoint(tmp_path / "step-2").load_into(into)
    assert torch.equal(into["w"], torch.full((3, 5), 2.0))
    assert into["groups"] == state(2.0)["groups"]


def test_no_bit_of_meta_json_can_be_turned_without_notice(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "step-2", tmp_path / "step-2")
    meta = tmp_path / "step-2" / "meta.json"
    data = meta.read_bytes()
    right = open_checkpoint(tmp_path / "step-2").facts
    refused = 0
    for place in range(len(data)):
        for bit in range(8):
            meta.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            try:
                assert open_checkpoint(tmp_path / "step-2").facts == right  # the bit was one of a space
            except InvalidUsage:
                refused += 1
    assert refused > 6 * len(data)
