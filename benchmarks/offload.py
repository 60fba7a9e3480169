"""Activation offload: device memory and step time by ratio and length, compared with torch's and torchtune's methods.

    python benchmarks/offload.py --device cuda --lengths 64K,128K,256K --json offload.json
    python benchmarks/offload.py --device cuda --longest            # the longest sequence with and without
    python benchmarks/offload.py --device sim                       # a small model on the CPU: memory, not time

A step is forward and backward of one sequence. Memory is the peak above weights and gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.offload import ActivationOffload, MemoryMeter, PinnedPool
from hdpcomm.perf.config import parse_size
from hdpcomm.train import summed_loss

SHAPES = {  # the layers of LLaMA-7B; a laptop's
    "cuda": LlamaConfig(vocabulary=32000, layers=8, hidden=4096, heads=32, kv_heads=8, ffn=11008),
    "sim": LlamaConfig(vocabulary=256, layers=8, hidden=64, heads=4, kv_heads=2, ffn=128),
}
LENGTHS = {"cuda": "64K,128K,256K", "sim": "256,1K"}
POOL = {"cuda": "100G", "sim": "256M"}

Context = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one length; has ``error`` instead of figures if it failed."""

    method: str
    tokens: int
    seconds: float | None
    memory_bytes: int | None
    slower: float | None  # share of the step time without offload
    saved: float | None  # share of its memory
    error: str = ""


class Bench:
    """A model on a device, whose steps run under a given method to save activations."""

    def __init__(self, options: argparse.Namespace, pool: PinnedPool | None = None) -> None:
        cuda = options.device == "cuda"
        if not cuda:
            torch.set_num_threads(1)
        self.place = torch.device("cuda" if cuda else "cpu")
        shape = SHAPES[options.device]
        sizes = {name: getattr(shape, name) for name in ("vocabulary", "hidden", "heads", "kv_heads", "ffn")}
        self.shape = LlamaConfig(layers=options.layers or shape.layers, **sizes)
        dtype = torch.bfloat16 if cuda else torch.float32
        self.model = Llama(self.shape, dtype=dtype, device=self.place)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.comm = hdp.init(transport="cuda" if cuda else "shm")
        pool = pool or PinnedPool(parse_size(options.pool or POOL[options.device]), device=self.place)
        self.offload = ActivationOffload(pool, self.model, min_bytes=1 << 20 if cuda else 1)
        self.repeats = options.repeats

    def step(self, tokens: int, context: Context) -> None:
        text = torch.arange(tokens, device=self.place) % self.shape.vocabulary
        places = torch.arange(tokens, device=self.place)
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        with context():
            logits = self.model(text, positions=places, cu_seqlens=bounds, comm=self.comm)
            loss = summed_loss(logits, text.roll(-1))
        del logits
        loss.backward()

    def synchronize(self) -> None:
        if self.place.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, method: str, tokens: int, context: Context, base: Row | None) -> Row:
        try:
            self.step(tokens, context)  # warm
            with MemoryMeter(self.place) as meter:
                self.step(tokens, context)
                self.synchronize()
            best = float("inf")
            for _ in range(self.repeats):
                self.synchronize()
                started = time.perf_counter()
                self.step(tokens, context)
                self.synchronize()
                best = min(best, time.perf_counter() - started)
        except (torch.OutOfMemoryError, hdp.Error) as error:
            if self.place.type == "cuda":
                torch.cuda.empty_cache()
            return Row(method, tokens, None, None, None, None, str(error).splitlines()[0][:200])
        known = base is not None and base.seconds is not None
        slower = best / base.seconds - 1 if known else None
        saved = 1 - meter.peak / base.memory_bytes if known else None
        return Row(method, tokens, best, meter.peak, slower, saved)


def others(place: torch.device) -> dict[str, Context]:
    """Other libraries' methods: torch's, and torchtune's if it is installed (it needs CUDA)."""
    pin = place.type == "cuda"
    found: dict[str, Context] = {"save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)}
    with contextlib.suppress(ImportError):
        from torchtune.training import OffloadActivations

        if pin:
            found["torchtune"] = lambda: OffloadActivations(use_pin_memory=True, use_streams=True)
    return found


def table(bench: Bench, lengths: list[int], ratios: list[float]) -> list[Row]:
    rows = []
    print(f"{'method':<14}{'tokens':>9}{'s/step':>10}{'memory MB':>12}{'slower':>9}{'saved':>8}")
    for tokens in lengths:
        base: Row | None = None
        ways: dict[str, Context] = {"none": contextlib.nullcontext}
        for ratio in ratios:
            ways[f"r={ratio:g}"] = lambda ratio=ratio, tokens=tokens: bench.offload.micro_batch(ratio, tokens=tokens)
        ways |= others(bench.place)
        for method, context in ways.items():
            row = bench.measure(method, tokens, context, base)
            base = base or row
            rows.append(row)
            if row.seconds is None or row.memory_bytes is None:
                print(f"{method:<14}{tokens:>9}  {row.error}")
                continue
            rest = "" if row.slower is None else f"{row.slower:>9.1%}{row.saved:>8.1%}"
            print(f"{method:<14}{tokens:>9}{row.seconds:>10.4f}{row.memory_bytes / 1e6:>12.1f}{rest}", flush=True)
    return rows


def longest(bench: Bench, start: int) -> dict[str, int]:
    """Tokens of the longest sequence that runs, to 1/8, without offload and at ratio 1; CUDA only."""
    return {method: longest_of(bench, ratio, start) for method, ratio in (("none", 0.0), ("r=1", 1.0))}


def longest_of(bench: Bench, ratio: float, start: int) -> int:
    """Tokens of the longest sequence at one ratio, searched up from ``start``, or down if it fails; 0 if 1024 fail."""

    def runs(tokens: int) -> bool:
        way = lambda: bench.offload.micro_batch(ratio, tokens=tokens)
        row = bench.measure(f"r={ratio:g}", tokens, way, None)
        print(f"r={ratio:g}, {tokens} tokens: {row.error or 'runs'}", flush=True)
        return not row.error

    tokens = max(1024, start)
    if not runs(tokens):
        while tokens > 1024:
            tokens = max(1024, tokens - max(1024, tokens // 8 // 1024 * 1024))
            if runs(tokens):
                return tokens
        return 0
    while runs(longer := tokens + max(1024, tokens // 8 // 1024 * 1024)):
        tokens = longer
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda" if torch.cuda.is_available() else "sim")
    parser.add_argument("--lengths", help="tokens, like 64K,128K")
    parser.add_argument("--ratios", default="0.25,0.5,0.75,1")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--pool", help="pinned host memory, like 100G")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--longest", action="store_true", help="find the longest sequence instead (cuda)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.longest and options.device != "cuda":
        parser.error("--longest needs --device cuda: a simulated device has no limit of its own")
    lengths = [parse_size(part) for part in (options.lengths or LENGTHS[options.device]).split(",")]
    bench = Bench(options)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "simulated on the CPU"
    content: dict[str, object] = {"device": name, "torch": torch.__version__, "model": asdict(bench.shape)}
    if options.longest:
        content["longest"] = longest(bench, lengths[0])
    else:
        rows = table(bench, lengths, [float(part) for part in options.ratios.split(",")])
        content["rows"] = [asdict(row) for row in rows]
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
