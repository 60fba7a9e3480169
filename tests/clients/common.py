"""What the scripts of this folder share: each runs itself twice, over hdpcomm and as its own truth, and compares.

``python tests/clients/fsdp2.py`` starts the ranks itself. A script defines ``work(backend)``, which returns named
figures; rank 0's of the run over hdpcomm are held against those of the other run, over gloo or in one process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["batches", "figures_of", "join", "leave", "main", "tiny_llama", "trained", "word_tokenizer"]

VOCABULARY = 64
Figures = dict[str, list[float]]
_kept: list[dict[str, Any]] = []


def join(backend: str) -> tuple[int, int]:
    """The default group; gives rank and size. No import of hdpcomm: its entry point has told torch the name."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size()


def leave(backend: str) -> None:
    """Ends the default group; over hdpcomm it must have moved bytes."""
    import torch.distributed as dist

    if backend == "hdpcomm":
        engine = dist.group.WORLD.engine
        sent = sum(comm.stats()["bytes_sent"] for comm in (engine.world, engine.messages))
        assert sent > 1000, f"hdpcomm moved {sent} bytes: something else did the work"
    store = dist.distributed_c10d._get_default_store()
    store.add("ranks that have ended", 1)
    while store.add("ranks that have ended", 0) < dist.get_world_size():
        time.sleep(0.05)
    if backend == "hdpcomm":
        dist.destroy_process_group()
    else:
        # torch 2.13 hangs at times where DDP over gloo is let go of right after an operation: the thread that ends the
        # operation wants the GIL, which the one that ends the group holds. So it lives until main() ends the process.
        _kept.append(dict(sys._getframe(1).f_locals))


def tiny_llama() -> Any:
    """A Llama of transformers with 2 layers; the same weights everywhere."""
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batches(rank: int, steps: int, rows: int = 2, tokens: int = 12) -> list[Any]:
    """Token ids [rows, tokens] of a rank's steps."""
    import torch

    draw = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(1, VOCABULARY, (rows, tokens), generator=draw) for _ in range(steps)]


def figures_of(model: Any) -> list[float]:
    """A sum and a sum of squares for each parameter, in fp64."""
    return [
        float(f(p.detach().double()))
        for p in model.parameters()
        for f in (lambda x: x.sum(), lambda x: x.square().sum())
    ]


def word_tokenizer() -> Any:
    """A tokenizer of the words w2, w3, .. up to the vocabulary of :func:`tiny_llama`."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def trained(trainer: Any, name: str) -> Figures:
    """The losses of a trainer of :func:`tiny_llama`, and figures of what it saves."""
    from safetensors.torch import load_file

    before = tiny_llama().state_dict()
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    [file] = Path(trainer.args.output_dir).glob("*.safetensors")
    saved = {name: tensor.double() for name, tensor in sorted(load_file(file).items())}
    moved = max(float((tensor - before.get(key, 0.0)).abs().max()) for key, tensor in saved.items())
    assert moved > 1e-3, f"{name}: no weight has moved by more than {moved}"
    weights = [float(figure) for tensor in saved.values() for figure in (tensor.sum(), tensor.square().sum())]
    return {f"losses, {name}": losses, f"weights, {name}": weights}


def main(
    work: Callable[[str], Figures],
    *,
    against: str,
    packages: Sequence[str],
    ranks: int = 2,
    atol: float = 1e-5,
    launcher: Sequence[str] | None = None,
) -> None:
    """Runs ``work`` over hdpcomm on ``ranks`` ranks and as ``against`` says, and compares what both return.

    ``against``: ``"gloo"``, on as many ranks, or ``"one process"``, which calls ``work("one process")``. ``launcher``:
    a command in the place of torchrun, which starts the ranks; ``{ranks}`` in it is their number.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.backend:
        found = work(given.backend)
        if int(os.environ.get("RANK", "0")) == 0:
            Path(given.out).write_text(json.dumps(found))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ours = _run("hdpcomm", ranks, folder, launcher)
        truth = _run(against, ranks, folder, launcher)
    most = _compare(ours, truth, atol)
    count = sum(map(len, truth.values()))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    seconds = time.monotonic() - started
    print(f"ok: {versions}: {count} figures on {ranks} ranks, at most {most:.1e} from {against}, {seconds:.0f} s")


def _run(backend: str, ranks: int, folder: str, launcher: Sequence[str] | None) -> Figures:
    out = Path(folder, f"{backend}.json")
    start = list(launcher or ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}"))
    start = [] if backend == "one process" else [word.format(ranks=ranks) for word in start]
    command = [sys.executable, *start, str(Path(sys.argv[0]).resolve()), "--backend", backend, "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0 or not out.exists():
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    figures: Figures = json.loads(out.read_text())
    return figures


def _compare(ours: Figures, truth: Figures, atol: float) -> float:
    """The largest difference. Ends the program where there is one above ``atol``, or nothing to compare."""
    if ours.keys() != truth.keys() or not truth or any(not values for values in truth.values()):
        sys.exit(f"figures differ in their names, or there are none: {sorted(ours)} and {sorted(truth)}")
    most = 0.0
    for name, expected in truth.items():
        if len(ours[name]) != len(expected):
            sys.exit(f"{name}: {len(ours[name])} figures, expected {len(expected)}")
        for place, (a, b) in enumerate(zip(ours[name], expected, strict=True)):
            if not abs(a - b) <= atol:
                sys.exit(f"{name}[{place}] is {a!r}, expected {b!r} within {atol}")
            most = max(most, abs(a - b))
    return most
