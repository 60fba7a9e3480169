"""Runs whose ranks share experts: the losses of a run without, checkpoints of the whole model, and refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from hdpcomm.attention import positions
from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, from_pretrained
from hdpcomm.run import RunConfig
from hdpcomm.run.model import export_model, folder_model, model_facts, model_spec
from tests.ranks.parallel.test_pipeline_runs import check_exports, data, losses, run_of  # noqa: F401

MODEL = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=12, experts=4, router_z_loss=0.01)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain") / "model"


@pytest.fixture(scope="module")
def plain(data, plain_folder):  # noqa: F811
    return run_of(data, 1, held_out=True, model=MODEL, export=plain_folder)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {"expert": 2, "recompute": 1}), (8, {"expert": 2, "tensor": 2, "pipeline": 2})],
)
def test_a_run_has_the_losses_of_one_process(data, plain, plain_folder, tmp_path, ranks, options):  # noqa: F811
    steps = []
    results = run_of(data, ranks, held_out=True, watching=steps, model=MODEL, export=tmp_path / "model", **options)
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    found, wanted = (r[0].evaluations["balanced"][0].loss for r in (results, plain))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert {result.parameters for result in results} == {plain[0].parameters}
    check_exports(tmp_path / "model", plain_folder)
    for _, metrics, _ in steps:
        assert metrics.expert_tokens_max >= metrics.expert_tokens_mean
        assert metrics.expert_tokens_mean >= metrics.tokens * 2 / 4  # tensor ranks fill up their blocks
        assert metrics.expert_tokens_dropped == 0


@pytest.mark.parametrize("recompute", [0, 1])
def test_sequences_that_the_ranks_hold_no_other_way(data, recompute):  # noqa: F811
    """They run in slices, and routers' losses are those of whole sequences."""
    balanced = dataclasses.replace(MODEL, router_aux_loss=0.05)
    sliced = {"model": balanced, "expert": 2, "capacity": 120, "recompute": recompute}
    with pytest.raises(InvalidUsage, match="longest sequence has 300 tokens, and 2 ranks with a capacity of 120"):
        run_of(data, 2, **sliced)
    results = run_of(data, 2, slices=8, **sliced)
    assert losses(results) == pytest.approx(losses(run_of(data, 1, model=balanced)), rel=1e-4)


def test_checkpoints_go_on_with_any_number_of_expert_ranks(data, plain, tmp_path):  # noqa: F811
    first = run_of(data, 2, model=MODEL, expert=2, steps=2, out=tmp_path / "run")
    assert first[0].saved is not None
    for ranks, expert in ((4, 4), (1, 1)):
        out = {"out": tmp_path / f"on{ranks}", "resume": str(first[0].saved)}
        results = run_of(data, ranks, model=MODEL, expert=expert, **out)
        assert results[0].first_step == 2
        assert losses(results) == pytest.approx(losses(plain)[2:], rel=1e-4)


def test_an_exported_model_is_a_mixtral(tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    ours = Llama(MODEL, seed=4)
    export_model(MODEL, ours.state_dict(), tmp_path / "out")
    tokens, bounds = torch.arange(50), torch.tensor([0, 20, 50], dtype=torch.int32)
    there = from_pretrained(tmp_path / "out")
    assert type(there.causal_lm).__name__ == "MixtralForCausalLM"
    places = {"positions": positions(bounds, rank=0, size=1), "cu_seqlens": bounds, "comm": None}
    torch.testing.assert_close(there(tokens, **places), ours(tokens, **places), rtol=1e-4, atol=1e-4)


def test_a_folder_with_experts_trains(data, tmp_path):  # noqa: F811
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=16, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=4, output_router_logits=True, pad_token_id=0,
        sliding_window=None,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model = folder_model(tmp_path / "model")
    plain = run_of(data, 1, model=model, export=tmp_path / "plain")
    results = run_of(data, 2, model=model, expert=2, offload=16 << 20, export=tmp_path / "out")
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    assert results[0].parameters == plain[0].parameters
    check_exports(tmp_path / "out", tmp_path / "plain")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "MixtralForCausalLM"


def common(data, monkeypatch):  # noqa: F811
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return ["train", "--data", data, "--hidden", "16", "--ffn", "12", "--layers", "1", "--steps", "1", "--ranks", "2"]


def test_the_command_trains_with_experts(data, tmp_path, monkeypatch):  # noqa: F811
    options = ["--experts", "4", "--top-k", "2", "--expert", "2", "--context", "300", "--out", str(tmp_path / "run")]
    assert main([*common(data, monkeypatch), *options]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["expert_tokens_mean"] == row["tokens"] * 2 / 4
    assert row["expert_tokens_max"] >= row["expert_tokens_mean"]
    assert row["expert_tokens_dropped"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--expert", "2"], "0 experts cannot be shared evenly by 2 ranks; give --experts as a multiple of 2"),
        (["--expert", "2", "--experts", "3"], "3 experts cannot be shared evenly by 2 ranks"),
        (["--expert", "3", "--experts", "3"], "2 HDP ranks cannot be groups of 3 that share experts"),
        (["--experts", "2", "--top-k", "3"], "top_k is 3 of 2 experts"),
        (["--expert", "2", "--experts", "4", "--compare", "ddp"], "expert ranks do not go together with ddp"),
    ],
)
def test_the_command_refuses_by_name(data, capfd, monkeypatch, options, message):  # noqa: F811
    assert main([*common(data, monkeypatch), *options]) != 0
    assert message in " ".join(capfd.readouterr().err.split())


def test_facts_of_models():
    assert not {"experts", "top_k", "router_aux_loss"} & model_facts(LlamaConfig()).keys()
    assert model_facts(MODEL)["experts"] == 4
    spec = model_spec(RunConfig(model=MODEL).model)
    assert (spec.experts, spec.top_k) == (4, 2)
