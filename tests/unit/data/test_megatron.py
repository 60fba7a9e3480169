"""Files of Megatron-Core: documents by the format's definition, on any number of ranks, and every damage is told."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.data import build_data, encoder_of, is_indexed, open_corpus
from hdpcomm.data.corpus import content_digest
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads

TYPES: dict[str, int] = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


class Encoder:
    """Stands for the tokenizer of a run, which nothing here asks for tokens."""

    def __init__(self, vocabulary: int = 100) -> None:
        self.name, self.fingerprint, self.vocabulary = "mine", "print of mine", vocabulary


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "int32", **changed: Any) -> None:
    """Documents of sequences of tokens, as the format is described; ``changed``: parts of the index, instead."""
    sequences = [sequence for document in documents for sequence in document]
    itemsize, first, pointers, places = np.dtype(dtype).itemsize, 0, [], [0]
    for sequence in sequences:
        pointers.append(first * itemsize)
        first += len(sequence)
    for document in documents:
        places.append(places[-1] + len(document))
    parts = {"magic": b"MMIDIDX\0\0", "version": 1, "code": TYPES[dtype], "sequences": len(sequences),
             "marks": len(places), "lengths": list(map(len, sequences)), "pointers": pointers, "places": places,
             "rest": b""} | changed  # fmt: skip
    head = parts["magic"] + struct.pack("<QBQQ", *(parts[name] for name in ("version", "code", "sequences", "marks")))
    arrays = ((parts["lengths"], "<i4"), (parts["pointers"], "<i8"), (parts["places"], "<i8"))
    Path(f"{prefix}.idx").write_bytes(
        head + b"".join(np.array(values, dtype=kind).tobytes() for values, kind in arrays) + parts["rest"]
    )
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(sequence, dtype=dtype).tobytes() for sequence in sequences))


def read(corpus: Any) -> list[list[int]]:
    return [corpus.read(sequence).tolist() for sequence in range(len(corpus))]


DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[7, 8, 9, 10]], [[11]]]
FLAT = [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11]]


@pytest.mark.parametrize("named", ["", ".bin", ".idx"])
@pytest.mark.parametrize("dtype", TYPES)
def test_documents(tmp_path: Path, dtype: str, named: str) -> None:
    write(tmp_path / "a.b_text_document", DOCUMENTS, dtype)
    path = f"{tmp_path}/a.b_text_document{named}"
    assert is_indexed([path], encoder=Encoder())
    corpus = open_corpus([path], context=10, encoder=Encoder())
    assert read(corpus) == FLAT
    assert read(pickle.loads(pickle.dumps(corpus))) == FLAT
    assert (corpus.encoder, corpus.vocabulary, corpus.num_documents) == ("print of mine", 100, 4)
    assert read(open_corpus([path], context=2, encoder=Encoder())) == [
        piece for each in FLAT for piece in (each[:2], each[2:4]) if piece
    ]
    assert not list(tmp_path.glob(".*"))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=3), min_size=1, max_size=9))
def test_any_documents(tmp_path: Path, documents: list[list[list[int]]]) -> None:
    write(tmp_path / "a", documents, "uint16")
    wanted = [flat for document in documents if (flat := [token for sequence in document for token in sequence])]
    if not wanted:
        with pytest.raises(InvalidUsage, match=r"a: no document with a token"):
            open_corpus([tmp_path / "a"], context=50, encoder=Encoder())
        return
    assert read(open_corpus([tmp_path / "a"], context=50, encoder=Encoder())) == wanted


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_mixtures(tmp_path: Path, size: int) -> None:
    write(tmp_path / "a", DOCUMENTS)
    write(tmp_path / "b", [[[20]] * 3], "uint16")

    def rank() -> tuple[list[list[int]], str, list[tuple[int, ...]]]:
        with hdp.init() as comm:
            paths = [tmp_path / "a", tmp_path / "b.idx"]
            corpus = open_corpus(paths, context=9, weights=[1, 3], encoder=Encoder(), comm=comm)
            sampler = corpus.sampler(tokens=9, seed=1)
            return read(corpus), content_digest(corpus), [sampler.batch(step).ids for step in range(9)]

    first, *others = run_threads(rank, size)
    assert all(other == first for other in others)
    assert first[0] == [*FLAT, [20, 20, 20]]
    write(tmp_path / "a", [[[2, 2, 3]], *DOCUMENTS[1:]])
    assert run_threads(rank, size)[0][1] != first[1]


@pytest.mark.parametrize(("value", "dtype"), [(100, "int32"), (-1, "int32"), (-1, "int8"), (60000, "uint16")])
def test_tokens_that_the_tokenizer_does_not_have(tmp_path: Path, value: int, dtype: str) -> None:
    write(tmp_path / "a", [[[1]], [[2, 3], [value]]], dtype)
    corpus = open_corpus([tmp_path / "a"], context=9, encoder=Encoder())
    assert corpus.read(0).tolist() == [1]
    assert corpus.part(1, 0, 1)[0].tolist() == [2]  # of a document, the part that is read is checked
    with pytest.raises(InvalidUsage, match=rf"a document 1: token {value:,}, and mine has 100; give the tokenizer"):
        corpus.read(1)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 2}, "it has version 2 and type 4"),
    "floats": ({"code": 7}, "it has version 1 and type 7"),
    "code": ({"code": 99}, "it has version 1 and type 99"),
    "magic": ({"magic": b"TNTIDX\0\0\0"}, "it does not begin like one"),
    "modes": ({"rest": bytes(5)}, r"bytes, and 142 were expected \(text alone\)"),
    "counts": ({"sequences": 1 << 60}, "were expected"),
    "pointers": ({"pointers": [0, 0, 0, 0, 0]}, "its sequences do not follow each other"),
    "lengths": ({"lengths": [3, -1, 2, 4, 1]}, "its sequences do not follow each other"),
    "places": ({"places": [0, 1, 3, 3, 4, 4]}, "its documents are not all of its sequences"),
    "falling": ({"places": [0, 3, 1, 3, 4, 5]}, "its documents are not all of its sequences"),
    "none": ({"sequences": 0, "marks": 1, "lengths": [], "pointers": [], "places": [0]}, "or it has none"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_indexes(tmp_path: Path, case: str) -> None:
    changed, message = BAD[case]
    write(tmp_path / "a", DOCUMENTS, **changed)
    with pytest.raises(InvalidUsage, match=rf"a.idx: no index of Megatron-Core, or a damaged one \(.*{message}"):
        open_corpus([tmp_path / "a"], context=9, encoder=Encoder())


def test_every_truncation(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    for ending, message in ((".idx", "a.idx: no index"), (".bin", r"a.bin: .* bytes, and its .idx says 44; copy both")):
        path = tmp_path / f"a{ending}"
        content = path.read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            with pytest.raises(InvalidUsage, match=message):
                open_corpus([tmp_path / "a"], context=9, encoder=Encoder())
        path.write_bytes(content + b"\0")
        with pytest.raises(InvalidUsage, match=r"were expected|says 44"):
            open_corpus([tmp_path / "a"], context=9, encoder=Encoder())
        path.write_bytes(content)
    assert len(open_corpus([tmp_path / "a"], context=9, encoder=Encoder())) == 4


def test_what_is_no_pair(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(InvalidUsage, match=r"a: tokens of Megatron-Core do not name their tokenizer; give it by --tok"):
        open_corpus([tmp_path / "a"], context=9)
    with pytest.raises(InvalidUsage, match=r"a.bin: tokens of Megatron-Core are read in place"):
        build_data([tmp_path / "a.bin"], tmp_path / "out", encoder=encoder_of(None))
    with pytest.raises(InvalidUsage, match=r"holds no text file; .* or a prefix of Megatron-Core's files"):
        open_corpus([tmp_path], context=9, encoder=Encoder())
    (tmp_path / "a").write_text("a text beside them")
    assert bytes(open_corpus([tmp_path / "a"], context=99).read(0).tolist()) == b"a text beside them"
    os.unlink(tmp_path / "a.idx")
    with pytest.raises(InvalidUsage, match=r"a.bin: this is a binary file"):
        open_corpus([tmp_path / "a.bin"], context=9)
