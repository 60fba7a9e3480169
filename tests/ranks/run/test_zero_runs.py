"""Runs with ZeRO-2 and ZeRO-3: losses, checkpoints and exports as without; the stage that a limit asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hdpcomm as hdp
from hdpcomm.data import open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.run import RunConfig, Saving, folder_model, train
from hdpcomm.run.memory import fit_zero, predict_memory
from hdpcomm.testing import run_threads

MODEL = LlamaConfig(layers=5, hidden=16, heads=2, kv_heads=2, ffn=24)
SPARSE = LlamaConfig(layers=4, hidden=16, heads=2, kv_heads=2, ffn=12, experts=4)
CONTEXT = 80


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return folder


def config_of(**changed: Any) -> RunConfig:
    options = {"model": MODEL, "steps": 4, "capacity": CONTEXT, "tokens_per_step": 4 * CONTEXT}
    return RunConfig(**options | changed)


def run_of(
    data: Path, ranks: int, *, out: Path | None = None, resume: str | None = None, export: Path | None = None,
    **changed: Any,
) -> Any:  # fmt: skip
    def rank() -> Any:
        torch.set_num_threads(1)
        saving = None if out is None else Saving(out, every=2, resume=resume)
        corpus = open_corpus([data], context=CONTEXT)
        with hdp.init() as comm:
            return train(comm, corpus, config_of(**changed), saving=saving, held_out=corpus, export=export)

    return run_threads(rank, ranks)[0]


def losses(result: Any) -> list[float]:
    return [step.loss for step in result.steps["balanced"]] + [each.loss for each in result.evaluations["balanced"]]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"zero": 2}),
        (2, {"zero": 3}),
        (4, {"zero": 3, "pipeline": 2, "layers": 4}),
        (4, {"zero": 3, "tensor": 2, "layers": 4}),
        (4, {"zero": 3, "expert": 2, "model": SPARSE}),
        (2, {"zero": 3, "dtype": "bf16"}),
    ],
    ids=str,
)
def test_a_run_goes_on_with_any_other_stage(ranks: int, options: dict[str, Any], data: Path, tmp_path: Path) -> None:
    if layers := options.pop("layers", 0):
        options["model"] = LlamaConfig(layers=layers, hidden=16, heads=2, kv_heads=2, ffn=24)
    same = {name: options[name] for name in ("model", "dtype") if name in options}
    limit = 1e-2 if "dtype" in options else 1e-5
    alone = run_of(data, 1, out=tmp_path / "alone", export=tmp_path / "alone-model", **same)
    shared = run_of(data, ranks, out=tmp_path / "shared", export=tmp_path / "model", **options)
    assert losses(shared) == pytest.approx(losses(alone), rel=limit)
    # Each goes on from the other's second step.
    then = run_of(data, ranks, out=tmp_path / "a", resume=str(tmp_path / "alone" / "step-2"), **options)
    other = run_of(data, 1, out=tmp_path / "b", resume=str(tmp_path / "shared" / "step-2"), **same)
    for found in (then, other):
        assert losses(found) == pytest.approx(losses(alone)[2:], rel=limit)
    exported, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "alone-model"))
    assert exported.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (exported[name] - tensor).float().norm() <= 20 * limit * (tensor.float().norm() + 1e-3), name


@pytest.mark.parametrize(("ranks", "options"), [(3, {}), (4, {"pipeline": 2}), (2, {"tensor": 1, "dtype": "bf16"})])
def test_a_model_of_a_folder(ranks: int, options: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """More layers than are measured; read by parts, and exported."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "architectures": ["Qwen3ForCausalLM"],
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes))
    model.save_pretrained(tmp_path / "model")
    alone = run_of(data, 1, model=folder_model(tmp_path / "model"))
    found = run_of(data, ranks, model=folder_model(tmp_path / "model"), zero=3, export=tmp_path / "out", **options)
    assert losses(found) == pytest.approx(losses(alone), rel=1e-2 if "dtype" in options else 1e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())


DEEP = LlamaConfig(layers=8, hidden=64, heads=2, kv_heads=2, ffn=256)


def test_each_stage_takes_less_and_auto_takes_the_least() -> None:
    peaks = []
    for zero in range(4):
        (memory,) = predict_memory(config_of(model=DEEP, recompute="full", zero=zero), 4)
        peaks.append(memory.peak_bytes(CONTEXT, 8))
    assert peaks == sorted(peaks, reverse=True)
    for wanted in (0, 1, 3):
        auto = config_of(model=DEEP, recompute="full", zero="auto", memory=int(peaks[wanted]) + 1)
        assert fit_zero(None, auto, 4) == wanted


def test_auto_is_refused_where_no_stage_fits() -> None:
    with pytest.raises(InvalidUsage, match=r"no stage of ZeRO brings a step within .* a rank; with zero 3 it takes"):
        fit_zero(None, config_of(model=DEEP, recompute="full", zero="auto", memory=1 << 20), 4)


def test_auto_runs(data: Path) -> None:
    run = run_of(data, 2, model=DEEP, recompute="full", zero="auto", memory=64 << 20, steps=1)
    assert len(losses(run)) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"zero": 2, "queue": True}, "zero=2 adds gradients in the order .* queue=True"),
        ({"zero": 3, "pipeline": 2, "split_backward": True}, "zero=3 .* split_backward=True"),
        ({"zero": "auto"}, "zero is 'auto' and no limit was given"),
        ({"zero": 4}, "zero 4; give fp32 or bf16, and 0, 1, 2, 3 or auto"),
        ({"zero": 3, "policies": ("ddp",)}, "DDP keeps the whole optimizer"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], told: str) -> None:
    model = LlamaConfig(layers=4, hidden=16, heads=2, kv_heads=2, ffn=24)
    with pytest.raises(InvalidUsage, match=told):
        config_of(model=model, **options)
