"""Damaged and planted stores, plans, calibrations, models and runs: a sentence or what was written, and nothing else.

No code runs, nothing waits, no file outside is touched, and what has a checksum has no other meaning.
``HDPCOMM_FOLDER_CASES``: how many of each kind of damage and folder. ``HDPCOMM_FOLDER_S``: seconds after
which reading one counts as a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hdpcomm.cli.main import main
from hdpcomm.data import open_store
from hdpcomm.errors import Error
from hdpcomm.models.weights import weight_files
from hdpcomm.plan import Calibration, ClusterSpec, CostModel, Planner, StepPlan
from hdpcomm.plan.model_config import load_model
from hdpcomm.run import read_metrics
from hdpcomm.trace.run_report import run_report
from tests.harness.patience import PATIENCE
from tests.harness.payload import Payload

CASES = int(os.environ.get("HDPCOMM_FOLDER_CASES", "2"))
LONG_S = float(os.environ.get("HDPCOMM_FOLDER_S", "60")) * PATIENCE
Damage = Callable[[Path, random.Random, Path], None]


# --- sound folders --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("sound")
    text = top / "a.txt"
    text.write_text("\n\n".join(f"document {number} " + "x" * number for number in range(40)))
    assert main(["data", "build", str(text), "--out", str(top / "store")]) == 0
    options = ["--data", str(text), "--ranks", "1", "--steps", "2", "--layers", "1", "--hidden", "8", "--ffn", "8"]
    options += ["--heads", "1", "--kv-heads", "1", "--context", "64", "--tokens-per-step", "128", "--trackers", "none"]
    assert main(["train", *options, "--out", str(top / "run"), "--export", str(top / "model")]) == 0
    (top / "plan").mkdir()
    planner = Planner(None, ClusterSpec(4, 100), cost_model=CostModel(1e-6, 1e-5))
    plan = planner.plan([300, 20, 7, 90, 41, 5])
    plan.save(top / "plan/plan.json")
    shutil.rmtree(top / "run/checkpoints", ignore_errors=True)  # test_changed_checkpoints.py damages these
    return top


def read_store(folder: Path) -> Any:
    store = open_store(folder)
    store.check()
    return [store.tokens(place, 0, int(length)).tolist() for place, length in enumerate(store.lengths)]


def read_plans(folder: Path) -> Any:
    return [StepPlan.load(folder / name).hash for name in ("plan.json",)]


def read_run(folder: Path) -> None:
    """Its files may be written by hand, so they may mean something else."""
    for read in (run_report, lambda run: Calibration.load(run / "calibration.json")):
        with contextlib.suppress(Error):
            read(folder)
    read_metrics(folder / "metrics.jsonl")


def read_model(folder: Path) -> None:
    """Weights have no checksum in the format of transformers."""
    load_model(folder)
    weight_files(folder)


READERS: dict[str, Callable[[Path], Any]] = {
    "store": read_store,
    "plan": read_plans,
    "run": read_run,
    "model": read_model,
}

# --- damage ---------------------------------------------------------------------------------------------------------


def a_file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))


def flip(folder: Path, draw: random.Random, _: Path) -> None:
    file = a_file(folder, draw)
    data = bytearray(file.read_bytes() or b"\0")
    for _ in range(draw.randint(1, 3)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(folder: Path, draw: random.Random, _: Path) -> None:
    file = a_file(folder, draw)
    file.write_bytes(file.read_bytes()[: draw.randrange(max(1, file.stat().st_size))])


def remove(folder: Path, draw: random.Random, _: Path) -> None:
    a_file(folder, draw).unlink()


def swap(folder: Path, draw: random.Random, _: Path) -> None:
    one, other = a_file(folder, draw), a_file(folder, draw)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def noise(folder: Path, draw: random.Random, _: Path) -> None:
    a_file(folder, draw).write_bytes(draw.randbytes(draw.choice([1, 100, 5000])))


def pipe(folder: Path, draw: random.Random, _: Path) -> None:
    file = a_file(folder, draw)
    file.unlink()
    os.mkfifo(file)


def device(folder: Path, draw: random.Random, _: Path) -> None:
    file = a_file(folder, draw)
    file.unlink()
    file.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/dev/random", "/proc", folder]))


def huge(folder: Path, draw: random.Random, _: Path) -> None:
    """A file with holes: 1 TB for who reads all of it."""
    os.truncate(a_file(folder, draw), 1 << 40)


def nested(folder: Path, draw: random.Random, _: Path) -> None:
    a_file(folder, draw).write_text(draw.choice(["[" * 100_000, '{"a":' * 50_000, "- " * 20_000, "&a [*a, *a]\n" * 9]))


def other_values(folder: Path, draw: random.Random, _: Path) -> None:
    """JSON whose values are of other kinds, as somebody's editor leaves them."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".jsonl")]
    file = draw.choice(found)
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    changed = draw.randrange(len(lines))
    content = json.loads(lines[changed])
    places = [(content, key) for key in (content if isinstance(content, dict) else range(len(content)))]
    places += [(each, key) for each in (content.values() if isinstance(content, dict) else []) if isinstance(each, dict)
               for key in each]  # fmt: skip
    holder, key = draw.choice(places)
    holder[key] = draw.choice([None, -1, 0, 1 << 70, float("nan"), float("inf"), "x", [], {}, True, "\udcff", [None]])
    lines[changed] = json.dumps(content)
    file.write_text("\n".join(lines) + "\n")


def linked(folder: Path, draw: random.Random, _: Path) -> None:
    """To a file beside the folder, which must not change."""
    file = a_file(folder, draw)
    file.unlink()
    file.symlink_to(folder.parent / "outside")


def planted(folder: Path, draw: random.Random, marker: Path) -> None:
    """A call in a form that some reader may follow."""
    file = a_file(folder, draw)
    payload = Payload(marker)
    if file.suffix in (".yaml", ".json", ".jsonl") and draw.random() < 0.5:
        file.write_text(draw.choice([f"!!python/object/apply:os.mkdir ['{marker}']\n", yaml.dump(payload)]))
    elif draw.random() < 0.5:
        file.write_bytes(pickle.dumps(payload, protocol=draw.randint(0, 5)))
    else:
        np.save(folder / "array.npy", np.array([payload], dtype=object), allow_pickle=True)
        (folder / "array.npy").rename(file)


DAMAGES: tuple[Damage, ...] = (
    *(flip, cut, remove, swap, noise, pipe, device, huge, nested, other_values, linked, planted),
)


@contextlib.contextmanager
def no_hang(what: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"{what}: hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LONG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_sentence_or_what_was_written(damage: Damage, kind: str, sound: Path, tmp_path: Path) -> None:
    read = READERS[kind]
    right = read(sound / kind)
    (tmp_path / "outside").write_text("as it was")
    for seed in range(CASES):
        what = f"{damage.__name__} {kind} {seed}"
        folder, marker = tmp_path / f"{seed}", tmp_path / f"ran-{seed}"
        shutil.copytree(sound / kind, folder)
        damage(folder, random.Random(what), marker)
        with no_hang(what), contextlib.suppress(Error, OSError):  # of a file that is not there
            assert read(folder) == right, what
        assert not marker.exists(), f"{what}: code ran"
        assert (tmp_path / "outside").read_text() == "as it was", what
        shutil.rmtree(folder)
