"""Stores of tokens: what was written comes back, in one order on any number of ranks, and every damage is told."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdpcomm as hdp
from hdpcomm.data import BatchReader, build_data, is_indexed, open_corpus, open_store
from hdpcomm.data.corpus import content_digest, corpus_of
from hdpcomm.data.token_store import BLOCK_BYTES, is_store
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import json_checksum
from hdpcomm.testing import run_threads


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hdpcomm/data"


def write_lines(path: Path, count: int, seed: int = 0) -> list[bytes]:
    """JSONL of ``count`` texts of very different lengths; the texts that are not empty."""
    generator = random.Random(seed)
    texts = ["é" * generator.randrange(4) + "x" * generator.choice((0, 1, 7, 300, 5000)) + str(i) for i in range(count)]
    texts[count // 2] = ""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [text.encode() for text in texts if text]


def documents(store: Any) -> list[bytes]:
    return [store.tokens(i, 0, int(n)).astype(np.uint8).tobytes() for i, n in enumerate(store.lengths)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_order_does_not_depend_on_the_ranks(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdpcomm.data.records._UNIT_BYTES", 10_000)
    texts = write_lines(tmp_path / "a.jsonl", 200)
    (tmp_path / "b.txt").write_bytes(b"plain text")

    def build() -> list[bytes]:
        with hdp.init() as comm:
            store = build_data([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "out", comm=comm)
            return documents(store)

    for found in run_threads(build, size):
        assert found == [*texts, b"plain text"]
    assert open_store(tmp_path / "out").check() == sum(map(len, texts)) + 10
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_digest_does_not_depend_on_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is gone is built again, maybe by other ranks, and the run that read it goes on."""
    monkeypatch.setattr("hdpcomm.data.records._UNIT_BYTES", 3_000)
    write_lines(tmp_path / "a.jsonl", 200)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "b.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 9)

    def digest(cache: str) -> str:
        with hdp.init() as comm:
            paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
            return content_digest(open_corpus(paths, context=100, cache=tmp_path / cache, comm=comm))

    digests = {found for size in (1, 2, 3) for found in run_threads(digest, size, str(size))}
    assert len(digests) == 1
    (tmp_path / "b.jsonl").write_text(f"{json.dumps({'messages': chat})}\n".replace("yes", "yea") * 9)
    assert run_threads(digest, 2, "other")[0] not in digests


def test_a_store_of_an_older_version_keeps_its_digest(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    store = build_data([tmp_path / "a.jsonl"], tmp_path / "out")
    older = replace(store, content="")
    assert store.content
    assert content_digest(corpus_of("a", [older], context=9)) != content_digest(corpus_of("a", [store], context=9))
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    del meta["content"], meta["sha256"]
    (tmp_path / "out/meta.json").write_text(json.dumps(meta | {"sha256": json_checksum(meta)}))
    assert open_store(tmp_path / "out").content == ""


def test_a_path_that_is_named_twice(tmp_path: Path, cache: Path) -> None:
    texts = write_lines(tmp_path / "a.jsonl", 5)
    corpus = open_corpus([tmp_path / "a.jsonl"] * 2, context=9000, weights={0: (1, 0), 3: (1, 1)})
    assert [bytes(corpus.read(i).tolist()) for i in range(len(corpus))] == texts * 2
    assert len(list(cache.iterdir())) == 1


def test_lines_at_the_borders_of_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for unit in (1, 2, 13, 14, 15, 1000):
        monkeypatch.setattr("hdpcomm.data.records._UNIT_BYTES", unit)
        path = tmp_path / f"{unit}.jsonl"
        path.write_text('{"text":"ab"}\n\n{"text":"c"}\n{"text":"def"}')
        assert documents(build_data([path], tmp_path / str(unit))) == [b"ab", b"c", b"def"]


def test_the_cache_is_found_again_and_follows_the_files(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = write_lines(path, 20)
    assert not is_indexed([path])
    corpus = open_corpus([path], context=1000)
    (kept,) = cache.iterdir()
    before = (kept / "meta.json").stat().st_mtime_ns
    assert is_indexed([path])
    again = open_corpus([path], context=1000)
    assert (kept / "meta.json").stat().st_mtime_ns == before
    assert (again.sequences == corpus.sequences).all()
    assert bytes(pickle.loads(pickle.dumps(again)).read(0).tolist()) == texts[0]
    write_lines(path, 21, seed=1)
    assert not is_indexed([path])
    assert len(open_corpus([path], context=1000).documents) == 20
    assert len(list(cache.iterdir())) == 2
    assert not is_indexed([path], text_field="body")


def test_a_part_is_what_the_whole_has_there(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 30)
    corpus = open_corpus([tmp_path / "a.jsonl"], context=300)
    reader = BatchReader(corpus, tuple(range(len(corpus))))
    generator = random.Random(3)
    for sequence in range(len(corpus)):
        tokens, labels = reader(sequence)
        assert tokens.tolist() == corpus.read(sequence).tolist()
        assert labels.tolist() == [*tokens.tolist()[1:], -100]
        start, stop = sorted((generator.randrange(len(tokens) + 1), generator.randrange(len(tokens) + 1)))
        for first, last in ((start, stop), (0, 0), (len(tokens) - 1, len(tokens))):
            part = reader.part(sequence, first, last)
            assert [each.tolist() for each in part] == [tokens[first:last].tolist(), labels[first:last].tolist()]
    with pytest.raises(InvalidUsage, match="tokens 0 to 999 were asked for"):
        corpus.part(0, 0, 999)


def test_only_the_blocks_of_a_part_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * (5 * BLOCK_BYTES)}) + "\n")
    store = build_data([tmp_path / "a.jsonl"], tmp_path / "out")
    store.tokens(0, 3 * BLOCK_BYTES + 5, 100)
    assert store.checked["tokens-0.bin"].tolist() == [False, False, False, True, False]
    store.tokens(0, BLOCK_BYTES - 1, 2)
    assert store.checked["tokens-0.bin"].tolist() == [True, True, False, True, False]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["tokens-0.bin", "documents.npy", "checksums.npy", "meta.json"])
def test_damage_is_told_and_a_cache_built_again(
    tmp_path: Path, cache: Path, name: str, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    texts = write_lines(path, 20)
    build_data([path], out)
    open_corpus([path], context=9)
    (kept,) = cache.iterdir()
    for folder in (out, kept):
        harm(folder / name)
    with pytest.raises(InvalidUsage, match=r"damaged|holds no tokens|has format|not JSON"):
        open_store(out).check()
    if name == "tokens-0.bin" and harm is flip:  # seen only where it is read
        corpus = open_corpus([path], context=10_000)
        with pytest.raises(InvalidUsage, match=r"tokens-0.bin: damaged between bytes 0 and .*build it again"):
            corpus.read(0)
        return
    corpus = open_corpus([path], context=10_000)
    assert bytes(corpus.read(0).tolist()) == texts[0]
    assert "built again now" in caplog.text


def test_an_error_is_that_of_the_first_line_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdpcomm.data.records._UNIT_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    write_lines(path, 100)
    lines = path.read_text().splitlines()
    lines[40], lines[77] = "{", "[]"
    path.write_text("\n".join(lines))

    def told() -> str:
        with hdp.init() as comm:
            try:
                open_corpus([path], context=9, comm=comm)
            except InvalidUsage as error:
                text = str(error)
            comm.barrier()  # the communicator is as usable as before
            return text

    for text in run_threads(told, 3):
        assert text.startswith(f"{path}:41: this line is not JSON")
    left = list((tmp_path / "cache/hdpcomm/data").iterdir())
    assert left == []


def test_what_a_killed_builder_left_is_removed_after_a_day(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path, 5)
    old, young = tmp_path / ".out.aaaa.partial", tmp_path / ".out.bbbb.partial"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))
    build_data([path], out)
    assert not old.exists()
    assert young.exists()
    with pytest.raises(InvalidUsage, match="is there already; give another folder, or delete it"):
        build_data([path], out)


def test_stores_and_files_make_one_corpus(tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "a.jsonl", 6)
    (tmp_path / "b.txt").write_text("plain")
    build_data([tmp_path / "a.jsonl"], tmp_path / "out")
    corpus = open_corpus([tmp_path / "b.txt", tmp_path / "out"], context=10_000)
    assert [bytes(corpus.read(i).tolist()) for i in range(len(corpus))] == [b"plain", *texts]
    assert is_indexed([tmp_path / "b.txt", tmp_path / "out"])


def test_held_out_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 41)
    corpus = open_corpus([tmp_path / "a.jsonl"], context=300)
    rest, held = corpus.split(0.25, seed=3)
    kept, out = ({int(d) for d in each.sequences[:, 0]} for each in (rest, held))
    assert len(out) == 10
    assert kept | out == set(range(40))
    assert not kept & out
    assert (corpus.split(0.25, seed=3)[1].sequences == held.sequences).all()
    assert not np.array_equal(corpus.split(0.25, seed=4)[1].sequences, held.sequences)
    for wrong in (0.0, 1.0, float("nan")):
        with pytest.raises(InvalidUsage, match="give a number between 0 and 1"):
            corpus.split(wrong, seed=0)
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(InvalidUsage, match="1 document leaves nothing to train on"):
        open_corpus([tmp_path / "one.txt"], context=3).split(0.5, seed=0)


def test_runs_that_build_the_same_at_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = write_lines(path, 50)
    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(lambda _: open_corpus([path], context=10_000), range(12)))
    for corpus in opened:
        assert [bytes(corpus.read(i).tolist()) for i in range(len(corpus))] == texts
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, 5)
    with pytest.raises(InvalidUsage, match=r"cannot be made \(Not a directory\); give a folder .* \(--data-cache"):
        open_corpus([path], context=9, cache=path / "below")


def test_no_bit_of_meta_json_has_another_meaning(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    out = tmp_path / "store"
    right = documents(build_data([tmp_path / "a.jsonl"], out))
    meta = out / "meta.json"
    data = meta.read_bytes()
    for place in range(len(data)):
        for bit in range(8):
            meta.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            assert is_store(out)
            with contextlib.suppress(InvalidUsage):
                assert documents(open_store(out)) == right  # the bit was one of a space


def test_stores_of_another_format_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    out = tmp_path / "store"
    build_data([tmp_path / "a.jsonl"], out)
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps(meta | {"format": 1}))
    with pytest.raises(InvalidUsage, match="has format 1, and this hdpcomm reads format 2 or 3; build it again"):
        open_store(out)
