"""A model that does not fit whole on every rank: each rank's peak memory beside the prediction, resumed and exported.

    python benchmarks/large_model.py [--layers 16] [--hidden 2048] [--ranks 4] [--zero 3] [--folder FOLDER]
    python benchmarks/large_model.py --loading [--layers 16] [--hidden 768] [--folder FOLDER]

Writes a Llama of transformers (1.04 billion parameters in bf16 by default) tensor by tensor, trains it in fp32 with
AdamW on ranks that share each layer (``--tensor``), or on as many HDP ranks with ``--zero``, goes on from the
checkpoint, exports it, and opens the export. Whole on every rank, weights, gradients and optimizer would take 16 bytes
a parameter and rank.

With ``--loading`` four ranks only read the model, on each of three meshes (:data:`LOADING`): each rank's peak beside
its own part and the largest tensor, and what the ranks have read of the files beside their size.

A rank's peak is that of its anonymous memory and its share of the shared memory above what it had before the run
(RssAnon, and RssShmem divided by the ranks, of /proc/self/status, sampled every 50 ms, or 5 ms of loading). The
kernel's own shares (Pss) say more of the rank that ends last: what the others have unmapped by then counts as its own.
Pages of the files that it reads are the kernel's cache and are not counted.
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
from safetensors import safe_open

import hdpcomm as hdp
from hdpcomm.data import open_corpus
from hdpcomm.models import FolderWeights, NewWeights, adapt
from hdpcomm.models.export import write_folder
from hdpcomm.run import RunConfig, Saving, folder_model, train
from hdpcomm.run.memory import predict_memory
from hdpcomm.run.model import new_part
from hdpcomm.run.pipelines import mesh_of
from hdpcomm.testing import spawn
from hdpcomm.train.zero.shared_parts import has_part

CONTEXT = 32
LOADING: dict[str, tuple[dict[str, Any], int]] = {
    "pipeline 2 x tensor 2": ({"pipeline": 2, "tensor": 2}, 0),
    "tensor 2 x expert 2": ({"tensor": 2, "expert": 2}, 4),
    "zero 3": ({"zero": 3}, 0),
}
"""By name, the mesh of four ranks, and the experts of each layer of its model (a Mixtral; 0: a Llama)."""


class Peak:
    """The most memory of this process, one of so many ranks, in a ``with``, above what it had before."""

    def __init__(self, ranks: int, every_s: float = 0.05) -> None:
        self._ranks, self._every_s = ranks, every_s

    def __enter__(self) -> Peak:
        self._before, self.bytes, self._stop = _resident(self._ranks), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self._every_s):
            self.bytes = max(self.bytes, _resident(self._ranks) - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident(ranks: int) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, shared = (1024 * int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return anonymous + shared // ranks


def config_of(where: Path, ranks: int, zero: int, **options: Any) -> RunConfig:
    """With ``zero`` the ranks are HDP ranks, else tensor ranks."""
    sizes = {"zero": zero} if zero else {"tensor": ranks}
    tokens = CONTEXT * (2 * ranks if zero else 2)
    return RunConfig(model=folder_model(where / "model"), capacity=CONTEXT, tokens_per_step=tokens, **sizes, **options)


def write_model(options: argparse.Namespace, folder: Path, experts: int = 0) -> int:
    """Writes the model; returns its parameters."""
    heads = options.hidden // 64
    sizes: dict[str, Any] = {
        "vocab_size": options.vocabulary, "hidden_size": options.hidden, "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers, "num_attention_heads": heads,
        "num_key_value_heads": max(options.ranks, heads // 4), "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if experts:  # as many parameters
        sizes["intermediate_size"] //= experts
        config = transformers.MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=2)
    else:
        config = transformers.LlamaConfig(**sizes)
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
    with hdp.init(timeout=600.0) as comm, Peak(ranks) as peak:
        started = time.perf_counter()
        result = train(comm, corpus, config, saving=saving, export=where / "export" if resume else None)
    return {
        "peak": peak.bytes,
        "seconds": time.perf_counter() - started,
        "losses": [step.loss for step in result.steps["balanced"]],
        "step_s": [step.seconds for step in result.steps["balanced"]],
    }


def load_rank(folder: str, sizes: dict[str, Any]) -> dict[str, int]:
    torch.set_num_threads(1)
    config = RunConfig(model=folder_model(Path(folder)), **sizes)
    read: list[FolderWeights] = []

    def weights(whole: Any) -> FolderWeights:
        read.append(FolderWeights(Path(folder), whole))
        return read[0]

    options: dict[str, Any] = {"recompute": ["none"] * config.pipeline, "zero": int(config.zero)}
    options["layers"] = config.stage_layers
    with hdp.init(timeout=600.0) as comm:
        mesh = mesh_of(comm, config)
        new_part(config.model, mesh, weights=None, **options)  # imports what it needs
        with Peak(comm.size, 0.005) as peak:
            parts = new_part(config.model, mesh, weights=weights, **options)
        tensors = {id(t): t for part in parts for t in (*part.parameters(), *part.buffers())}.values()
        own = sum(t._hdpcomm_part[1].nbytes if has_part(t) else t.nbytes for t in tensors)
    return {"peak": peak.bytes, "own": own, "read": read[0].bytes_read}


def loading(options: argparse.Namespace, where: Path) -> dict[str, Any]:
    """Peaks of four ranks that read a model on each of the meshes."""
    found: dict[str, Any] = {}
    for name, (sizes, experts) in LOADING.items():
        folder = where / f"experts {experts}"
        if not folder.exists():
            write_model(options, folder, experts)
        files = sorted(folder.glob("*.safetensors"))
        opened = [safe_open(file, framework="pt") for file in files]
        stored = [each.get_tensor(key).nbytes for each in opened for key in each.keys()]  # noqa: SIM118
        started = time.perf_counter()
        ranks = spawn(load_rank, 4, str(folder), sizes, timeout=600.0)
        found[name] = {
            "seconds": time.perf_counter() - started,
            "own_bytes": [each["own"] for each in ranks],
            "peak_bytes": [each["peak"] for each in ranks],
            "largest_tensor": max(stored),
            "ratios": [each["peak"] / (each["own"] + max(stored)) for each in ranks],
            "stored_bytes": sum(stored),
            "bytes_read": sum(each["read"] for each in ranks),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("hidden", 2048), ("vocabulary", 32000), ("ranks", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=0, help="HDP ranks in place of tensor ranks")
    parser.add_argument("--loading", action="store_true", help="four ranks read it on three meshes, and no more")
    parser.add_argument("--folder", type=Path, help="where everything is written (a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        where = Path(name)
        if options.loading:
            write(loading(options, where), options.json)
            return
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
    write(found, options.json)


def write(found: dict[str, Any], file: Path | None) -> None:
    print(json.dumps(found, indent=1))
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
