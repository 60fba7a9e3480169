"""JSONL, Parquet, Hugging Face datasets and chats: the same documents from each, one clear error for what is wrong."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hdpcomm.data import build_data, encoder_of, open_corpus
from hdpcomm.data.encoders import assistant_spans
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.distributions import read_lengths, sample_lengths
from tests.harness.tokenizers import save_tokenizer

TEXTS = ["short", "é" * 40, "x" * 500, "last"]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "say é"},
    {"role": "assistant", "content": "é!"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "é?"},
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def texts_of(path: Path, **options: Any) -> list[str]:
    corpus = open_corpus([path], context=10_000, **options)
    return [bytes(corpus.read(i).tolist()).decode() for i in range(len(corpus))]


def trained(corpus: Any, sequence: int) -> bytes:
    """The bytes that count for the loss."""
    labels = corpus.part(sequence, 0, int(corpus.lengths[sequence]))[1]
    return bytes(labels[labels >= 0].tolist())


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    (tmp_path / "data").mkdir()
    path = tmp_path / "data/a.parquet"
    pq.write_table(pa.table({"n": list(range(4)), "text": TEXTS}), path, row_group_size=3)
    assert texts_of(path) == TEXTS
    (tmp_path / "data/b.txt").write_text("beside")
    assert texts_of(tmp_path / "data") == [*TEXTS, "beside"]
    with pytest.raises(InvalidUsage, match=r"there is no column 'body' or 'messages' \(columns: 'n', 'text'\)"):
        texts_of(path, text_field="body")
    with pytest.raises(InvalidUsage, match=r"a.parquet row 0: the column 'n' holds a int, text was expected"):
        texts_of(path, text_field="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidUsage, match="no Parquet file, or a damaged one"):
        texts_of(path)


TOKENS = [[1, 255, 0], [], [7], [9] * 300]


def columns(kind: str, path: Path, values: list[Any], **more: Any) -> Path:
    """A file or dataset with a column ``ids``, as arrow makes it of these values."""
    pa = pytest.importorskip("pyarrow")
    array = pa.array(values, **more)
    path.parent.mkdir(exist_ok=True)
    if kind == "parquet":
        import pyarrow.parquet as pq

        path = path.with_suffix(".parquet")
        pq.write_table(pa.table({"ids": array}), path, row_group_size=2)
    elif kind == "dataset":
        pytest.importorskip("datasets").Dataset(pa.table({"ids": array})).save_to_disk(str(path))
    else:
        path = path.with_suffix(".jsonl")
        path.write_text("".join(f"{json.dumps({'ids': value})}\n" for value in values))
    return path


@pytest.mark.parametrize("width", ["uint8", "int32", "uint64", "int64"])
@pytest.mark.parametrize("kind", ["parquet", "dataset", "jsonl"])
def test_a_column_of_tokens(tmp_path: Path, kind: str, width: str) -> None:
    pa = pytest.importorskip("pyarrow")
    path = columns(kind, tmp_path / "a", TOKENS, type=pa.list_(getattr(pa, width)()))
    corpus = open_corpus([path], context=1000, text_field="ids")
    assert [corpus.read(i).tolist() for i in range(len(corpus))] == [each for each in TOKENS if each]


@pytest.mark.parametrize("kind", ["parquet", "dataset", "jsonl"])
def test_columns_that_hold_no_tokens(tmp_path: Path, kind: str) -> None:
    row = {"jsonl": r"a.jsonl:3", "parquet": "a.parquet row 2", "dataset": "a row 2"}[kind]
    for odd in (256, -1, 1 << 40):
        path = columns(kind, tmp_path / str(odd) / "a", [[1], [2], [3, odd]])
        with pytest.raises(
            InvalidUsage, match=rf"{row}: token {odd:,}, and byte has 256; give the tokenizer that made"
        ):
            open_corpus([path], context=10, text_field="ids")
    for name, odd in {
        "floats": [0.5],
        "nulls": [None],
        "bools": [True],
        "texts": ["a"],
        "lists": [[1], [2, 3]],
    }.items():
        values = [[], [], odd]
        path = columns(kind, tmp_path / name / "a", values)
        with pytest.raises(
            InvalidUsage, match=rf"{row}: the (column|field) 'ids' holds a list, text was expected, or a"
        ):
            open_corpus([path], context=10, text_field="ids")


def test_a_column_of_tokens_needs_the_tokenizer_that_made_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_tokenizer(tmp_path / "model")
    encoder = encoder_of(tmp_path / "model")
    last = encoder.vocabulary - 1
    path = columns("parquet", tmp_path / "a", [[1, last], [last, last + 1]])
    with pytest.raises(InvalidUsage, match=rf"row 1: token {last + 1}, and model has {last + 1}"):
        open_corpus([path], context=10, text_field="ids", encoder=encoder)
    path = columns("parquet", tmp_path / "b", [[1, last], [2]])
    corpus = open_corpus([path], context=10, text_field="ids", encoder=encoder)
    assert [corpus.read(i).tolist() for i in range(2)] == [[1, last], [2]]
    assert corpus.vocabulary == last + 1


INDEXES = {
    "streaming": ("LocalDataset", {"shards": [{"samples": 2}, {"samples": 2}]}),
    "litdata": ("StreamingDataset", {"chunks": [{"chunk_size": 3}, {"chunk_size": 1}]}),
}


@pytest.mark.parametrize("package", INDEXES)
def test_folders_of_other_packages(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that their own packages have written are read by tests/clients/data_formats.py."""
    name, index = INDEXES[package]
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "text.txt").write_text("which is no document of this folder")
    monkeypatch.setitem(sys.modules, package, None)
    wanted = "mosaicml-streaming" if package == "streaming" else package
    with pytest.raises(InvalidUsage, match=f"{tmp_path}: {package} is needed to read it; pip install {wanted}"):
        texts_of(tmp_path)
    samples = [{"text": text, "ids": np.array([place])} for place, text in enumerate(TEXTS)]
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(**{name: lambda path: samples if path else None}))
    assert texts_of(tmp_path) == TEXTS
    corpus = open_corpus([tmp_path], context=9, text_field="ids")
    assert [corpus.read(place).tolist() for place in range(4)] == [[0], [1], [2], [3]]
    samples[2]["ids"] = np.array([0.5])
    (tmp_path / "new").touch()
    with pytest.raises(InvalidUsage, match=rf"{tmp_path} row 2: the column 'ids' holds a ndarray, text was expected"):
        open_corpus([tmp_path], context=9, text_field="ids")


@pytest.mark.parametrize("index", ["[]", "{}", "no JSON", '{"shards": [{}]}', '{"chunks": 3}', "[" * 9_000])
def test_an_index_of_something_else(tmp_path: Path, index: str) -> None:
    (tmp_path / "index.json").write_text(index)
    assert texts_of(tmp_path) == [index]


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": TEXTS})
    data.save_to_disk(str(tmp_path / "plain"))
    assert texts_of(tmp_path / "plain") == TEXTS
    data.select([3, 0]).save_to_disk(str(tmp_path / "chosen"))
    assert texts_of(tmp_path / "chosen") == ["last", "short"]
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InvalidUsage, match=re.escape(f"give one of them: {tmp_path}/splits/train")):
        texts_of(tmp_path / "splits")
    assert texts_of(tmp_path / "splits/train") == TEXTS
    chats = datasets.Dataset.from_dict({"messages": [CHAT]})
    chats.save_to_disk(str(tmp_path / "chats"))
    assert trained(open_corpus([tmp_path / "chats"], context=1000), 0) == "é!\n<|end|>\né?\n<|end|>\n".encode()
    next((tmp_path / "plain").glob("*.arrow")).unlink()
    with pytest.raises(InvalidUsage, match="this dataset cannot be opened"):
        texts_of(tmp_path / "plain")


def test_a_chat_in_bytes_trains_what_the_assistant_wrote(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    silent = [{"role": "user", "content": "hello?"}]
    parts = [*silent, {"role": "assistant", "content": [{"type": "text", "text": "in "}, {"text": "parts"}]}]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (CHAT, silent, parts)))
    corpus = open_corpus([path], context=1000)
    assert len(corpus) == 2  # nothing to learn from the silent one
    assert trained(corpus, 0) == "é!\n<|end|>\né?\n<|end|>\n".encode()
    assert trained(corpus, 1) == b"in parts\n<|end|>\n"
    tokens = bytes(corpus.read(0).tolist()).decode()
    assert tokens.startswith("<|system|>\nbe brief\n<|end|>\n<|user|>\nsay é\n<|end|>\n<|assistant|>\né!\n")


def test_pieces_of_a_chat_without_an_answer_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "yes"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    corpus = open_corpus([path], context=100)
    assert corpus.num_cut == 1
    assert b"".join(trained(corpus, i) for i in range(len(corpus))) == b"yes\n<|end|>\n"
    assert all(trained(corpus, i) for i in range(len(corpus)))


# --- tokenizers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_tokenizer_of_a_folder(folder: Path, tmp_path: Path) -> None:
    encoder = encoder_of(folder)
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat")
    corpus = open_corpus([path], context=100, encoder=encoder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert corpus.read(0).tolist() == [*tokenizer("the cat sat on the mat")["input_ids"], tokenizer.eos_token_id]
    assert len(corpus.read(0)) < 22
    assert corpus.vocabulary == len(tokenizer)
    assert f"{folder.name} token" in corpus.describe()
    build_data([path], tmp_path / "out", encoder=encoder)
    assert open_corpus([tmp_path / "out"], context=100, encoder=encoder).read(0).tolist() == corpus.read(0).tolist()
    with pytest.raises(InvalidUsage, match=r"out holds tokens of .*, and this run's are of byte; build it again"):
        open_corpus([tmp_path / "out"], context=100)


TEMPLATES = {
    "as it comes": "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "marked": "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "reasoning only in the last turn": "{% for m in messages %}[{{ m.role }}]"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    encoder = encoder_of(save_tokenizer(tmp_path / "tokenizer", chat_template=TEMPLATES[name]))
    tokens, counted = encoder.chat(CHAT, "here")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(tokens) == whole
    last = "<think></think>" if name.startswith("reasoning") else ""
    assert tokenizer.decode(tokens[counted]) == f"é!<end>{last}é?<end>"
    assert counted.dtype == np.bool_


def test_a_tokenizer_without_a_template_takes_the_plain_one(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokens, counted = encoder_of(folder).chat(CHAT, "here")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokens[counted]) == "é!\n<|end|>\né?\n<|end|>\n"


def test_turns_that_the_template_hides_are_refused() -> None:
    def render(messages: Any, ask: bool) -> str:
        return f"{len(messages)} messages{' ...' if ask else ''}"

    with pytest.raises(InvalidUsage, match=r"here: message 2 of the assistant cannot be found .* \{% generation %\}"):
        assistant_spans(render, CHAT, "here")


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InvalidUsage, match="no such folder"):
        encoder_of(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidUsage, match="holds no tokenizer that transformers can load"):
        encoder_of(tmp_path)


# --- what is wrong --------------------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def line(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text + "\n") and None


def outside(path: Path) -> None:
    path.mkdir()
    (path / "passwd.txt").symlink_to("/etc/passwd")


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (pipe, "this is a pipe, a socket or a device; give a file"),
    "links that lead out": (outside, "this folder holds no text file"),
    "deep.jsonl": (line("[" * 200_000), "deep.jsonl:1: this JSON is nested too deeply"),
    "deep object.jsonl": (line('{"text":' * 100_000), "nested too deeply|not JSON"),
    "digits.jsonl": (line('{"text": ' + "9" * 5000 + "}"), "this line is not JSON|holds a int"),
    "no messages.jsonl": (line('{"messages": []}'), ":1: this conversation has no message"),
    "no list.jsonl": (line('{"messages": "hi"}'), "the field 'messages' holds a str, a list of messages was expected"),
    "no role.jsonl": (line('{"messages": [{"content": "a"}]}'), "message 0 is .*; an object with a 'role'"),
    "an image.jsonl": (
        line('{"messages": [{"role": "user", "content": [{"image": 1}]}]}'),
        "the content of message 0 is .*; text was expected",
    ),
    "silent.jsonl": (
        line('{"messages": [{"role": "user", "content": "a"}]}'),
        "no document with a token to train on .*conversations without an answer",
    ),
    "no parquet.parquet": (line("text"), "no Parquet file, or a damaged one"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    make, message = BAD[name]
    make(path)
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(InvalidUsage, match=message) as caught:
        open_corpus([path], context=64)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_links_inside_a_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("a")
    (tmp_path / "data/b.txt").symlink_to("a.txt")
    (tmp_path / "data/c.txt").symlink_to("/etc/hostname")
    assert texts_of(tmp_path / "data") == ["a", "a"]


@pytest.mark.parametrize(
    "name", ["lognormal:nan:nan", "lognormal:1:inf", "lognormal:1:-1", "lognormal:1", "lognormal:a:b"]
)
def test_wrong_distributions(name: str) -> None:
    with pytest.raises(InvalidUsage, match="expected lognormal:MU:SIGMA"):
        sample_lengths(name, context=10, seed=0, tokens=100)


def test_huge_lengths(tmp_path: Path) -> None:
    assert sum(sample_lengths("lognormal:1e300:0", context=10, seed=0, tokens=100)) == 100
    path = tmp_path / "lengths"
    path.write_text("5 " + "9" * 5000)
    with pytest.raises(InvalidUsage, match="entry 2 is '9999"):
        read_lengths(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidUsage, match="is no file"):
        read_lengths(tmp_path / "pipe")
