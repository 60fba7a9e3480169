"""Runs with ``--lora``: adapters of one process on HDP ranks and in stages, checkpoints, and exports for peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import FolderWeights, NewWeights
from hdpcomm.models.lora_names import is_adapter
from hdpcomm.options import BadOption, LoraOptions
from hdpcomm.run import RunConfig, folder_model
from hdpcomm.run.model import model_on_meta
from tests.ranks.parallel.test_pipeline_runs import losses, run_of, run_rank_with

transformers = pytest.importorskip("transformers", minversion="5.0")
peft = pytest.importorskip("peft")

LORA = "r=2,alpha=4,targets=q_proj+down_proj"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "model"
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def plain(data: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("plain") / "adapters"
    return run_of(data, 1, held_out=True, model=folder_model(folder), lora=LORA, export=out), out


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (2, {}),
        (2, {"pipeline": 2, "recompute": 1}),
        (4, {"pipeline": 2, "zero": 1}),
        (2, {"zero": 3}),
        (4, {"pipeline": 2, "zero": 3}),
        (2, {"pipeline": 2, "chunks": 2, "split_backward": True}),
        (2, {"tensor": 2}),
        (4, {"tensor": 2, "zero": 1, "recompute": 2}),
        (4, {"tensor": 2, "zero": 3}),
        (4, {"pipeline": 2, "tensor": 2, "split_backward": True}),
    ],
    ids=["hdp2", "pp2", "pp2xhdp2", "zero3", "zero3xpp2", "interleaved", "tp2", "tp2xhdp2", "zero3xtp2", "pp2xtp2"],
)
def test_weights_of_one_process(
    data: str, folder: Path, plain: tuple[Any, Path], tmp_path: Path, number: int, options: dict[str, Any]
) -> None:
    results = run_of(
        data, number, held_out=True, model=folder_model(folder), lora=LORA, export=tmp_path / "out", **options
    )
    assert losses(results) == pytest.approx(losses(plain[0]), rel=1e-5)
    norms, wanted_norms = ([s.grad_norm for s in each[0].steps["balanced"]] for each in (results, plain[0]))
    assert norms == pytest.approx(wanted_norms, rel=1e-4)
    assert results[0].parameters == plain[0][0].parameters
    found, wanted = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "out", plain[1]))
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert (weight - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


def test_peft_opens_what_was_trained(folder: Path, plain: tuple[Any, Path]) -> None:
    """The base as it was, and beside it adapters that have learned something."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        first = base(tokens).logits
        made = peft.PeftModel.from_pretrained(base, plain[1]).eval()
        assert not torch.equal(made(tokens).logits, first)
    adapters = {name for name in made.state_dict() if is_adapter(name)}
    assert len(adapters) == 4 * 2 * 2
    saved = load_file(plain[1] / "adapter_model.safetensors")
    for name, tensor in made.state_dict().items():
        if is_adapter(name):
            assert torch.equal(tensor, saved[name.replace(".default", "")]), name
            assert tensor.any(), name
    unloaded = made.unload().state_dict()
    assert all(torch.equal(unloaded[name], tensor) for name, tensor in before.items())


def test_a_run_goes_on_and_another_begins_with_it(ranks, data, folder, plain, tmp_path) -> None:
    model = folder_model(folder)
    common = {"model": model, "lora": LORA}
    ranks(2, run_rank_with, data, common | {"out": str(tmp_path / "run"), "pipeline": 2, "steps": 2})
    resume = {"resume": str(tmp_path / "run/step-2")}
    for name, sizes in (("pipeline", {"pipeline": 2}), ("plain", {}), ("tensor", {"tensor": 2})):
        again = ranks(2, run_rank_with, data, common | resume | sizes | {"out": str(tmp_path / name)})
        assert again[0].first_step == 2
        assert losses(again) == pytest.approx(losses(plain[0])[2:], rel=1e-5)
    others = ranks(2, run_rank_with, data, common | {"init_from": tmp_path / "run/step-2", "steps": 1})
    assert losses(others)[0] < losses(plain[0])[0]
    with pytest.raises(Exception, match="lora"):
        ranks(2, run_rank_with, data, {"model": model, **resume, "out": str(tmp_path / "none")})


def test_a_run_without_adapters_is_gone_on_with_by_some(ranks, data, folder, tmp_path) -> None:
    common = {"model": folder_model(folder), "steps": 2, "lr": 0.01}
    before = ranks(2, run_rank_with, data, common | {"out": str(tmp_path / "run")})
    begins = {"init_from": tmp_path / "run/step-2", "lora": LORA, "pipeline": 2}
    after = ranks(2, run_rank_with, data, common | begins)
    assert losses(after)[0] < losses(before)[-1]


def test_first_values_are_those_of_peft_and_of_the_folder(folder: Path) -> None:
    model = RunConfig(model=folder_model(folder), lora=LORA).model
    whole = model_on_meta(model)
    stored = load_file(folder / "model.safetensors")
    weights = FolderWeights(folder, whole, seed=3)
    for name, parameter in whole.named_parameters():
        value = weights.whole(name)
        assert value.shape == parameter.shape
        assert parameter.requires_grad == is_adapter(name)
        if ".lora_A." in name:  # uniform, as of an nn.Linear
            assert value.std() == pytest.approx(value.shape[1] ** -0.5 / 3**0.5, rel=0.3)
            assert not torch.equal(value, FolderWeights(folder, whole, seed=4).whole(name))
        elif ".lora_B." in name:
            assert not value.any()
        else:
            plain = name.replace("model.base_model.model.", "").replace(".base_layer", "")
            assert torch.equal(value, stored[plain]), name
    name = "model.layers.1.self_attn.q_proj"
    new = NewWeights(model_on_meta(folder_model(folder)), 5).whole(f"model.{name}.weight")
    assert torch.equal(new, NewWeights(whole, 5).whole(f"model.base_model.model.{name}.base_layer.weight"))


def test_the_command(data: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    given = ["train", "--data", data, "--model", str(folder), "--context", "300", "--capacity", "300", "--steps", "1"]
    given += ["--tokens-per-step", "700", "--ranks", "2", "--pipeline", "2", "--dtype", "bf16"]
    given += ["--lora", "r=2,alpha=4,targets=all-linear", "--export", str(tmp_path / "out")]
    assert main(given) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert len(peft.PeftModel.from_pretrained(base, tmp_path / "out").peft_config["default"].target_modules) == 7


@pytest.mark.parametrize(
    "text",
    ["", "r=2", "r=2,alpha=x,targets=a", "r=0,alpha=1,targets=a", "r=2,alpha=4,targets=", "r=2,alpha=4,dropout=1"],
)
def test_texts_that_are_none(text: str) -> None:
    with pytest.raises(BadOption, match=r"r=16,alpha=32,targets=q_proj|give at least 1"):
        LoraOptions.parse(text)


def test_refusals(data: str, folder: Path) -> None:
    with pytest.raises(InvalidUsage, match="give the folder of a model"):
        RunConfig(lora=LORA)
    with pytest.raises(InvalidUsage, match=r"Embedding and its head a .*Linear; an nn\.Embedding, without LoRA"):
        run_of(data, 2, model=folder_model(folder), lora="r=2,alpha=4,targets=embed_tokens", tensor=2)
    with pytest.raises(InvalidUsage, match=r"does not fit Qwen3ForCausalLM: Target modules .*nothing"):
        run_of(data, 1, model=folder_model(folder), lora="r=2,alpha=4,targets=nothing")
