"""Folders that mosaicml-streaming and litdata write, by hdpcomm.data.open_corpus: tokens and texts, in their order."""

from __future__ import annotations

import importlib.metadata
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from litdata.streaming.writer import BinaryWriter
from streaming import MDSWriter

from hdpcomm.data import open_corpus

DRAWN = random.Random(3)
TOKENS = [np.array([DRAWN.randrange(256) for _ in range(1 + place % 50)], np.uint16) for place in range(300)]
TEXTS = [f"text {place} é" for place in range(300)]


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]]) -> None:
    with MDSWriter(out=str(folder), columns=columns, size_limit=5000) as writer:
        for sample in samples:
            writer.write(sample)


def write_litdata(folder: Path, samples: list[dict[str, Any]]) -> None:
    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=5000)
    for place, sample in enumerate(samples):
        writer[place] = sample
    writer.done()
    writer.merge()


def main() -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        tokens, texts = [{"ids": each, "n": 1} for each in TOKENS], [{"text": each} for each in TEXTS]
        write_mds(folder / "mds-tokens", {"ids": "ndarray:uint16", "n": "int"}, tokens)
        write_mds(folder / "mds-texts", {"text": "str"}, texts)
        write_litdata(folder / "litdata-tokens", tokens)
        write_litdata(folder / "litdata-texts", texts)
        for kind in ("mds", "litdata"):
            for name, field, wanted in (
                ("tokens", "ids", [each.tolist() for each in TOKENS]),
                ("texts", "text", [list(each.encode()) for each in TEXTS]),
            ):
                path = folder / f"{kind}-{name}"
                corpus = open_corpus([path], context=100, text_field=field, cache=folder / "cache")
                assert [corpus.read(place).tolist() for place in range(len(corpus))] == wanted, path
    names = [f"{name} {importlib.metadata.version(name)}" for name in ("mosaicml-streaming", "litdata")]
    print(f"ok: {', '.join(names)}: 1,200 documents as they wrote them")


if __name__ == "__main__":
    main()
