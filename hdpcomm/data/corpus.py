"""A corpus: an index of documents whose lengths are known before any of their tokens is read.

Planning a step needs the lengths of the whole global batch, while a rank needs only the tokens of its own sequences. So
the index holds lengths and positions in files, is small enough to be sent to every rank, and :meth:`Corpus.read` reads
one sequence.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm.data.text import check_text, json_text, jsonl_documents, text_files
from hdpcomm.errors import InvalidUsage

__all__ = ["Corpus", "open_corpus", "standard_library"]

Index = npt.NDArray[np.int64]

_JSONL = {".jsonl", ".ndjson"}


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Sequences cut from documents; made by :func:`open_corpus`. Small when pickled: it holds positions, no tokens.

    Attributes:
        name: the source of the documents, for messages.
        context: the longest sequence, in tokens; longer documents were cut into pieces of this size.
        files: the files that hold the documents.
        documents: ``[documents, 4]``: file, byte offset, bytes in the file, length in tokens.
        sequences: ``[sequences, 3]``: document, first token inside it, length in tokens.
        text_field: the field of JSONL lines that holds the text.
    """

    name: str
    context: int
    files: tuple[Path, ...]
    documents: Index
    sequences: Index
    text_field: str

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> Index:
        """``[sequences]``: tokens of each sequence."""
        return self.sequences[:, 2]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return int(self.lengths.sum())

    @property
    def num_cut(self) -> int:
        """Documents that were longer than ``context`` and so became several sequences."""
        return int((self.documents[:, 3] > self.context).sum())

    def read(self, sequence: int) -> Tensor:
        """The tokens of one sequence, ``[length]`` int64 (bytes, 0 to 255). Local; reads one file.

        Raises:
            InvalidUsage: no such sequence, or the file changed since it was indexed.
        """
        if not 0 <= sequence < len(self):
            raise InvalidUsage(f"sequence {sequence} was asked for; this corpus has 0 to {len(self) - 1}")
        document, first, length = (int(value) for value in self.sequences[sequence])
        file, offset, size, _ = (int(value) for value in self.documents[document])
        path = self.files[file]
        jsonl = path.suffix in _JSONL
        try:
            with path.open("rb") as handle:
                handle.seek(offset if jsonl else offset + first)
                data = handle.read(size if jsonl else length)
        except OSError as error:
            raise InvalidUsage(
                f"{path}: cannot be read any more ({error.strerror}); do not change the data while a run reads it"
            ) from error
        if jsonl:
            data = json_text(data, where=f"{path} at byte {offset}", field=self.text_field)[first : first + length]
        if len(data) != length:
            raise InvalidUsage(
                f"{path}: {length} bytes were expected and {len(data)} found; the file changed since it was "
                "indexed, start again"
            )
        return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.int64))

    def describe(self) -> str:
        """One readable line: size of the corpus, lengths of the sequences, and how many documents were cut."""
        quantiles = np.quantile(self.lengths, (0.5, 0.9))
        text = (
            f"{self.name}: {_many(len(self.documents), 'document')}, "
            f"{_many(self.num_tokens, 'byte token')} in {_many(len(self), 'sequence')} (median "
            f"{quantiles[0]:,.0f}, 90% below {quantiles[1]:,.0f}, longest "
            f"{int(self.lengths.max()):,})"
        )
        if self.num_cut:
            cut = f"{_many(self.num_cut, 'document')} longer than the context of {self.context:,}"
            text += f"; {cut} {'was' if self.num_cut == 1 else 'were'} cut into pieces"
        return text


def open_corpus(
    paths: Sequence[str | Path], *, context: int, text_field: str = "text", name: str | None = None
) -> Corpus:
    """Indexes text files, JSONL files (``.jsonl``, ``.ndjson``) and folders of both. Local.

    Args:
        paths: files and folders. The text files of a folder are taken in a fixed order, without empty and binary ones;
            a file that is named here must not be empty or binary.
        context: the longest sequence in tokens; longer documents are cut into pieces of this size.
        text_field: the field of a JSONL line that holds the text.

    Raises:
        InvalidUsage: a path that does not exist, an empty or binary file, a folder with no text, a line that is no JSON
            object (``file:line``) or has no such field.

    Example:
        >>> corpus = open_corpus([Path(__file__).parent], context=4096)
        >>> len(corpus.read(0)) - int(corpus.lengths[0])
        0
    """
    if context < 1:
        raise InvalidUsage(f"context is {context}; a sequence needs at least 1 token")
    if not paths:
        raise InvalidUsage("no path was given; name at least one text file, JSONL file or folder")
    files: list[Path] = []
    documents: list[tuple[int, int, int, int]] = []
    for path in map(Path, paths):
        before = len(documents)
        for file in _files_of(path):
            documents.extend(_documents_of(file, len(files), text_field))
            files.append(file)
        if len(documents) == before:
            raise InvalidUsage(
                f"{path}: {'every line has an empty text' if path.is_file() else 'no text was found'}; give files "
                "with text in them"
            )
    return _cut(name or ", ".join(map(str, paths)), files, documents, context, text_field)


def standard_library(*, context: int) -> Corpus:
    """The source files of the running Python's standard library: real text with a long tail of lengths.

    Raises:
        InvalidUsage: this Python has no source files on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = list(text_files(root, suffix=".py", without=("site-packages", "dist-packages", "__pycache__")))
    if not files:
        raise InvalidUsage(
            f"{root}: the standard library of this Python has no source files here; give a corpus with --data"
        )
    documents = [(index, 0, size, size) for index, size in enumerate(path.stat().st_size for path in files)]
    return _cut("Python's standard library", files, documents, context, "text")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _files_of(path: Path) -> Iterable[Path]:
    if path.is_dir():
        found = list(text_files(path))
        if not found:
            raise InvalidUsage(f"{path}: this folder holds no text file; give one with text or JSONL files in it")
        return found
    if not path.exists():
        raise InvalidUsage(f"{path}: no such file or folder; check the path given with --data")
    check_text(path)
    return [path]


def _documents_of(path: Path, file: int, text_field: str) -> Iterable[tuple[int, int, int, int]]:
    if path.suffix in _JSONL:
        return [(file, offset, size, length) for offset, size, length in jsonl_documents(path, field=text_field)]
    size = path.stat().st_size
    return [(file, 0, size, size)]


def _cut(
    name: str, files: list[Path], documents: list[tuple[int, int, int, int]], context: int, text_field: str
) -> Corpus:
    table = np.array(documents, dtype=np.int64).reshape(-1, 4)
    pieces = -(-table[:, 3] // context)
    document = np.repeat(np.arange(len(table), dtype=np.int64), pieces)
    first = (np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * context
    length = np.minimum(table[document, 3] - first, context)
    sequences = np.stack((document, first, length), axis=1)
    return Corpus(
        name=name, context=context, files=tuple(files), documents=table, sequences=sequences, text_field=text_field
    )
