"""Files that hdpcomm reads, changed at random: a value, or one clear error, and nothing else.

``HDPCOMM_PARSER_CASES``: how many changed files in all; each kind of file gets its share.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hdpcomm as hdp
from hdpcomm.cli.train_options import read_config
from hdpcomm.comm.costs import load_costs, save_costs
from hdpcomm.data import open_corpus, open_store
from hdpcomm.plan import Calibration, ClusterSpec, CostModel, Planner, StepPlan
from hdpcomm.plan.distributions import read_lengths
from hdpcomm.plan.model_config import load_model
from hdpcomm.run.checkpoints import CheckpointFolder, open_checkpoint
from hdpcomm.run.metrics_log import read_lines

CASES = int(os.environ.get("HDPCOMM_PARSER_CASES", "300"))
LENGTHS = [5000, 900, 400, 50, 50]
CLUSTER = ClusterSpec(ranks=4, ranks_per_node=2, device="h100", capacity=4096)
COST = CostModel(attention=1e-12, linear=1e-7, fixed=1e-4, piece=1e-9, ring_step=1e-5)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 63, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-320, 1e30, 1e308, math.inf, -math.inf, math.nan),
    *("", "x", "\0", "../../etc", "\ud800", "1", "nan", "9" * 5000, "[" * 20_000),
    *([], {}, [[]], [None], {"": 0}, [1] * 1000),
)


@dataclass(frozen=True)
class Kind:
    """``write``: makes a good file in a folder; ``form``: how its content may be changed beside its bytes."""

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    form: str = "json"


def written(content: object, name: str = "file") -> Callable[[Path], Path]:
    text = content if isinstance(content, str) else json.dumps(content)

    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


def a_plan() -> StepPlan:
    return Planner(None, CLUSTER, policy="balanced", cost_model=COST).plan(LENGTHS)


def write_costs(folder: Path) -> Path:
    return save_costs("shm", load_costs("shm"), folder / "costs.json")


def write_checkpoint(folder: Path) -> Path:
    checkpoints = CheckpointFolder(folder / "run", keep=1)
    checkpoints.save(1, {"x": torch.ones(3)}, {"tokens": 5})
    checkpoints.wait()
    return folder / "run" / "step-1" / "meta.json"


def write_store(folder: Path) -> Path:
    records = folder / "records.jsonl"
    records.write_text('{"text": "some text"}\n' * 9)
    open_corpus([records], context=100, cache=folder / "cache")
    (meta,) = (folder / "cache").rglob("meta.json")
    return meta


def read_costs(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hdpcomm.comm.costs.costs_path", lambda: path)
        load_costs("shm")


def read_records(path: Path) -> None:
    corpus = open_corpus([path], context=100, cache=path.parent / "cache")
    for place in range(len(corpus)):
        corpus.read(place)


def plan_by(cost: CostModel) -> None:
    """A profile that is taken may not break the planner."""
    Planner(None, CLUSTER, policy="balanced", cost_model=cost).plan(LENGTHS).validate(LENGTHS)


MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "intermediate_size": 96,
    "head_dim": 16,
}
OPTIONS = {"data": ["a.txt"], "steps": 3, "layers": 2, "lr": 1e-3, "policy": "balanced", "context": 64}
RECORDS = [{"text": "one"}, {"text": "zwei"}, {"messages": [{"role": "user", "content": "x"}], "text": ""}]
KINDS = {
    "plan": Kind(lambda f: written(a_plan().to_json())(f), lambda path: StepPlan.from_json(path.read_text("latin-1"))),
    "cost model": Kind(written(COST.to_json()), lambda path: plan_by(CostModel.from_json(path.read_text("latin-1")))),
    "model": Kind(written(MODEL), load_model),
    "options": Kind(written(yaml.safe_dump(OPTIONS)), read_config, "yaml"),
    "costs": Kind(write_costs, read_costs),
    "lengths": Kind(written("\n".join(map(str, LENGTHS))), read_lengths, "bytes"),
    "checkpoint": Kind(write_checkpoint, lambda path: open_checkpoint(path.parent)),
    "store": Kind(write_store, lambda path: open_store(path.parent)),
    "records": Kind(written("\n".join(map(json.dumps, RECORDS)), "a.jsonl"), read_records, "lines"),
}


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside of one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def change_value(value: Any, draw: random.Random) -> Any:
    """Something strange in a random place, a value that is gone, or one that stands elsewhere, too."""
    value = copy.deepcopy(value)
    *way, last = draw.choice(places(value)[1:]) or (None,)
    at = value
    for key in way:
        at = at[key]
    action = draw.randrange(6)
    if action == 0:
        del at[last]
    elif action == 1:
        strange = draw.choice([text for text in STRANGE if isinstance(text, str)])
        at.update({strange: at[last]}) if isinstance(at, dict) else at.append(at[last])
    elif action == 2:
        at[last] = [at[last]]
    else:
        at[last] = draw.choice(STRANGE)
    return value


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content) + 1)
    stop = min(len(content), start + draw.choice((0, 1, 1, 8, 100)))
    put = draw.choice((b"", b"\0", b"9", b"-", b"[" * 20_000, b"\xff\xfe", bytes(draw.choices(range(256), k=8))))
    before = content[:start]
    return draw.choice((before, before + put + content[stop:], before + put + content[start:]))


def changed(content: bytes, form: str, draw: random.Random) -> bytes:
    if form == "bytes" or draw.random() < 0.3:
        return change_bytes(content, draw)
    if form == "yaml":
        return yaml.safe_dump(change_value(yaml.safe_load(content), draw)).encode(errors="surrogatepass")
    if form == "lines":
        lines = content.splitlines()
        place = draw.randrange(len(lines))
        lines[place] = json.dumps(change_value(json.loads(lines[place]), draw)).encode()
        return b"\n".join(lines)
    value = json.loads(content)
    for _ in range(draw.randint(1, 3)):
        value = change_value(value, draw) if isinstance(value, (dict, list)) and value else draw.choice(STRANGE)
    return json.dumps(value).encode()


def lines(content: object) -> Callable[[Path], Path]:
    return written(json.dumps(content) + "\n")


FILES = KINDS | {
    "calibration": Kind(written({}), Calibration.load),
    "plan": Kind(written(a_plan().to_json(), "plan.json"), StepPlan.load),
    "metrics": Kind(lines({"step": 1}), read_lines),
    "documents": Kind(lambda f: write_store(f).with_name("documents.npy"), lambda path: open_store(path.parent)),
    "checksums": Kind(lambda f: write_store(f).with_name("checksums.npy"), lambda path: open_store(path.parent)),
    "tokens": Kind(lambda f: write_store(f).with_name("tokens-0.bin"), lambda path: open_store(path.parent)),
    "weights": Kind(
        lambda f: next(write_checkpoint(f).parent.glob("*.distcp")), lambda path: open_checkpoint(path.parent)
    ),
}
del FILES["cost model"]


@pytest.mark.parametrize("kind", FILES)
def test_files_that_never_end(kind: str, tmp_path: Path) -> None:
    """A pipe, an endless device and a file of 1 TB in the place of each are refused at once."""
    given = FILES[kind]
    path = given.write(tmp_path)
    for plant in (os.mkfifo, lambda place: place.symlink_to("/dev/zero"), sparse):
        path.unlink()
        plant(path)
        if plant is sparse and kind == "records":
            continue  # data may be of any size
        with pytest.raises((hdp.InvalidUsage, OSError)):
            given.read(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_files(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind]
    path = given.write(tmp_path)
    good = path.read_bytes()
    given.read(path)
    refused = 0
    cases = -(-CASES // len(KINDS))
    for seed in range(cases):
        content = changed(good, given.form, random.Random(f"{kind} {seed}"))
        path.write_bytes(content)
        try:
            given.read(path)
        except hdp.InvalidUsage:
            refused += 1
        except Exception as error:
            raise AssertionError(f"case {seed}: {content[:300]!r}") from error
    assert refused > cases / 5
