"""What plans need of stored tokens, beside litdata and mosaicml-streaming: all lengths, and parts of sequences.

usage: python benchmarks/data_formats.py [--documents N] [--reads N] [--json FILE]
       (pip install litdata mosaicml-streaming)

The same documents of 16-bit tokens in each format, uncompressed on a local disk. `lengths`: seconds to open the store
and to know the lengths of all documents. `whole`: microseconds to read a document that is drawn at random, `part`: the
same for an eighth of one of the longest 1%, as a rank of eight reads it. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 50_000
Read = Callable[[int], Any]


def documents(count: int) -> Iterable[np.ndarray]:
    draw = np.random.default_rng(0)
    for _ in range(count):
        length = int(np.clip(draw.lognormal(6.5, 1.5), 16, 200_000))
        yield draw.integers(VOCABULARY, size=length, dtype=np.uint16)


def write_ours(folder: Path, count: int) -> None:
    from hdpcomm.data.store_writer import PartWriter, partial_of, publish

    partial = partial_of(folder, "bench")
    partial.mkdir()
    writer = PartWriter(partial, 0, vocabulary=VOCABULARY)
    for unit, tokens in enumerate(documents(count)):
        writer.add(unit, tokens, None)
    writer.close()
    publish(partial, folder, parts=1, facts={"encoder": "", "encoder_name": "", "vocabulary": VOCABULARY})


def open_ours(folder: Path) -> tuple[Callable[[], np.ndarray], Read, Callable[[int, int, int], Any]]:
    from hdpcomm.data.token_store import open_store

    store = open_store(folder)
    return lambda: np.array(store.lengths), lambda i: store.tokens(i, 0, int(store.lengths[i])), store.tokens


def write_litdata(folder: Path, count: int) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=1 << 26)
    for place, tokens in enumerate(documents(count)):
        writer[place] = {"tokens": tokens}
    writer.done()
    writer.merge()


def open_litdata(folder: Path) -> tuple[Callable[[], np.ndarray], Read, Callable[[int, int, int], Any]]:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder))
    return of_samples(len(dataset), lambda i: dataset[i]["tokens"])


def write_streaming(folder: Path, count: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:uint16"}) as writer:
        for tokens in documents(count):
            writer.write({"tokens": tokens})


def open_streaming(folder: Path) -> tuple[Callable[[], np.ndarray], Read, Callable[[int, int, int], Any]]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), batch_size=1)
    return of_samples(len(dataset), lambda i: dataset[i]["tokens"])


def of_samples(count: int, read: Read) -> tuple[Callable[[], np.ndarray], Read, Callable[[int, int, int], Any]]:
    """Neither format tells lengths, or reads a part: the sample is read."""
    lengths = lambda: np.array([len(read(i)) for i in range(count)])
    return lengths, read, lambda i, first, length: read(i)[first : first + length]


FORMATS = {
    "hdpcomm": (write_ours, open_ours),
    "litdata": (write_litdata, open_litdata),
    "mosaicml-streaming": (write_streaming, open_streaming),
}


def median_us(calls: Iterable[Callable[[], Any]]) -> float:
    times = []
    for call in calls:
        started = time.perf_counter()
        np.asarray(call()).sum()  # so that mapped pages are read
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def measure(name: str, count: int, reads: int) -> dict[str, Any]:
    write, opened = FORMATS[name]
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "store")
        started = time.perf_counter()
        write(folder, count)
        written = time.perf_counter()
        lengths_of, whole, part = opened(folder)
        lengths = lengths_of()
        told = time.perf_counter()
        draw = np.random.default_rng(1)
        longest = np.argsort(lengths)[-max(8, count // 100) :]
        eighths = [(int(i), int(lengths[i]) // 8) for i in draw.choice(longest, reads)]
        return {
            "format": name,
            "documents": count,
            "tokens": int(lengths.sum()),
            "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            "write_s": written - started,
            "lengths_s": told - written,
            "whole_us": median_us(lambda i=int(i): whole(i) for i in draw.integers(count, size=reads)),
            "part_us": median_us(lambda i=i, n=n: part(i, 3 * n, n) for i, n in eighths),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--reads", type=int, default=500)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [measure(name, given.documents, given.reads) for name in FORMATS]
    assert len({row["tokens"] for row in rows}) == 1, "the formats tell different lengths"
    print("| format | bytes a token | written in s | lengths, s | whole, us | part, us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        figures = (row["bytes"] / row["tokens"], row["write_s"], row["lengths_s"], row["whole_us"], row["part_us"])
        print(f"| {row['format']} | {' | '.join(f'{figure:.4g}' for figure in figures)} |")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
