"""Stages of a training: a run that begins where another one ended, with other data, context, mesh or type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.data import open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.run import RunConfig, Saving, Schedule, folder_model, read_metrics, train
from hdpcomm.run.checkpoints import open_checkpoint
from hdpcomm.run.first_weights import CheckpointWeights
from hdpcomm.testing import run_threads
from tests.harness.signing import sign

MODEL = LlamaConfig(layers=4, hidden=16, heads=2, kv_heads=2, ffn=24)
CONSTANT = Schedule("constant", warmup=0)
STAGES = (  # tokens of a context, ranks, and how they share the model
    (64, 2, {"zero": 1}),
    (160, 4, {"pipeline": 2, "tensor": 2}),
    (300, 2, {"zero": 3, "tensor": 1}),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return folder


def run_rank(data: Path, context: int, out: Path | None, export: Path | None, **changed: Any) -> Any:
    torch.set_num_threads(1)
    corpus = open_corpus([data], context=context)
    config = RunConfig(**{"model": MODEL, "steps": 2, "capacity": context, "tokens_per_step": 2 * context} | changed)
    with hdp.init() as comm:
        return train(comm, corpus, config, saving=None if out is None else Saving(out), export=export)


def run_of(
    data: Path, ranks: int, *, context: int = 160, out: Path | None = None, export: Path | None = None, **changed: Any
) -> Any:
    return run_threads(lambda: run_rank(data, context, out, export, **changed), ranks)[0]


def losses(result: Any) -> list[float]:
    return [step.loss for step in result.steps["balanced"]]


def stages(data: Path, folder: Path, *, alone: bool) -> list[float]:
    """The losses of three runs, each with the weights and the optimizer of the one before."""
    found, before = [], None
    for number, (context, ranks, options) in enumerate(STAGES):
        begin = {} if before is None else {"init_from": before, "keep_optimizer": True}
        mesh = {} if alone else options
        before = folder / str(number)
        found += losses(run_of(data, 1 if alone else ranks, context=context, out=before, **begin, **mesh))
    return found


def test_three_contexts_on_three_meshes_are_as_one_process(data: Path, tmp_path: Path) -> None:
    meshes, alone = (stages(data, tmp_path / name, alone=name == "alone") for name in ("meshes", "alone"))
    assert meshes == pytest.approx(alone, rel=1e-4)
    assert len(alone) == 6


def test_the_optimizer_goes_on_only_if_it_is_to(data: Path, tmp_path: Path) -> None:
    first, whole = tmp_path / "first", run_of(data, 1, steps=4, schedule=CONSTANT)
    run_of(data, 1, steps=2, out=first, schedule=CONSTANT)
    # Both begin with the batches of step 0 and equal weights: only the optimizer differs.
    kept = run_of(data, 1, init_from=first, keep_optimizer=True, schedule=CONSTANT)
    new = run_of(data, 1, init_from=first, schedule=CONSTANT)
    assert losses(kept)[0] == losses(new)[0] < losses(whole)[0]
    assert losses(kept)[1] != losses(new)[1]


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "bf16", "zero": 1}, {"dtype": "bf16", "zero": 3}])
def test_the_widest_weights_are_taken(data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """From bf16 with fp32 masters to fp32: nothing is rounded on the way, and back."""
    run_of(data, 2, out=tmp_path / "narrow", **options)
    run_of(data, 1, out=tmp_path / "wide", init_from=tmp_path / "narrow", lr=1e-30, weight_decay=0.0)
    run_of(data, 2, export=tmp_path / "model", init_from=tmp_path / "wide", lr=1e-30, weight_decay=0.0)
    found = open_checkpoint(tmp_path / "narrow" / "step-2")
    masters = CheckpointWeights(found, Llama(MODEL, device="meta"))
    exported = load_file(tmp_path / "model" / "model.safetensors")
    for ours, theirs in (("embedding.weight", "model.embed_tokens.weight"), ("norm.weight", "model.norm.weight")):
        assert masters.whole(ours).dtype == torch.float32
        assert torch.equal(masters.whole(ours), exported[theirs])
    rounded = masters.whole("embedding.weight").bfloat16().float()
    assert not torch.equal(rounded, masters.whole("embedding.weight"))


def test_a_model_with_another_rope_goes_on(data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "architectures": ["Qwen3ForCausalLM"],
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    short = transformers.Qwen3Config(**sizes, max_position_embeddings=64)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    long = transformers.Qwen3Config(**sizes, max_position_embeddings=256, rope_parameters=rope)
    for name, config in (("short", short), ("long", long)):
        config.save_pretrained(tmp_path / name)
    run_of(data, 2, model=folder_model(tmp_path / "short"), out=tmp_path / "run", tensor=1)
    model = folder_model(tmp_path / "long")
    found = run_of(data, 1, model=model, init_from=tmp_path / "run", export=tmp_path / "model", lr=1e-30)
    assert len(losses(found)) == 2
    written = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert written.rope_parameters["factor"] == 4.0
    # A folder with weights is as good as a run.
    again = run_of(data, 1, model=model, init_from=tmp_path / "model", lr=1e-30)
    assert losses(again)[0] == pytest.approx(losses(found)[0], rel=1e-5)


@pytest.fixture(scope="module")
def saved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved")
    run_of(data, 1, steps=1, out=folder / "run")
    return folder / "run"


class TestRefusals:
    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"model": LlamaConfig(layers=4, hidden=32, heads=2, ffn=24)}, r"has embedding\.weight with the shape"),
            ({"model": LlamaConfig(layers=5, hidden=16, heads=2, kv_heads=2, ffn=24)}, r"blocks\.4.* does not have it"),
            ({"keep_optimizer": True, "optimizer": "Adam"}, "saved with the optimizer AdamW, and this run has Adam"),
        ],
    )
    def test_another_model_or_optimizer(self, data: Path, saved: Path, changed: dict[str, Any], reason: str) -> None:
        with pytest.raises(InvalidUsage, match=reason):
            run_of(data, 1, init_from=saved, **changed)

    def test_nothing_there(self, data: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidUsage, match="no such checkpoint"):
            run_of(data, 2, init_from=tmp_path / "none")

    @pytest.mark.parametrize("policies", [[], "balanced", [3]])
    def test_a_checkpoint_that_names_no_policy(self, data: Path, saved: Path, tmp_path: Path, policies: Any) -> None:
        step = tmp_path / "step-1"
        shutil.copytree(saved / "step-1", step)
        meta = json.loads((step / "meta.json").read_text())
        meta["config"]["policies"] = policies
        (step / "meta.json").write_text(json.dumps(meta))
        sign(step)
        with pytest.raises(InvalidUsage, match=r"meta\.json: policies: .* is no list of policies"):
            run_of(data, 1, init_from=step)

    def test_a_checkpoint_whose_metadata_name_code(self, data: Path, saved: Path, tmp_path: Path) -> None:
        step = tmp_path / "step-1"
        shutil.copytree(saved / "step-1", step)
        (step / ".metadata").write_bytes(b"cos\nsystem\n(S'touch planted'\ntR.")
        sign(step)
        with pytest.raises(InvalidUsage, match=r"step-1: damaged \(.*names os\.system"):
            run_of(data, 1, init_from=step)

    def test_the_folder_of_a_model_for_the_built_in_one(self, data: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(InvalidUsage, match="this run trains the built-in Llama; give --model"):
            run_of(data, 1, init_from=tmp_path)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (["--keep-optimizer"], "--keep-optimizer was given without --init-from"),
            (["--optimizer", "Foo"], "--optimizer Foo cannot be found"),
            (["--optimizer", "no_module:Foo"], "--optimizer no_module:Foo cannot be found"),
            (["--optimizer", "lr_scheduler"], "is no class of optimizers"),
            (["--optimizer", "LBFGS"], "computes the loss several times a step"),
            (["--optimizer-options", "momentum=0.9"], "has momentum, which AdamW does not take; it takes betas"),
            (["--optimizer-options", "betas"], "NAME=VALUE was expected"),
            (["--optimizer-options", "lr=1"], "has lr; give --lr"),
            (["--optimizer", "Rprop", "--weight-decay", "0.2"], "Rprop has no weight decay; leave out --weight-decay"),
            (["--optimizer", "SGD", "--optimizer-options", "nesterov=true"], "cannot be made over this model"),
        ],
    )
    def test_the_command(
        self, data: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
        options: list[str], reason: str,
    ) -> None:  # fmt: skip
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        sizes = ["--hidden", "16", "--ffn", "24", "--layers", "1", "--steps", "1", "--ranks", "1", "--context", "64"]
        assert main(["train", "--data", str(data), *sizes, *options]) != 0
        assert reason in " ".join(capfd.readouterr().err.split())


def test_optimizers_by_name(data: Path) -> None:
    sgd = run_of(data, 1, optimizer="SGD", optimizer_options=("momentum=0.9", "nesterov=true"))
    other = run_of(data, 2, optimizer="torch.optim:SGD", optimizer_options=("momentum=0.9", "nesterov=True"), zero=1)
    plain = run_of(data, 1, optimizer="SGD")
    assert losses(sgd) == pytest.approx(losses(other), rel=1e-5)
    assert losses(sgd)[1] != losses(plain)[1]


class TestMixtures:
    @pytest.fixture
    def files(self, tmp_path: Path) -> list[str]:
        for name, text in (("code", "if x: y = 1\n"), ("prose", "and so it was told\n")):
            with (tmp_path / f"{name}.jsonl").open("w") as file:
                for i in range(12):
                    file.write(json.dumps({"text": text * (i * i + 1)}) + "\n")
        return [f"{tmp_path / 'code.jsonl'}=0.7", f"{tmp_path / 'prose.jsonl'}=0.3"]

    @pytest.fixture
    def command(self, files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        sizes = ["--hidden", "16", "--ffn", "24", "--layers", "1", "--heads", "2", "--context", "256"]
        sizes += ["--tokens-per-step", "512", "--trackers", "none", "--data-cache", str(tmp_path / "cache")]
        return ["train", *sizes, "--data", *files]

    def losses(self, out: Path) -> list[float]:
        return [row["loss"] for row in read_metrics(out / "metrics.jsonl")]

    def test_the_order_is_that_of_any_ranks_and_of_a_resumed_run(
        self, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        common = [*command, "--steps", "12", "--schedule", "constant"]
        for ranks in ("1", "2", "4"):
            assert main([*common, "--ranks", ranks, "--out", str(tmp_path / ranks)]) == 0
        assert "a mixture of 70%, 30% of the tokens" in " ".join(capfd.readouterr().out.split())
        half = [*command, "--schedule", "constant", "--ranks", "2", "--out", str(tmp_path / "half")]
        assert main([*half, "--steps", "7"]) == 0
        assert main([*half, "--steps", "12", "--resume", "auto"]) == 0
        wanted = self.losses(tmp_path / "1")
        assert len(wanted) == 12
        for out in ("2", "4", "half"):
            assert self.losses(tmp_path / out) == pytest.approx(wanted, rel=1e-4)
        other = [each.replace("0.7", "0.5") for each in half]
        assert main([*other, "--steps", "14", "--resume", "auto"]) != 0
        assert "was saved on other data" in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            (lambda files: [files[0], files[1].rpartition("=")[0]], "has no weight, and other data has"),
            (
                lambda files: [files[0], files[1].replace("0.3", "0")],
                "weights is 0.0, expected a finite number above 0",
            ),
            (lambda files: [files[0], files[1].replace("0.3", "x")], "PATH=WEIGHT was expected"),
            (lambda files: [*files, "--eval-data", files[0]], "--eval-data has weights"),
        ],
    )
    def test_refusals(
        self, command: list[str], files: list[str], capfd: pytest.CaptureFixture[str], changed: Any, reason: str
    ) -> None:
        assert main([*command[: -len(files)], *changed(files), "--ranks", "1", "--steps", "1"]) != 0
        assert reason in " ".join(capfd.readouterr().err.split())
