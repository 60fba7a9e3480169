"""Parts of tensors in checkpoints: any parts are written, any others are read; what is missing is told."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.offload import MemoryMeter
from hdpcomm.run import CheckpointFolder, open_checkpoint
from hdpcomm.run.tensor_files import TensorFiles, join_files, write_tensors
from hdpcomm.train.state.layout import TensorPart, boxes

SHAPES = [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (3, 1, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_are_the_range(shape: tuple[int, ...]) -> None:
    """Every range of every shape, against the numbers of the elements."""
    numbers = torch.arange(int(torch.Size(shape).numel())).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(numbers.numel() + 1), 2):
        found = boxes(shape, start, stop)
        chosen = [numbers[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten() for box in found]
        assert [int(n) for each in chosen for n in each] == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def cuts(count: int, writers: int, seed: int) -> list[int]:
    drawn = torch.randint(0, count + 1, (writers - 1,), generator=torch.Generator().manual_seed(seed))
    return [0, *sorted(drawn.tolist()), count]


def states(writers: int, seed: int, fill: float | None = None) -> list[dict[str, Any]]:
    """Each writer's state: parts of a tensor of each shape; and what only the first one writes."""
    found: list[dict[str, Any]] = [{"parts": {}} for _ in range(writers)]
    for place, shape in enumerate(SHAPES):
        whole = torch.arange(float(torch.Size(shape).numel())) + 100 * place
        bounds = cuts(whole.numel(), writers, seed + place)
        for state, (start, stop) in zip(found, itertools.pairwise(bounds), strict=True):
            values = whole[start:stop].clone() if fill is None else torch.full((stop - start,), fill)
            state["parts"][str(place)] = TensorPart.of_range(shape, start, values)
    for state in found:
        state |= {"whole": torch.full((3,), 5.0 if fill is None else fill), "step": 7 if fill is None else -1}
    return found


def elements(part: TensorPart) -> torch.Tensor:
    """In the order of its boxes."""
    boxes_of_it = [part.box(chunk.offsets).flatten() for chunk in part.__create_chunk_list__()]
    return torch.cat(boxes_of_it) if boxes_of_it else torch.empty(0)


def saved(path: Path, writers: int, seed: int) -> CheckpointFolder:
    folders = [CheckpointFolder(path, keep=2, rank=rank, writers=writers, session="s") for rank in range(writers)]
    for folder, state in zip(folders, states(writers, seed), strict=True):
        folder.save(4, state, {"note": "x"})
    for folder in folders:
        folder.wait()
    return folders[0]


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (2, 1), (3, 2), (4, 4)])
def test_other_ranks_read_what_they_need(tmp_path: Path, writers: int, readers: int) -> None:
    saved(tmp_path, writers, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    found = open_checkpoint(tmp_path / "step-4")
    wanted = states(readers, seed=2)
    for reader, state in enumerate(states(readers, seed=2, fill=-1.0)):
        found.load_into(state)
        for name, part in state["parts"].items():
            assert torch.equal(elements(part), elements(wanted[reader]["parts"][name]))
        assert torch.equal(state["whole"], torch.full((3,), 5.0))
        assert state["step"] == 7
    plain = {"parts": {str(place): torch.zeros(shape) for place, shape in enumerate(SHAPES)}}
    found.load_into(plain)  # a trainer that is not sharded
    for place, shape in enumerate(SHAPES):
        expected = torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * place
        assert torch.equal(plain["parts"][str(place)], expected)


def test_a_writer_may_be_one_checkpoint_ahead(tmp_path: Path) -> None:
    """The first writer, whose disk is slow, joins a part while the one who wrote it writes the next. Older parts go."""
    folders = [CheckpointFolder(tmp_path, keep=2, rank=rank, writers=2, session="s") for rank in range(2)]
    for step in (1, 2, 3):
        folders[1].save(step, states(2, seed=1)[1], {})
        folders[1].wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-2.s.1", ".step-3.s.1"]
    for step in (2, 3):
        folders[0].save(step, states(2, seed=1)[0], {})
    folders[0].wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_a_part_of_another_shape_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path, 2, seed=3)
    with pytest.raises(InvalidUsage, match=r"does not fit this run .*Size mismatch"):
        open_checkpoint(tmp_path / "step-4").load_into({"parts": {"3": TensorPart.of_range((5, 5), 2, torch.zeros(4))}})


def test_a_copy_is_of_the_moment_of_saving(tmp_path: Path) -> None:
    live = torch.ones(4)
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, {"x": TensorPart.of_range((2, 2), 0, live)}, {})
    live.zero_()
    folder.wait()
    read = {"x": torch.zeros(2, 2)}
    open_checkpoint(tmp_path / "step-1").load_into(read)
    assert torch.equal(read["x"], torch.ones(2, 2))


def test_a_writer_that_died_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part, which it has begun, grows no more: that is noticed long before the time of the living is over."""
    monkeypatch.setattr("hdpcomm.run.checkpoints._LAST_PATIENCE_S", 1000.0)
    monkeypatch.setattr("hdpcomm.run.checkpoints._SILENCE_S", 0.05)
    saved(tmp_path, 2, seed=1).path.joinpath("step-4").rename(tmp_path / "step-2")
    folder = CheckpointFolder(tmp_path, keep=2, writers=2, session="s")
    begun = tmp_path / ".step-4.s.1"
    begun.mkdir()
    (begun / "__1_0.distcp").write_bytes(b"some of it")
    folder.save(4, states(2, seed=1)[0], {})
    folder.give_up()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_part_that_grows_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look finds more, and one look without more would be the last."""
    looks = itertools.count()
    monkeypatch.setattr("hdpcomm.run.checkpoints._LAST_PATIENCE_S", 1000.0)
    monkeypatch.setattr("hdpcomm.run.checkpoints._SILENCE_S", 0.0)
    monkeypatch.setattr("hdpcomm.run.checkpoints._bytes_in", lambda _: next(looks))
    first, second = (CheckpointFolder(tmp_path, keep=2, rank=rank, writers=2, session="s") for rank in (0, 1))
    one, other = states(2, seed=1)
    first.save(4, one, {})
    ending = threading.Thread(target=first.give_up)
    ending.start()
    while next(looks) < 20:
        time.sleep(0.001)
    second.save(4, other, {})
    ending.join()
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_a_part_that_never_comes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdpcomm.run.checkpoints._PATIENCE_S", 0.05)
    other = CheckpointFolder(tmp_path, keep=2, rank=1, writers=2, session="of another run")
    folder = CheckpointFolder(tmp_path, keep=2, writers=2, session="s")
    for each, state in zip((folder, other), states(2, seed=1), strict=True):
        each.save(4, state, {})
    other.wait()
    with pytest.raises(Error, match=r"rank 1 has not written its part within 0.05 s .*the same one on all hosts"):
        folder.wait()
    assert not list(tmp_path.glob("step-*"))


def test_the_first_writer_waits_for_a_slow_one(tmp_path: Path) -> None:
    first, second = (CheckpointFolder(tmp_path, keep=2, rank=rank, writers=2, session="s") for rank in (0, 1))
    one, other = states(2, seed=1)
    first.save(4, one, {})
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    time.sleep(0.1)
    assert not list(tmp_path.glob("step-*"))
    second.save(4, other, {})
    second.wait()
    waiting.join(20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_a_tensor_that_would_not_be_whole_is_an_error(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": TensorPart.of_range((2, 3), 0, torch.zeros(2))})
    write_tensors(tmp_path / "b", {"x": TensorPart.of_range((2, 3), 3, torch.zeros(3))}, rank=1)
    with pytest.raises(Error, match="the checkpoint has 5 of the 6 elements of x"):
        join_files(tmp_path / "a", [tmp_path / "b"])


def test_writing_copies_one_box_at_a_time(tmp_path: Path) -> None:
    """Views of flat memory, as a rank's shards are, have to be copied; all together they would be 100 boxes."""
    shards = torch.arange(100 * 600.0).view(100, 600)
    parts = {str(place): TensorPart.of_range((10, 100), 0, shards[place]) for place in range(100)}
    with MemoryMeter("cpu") as meter:
        write_tensors(tmp_path / "a", parts)
    assert shards[0].nbytes <= meter.peak < 3 * shards[0].nbytes
    others = {name: TensorPart.of_range((10, 100), 600, torch.ones(400)) for name in parts}
    write_tensors(tmp_path / "b", others, rank=1)
    join_files(tmp_path / "a", [tmp_path / "b"])
    read = {name: torch.zeros(10, 100) for name in parts}
    TensorFiles(tmp_path / "a").read_into(read)
    for place, tensor in enumerate(read.values()):
        assert torch.equal(tensor.flatten(), torch.cat([shards[place], torch.ones(400)]))


def test_tensors_cut_by_columns_and_then_by_rows(tmp_path: Path) -> None:
    """Two ranks have the left columns, each a range; two have the right ones and the last of the left, of which the
    first writes and both read the right ones, and the second writes the other."""
    whole = torch.arange(35.0).view(7, 5)
    left, right = whole[:, :2].contiguous(), whole[:, 3:].contiguous()
    parts = [
        TensorPart((7, 5), TensorPart.of_range((7, 2), 0, left.flatten()[:7].clone()).boxes),
        TensorPart((7, 5), TensorPart.of_range((7, 2), 7, left.flatten()[7:].clone()).boxes),
        TensorPart((7, 5), [((0, 2), torch.zeros(7, 1)), ((0, 3), right.clone())], written=(False, True)),
        TensorPart((7, 5), [((0, 2), whole[:, 2:3].clone()), ((0, 3), torch.zeros(7, 2))], written=(True, False)),
    ]
    folders = [CheckpointFolder(tmp_path, keep=1, rank=rank, writers=4, session="s") for rank in range(4)]
    for folder, part in zip(folders, parts, strict=True):
        folder.save(1, {"x": part, "inner": {"y": part}}, {})
    for folder in folders:
        folder.wait()
    found = open_checkpoint(tmp_path / "step-1")
    plain = {"x": torch.zeros(7, 5), "inner": {"y": torch.zeros(7, 5)}}
    found.load_into(plain)
    assert torch.equal(plain["x"], whole)
    assert torch.equal(plain["inner"]["y"], whole)
    found.load_into({"x": parts[3]})
    assert torch.equal(parts[3].box(torch.Size((0, 3))), right)
    found.load_into({"x": parts[2]})
    assert torch.equal(parts[2].box(torch.Size((0, 2))), whole[:, 2:3])
