"""Runs whose documents become tokens meanwhile: the same order on any number of ranks, and after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import LoaderService, open_stream
from hdpcomm.data.loader import blocks
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.run import Loading, MetricsLog, RunConfig, RunResult, Saving, Watching, read_metrics, train

CONFIG = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)
STEPS = 8
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": f"the {i}th text; " * (i % 7 * (i % 5) + 1)} for i in range(120)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def trained(
    data: str, out: str, resume: str | None = None, policies: tuple[str, ...] = ("balanced",), **changed: Any
) -> RunResult:
    """One rank of a run of 8 steps, saved every second one."""
    torch.set_num_threads(1)
    config = RunConfig(
        **{"model": CONFIG, "steps": STEPS, "capacity": 300, "tokens_per_step": 700, "policies": policies} | changed
    )
    saving = Saving(Path(out) / "checkpoints", every=2, resume=resume)
    loading = Loading(loaders=2, folder=Path(out) / "spool")
    with hdp.init() as comm, MetricsLog(Path(out) / f"metrics-{comm.rank}.jsonl") as log:
        stream = open_stream([data], context=300, block_bytes=900, shuffled=3, comm=comm)
        return train(comm, stream, config, saving=saving, watching=Watching(on_step=log.write), loading=loading)


def rows(out: Path, policy: str = "balanced") -> list[dict[str, Any]]:
    return [row for row in read_metrics(out / "metrics-0.jsonl") if row["policy"] == policy]


WHOLE: dict[str, Path] = {}


@pytest.fixture
def whole(ranks: Ranks, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on two ranks, made once."""
    if data not in WHOLE:
        out = tmp_path_factory.mktemp("whole")
        ranks(2, trained, data, str(out))
        WHOLE[data] = out
    return WHOLE[data]


def test_a_resumed_run_has_the_bits_of_the_whole_one(ranks: Ranks, data: str, whole: Path, tmp_path: Path) -> None:
    saved = whole / "checkpoints/step-4"
    results = ranks(2, trained, data, str(tmp_path), str(saved))
    assert [result.first_step for result in results] == [4, 4]
    assert [row["loss"] for row in rows(tmp_path)] == [row["loss"] for row in rows(whole)[4:]]
    assert list((tmp_path / "spool").iterdir()) == []
    assert os.listdir(whole / "spool") == []


def test_order_and_losses_on_other_ranks_and_meshes(ranks: Ranks, data: str, whole: Path, tmp_path: Path) -> None:
    wanted = rows(whole)
    for number, size, options in ((0, 1, {}), (1, 3, {}), (2, 2, {"pipeline": 2}), (3, 2, {"tensor": 2})):
        out = tmp_path / str(number)
        out.mkdir()
        ranks(size, trained_with, data, str(out), options)
        assert [row["tokens"] for row in rows(out)] == [row["tokens"] for row in wanted]
        assert [row["loss"] for row in rows(out)] == pytest.approx([row["loss"] for row in wanted], rel=1e-4)


def trained_with(data: str, out: str, options: dict[str, Any]) -> RunResult:
    return trained(data, out, None, **options)


def test_policies_side_by_side(ranks: Ranks, data: str, whole: Path, tmp_path: Path) -> None:
    ranks(2, trained, data, str(tmp_path), None, ("balanced", "static"))
    assert [row["loss"] for row in rows(tmp_path)] == pytest.approx([row["loss"] for row in rows(whole)], rel=1e-4)
    static = [row["loss"] for row in rows(tmp_path, "static")]
    assert static == pytest.approx([row["loss"] for row in rows(whole)], rel=1e-4)


def test_metrics_tell_what_loading_cost(whole: Path) -> None:
    found = rows(whole)
    assert all(row["loader_stall_s"] >= 0 for row in found)


def test_what_a_checkpoint_of_other_data_says(ranks: Ranks, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("other text " * 90)
    for message in ranks(2, refusal, str(tmp_path), str(tmp_path), str(whole)):
        assert "was saved on other data" in message
        assert "--loader" in message


def test_a_wrong_record_ends_all_ranks_alike(ranks: Ranks, tmp_path: Path) -> None:
    good = '{"text": "fine"}\n'
    (tmp_path / "a.jsonl").write_text(good * 400 + "{\n" + good)
    messages = ranks(2, refusal, str(tmp_path), str(tmp_path), None)
    assert len(set(messages)) == 1
    assert "a.jsonl:401: this line is not JSON" in messages[0]


def refusal(data: str, out: str, resume: str | None) -> str:
    try:
        trained(data, out, resume)
    except InvalidUsage as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_blocks_nobody(ranks: Ranks, data: str, tmp_path: Path, leaver: int) -> None:
    found = ranks(2, sequences_with_a_leaver, data, str(tmp_path), leaver)
    alone = ranks(1, sequences_with_a_leaver, data, str(tmp_path), -1)
    assert found[1 - leaver] == alone[0]
    assert list(tmp_path.iterdir()) == []


def sequences_with_a_leaver(data: str, folder: str, leaver: int) -> list[bytes]:
    blocks._TAKE_OVER_S = 0.05
    found: list[bytes] = []
    with hdp.init() as comm:
        stream = open_stream([data], context=300, block_bytes=900, comm=comm)
        with LoaderService(stream, tokens=700, comm=comm, folder=Path(folder), prefetch=0) as loader:
            for step in range(0 if comm.rank == leaver else 30):
                reader = loader.reader(step)
                found += [bytes(reader(place)[0].tolist()) for place in range(len(reader.batch.sequences))]
                loader.done(step + 1)
        comm.barrier()
    blocks._TAKE_OVER_S = 5.0
    return found
