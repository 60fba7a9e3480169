"""Corpora: sequences have the content of the files, and every bad input has its own message."""

from __future__ import annotations

import json
import os
import pickle
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdpcomm.data import open_corpus, standard_library
from hdpcomm.data.records import looks_like_text
from hdpcomm.errors import InvalidUsage


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def text_of(corpus, sequence):
    tokens = corpus.read(sequence)
    assert tokens.dtype == torch.int64
    assert len(tokens) == corpus.lengths[sequence]
    return bytes(tokens.tolist())


def test_text_file_is_read_back_in_pieces(tmp_path):
    data = bytes(range(32, 127)) * 3
    (tmp_path / "a.txt").write_bytes(data)
    corpus = open_corpus([tmp_path / "a.txt"], context=100)
    assert corpus.lengths.tolist() == [100, 100, 85]
    assert b"".join(text_of(corpus, i) for i in range(3)) == data
    assert corpus.num_cut == 1
    assert corpus.num_tokens == len(data)
    assert "1 document longer than the context of 100 was cut into pieces" in corpus.describe()


def test_nothing_is_said_of_cutting_when_nothing_was_cut(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    assert "cut into" not in open_corpus([tmp_path], context=5).describe()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=8),
    context=st.integers(1, 70),
    blank=st.booleans(),
)
def test_jsonl_gives_the_texts_in_order(tmp_path, texts, context, blank):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"n": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    path.write_text(("\n\n" if blank else "\n").join(lines), encoding="utf-8")
    wanted = [text.encode() for text in texts if text]
    if not wanted:
        with pytest.raises(InvalidUsage, match="every line has an empty text"):
            open_corpus([path], context=context)
        return
    corpus = open_corpus([path], context=context)
    assert max(corpus.lengths) <= context
    found = [b""] * len(corpus.documents)
    for i in range(len(corpus)):
        found[corpus.sequences[i, 0]] += text_of(corpus, i)
    assert found == wanted


def test_text_field_and_lone_surrogates(tmp_path):
    path = tmp_path / "a.ndjson"
    path.write_text('{"body": "\\ud800x", "text": 3}\n')
    assert text_of(open_corpus([path], context=9, text_field="body"), 0) == b"\xed\xa0\x80x"


def test_folder_is_in_a_fixed_order_without_binary_empty_and_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "lines.jsonl").write_text('{"text": "json"}\n')
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    os.symlink(tmp_path, tmp_path / "b" / "loop")
    corpus = open_corpus([tmp_path], context=100)
    assert [text_of(corpus, i) for i in range(len(corpus))] == [b"json", b"one", b"two"]


def test_several_paths_keep_their_order(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).write_text(name)
    corpus = open_corpus([tmp_path / "y", str(tmp_path / "x")], context=4)
    assert [text_of(corpus, i) for i in range(2)] == [b"y", b"x"]


def test_a_corpus_can_be_pickled(tmp_path):
    (tmp_path / "a").write_text("text")
    corpus = pickle.loads(pickle.dumps(open_corpus([tmp_path], context=4)))
    assert text_of(corpus, 0) == b"text"


def test_standard_library_is_hundreds_of_short_blocks_for_each_long_one():
    corpus = standard_library(context=65536)
    assert corpus.num_tokens > 1_000_000
    assert np.median(corpus.lengths) < 500
    assert 0 < (corpus.lengths > 4096).mean() < 0.01
    for block in (text_of(corpus, i) for i in range(200)):
        lines = block.rstrip().split(b"\n")
        depths = [len(line) - len(line.lstrip()) for line in lines]
        assert all(line.strip() for line in lines), block
        assert depths == sorted(depths), block
    sizes = [path.stat().st_size for path in corpus.sources[0].files]
    assert corpus.num_tokens == sum(sizes)
    first = b"".join(text_of(corpus, i) for i in range(200))
    assert first == b"".join(path.read_bytes() for path in corpus.sources[0].files[:40])[: len(first)]
    assert corpus.lengths.max() == 65536
    assert corpus.num_cut > 0
    assert not any("site-packages" in str(path) for path in corpus.sources[0].files)
    assert all(
        str(path).startswith(sysconfig.get_path("stdlib")) and path.suffix == ".py" for path in corpus.sources[0].files
    )
    again = standard_library(context=65536)
    assert (again.sequences == corpus.sequences).all()


def test_standard_library_with_whole_files():
    corpus, blocks = standard_library(context=65536, whole_every=8), standard_library(context=65536)
    assert corpus.sources[0].files == blocks.sources[0].files
    assert corpus.num_tokens == blocks.num_tokens
    assert (corpus.lengths > 8192).sum() > 1.2 * (blocks.lengths > 8192).sum()  # 1.3 with the files of Python 3.11.2
    assert np.median(corpus.lengths) < 500
    eighth = corpus.sources[0].files[7].read_bytes()
    assert eighth[:65536] in [text_of(corpus, i) for i in np.flatnonzero(corpus.lengths == min(len(eighth), 65536))]


def test_standard_library_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(InvalidUsage, match="has no source files here; give a corpus with --data"):
        standard_library(context=64)


BAD = {
    "missing": (lambda _: None, "no such file or folder"),
    "empty": (lambda p: p.touch(), "the file is empty"),
    "binary": (lambda p: p.write_bytes(bytes(range(256)) * 4), "this is a binary file"),
    "noise": (lambda p: p.write_bytes(bytes(b for b in range(1, 256)) * 4), "this is a binary file"),
    "empty folder": (lambda p: p.mkdir(), "this folder holds no text file"),
    "folder of binaries": (
        lambda p: (p.mkdir(), (p / "a").write_bytes(b"\0\1"), (p / "b").touch()),
        "this folder holds no text file",
    ),
    "empty texts.jsonl": (lambda p: p.write_text('{"text": ""}\n\n'), "every line has an empty text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_paths(tmp_path, name):
    path = tmp_path / name
    make, message = BAD[name]
    make(path)
    with pytest.raises(InvalidUsage, match=message) as caught:
        open_corpus([path], context=64)
    assert str(path) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(InvalidUsage, match="cannot be read"):
        open_corpus([path], context=64)


LINES = {
    "{bad": "this line is not JSON",
    "[1, 2]": "this line holds a JSON list, an object with the field 'text' was expected",
    '{"body": "a"}': r"there is no field 'text' or 'messages' \(fields: 'body'\); choose one with --text-field",
    '{"text": 7}': "the field 'text' holds a int, text was expected",
}


@pytest.mark.parametrize("line", LINES)
def test_bad_jsonl_lines_name_file_and_line(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(InvalidUsage, match=LINES[line]) as caught:
        open_corpus([path], context=64)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_invalid_utf8_in_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InvalidUsage, match=r"a\.jsonl:1: this line is not JSON"):
        open_corpus([path], context=64)


def test_bad_arguments():
    with pytest.raises(InvalidUsage, match="no path was given"):
        open_corpus([], context=4)
    with pytest.raises(InvalidUsage, match="context is 0"):
        open_corpus(["x"], context=0)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("long text")
    corpus = open_corpus([path], context=64)
    path.write_text("short")
    with pytest.raises(InvalidUsage, match="9 bytes were expected and 5 found; the file changed"):
        corpus.read(0)
    path.unlink()
    with pytest.raises(InvalidUsage, match="cannot be read any more"):
        corpus.read(0)
    with pytest.raises(InvalidUsage, match="sequence 1 was asked for; this corpus has 0 to 0"):
        corpus.read(1)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (b"plain", True),
        ("für Größe".encode(), True),
        ("für die Größe der Straße".encode("latin-1"), True),
        ("日本語".encode()[:-1], True),  # cut inside a character
        (b"a\0b", False),
        (os.urandom(0) + bytes(range(128, 256)), False),
        (b"\x01\x02\x03abc", False),
    ],
)
def test_what_counts_as_text(head, text):
    assert looks_like_text(head) is text


def test_paths_may_have_any_names(tmp_path):
    path = Path(tmp_path, "ünï [x] %s {0}.txt")
    path.write_text("ok")
    assert text_of(open_corpus([path], context=8), 0) == b"ok"
