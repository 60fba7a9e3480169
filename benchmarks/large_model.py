"""A model that does not fit whole on every rank: each rank's peak memory beside the prediction, resumed and exported.

    python benchmarks/large_model.py [--layers 16] [--hidden 2048] [--ranks 4] [--zero 3] [--folder FOLDER]

Writes a Llama of transformers (1.04 billion parameters in bf16 by default) tensor by tensor, trains it in fp32 with
AdamW on ranks that share each layer (``--tensor``), or on as many HDP ranks with ``--zero``, goes on from the
checkpoint, exports it, and opens the export. Whole on every rank, weights, gradients and optimizer would take 16 bytes
a parameter and rank.

A rank's peak is that of its anonymous and shared memory above what it had before the run (Pss_Anon and Pss_Shmem of
/proc/self/smaps_rollup, sampled every 50 ms): a page that several ranks map counts as its share for each. Pages of the
files that it reads are the kernel's cache and are not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import hdpcomm as hdp
from hdpcomm.data import open_corpus
from hdpcomm.models import NewWeights, adapt
from hdpcomm.models.export import write_folder
from hdpcomm.run import RunConfig, Saving, folder_model, train
from hdpcomm.run.memory import predict_memory
from hdpcomm.testing import spawn

CONTEXT = 32


class Peak:
    """The most memory of this process in a ``with``, above what it had before."""

    def __enter__(self) -> Peak:
        self._before, self.bytes, self._stop = _resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self.bytes = max(self.bytes, _resident() - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))


def config_of(where: Path, ranks: int, zero: int, **options: Any) -> RunConfig:
    """With ``zero`` the ranks are HDP ranks, else tensor ranks."""
    sizes = {"zero": zero} if zero else {"tensor": ranks}
    tokens = CONTEXT * (2 * ranks if zero else 2)
    return RunConfig(model=folder_model(where / "model"), capacity=CONTEXT, tokens_per_step=tokens, **sizes, **options)


def write_model(options: argparse.Namespace, folder: Path) -> int:
    """Writes the model; returns its parameters."""
    heads = options.hidden // 64
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=max(options.ranks, heads // 4),
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = adapt(transformers.AutoModelForCausalLM.from_config(config))
    weights = NewWeights(model, 0)
    tensors = ((name, weights.whole(name).bfloat16()) for name, _ in model.named_parameters())
    write_folder(config, ((name.removeprefix("model."), tensor) for name, tensor in tensors), folder)
    return sum(p.numel() for p in model.parameters())


def run_rank(folder: str, steps: int, resume: bool, ranks: int, zero: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    where = Path(folder)
    corpus = open_corpus([where / "text.txt"], context=CONTEXT)
    config = config_of(where, ranks, zero, steps=steps, lr=1e-4, check_replicas=0)
    saving = Saving(where / "run", resume="auto" if resume else None)
    with hdp.init(timeout=600.0) as comm, Peak() as peak:
        started = time.perf_counter()
        result = train(comm, corpus, config, saving=saving, export=where / "export" if resume else None)
    return {
        "peak": peak.bytes,
        "seconds": time.perf_counter() - started,
        "losses": [step.loss for step in result.steps["balanced"]],
        "step_s": [step.seconds for step in result.steps["balanced"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("hidden", 2048), ("vocabulary", 32000), ("ranks", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=0, help="HDP ranks in place of tensor ranks")
    parser.add_argument("--folder", type=Path, help="where everything is written (a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        where = Path(name)
        (where / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
        started = time.perf_counter()
        parameters = write_model(options, where / "model")
        written_s = time.perf_counter() - started
        config = config_of(where, options.ranks, options.zero)
        (memory,) = predict_memory(config, options.ranks)
        predicted = memory.peak_bytes(CONTEXT)
        first = spawn(run_rank, options.ranks, name, 3, False, options.ranks, options.zero, timeout=3600.0)
        then = spawn(run_rank, options.ranks, name, 4, True, options.ranks, options.zero, timeout=3600.0)
        made = transformers.AutoModelForCausalLM.from_pretrained(where / "export", dtype=torch.bfloat16)
        exported = sum(p.numel() for p in made.parameters())
    found = {
        "parameters": parameters, "ranks": options.ranks, "zero": options.zero, "written_s": written_s,
        "predicted": predicted, "states": memory.states, "peaks": [each["peak"] for each in first],
        "ratios": [each["peak"] / predicted for each in first],
        "peaks_resumed_and_exported": [each["peak"] for each in then],
        "seconds": first[0]["seconds"], "step_s": first[0]["step_s"],
        "losses": first[0]["losses"] + then[0]["losses"], "exported_parameters": exported,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
