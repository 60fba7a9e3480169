"""Seconds that a step waits for tokens, with a tokenizer that is slow on purpose: in the step, or by a loader service.

usage: python benchmarks/loader.py [--steps N] [--step-s SECONDS] [--tokenizer-us US] [--loaders N ...]
                                   [--prefetch N ...] [--json FILE]

The step is a sleep, so that the table shows the overlap and not the machine; the tokenizer sleeps so many microseconds
for each KB of text, and lets other threads run meanwhile, as those of Hugging Face do. `in the step` makes the tokens
of a step when it begins, as a loop without a loader does. One process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from hdpcomm.data import ByteEncoder, LoaderService, open_stream


class SlowEncoder(ByteEncoder):
    def __init__(self, us_per_kb: float) -> None:
        self.us_per_kb = us_per_kb

    def text(self, text: str | bytes) -> np.ndarray:
        time.sleep(len(text) / 1000 * self.us_per_kb * 1e-6)
        return super().text(text)


def write_data(folder: Path, kilobytes: int) -> Path:
    generator = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w") as file:
        written = 0
        while written < kilobytes * 1000:
            text = "some words " * int(generator.lognormal(3, 1.5) + 1)
            written += file.write(json.dumps({"text": text[:40000]}) + "\n")
    return folder / "data.jsonl"


def run(path: Path, options: argparse.Namespace, *, loaders: int, prefetch: int) -> dict[str, float]:
    """Seconds until the first step began, and the mean of what the others waited."""
    began = time.perf_counter()
    stream = open_stream([path], context=4096, encoder=SlowEncoder(options.tokenizer_us), block_bytes=1 << 15)
    waits = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LoaderService(stream, tokens=options.tokens, loaders=loaders, prefetch=prefetch, folder=Path(folder)) as loader,
    ):
        for step in range(options.steps):
            started = time.perf_counter()
            reader = loader.reader(step)
            for place in range(len(reader.batch.sequences)):
                reader(place)
            waits.append(time.perf_counter() - started)
            if step == 0:
                first = time.perf_counter() - began
            time.sleep(options.step_s)
            loader.done(step + 1)
    return {"first_s": first, "stall_s": sum(waits[1:]) / len(waits[1:])}


def in_the_step(path: Path, options: argparse.Namespace) -> dict[str, float]:
    encoder, waits, room = SlowEncoder(options.tokenizer_us), [], 0
    started = time.perf_counter()
    with path.open() as file:
        for line in file:
            room += len(encoder.text(json.loads(line)["text"]))
            if room >= options.tokens:
                room = 0
                waits.append(time.perf_counter() - started)
                time.sleep(options.step_s)
                started = time.perf_counter()
                if len(waits) == options.steps:
                    break
    return {"first_s": waits[0], "stall_s": sum(waits[1:]) / len(waits[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.1, help="what a step computes (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step (default: %(default)s)")
    parser.add_argument("--tokenizer-us", type=float, default=1000, help="for each KB of text (default: %(default)s)")
    parser.add_argument("--loaders", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: at least 2, since the first one waits for all")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_data(Path(folder), (options.steps + 10) * options.tokens // 1000)
        rows.append({"made": "in the step", **in_the_step(path, options)})
        rows += [
            {"made": f"loaders {loaders}, prefetch {prefetch}"} | run(path, options, loaders=loaders, prefetch=prefetch)
            for loaders in options.loaders
            for prefetch in options.prefetch
        ]
    print(f"a step computes {options.step_s * 1e3:g} ms on {options.tokens:,} tokens, whose making takes "
          f"{options.tokens / 1000 * options.tokenizer_us * 1e-3:.0f} ms of one thread")  # fmt: skip
    print(f"{'tokens made':28} {'first step':>12} {'stall of a step':>16}")
    for row in rows:
        print(f"{row['made']:28} {row['first_s']:10.2f} s {row['stall_s'] * 1e3:13.1f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
