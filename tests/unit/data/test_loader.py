"""The loader service in one process: each sequence once an epoch, the same order whoever makes it, and every error."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.data import ByteEncoder, LoaderService, open_corpus, open_stream
from hdpcomm.data.loader import blocks as loader_blocks
from hdpcomm.data.loader.order import StreamSampler
from hdpcomm.errors import Aborted, CommTimeout, Error, InvalidUsage


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not [each.name for each in threading.enumerate() if each.name.startswith("hdpcomm-loader")]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def texts(tmp_path):
    """Lengths of 1, of the context, around it, and far above; in JSONL and text files."""
    lengths = [1, 63, 64, 65, 128, 129, 500, 2, 2, 2, 64, 64] + [7 * i % 90 + 1 for i in range(60)]
    made = [f"{i}:{'ab' * 300}"[:length] for i, length in enumerate(lengths)]
    folder = tmp_path / "texts"
    folder.mkdir()
    jsonl(folder / "a.jsonl", *({"text": text} for text in [*made[:50], ""]))
    for i, text in enumerate(made[50:]):
        (folder / f"{i}.txt").write_text(text)
    return folder, made


def epoch_of(loader: LoaderService, epoch: int, step: int = 0) -> tuple[list[bytes], int]:
    """The texts of an epoch that begins with this step, and the first step after it."""
    found = []
    while (batch := loader.batch(step)).epoch == epoch:
        reader = loader.reader(step)
        found += [bytes(reader(place)[0].tolist()) for place in range(len(batch.sequences))]
        step += 1
        loader.done(step)
    return found, step


def pieces(texts: list[str], context: int) -> Counter[bytes]:
    return Counter(text[at : at + context].encode() for text in texts for at in range(0, len(text), context))


@pytest.mark.parametrize(("block_bytes", "loaders", "prefetch"), [(1 << 18, 1, 0), (700, 3, 2), (90, 2, 40)])
def test_each_sequence_once_an_epoch(texts, block_bytes, loaders, prefetch):
    folder, made = texts
    stream = open_stream([folder], context=64, block_bytes=block_bytes, shuffled=3)
    with LoaderService(stream, tokens=200, loaders=loaders, prefetch=prefetch) as loader:
        first, step = epoch_of(loader, 0)
        second, _ = epoch_of(loader, 1, step)
    assert Counter(first) == Counter(second) == pieces(made, 64)
    assert first != second


def test_the_order_depends_on_nothing_but_the_stream_and_the_seed(texts):
    stream = pickle.loads(pickle.dumps(open_stream([texts[0]], context=64, block_bytes=500, shuffled=3)))

    def order(**options):
        with LoaderService(stream, tokens=128, **options) as loader:
            return [loader.batch(step).sequences for step in range(60)]

    whole = order()
    assert order(loaders=3, prefetch=9) == order(prefetch=0) == whole
    assert order(seed=1) != whole


@pytest.mark.parametrize("stop", [0, 1, 17, 40])
def test_it_goes_on_from_its_state(texts, stop):
    stream = open_stream([texts[0]], context=64, block_bytes=500, shuffled=3)
    with LoaderService(stream, tokens=128) as loader:
        for step in range(stop):
            loader.batch(step)
            loader.done(step + 1)
        state = json.loads(json.dumps(loader.state(stop)))
        rest = [loader.batch(step) for step in range(stop, 60)]
    with LoaderService(stream, tokens=128, state=state, prefetch=5) as loader:
        assert [loader.batch(step) for step in range(stop, 60)] == rest


@settings(max_examples=50, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(1, 20), max_size=9), min_size=1, max_size=9).filter(any),
    tokens=st.integers(20, 90),
    shuffled=st.integers(1, 10),
    seed=st.integers(0, 5),
)
def test_batches_of_any_blocks(blocks, tokens, shuffled, seed):
    asked: list[int] = []
    known: set[int] = set()

    def lengths_of(place):
        assert place.position in known
        asked.append(place.position)
        return np.array(blocks[place.block], dtype=np.int64)

    def sampler(state=None):
        return StreamSampler(
            len(blocks), lengths_of, lambda places: known.update(place.position for place in places),
            tokens=tokens, seed=seed, shuffled=shuffled, state=state,
        )  # fmt: skip

    one, batches = sampler(), []
    while not batches or batches[-1].epoch < 2:
        batches.append(one.next())
    everything = sorted((block, i, length) for block, rows in enumerate(blocks) for i, length in enumerate(rows))
    for epoch in (0, 1):
        assert sorted(row[1:] for each in batches for row in each.sequences if each.epoch == epoch) == everything
    assert all(0 < sum(each.lengths) <= tokens for each in batches)
    assert asked[: 2 * len(blocks)] == list(range(2 * len(blocks)))
    for at in (0, len(batches) // 2):
        other = sampler(json.loads(json.dumps(batches[at].state)))
        assert [other.next() for _ in batches[at + 1 :]] == batches[at + 1 :]


def test_parts_have_the_labels_of_an_indexed_corpus(tmp_path):
    """Chats count for the loss in parts only; a corpus with an index is the oracle."""
    chat = [{"role": "user", "content": "u" * 40}, {"role": "assistant", "content": "answer " * 9}]
    long = [*chat, {"role": "user", "content": "x" * 300}, *chat]
    path = jsonl(tmp_path / "c.jsonl", {"messages": chat}, {"text": "plain " * 30}, {"messages": long})
    corpus = open_corpus([path], context=50)
    wanted = {}
    for sequence in range(len(corpus)):
        tokens, labels = corpus.part(sequence, 0, int(corpus.lengths[sequence]))
        wanted[bytes(tokens.tolist()), tuple(labels.tolist())] = sequence
    with LoaderService(open_stream([path], context=50), tokens=50 * 40) as loader:
        reader, lengths = loader.reader(0), loader.batch(0).lengths
        assert len(lengths) == len(corpus)
        for place, length in enumerate(lengths):
            tokens, labels = reader(place)
            sequence = wanted[bytes(tokens.tolist()), tuple(labels.tolist())]
            for start, stop in [(0, 0), (0, 1), (length // 3, length // 2), (length - 1, length)]:
                ours, theirs = reader.part(place, start, stop), corpus.part(sequence, start, stop)
                assert torch.equal(ours[0], theirs[0])
                assert torch.equal(ours[1], theirs[1])
        with pytest.raises(
            InvalidUsage, match=rf"tokens 0 to {lengths[0] + 1} were asked for; sequence \d+ has {lengths[0]}"
        ):
            reader.part(0, 0, lengths[0] + 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "a.jsonl:3: this line is not JSON"),
        ('{"text": 5}', "a.jsonl:3: the field 'text' holds a int"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n' + row + "\n")
    with LoaderService(open_stream([path], context=9), tokens=20) as loader:
        for _ in range(2):
            with pytest.raises(InvalidUsage, match=message) as error:
                loader.batch(0)
            assert "\n" not in str(error.value)


class Odd(ByteEncoder):
    """Fails, or waits, where a text says so."""

    def __init__(self, go: threading.Event | None = None) -> None:
        self.go = go

    def text(self, text):
        if self.go is not None:
            self.go.wait(60)
        if "bad" in text:
            raise ZeroDivisionError("in the tokenizer")
        return super().text(text)


def test_what_a_tokenizer_raises_is_told_with_the_place(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "bad"})
    with (
        LoaderService(open_stream([path], context=9, encoder=Odd()), tokens=20) as loader,
        pytest.raises(Error, match=r"a.jsonl from byte 0: ZeroDivisionError: in the tokenizer; look at"),
    ):
        loader.batch(0)


def test_waits_end(tmp_path):
    """By the deadline, and when the service is stopped."""
    go = threading.Event()
    stream = open_stream([jsonl(tmp_path / "a.jsonl", {"text": "one"})], context=9, encoder=Odd(go))
    with LoaderService(stream, tokens=20, deadline_s=0.2) as loader:
        try:
            with pytest.raises(CommTimeout, match=r"0\.2 s.*: reading or the tokenizer is stuck"):  # of batch or block
                loader.batch(0)
        finally:
            go.set()
    go.clear()
    with LoaderService(stream, tokens=20) as loader:
        timer = threading.Timer(0.1, lambda: (loader.stop(), go.set()))
        timer.start()
        with pytest.raises(Aborted, match=r"the loader was closed while it (waited|read)"):
            loader.batch(0)
        timer.join()


def test_close_does_not_wait_for_a_stuck_tokenizer(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loader_blocks, "_CLOSE_S", 0.1)
    go = threading.Event()
    stream = open_stream([jsonl(tmp_path / "a.jsonl", {"text": "one"})], context=9, encoder=Odd(go))
    loader = LoaderService(stream, tokens=20, deadline_s=0.2)
    with pytest.raises(CommTimeout):
        loader.batch(0)
    try:
        loader.close()
        assert re.search(r"still reads \S+a.jsonl from byte 0: reading or the tokenizer", caplog.text)
    finally:
        go.set()
        monkeypatch.undo()
        loader.close()


def test_close_reads_no_further_documents(tmp_path):
    class Counting(ByteEncoder):
        texts = 0
        begun, go = threading.Event(), threading.Event()

        def text(self, text):
            self.texts += 1
            self.begun.set()
            self.go.wait(60)
            return super().text(text)

    encoder = Counting()
    stream = open_stream([jsonl(tmp_path / "a.jsonl", *[{"text": "one"}] * 50)], context=9, encoder=encoder)
    loader = LoaderService(stream, tokens=20, loaders=1)
    encoder.begun.wait(60)
    loader.stop()
    encoder.go.set()
    loader.close()
    assert encoder.texts == 1


def test_a_process_ends_although_a_tokenizer_is_stuck(tmp_path):
    """Also where nobody closes the loader."""
    jsonl(tmp_path / "a.jsonl", {"text": "one"})
    script = """
import sys, threading
from hdpcomm.data import ByteEncoder, LoaderService, open_stream
begun = threading.Event()
class Stuck(ByteEncoder):
    def text(self, text):
        begun.set()
        threading.Event().wait()
loader = LoaderService(open_stream([sys.argv[1]], context=9, encoder=Stuck()), tokens=20)
assert begun.wait(60)
print("begun")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.jsonl")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr


def test_files_must_stay_as_they_are(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"})
    stream = open_stream([path], context=9)
    jsonl(path, {"text": "other"})
    with (
        LoaderService(stream, tokens=20) as loader,
        pytest.raises(InvalidUsage, match=r"a.jsonl: had 16 bytes when the run began and has been changed since"),
    ):
        loader.batch(0)
    path.unlink()
    with LoaderService(stream, tokens=20) as loader, pytest.raises(InvalidUsage, match="cannot be read any more"):
        loader.batch(0)


def test_data_without_a_token(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": ""}, {"messages": [{"role": "user", "content": "no answer"}]})
    with (
        LoaderService(open_stream([path], context=9), tokens=20) as loader,
        pytest.raises(InvalidUsage, match="the data has no document with a token to train on"),
    ):
        loader.batch(0)


def test_bad_arguments(tmp_path, texts):
    stream = open_stream([texts[0]], context=64)
    for arguments, message in (
        ({"tokens": 63}, "a step of 63 tokens cannot hold a sequence of 64; raise --tokens-per-step"),
        ({"tokens": 64, "loaders": 0}, "loaders is 0"),
        ({"tokens": 64, "prefetch": -1}, "prefetch is -1"),
        ({"tokens": 64, "deadline_s": 0}, "deadline_s is 0"),
        ({"tokens": 64, "state": {"step": 3}}, "this is no state of a loader"),
        ({"tokens": 64, "folder": texts[0] / "0.txt"}, "no folder can be made there"),
    ):
        with pytest.raises(InvalidUsage, match=message):
            LoaderService(stream, **arguments)
    with LoaderService(stream, tokens=64) as loader:
        loader.done(3)
        with pytest.raises(InvalidUsage, match="step 2 was asked for, and 3 steps are done"):
            loader.batch(2)
        with pytest.raises(InvalidUsage, match="the state after 2 steps was asked for, and 3 steps are done"):
            loader.state(2)
    store = tmp_path / "store"
    store.mkdir()
    (store / "meta.json").write_text('{"kind": "hdpcomm tokens"}')
    for paths, message in (
        ([store], "holds tokens already"),
        ([], "no path was given"),
        ("text", "give a list of paths"),
        ([tmp_path / "none"], "no such file or folder"),
    ):
        with pytest.raises(InvalidUsage, match=message):
            open_stream(paths, context=9)


def test_a_full_disk_ends_the_wait(tmp_path, texts, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    stream = open_stream([texts[0]], context=64)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with LoaderService(stream, tokens=64, prefetch=0) as loader:
        monkeypatch.setattr(Path, "rename", full)
        with pytest.raises(Error, match=r"tokens cannot be written there .No space left on device.; make room"):
            loader.batch(0)


def test_what_was_made_is_removed(tmp_path, texts):
    """By the rank that made it; what a killed run left goes a day later."""
    parent = tmp_path / "blocks"
    stream = open_stream([texts[0]], context=64)
    left = parent / "loader-0123"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    with LoaderService(stream, tokens=64, folder=parent) as loader:
        loader.batch(0)
        mine = loader._blocks.folder
        assert list(parent.iterdir()) == [mine]
        with LoaderService(stream, tokens=64, folder=parent) as other:  # the same blocks
            assert other.batch(0) == loader.batch(0)
            assert other._blocks.folder == mine
        assert loader.reader(0)(0)[0].numel() == loader.batch(0).lengths[0]
    assert list(parent.iterdir()) == []


def test_a_block_that_somebody_removed_is_made_again(texts):
    folder, made = texts
    stream = open_stream([folder], context=64, block_bytes=500, shuffled=1)
    with LoaderService(stream, tokens=128, prefetch=0) as loader:
        loader.batch(0)
        for block in loader._blocks.folder.glob("block-*"):
            shutil.rmtree(block)
        assert Counter(epoch_of(loader, 0)[0]) == pieces(made, 64)


def test_used_blocks_make_room(texts, monkeypatch):
    monkeypatch.setattr(loader_blocks, "_KEPT_BYTES", 0)
    folder, made = texts
    stream = open_stream([folder], context=64, block_bytes=300, shuffled=2)
    with LoaderService(stream, tokens=128, prefetch=1) as loader:
        made_in = loader._blocks.folder
        most = 0
        for epoch, step in ((0, 0),):
            found, step = epoch_of(loader, epoch, step)
            most = len(list(made_in.glob("block-*")))
        again, _ = epoch_of(loader, 1, step)
    assert most < len(stream.blocks)
    assert Counter(found) == Counter(again) == pieces(made, 64)
