"""Megatron-Core: what its builder of datasets writes, by hdpcomm.data.open_corpus and by its own reader."""

from __future__ import annotations

import importlib.metadata
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path

from hdpcomm.data import open_corpus


class Encoder:
    """Stands for the tokenizer, which nothing is asked of but its size."""

    name, fingerprint, vocabulary = "mine", "mine", 50_000


def build(prefix: str, dtype: type, documents: list[list[list[int]]]) -> None:
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype)
    for place, document in enumerate(documents):
        if place % 2:
            builder.add_document(torch.tensor([token for each in document for token in each]), list(map(len, document)))
        else:
            for sequence in document:
                builder.add_item(torch.tensor(sequence))
            builder.end_document()
    builder.finalize(get_idx_path(prefix))


def main() -> None:
    drawn, compared = random.Random(5), 0
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (np.int32, np.uint16, np.int64):
            documents = [
                [[drawn.randrange(50_000) for _ in range(drawn.randrange(1, 90))] for _ in range(drawn.randrange(1, 4))]
                for _ in range(200)
            ]
            prefix = str(Path(folder, f"{dtype.__name__}_text_document"))
            build(prefix, dtype, documents)
            theirs = IndexedDataset(prefix)
            first = theirs.document_indices
            wanted = [
                np.concatenate([theirs[place] for place in range(begin, end)]).tolist()
                for begin, end in pairwise(first)
            ]
            assert wanted == [[token for sequence in each for token in sequence] for each in documents]
            corpus = open_corpus([prefix], context=1000, encoder=Encoder())
            assert [corpus.read(sequence).tolist() for sequence in range(len(corpus))] == wanted
            compared += corpus.num_tokens
    version = importlib.metadata.version("megatron-core")
    print(f"ok: torch {torch.__version__}, megatron-core {version}: {compared:,} tokens as its own reader gives them")


if __name__ == "__main__":
    main()
