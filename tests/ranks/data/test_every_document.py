"""Each source gives the same tokens in one order on any number of ranks, and a run trains each once an epoch."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import BatchSampler, Corpus, build_data, open_corpus
from hdpcomm.errors import Error
from hdpcomm.models import LlamaConfig
from hdpcomm.run import RunConfig, Saving, Watching, train
from hdpcomm.testing import run_threads
from tests.unit.data.test_megatron import write as write_megatron


class Encoder:
    """Bytes by another name, as a tokenizer that also made the data of tokens."""

    name, fingerprint, vocabulary = "mine", "mine", 256

    def text(self, text: str | bytes) -> Any:
        return np.frombuffer(text if isinstance(text, bytes) else text.encode(), dtype=np.uint8).astype(np.int64)


def texts_of(name: str, count: int = 90) -> list[bytes]:
    drawn = random.Random(name)
    return [f"{name} {place} {'x' * int(250 * drawn.random() ** 6)}".encode() for place in range(count)]


def lines_of(name: str) -> bytes:
    return "".join(json.dumps({"text": text.decode()}) + "\n" for text in texts_of(name)).encode()


def text_folder(folder: Path) -> str:
    (folder / "texts").mkdir()
    for place, text in enumerate(texts_of("text_folder")):
        (folder / f"texts/{place:03}.txt").write_bytes(text)
    return str(folder / "texts")


def jsonl(folder: Path) -> str:
    (folder / "a.jsonl").write_bytes(lines_of("jsonl"))
    return str(folder / "a.jsonl")


def compressed(folder: Path) -> str:
    (folder / "a.json.gz").write_bytes(gzip.compress(lines_of("compressed")))
    return str(folder / "a.json.gz")


def columns(folder: Path, name: str, values: Sequence[Any]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": values}), folder / f"{name}.parquet", row_group_size=11)
    return f"{folder}/{name}.parquet"


def parquet(folder: Path) -> str:
    return columns(folder, "texts", [text.decode() for text in texts_of("parquet")])


def tokens(folder: Path) -> str:
    return columns(folder, "tokens", [list(text) for text in texts_of("tokens")])


def dataset(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    values = [list(text) for text in texts_of("dataset")]
    datasets.Dataset.from_dict({"text": values}).save_to_disk(str(folder / "dataset"))
    return str(folder / "dataset")


def megatron(folder: Path) -> str:
    documents = [[list(text[:9]), list(text[9:])] for text in texts_of("megatron")]
    write_megatron(folder / "megatron_text_document", documents, "uint16")
    return f"{folder}/megatron_text_document"


def store(folder: Path) -> str:
    (folder / "b.jsonl").write_bytes(lines_of("store"))
    build_data([folder / "b.jsonl"], folder / "store", encoder=Encoder())
    return str(folder / "store")


def url(folder: Path) -> str:
    fsspec.filesystem("memory").pipe(f"{folder}/c.jsonl", lines_of("url"))
    return f"memory:/{folder}/"


SOURCES: tuple[Callable[[Path], str], ...] = (
    text_folder, jsonl, compressed, parquet, tokens, dataset, megatron, store, url,
)  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_one_order_on_any_number_of_ranks(
    source: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdpcomm.data.records._UNIT_BYTES", 1000)
    monkeypatch.setattr("hdpcomm.data.records._UNIT_ROWS", 7)
    path = source(tmp_path)

    def documents(cache: str) -> list[bytes]:
        with hdp.init() as comm:
            corpus = open_corpus([path], context=1000, encoder=Encoder(), cache=tmp_path / cache, comm=comm)
        return [bytes(corpus.read(place).tolist()) for place in range(len(corpus))]

    for size in (1, 2, 4):
        for found in run_threads(documents, size, f"cache{size}"):
            assert found == texts_of(source.__name__)


STEPS, TOKENS = 24, 3000


def trained(paths: list[str], out: str, attempt: int, dies_at: int, resume: str | None) -> None:
    """One rank of a run that notes what it reads in each step; its last rank is killed behind step ``dies_at``."""
    torch.set_num_threads(1)
    reads: list[tuple[int, int, int]] = []
    part = Corpus.part

    def noted(corpus: Corpus, sequence: int, start: int, stop: int) -> Any:
        reads.append((sequence, start, stop))
        return part(corpus, sequence, start, stop)

    Corpus.part = noted  # type: ignore[method-assign]  # in a process of its own
    model = LlamaConfig(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8)
    config = RunConfig(model=model, steps=STEPS, capacity=1024, tokens_per_step=TOKENS, seed=5)
    with hdp.init() as comm, Path(out, f"reads-{attempt}-{comm.rank}.jsonl").open("w") as log:

        def on_step(_policy: str, metrics: Any, _costs: Any) -> None:
            print(json.dumps([metrics.step, reads]), file=log, flush=True)
            reads.clear()
            if metrics.step == dies_at and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        # A cache of each attempt: its index is made by other ranks than that of the run that goes on.
        corpus = open_corpus(paths, context=500, encoder=Encoder(), cache=Path(out, f"cache{attempt}"), comm=comm)
        reads.clear()
        saving = Saving(Path(out) / "checkpoints", every=4, resume=resume)
        train(comm, corpus, config, saving=saving, watching=Watching(on_step=on_step))


def noted_reads(out: Path, attempt: int) -> dict[int, list[tuple[int, int, int]]]:
    """Tokens that the ranks of an attempt have read together, by step."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for path in out.glob(f"reads-{attempt}-*.jsonl"):
        for line in path.read_text().splitlines():
            step, reads = json.loads(line)
            found.setdefault(step, []).extend(map(tuple, reads))
    return found


def test_a_killed_run_reads_each_document_once_an_epoch(tmp_path: Path) -> None:
    paths = [source(tmp_path) for source in (compressed, tokens, megatron, store)]
    with pytest.raises(Error):
        hdp.testing.spawn(trained, 2, paths, str(tmp_path), 0, 10, None, timeout=100.0)
    hdp.testing.spawn(trained, 3, paths, str(tmp_path), 1, -1, "auto", timeout=100.0)
    before, after = noted_reads(tmp_path, 0), noted_reads(tmp_path, 1)
    first = min(after)
    assert 4 < first <= 11
    steps = {step: reads for step, reads in before.items() if step < first} | after
    corpus = open_corpus(paths, context=500, encoder=Encoder(), cache=tmp_path / "cache0")
    assert [bytes(corpus.read(place).tolist()) for place in range(len(corpus))] == [
        text for name in ("compressed", "tokens", "megatron", "store") for text in texts_of(name)
    ]
    sampler = BatchSampler(corpus.lengths, tokens=TOKENS, seed=5)
    read: Counter[tuple[int, int]] = Counter()  # (sequence, token of it)
    for place, step in enumerate(sorted(steps)):
        batch = sampler.batch(place)
        own = Counter((sequence, token) for sequence, *part in steps[step] for token in range(*part))
        assert own == Counter((sequence, token) for sequence in batch.ids for token in range(corpus.lengths[sequence]))
        read += own
        if sampler.batch(place + 1).epoch > batch.epoch:  # all of it, as often as there were epochs
            assert set(read.values()) == {batch.epoch + 1}
            assert len(read) == corpus.num_tokens
    assert batch.epoch >= 1
