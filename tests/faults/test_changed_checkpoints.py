"""Checkpoints that somebody else has changed or made: none runs code, waits for ever, or is read with another meaning,
and a run goes on from the one before.

``HDPCOMM_CHECKPOINT_CASES``: how many changed ones.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import hdpcomm as hdp
from hdpcomm.data import open_corpus
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.run import RunConfig, RunResult, Saving, train
from hdpcomm.run.checkpoints import CheckpointFolder, newest_checkpoint, open_checkpoint
from hdpcomm.run.tensor_files import TensorFiles, write_tensors
from hdpcomm.testing import run_threads
from tests.harness.payload import Payload
from tests.harness.signing import sign

CASES = int(os.environ.get("HDPCOMM_CHECKPOINT_CASES", "150"))
FACTS = {"ranks": 2, "config": {"seed": 1, "model": {"hidden": 32}}, "note": "sound"}


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3, 5), value), "groups": [{"lr": value, "betas": (0.9, 0.95), "fused": None}]}


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


def test_the_package_unpickles_nothing_with_any_globals() -> None:
    """Every ``torch.load`` says ``weights_only=True``; only processes that a rank has started are unpickled."""
    found = []
    for path in sorted(Path(hdp.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            called = ast.unparse(call.func)
            safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in call.keywords)
            if called in ("pickle.load", "pickle.loads", "pickle.Unpickler") or (called == "torch.load" and not safe):
                found.append(f"{path.name}: {called}")
    assert set(found) == {"launch.py: pickle.loads"}


def planted_metadata(step: Path, draw: random.Random, marker: Path) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    holder = draw.choice(["all", "planner_data", "storage_meta", "state_dict_metadata", "version"])
    data: Any = Payload(marker)
    if holder != "all":
        setattr(metadata, holder, data)
        data = metadata
    (step / ".metadata").write_bytes(pickle.dumps(data, protocol=draw.randint(0, 5)))
    sign(step)


class _ByName(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, each: Any) -> Any:
        return (getattr, (type(each), each.name)) if isinstance(each, Enum) else NotImplemented


def test_enumerations_of_python_3_11_2_are_read(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    step = tmp_path / "run/step-2"
    with (step / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    told = io.BytesIO()
    _ByName(told).dump(metadata)
    assert b"getattr" in told.getvalue()
    (step / ".metadata").write_bytes(told.getvalue())
    sign(step)
    into = state(-1.0)
    open_checkpoint(step).load_into(into)
    assert torch.equal(into["w"], torch.full((3, 5), 2.0))


@pytest.mark.parametrize(
    ("kind", "name"), [(torch.Size, "__len__"), (Metadata, "__init__"), (Metadata, "planner_data")]
)
def test_nothing_else_is_got_by_its_name(sound: Path, tmp_path: Path, kind: type, name: str) -> None:
    shutil.copytree(sound, tmp_path / "run")
    step = tmp_path / "run/step-2"
    reduced = b"\x80\x02cbuiltins\ngetattr\nc" + f"{kind.__module__}\n{kind.__name__}\nX".encode()
    reduced += len(name).to_bytes(4, "little") + name.encode() + b"\x86R."
    (step / ".metadata").write_bytes(reduced)
    sign(step)
    with pytest.raises(InvalidUsage, match=r"asks for '.*' of what is no enumeration with it"):
        open_checkpoint(step).load_into(state(-1.0))


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


def other_type(step: Path, draw: random.Random, _: Path) -> None:
    """The same name with elements of another type, or no tensor, or a tensor where there was none; rightly written."""
    kind = draw.choice([torch.int8, torch.bfloat16, torch.float64, str, list])
    into = state(-1.0)
    TensorFiles(step).read_into(into)
    if isinstance(kind, torch.dtype):
        into["w"] = into["w"].to(kind)
    elif kind is str:
        into["w"] = "no tensor"
    else:
        into["groups"][0]["lr"] = draw.choice([torch.tensor(2.0), "2.0", [2.0], True, float("nan")])
    rewritten(step, into)


def missing_chunk(step: Path, draw: random.Random, _: Path) -> None:
    """Tensors of which nothing, or only some rows, are there."""
    metadata: Metadata = pickle.loads((step / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["w"]
    assert isinstance(tensor, TensorStorageMetadata)
    whole = tensor.chunks.pop()
    if rows := draw.randrange(3):
        tensor.chunks.append(replace(whole, sizes=torch.Size((rows, 5))))
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(step)


def other_step(step: Path, draw: random.Random, _: Path) -> None:
    facts = json.loads((step / "meta.json").read_text())
    (step / "meta.json").write_text(json.dumps(facts | {"step": draw.choice([-3, 0, 1, 3, 10**30])}))
    sign(step)


def rewritten(step: Path, content: Mapping[str, Any]) -> None:
    """Writes a step's tensors anew."""
    facts = json.loads((step / "meta.json").read_text())
    shutil.rmtree(step)
    write_tensors(step, dict(content))
    facts["files"] = dict.fromkeys((path.name for path in step.iterdir()), None)
    (step / "meta.json").write_text(json.dumps(facts))
    sign(step)


def outside_file(step: Path, draw: random.Random, _: Path) -> None:
    metadata: Metadata = pickle.loads((step / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = draw.choice(["/dev/zero", "../step-1/__0_0.distcp", "..", ""])
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(step)


CHANGES: tuple[Callable[[Path, random.Random, Path], None], ...] = (
    *(flip, flip_meta, cut, swap, pipe, link_to_device, planted_metadata, planted_object, other_shape, outside_file),
    *(other_type, missing_chunk, other_step),
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
        assert "weights_only" not in told
        newest = newest_checkpoint(folder)[0]
        assert newest is not None
        shutil.rmtree(folder)
    assert refused


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


# --- runs -----------------------------------------------------------------------------------------------------------


def trained(data: Path, out: Path, steps: int, resume: str | None = None) -> RunResult:
    """One rank of a run that is saved after each step."""
    model = LlamaConfig(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8)
    config = RunConfig(model=model, steps=steps, capacity=64, tokens_per_step=128)
    saving = Saving(out / "checkpoints", every=1, resume=resume)
    with hdp.init() as comm:
        return train(comm, open_corpus([data], context=64), config, saving=saving)


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder with a run, and the loss of its second step."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.txt").write_text("some text " * 40)
    result = run_threads(trained, 2, folder / "a.txt", folder / "run", 2, timeout=100.0)[0]
    return folder, result.steps["balanced"][1].loss


def with_facts(**changed: Any) -> Callable[[Path, dict[str, Any]], None]:
    def change(step: Path, _: dict[str, Any]) -> None:
        facts = json.loads((step / "meta.json").read_text())
        (step / "meta.json").write_text(json.dumps(facts | changed))
        sign(step)

    return change


def with_weight(change: Callable[[torch.Tensor], Any]) -> Callable[[Path, dict[str, Any]], None]:
    def make(step: Path, content: dict[str, Any]) -> None:
        weights = content["policies"]["balanced"]["model"]
        weights["head.weight"] = change(weights["head.weight"])
        rewritten(step, content)

    return make


def with_group(**changed: Any) -> Callable[[Path, dict[str, Any]], None]:
    def make(step: Path, content: dict[str, Any]) -> None:
        content["policies"]["balanced"]["optimizer"]["param_groups"][0].update(changed)
        rewritten(step, content)

    return make


def with_generators(step: Path, content: dict[str, Any]) -> None:
    content["generators"] = torch.zeros_like(content["generators"])
    rewritten(step, content)


UNFIT: dict[str, tuple[Callable[[Path, dict[str, Any]], None], str]] = {
    "another shape": (with_weight(lambda _: torch.zeros(3, 4)), r"step-2: does not fit this run \(Size mismatch"),
    "transposed": (
        with_weight(lambda weight: weight.t().contiguous()),
        r"step-2: does not fit this run \(Size mismatch",
    ),
    "another type": (
        with_weight(lambda weight: weight.double()),
        "head.weight is torch.float64 in the checkpoint and torch",
    ),
    "no tensor": (with_weight(lambda _: "x"), "head.weight is no tensor in the checkpoint"),
    "betas": (with_group(betas=(0.9,)), r"betas is \(0.9,\) where \(0.9, 0.95\) is"),
    "generators": (with_generators, r"step-2: damaged \(generators: Invalid mt19937 state"),
    "ranks": (with_facts(ranks="two"), r"step-2: damaged \(meta.json: ranks: 'two' is no number of ranks"),
    "costs": (with_facts(cost_model=[1]), r"step-2: damaged \(meta.json: cost_model: "),
    "memory": (with_facts(memory_model={"capacity": 0}), r"step-2: damaged \(meta.json: memory_model: "),
    "interfaces": (with_facts(nics="x"), r"step-2: damaged \(meta.json: nics: "),
    "learned": (with_facts(learned=[1]), r"step-2: damaged \(meta.json: learned: "),
    "options": (with_facts(config={}), "step-2: holds no run of hdpcomm train"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_run_goes_on_from_the_older_checkpoint(
    case: str, run_of_two_steps: tuple[Path, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, told = UNFIT[case]
    folder, loss = run_of_two_steps
    shutil.copytree(folder / "run", tmp_path / "run")
    step = tmp_path / "run/checkpoints/step-2"
    dcp_to_torch_save(step, tmp_path / "content.pt")
    change(step, torch.load(tmp_path / "content.pt", weights_only=False))
    result = run_threads(trained, 2, folder / "a.txt", tmp_path / "run", 3, "auto", timeout=100.0)[0]
    assert any(re.search(told, message) for message in caplog.messages)
    assert result.first_step == 1
    assert [metrics.step for metrics in result.steps["balanced"]] == [1, 2]
    assert result.steps["balanced"][0].loss == pytest.approx(loss, rel=1e-6)
    assert open_checkpoint(step).step == 2  # written anew
    change(step, torch.load(tmp_path / "content.pt", weights_only=False))
    with pytest.raises(InvalidUsage, match=told):  # asked for by its name, it is not passed
        run_threads(trained, 2, folder / "a.txt", tmp_path / "run", 3, str(step), timeout=100.0)


def on_other_data(folder: Path, rank_of_others: int, resume: bool) -> RunResult | str:
    """A run of two ranks, of which one finds other bytes of the same length."""
    model = LlamaConfig(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8)
    config = RunConfig(model=model, steps=4, capacity=64, tokens_per_step=128)
    saving = Saving(folder / "run/checkpoints", resume="auto" if resume else None)
    with hdp.init() as comm:
        name = "b.txt" if comm.rank == rank_of_others or rank_of_others < 0 else "a.txt"
        try:
            return train(comm, open_corpus([folder / name], context=64), config, saving=saving)
        except Error as error:
            return f"{type(error).__name__} {getattr(error, 'unlike', ())}: {error}"


def test_other_data_of_the_same_lengths_are_noticed(run_of_two_steps: tuple[Path, float], tmp_path: Path) -> None:
    """By ranks among each other, and by a run that goes on."""
    folder = tmp_path / "runs"
    shutil.copytree(run_of_two_steps[0], folder)
    (folder / "b.txt").write_text("some text " * 39 + "some test ")
    for odd, resume in ((0, True), (1, True), (1, False)):
        for told in run_threads(on_other_data, 2, folder, odd, resume, timeout=100.0):
            assert re.match(rf"Mismatch \({odd},\): .*rank {odd} read other data than this run's", told)
    for told in run_threads(on_other_data, 2, folder, -1, True, timeout=100.0):
        assert re.match("InvalidUsage .* was saved on other data .*content", told)
