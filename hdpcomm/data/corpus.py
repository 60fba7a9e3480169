"""A corpus: an index of documents whose lengths are known before any of their tokens is read.

Planning a step needs the lengths of the whole global batch, while a rank needs only the tokens of its own shards. So
the index holds lengths and places, is small enough to be sent to every rank, and :meth:`Corpus.part` reads a part of
one sequence.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm.data.encoders import FolderEncoder, encoder_of
from hdpcomm.data.images import LazyPixels
from hdpcomm.data.megatron import MegatronTokens
from hdpcomm.data.records import block_starts, files_of, text_files
from hdpcomm.data.sampler import BatchSampler
from hdpcomm.data.token_store import NO_IMAGES, TokenStore
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import open_regular
from hdpcomm.kernels import IGNORE
from hdpcomm.plan import Item

__all__ = [
    "BatchReader", "Corpus", "CorpusSummary", "TextPieces", "content_digest", "corpus_of", "labelled",
    "standard_library",
]  # fmt: skip

Index = npt.NDArray[np.int64]
_SAMPLES = 1024
_SAMPLE_BYTES = 4096
Source: TypeAlias = "TextPieces | TokenStore | MegatronTokens"


@dataclass(frozen=True, slots=True)
class TextPieces:
    """Documents that are pieces of files, read in place: their tokens are their bytes.

    Attributes:
        pieces: ``[documents, 3]``: file, first byte, bytes.
    """

    files: tuple[Path, ...]
    pieces: Index
    encoder: ClassVar[str] = "bytes"
    encoder_name: ClassVar[str] = "byte"
    vocabulary: ClassVar[int] = 256

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def lengths(self) -> Index:
        """``[documents]``: tokens of each document."""
        return self.pieces[:, 2]

    def tokens(self, document: int, first: int, length: int) -> Index:
        """``length`` bytes of a piece from its byte ``first`` on. Raises: InvalidUsage if the file has changed."""
        file, start, _ = (int(value) for value in self.pieces[document])
        path = self.files[file]
        try:
            with path.open("rb") as handle:
                handle.seek(start + first)
                data = handle.read(length)
        except OSError as error:
            raise InvalidUsage(
                f"{path}: cannot be read any more ({error.strerror}); do not change the data while a run reads it"
            ) from error
        if len(data) != length:
            raise InvalidUsage(
                f"{path}: {length} bytes were expected and {len(data)} found; the file changed since it was "
                "indexed, start again"
            )
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

    def name_of(self, document: int) -> str:
        """Its file, and where it begins there."""
        file, start, _ = (int(value) for value in self.pieces[document])
        return f"{self.files[file]} from byte {start} on" if start else str(self.files[file])


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Sequences cut from documents; made by :func:`open_corpus`. Small when pickled: it holds places, no tokens.

    Attributes:
        name: the source of the documents, for messages.
        context: the longest sequence, in tokens; longer documents were cut into pieces of this size.
        sources: what holds the documents.
        documents: ``[documents, 3]``: source, document in it, length in tokens.
        sequences: ``[sequences, 3]``: document, first token inside it, length in tokens.
        encoder: fingerprint of what makes the tokens; ``encoder_name`` is its name for messages.
        vocabulary: every token is below it.
        weights: of the tokens of each source in a mixture; empty: each sequence comes once an epoch.
        later_weights: those that follow, with the first step that has them.
        images: ``[images, 8]``: document, first token, tokens, patches and grid as in the table of its store (see
            :mod:`hdpcomm.data.token_store`), place in that table.
        left_out: documents that would be cut inside an image.
        source_names: of ``sources``, for messages.
    """

    name: str
    context: int
    sources: tuple[Source, ...]
    documents: Index
    sequences: Index
    encoder: str = "bytes"
    encoder_name: str = "byte"
    vocabulary: int = 256
    weights: tuple[float, ...] = ()
    later_weights: tuple[tuple[int, tuple[float, ...]], ...] = ()
    images: Index = field(default_factory=lambda: NO_IMAGES[:, :8], repr=False)
    left_out: tuple[int, ...] = ()
    source_names: tuple[str, ...] = ()
    _masked: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_), repr=False)
    _model: Path | None = None  # folder with the processor of the images

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> Index:
        """``[sequences]``: tokens of each sequence."""
        return self.sequences[:, 2]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return int(self.lengths.sum())

    @property
    def num_cut(self) -> int:
        """Documents that were longer than ``context`` and so became several sequences."""
        return int((self.documents[np.unique(self.sequences[:, 0]), 2] > self.context).sum())

    @property
    def num_documents(self) -> int:
        """Documents that have a sequence here."""
        return len(np.unique(self.sequences[:, 0]))

    @property
    def num_images(self) -> int:
        """Images of these documents."""
        return int(np.isin(self.images[:, 0], self.sequences[:, 0]).sum())

    def sampler(self, *, tokens: int, seed: int, ramp: tuple[int, int] | None = None) -> BatchSampler:
        """Batches of at most so many tokens, after a ``ramp``, by the weights of the sources if there are any. Local;
        raises as :class:`BatchSampler`."""
        sources = self.documents[self.sequences[:, 0], 0] if self.weights else None
        weights = {0: self.weights, **dict(self.later_weights)} if self.weights else ()
        return BatchSampler(self.lengths, tokens=tokens, seed=seed, ramp=ramp, sources=sources, weights=weights)

    def read(self, sequence: int) -> Tensor:
        """The tokens of one sequence, ``[length]`` int64. Local.

        Raises:
            InvalidUsage: no such sequence; the file changed since it was indexed, or is damaged.
        """
        source, document, first, length = self._place(sequence)
        return torch.from_numpy(source.tokens(document, first, length))

    def part(self, sequence: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) ``[stop - start]`` int64 of a part of one sequence. Local; reads no more than that.

        The label of a token is the next one of the sequence; :data:`IGNORE` for the last one, and where the next one
        does not count for the loss. Raises: of :meth:`read`.
        """
        source, document, first, length = self._place(sequence)
        if not 0 <= start <= stop <= length:
            raise InvalidUsage(f"tokens {start} to {stop} were asked for; sequence {sequence} has {length}")
        first, count = first + start, min(stop + 1, length) - start
        masked = self._masked.size and self._masked[self.sequences[sequence, 0]]
        counted = cast("TokenStore", source).counted(document, first, count) if masked else None
        return labelled(source.tokens(document, first, count), counted, stop - start)

    def items(self, sequence: int) -> list[Item]:
        """The images of one sequence, for a plan. Local."""
        if not len(self.images):  # a step asks for all of its sequences
            return []
        first = int(self.sequences[sequence, 1])
        return [Item(start - first, *sizes) for start, *sizes in self._images_of(sequence)[:, 1:4].tolist()]

    def media(self, sequence: int) -> dict[str, Any]:
        """The images of one sequence as a model takes them, each read with its pixels; ``{}`` without any. Local."""
        if not len(self.images) or not len(images := self._images_of(sequence)):
            return {}
        source, document, *_ = self._place(sequence)
        grids, processor = images[:, 4:7].tolist(), cast(FolderEncoder, encoder_of(self._model)).processor

        def pixels(number: int) -> Any:
            picture = cast(TokenStore, source).picture(int(images[number, 7]))
            return processor(picture, source.name_of(document))["pixel_values"]

        grid = {"image_grid_thw": torch.tensor(grids)} if grids[0][0] else {}
        return {"pixel_values": LazyPixels(grids, pixels), **grid}

    def _images_of(self, sequence: int) -> Index:
        document, first, length = self.sequences[sequence]
        begin, end = np.searchsorted(self.images[:, 0], (document, document + 1))
        inside = np.searchsorted(self.images[begin:end, 1], (first, first + length))
        return self.images[begin + inside[0] : begin + inside[1]]

    def place_of(self, sequence: int) -> str:
        """Where one sequence is, for messages. Local. Raises: InvalidUsage: no such sequence."""
        source, document, first, length = self._place(sequence)
        return f"{source.name_of(document)}, tokens {first} to {first + length}"

    def _place(self, sequence: int) -> tuple[Source, int, int, int]:
        if not 0 <= sequence < len(self):
            raise InvalidUsage(f"sequence {sequence} was asked for; this corpus has 0 to {len(self) - 1}")
        place, first, length = (int(value) for value in self.sequences[sequence])
        source, document, _ = (int(value) for value in self.documents[place])
        return self.sources[source], document, first, length

    def split(self, fraction: float, *, seed: int) -> tuple[Corpus, Corpus]:
        """(the rest, held out): whole documents drawn by ``seed`` alone, at least one. Local.

        Raises: InvalidUsage for a fraction that is not between 0 and 1, or that leaves nothing to train on.
        """
        if not 0 < fraction < 1:
            raise InvalidUsage(f"{fraction} of the documents were to be held out; give a number between 0 and 1")
        used = np.unique(self.sequences[:, 0])
        count = max(1, round(fraction * len(used)))
        if count >= len(used):
            raise InvalidUsage(
                f"{fraction} of {_many(len(used), 'document')} leaves nothing to train on; give other text by "
                "--eval-data"
            )
        drawn = np.random.Generator(np.random.PCG64([seed, 0x5EED])).permutation(used)[:count]
        held = np.isin(self.sequences[:, 0], drawn)
        return replace(self, sequences=self.sequences[~held]), replace(self, sequences=self.sequences[held])

    def summary(self) -> CorpusSummary:
        """Facts of this corpus for the report of a run."""
        return CorpusSummary(
            name=self.name,
            context=self.context,
            documents=self.num_documents,
            sequences=len(self),
            tokens=self.num_tokens,
            cut_documents=self.num_cut,
            images=self.num_images,
            left_out=len(self.left_out),
            text=self.describe(),
        )

    def describe(self) -> str:
        """One readable line: size of the corpus, lengths of the sequences, and how many documents were cut."""
        quantiles = np.quantile(self.lengths, (0.5, 0.9))
        kind = "byte token" if self.encoder == "bytes" else f"{self.encoder_name} token"
        text = (
            f"{self.name}: {_many(self.num_documents, 'document')}, "
            f"{_many(self.num_tokens, kind)} in {_many(len(self), 'sequence')} (median "
            f"{quantiles[0]:,.0f}, 90% below {quantiles[1]:,.0f}, longest "
            f"{int(self.lengths.max()):,})"
        )
        text += f"; {_many(self.num_images, 'image')}" if self.num_images else ""
        if self.weights:
            text += f"; a mixture of {_shares(self.weights)} of the tokens"
            text += "".join(f", after step {step:,} {_shares(weights)}" for step, weights in self.later_weights)
        if self.num_cut:
            cut = f"{_many(self.num_cut, 'document')} longer than the context of {self.context:,}"
            text += f"; {cut} {'was' if self.num_cut == 1 else 'were'} cut into pieces"
        if self.left_out:
            rows = self.documents[list(self.left_out[:3])].tolist()
            names = ", ".join(self.sources[source].name_of(document) for source, document, _ in rows)
            text += f"; {_many(len(self.left_out), 'document')} left out, as a cut would go through an image: "
            text += names + ", ..." * (len(self.left_out) > len(rows))
        return text


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """Figures of a corpus, in numbers and, as :meth:`Corpus.describe`, in a line of text."""

    name: str
    context: int
    documents: int
    sequences: int
    tokens: int
    cut_documents: int
    images: int
    left_out: int
    text: str


@dataclass(frozen=True, slots=True)
class BatchReader:
    """``fetch`` for :meth:`hdpcomm.train.Trainer.step`: the sequences of a batch, whole or in parts.

    Attributes:
        ids: numbers of the sequences in the corpus.
    """

    corpus: Corpus
    ids: tuple[int, ...]
    _media: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def media(self, place: int) -> dict[str, Any]:
        """:meth:`Corpus.media` of the sequence at ``place``, which keeps the pixels that were made."""
        if place not in self._media:
            self._media[place] = self.corpus.media(self.ids[place])
        return self._media[place]

    def __call__(self, place: int) -> Any:
        """(tokens, labels) of the sequence at ``place`` of the batch; with images a dictionary of all."""
        sequence = self.ids[place]
        tokens, labels = self.corpus.part(sequence, 0, int(self.corpus.sequences[sequence, 2]))
        media = self.media(place)
        return {"tokens": tokens, "labels": labels, **media} if media else (tokens, labels)

    @property
    def items(self) -> list[list[Item]]:
        """``items`` of such a step."""
        return [self.corpus.items(sequence) for sequence in self.ids]

    def part(self, place: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of a part of it."""
        return self.corpus.part(self.ids[place], start, stop)


def labelled(following: npt.NDArray[Any], counted: npt.NDArray[np.bool_] | None, length: int) -> tuple[Tensor, Tensor]:
    """(tokens, labels) ``[length]`` int64 of a part of a sequence.

    Args:
        following: its tokens and, unless the sequence ends with it, the next one.
        counted: which of these count for the loss; ``None``: all.
    """
    read = torch.from_numpy(following.astype(np.int64))
    labels = torch.full((length,), IGNORE, dtype=torch.int64)
    if len(read) > 1:
        labels[: len(read) - 1] = read[1:]
        if counted is not None:
            labels[: len(read) - 1][~torch.from_numpy(counted[1:].astype(np.bool_))] = IGNORE
    return read[:length], labels


def corpus_of(name: str, sources: Sequence[Source], *, context: int) -> Corpus:
    """A corpus of these sources, cut into sequences of at most ``context`` tokens. Local.

    Pieces of a conversation in which no token counts for the loss are left out, and documents that would be cut inside
    an image.

    Raises: InvalidUsage if sources have tokens of different encoders, or nothing is left.
    """
    kinds = {(source.encoder, source.encoder_name, source.vocabulary) for source in sources}
    if len(kinds) > 1:
        names = ", ".join(sorted(name for _, name, _ in kinds))
        raise InvalidUsage(f"the data has tokens of several tokenizers ({names}); build all of it with one")
    encoder, encoder_name, vocabulary = next(iter(kinds))
    tables = [
        np.stack((np.full(len(each), number), np.arange(len(each)), each.lengths), axis=1)
        for number, each in enumerate(sources)
    ]
    documents = np.concatenate(tables).astype(np.int64)
    pairs = [
        (each.masked, each.images) if isinstance(each, TokenStore) else (np.zeros(len(each), np.bool_), NO_IMAGES)
        for each in sources
    ]
    masked = np.concatenate([marks for marks, _ in pairs])
    before = np.cumsum([0, *map(len, sources)])
    images = np.concatenate([_images(table, first) for (_, table), first in zip(pairs, before, strict=False)])
    begin, end = images[:, 1], images[:, 1] + images[:, 2]
    left_out = np.unique(images[begin // context != (end - 1) // context, 0])
    sequences = _cut(documents[:, 2], context)
    corpus = Corpus(
        name=name,
        context=context,
        sources=tuple(sources),
        documents=documents,
        sequences=sequences[~np.isin(sequences[:, 0], left_out)],
        encoder=encoder,
        encoder_name=encoder_name,
        vocabulary=vocabulary,
        images=images,
        left_out=tuple(left_out.tolist()),
        source_names=tuple(f"source {number}" for number in range(len(sources))),
        _masked=masked if masked.any() else np.zeros(0, dtype=np.bool_),
    )
    if not len(kept := _without_empty_pieces(corpus)) and len(left_out):
        raise InvalidUsage(f"{name}: a context of {context:,} tokens cuts an image of each document; raise --context")
    return kept


def standard_library(*, context: int, whole_every: int = 0) -> Corpus:
    """The blocks of the running Python's standard library (:func:`hdpcomm.data.records.block_starts`), a document each:
    hundreds of short ones, parts of functions, for each long one, mostly tables.

    Args:
        whole_every: one file in so many is one document, so that a larger part of the tokens is in long ones; 0: none.

    Raises:
        InvalidUsage: this Python has no source files on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(text_files(root, suffix=".py", without=("site-packages", "dist-packages", "__pycache__")))
    if not files:
        raise InvalidUsage(
            f"{root}: the standard library of this Python has no source files here; give a corpus with --data"
        )
    pieces: list[tuple[int, int, int]] = []
    for file, path in enumerate(files):
        data = path.read_bytes()
        starts = [0] if whole_every and (file + 1) % whole_every == 0 else block_starts(data)
        pieces.extend((file, start, stop - start) for start, stop in pairwise((*starts, len(data))))
    table = np.array(pieces, dtype=np.int64)
    name = "blocks of Python's standard library"
    name += f", one file in {whole_every} as a whole" if whole_every else ""
    return corpus_of(name, [TextPieces(files, table)], context=context)


def _shares(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight / sum(weights):.0%}" for weight in weights)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _images(table: Index, first: int) -> Index:
    """See :attr:`Corpus.images`; ``first``: number of the first document of the table."""
    return np.column_stack((table[:, 0] + first, table[:, 1:7], np.arange(len(table))))


def _cut(lengths: Index, context: int) -> Index:
    pieces = -(-lengths // context)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    first = (np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * context
    return np.stack((document, first, np.minimum(lengths[document] - first, context)), axis=1)


def _without_empty_pieces(corpus: Corpus) -> Corpus:
    if not corpus._masked.size:
        return corpus
    kept = np.ones(len(corpus), dtype=np.bool_)
    cut = corpus._masked & (corpus.documents[:, 2] > corpus.context)
    for sequence in np.flatnonzero(cut[corpus.sequences[:, 0]]).tolist():
        source, document, first, length = corpus._place(sequence)
        kept[sequence] = cast("TokenStore", source).counted(document, first + 1, length - 1).any()
    return replace(corpus, sequences=corpus.sequences[kept])


@lru_cache(maxsize=2)
def content_digest(corpus: Corpus) -> str:
    """A digest of the sizes of files and :data:`_SAMPLES` samples, evenly spaced over all of them; for a store of
    tokens, of all of them and the checksums of images. Local; made once for each corpus.

    Raises: InvalidUsage if a file cannot be read.
    """
    digest = hashlib.sha256()
    for source in corpus.sources:
        if not isinstance(source, TokenStore):
            _add_files(digest, source.files)
        else:
            digest.update(source.content.encode())
            for name, sums in sorted(source.checksums.items()) if not source.content else ():
                digest.update(b"" if name.startswith("images-") else name.encode() + sums.tobytes())
            digest.update(source.images[:, -1].tobytes())  # of images wherever they lie
    return digest.hexdigest()[:16]


def _add_files(digest: hashlib._Hash, paths: Sequence[Path]) -> None:
    files = [file for path in paths for file in files_of(path)]
    step = max(1, len(files) // _SAMPLES)
    for file in files[::step]:
        try:
            for piece in _samples(file, max(1, _SAMPLES // len(files))):
                digest.update(piece)
        except OSError as error:
            raise InvalidUsage(f"{file}: cannot be read ({error.strerror}); give data that all ranks see") from error


def _samples(file: Path, count: int) -> Iterator[bytes]:
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        yield size.to_bytes(8, "little")
        room = max(0, size - _SAMPLE_BYTES)
        for place in sorted({room * number // max(1, count - 1) for number in range(count)}):
            opened.seek(place)
            yield opened.read(_SAMPLE_BYTES)
