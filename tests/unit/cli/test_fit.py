"""``hdpcomm fit``: what fits, what it takes, and which setting to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdpcomm.cli.main import main
from hdpcomm.models import LlamaConfig
from hdpcomm.plan.memory import StepMemory
from hdpcomm.run import RunConfig
from hdpcomm.run.fit import Setting, best_setting, fit_settings
from hdpcomm.run.memory import predict_memory

SIZES = ["--layers", "4", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--ffn", "128", "--context", "16K"]


def table(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[dict[str, Any]], str]:
    path = tmp_path / "fit.json"
    code = main(["fit", *SIZES, "--ranks", "4", "--tensor", "2", "--json", str(path), *more])
    rows = json.loads(path.read_text())["settings"] if path.exists() else []
    printed = capsys.readouterr()
    return code, rows, printed.out + printed.err


def test_it_names_what_to_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, text = table(tmp_path, capsys)
    assert code == 0
    assert [(row["tensor"], row["zero"]) for row in rows] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert [row["take"] for row in rows] == [True, False, False, False]  # all are as fast: the one that cuts least
    for row in rows:
        assert row["fits"]
        assert row["tokens_per_s"] > 0
        parts = sum(row[name] for name in ("weights", "gradients", "optimizer", "activations"))
        assert 0 < parts <= row["together"]
    assert rows[1]["optimizer"] < rows[0]["optimizer"]
    assert rows[2]["gradients"] < rows[1]["gradients"]
    assert 'HybridDataParallel(zero=0, dtype=torch.bfloat16, mesh={"tensor": 2}, capacity=8192)' in " ".join(
        text.split()
    )


def test_an_optimizer_on_the_host_takes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, text = table(tmp_path, capsys, "--optimizer-offload")
    assert code == 0
    assert [row["optimizer"] for row in rows] == [0, 0, 0, 0]
    assert all(row["fits"] for row in rows)
    words = " ".join(text.split())
    assert 'mesh={"tensor": 2}, optimizer_offload=True, capacity=8192)' in words
    assert "--optimizer-offload; in transformers" in words


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, text = table(tmp_path, capsys, "--memory", "1M", "--zero", "3")
    assert code == 6
    assert [(row["fits"], row["take"], row["recomputed"], row["step_s"]) for row in rows] == [(False, False, 4, None)]
    assert "nothing of this fits into 1.0 MB of h100: give more --ranks" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ranks", "2", "--device", "b200"], "--device is 'b200'; choose from a100"),
        ([], "--ranks was not given"),
        (["--ranks", "3", "--tensor", "2"], "must be a multiple of 2"),
        (
            ["--ranks", "16", "--layers", "8", "--pipeline", "8", "--tensor", "1", "--zero", "3"],
            "take all 8 h100s of one",
        ),
    ],
)
def test_wrong_options(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *given]) == 6
    assert message in capsys.readouterr().err


def test_less_memory_recomputes_more_and_cuts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of a stage of ZeRO are known from another one, and the same as predicted for it alone."""
    model = LlamaConfig(vocabulary=2048, layers=4, hidden=128, heads=4, kv_heads=2, ffn=256)
    config = RunConfig(model=model, capacity=1024, tokens_per_step=8192, dtype="bf16")

    profiled: list[tuple[StepMemory, ...]] = []

    def predict_once(tried: RunConfig, ranks: int, on_host: int | None, _: Any) -> tuple[StepMemory, ...]:
        profiled.append(predict_memory(tried, ranks, on_host, profiled[0] if profiled else ()))
        return profiled[-1]

    monkeypatch.setattr("hdpcomm.run.fit.predict_memory", predict_once)

    def settings(memory: int) -> list[Setting]:
        limited = replace(config, recompute="auto", memory=memory)
        return list(fit_settings(limited, [2048, 1000, 500], 2, "h100", tensor=[1], zero=[0, 1, 2]))

    roomy = settings(10**10)
    assert [each.recomputed for each in roomy] == [0, 0, 0]
    (alone,) = predict_memory(replace(config, zero=2), 2, 8)
    assert (roomy[2].device.states, roomy[2].device.update) == (alone.states, alone.update)
    assert roomy[2].device.peak_bytes(1024) == pytest.approx(alone.peak_bytes(1024), rel=2e-3)
    limit = int(roomy[1].taken + roomy[2].taken) // 2  # not enough for zero 1, if no layer is recomputed
    assert roomy[2].taken < limit < roomy[1].taken < roomy[0].taken
    tight = settings(limit)
    assert [each.recomputed > 0 for each in tight] == [True, True, False]
    best = best_setting(tight)
    assert best is not None
    assert best.config.zero == 2
    assert all(each.step_s is not None and each.step_s > best.step_s for each in tight[:2] if each.fits)


@pytest.mark.timeout(180)
def test_latent_attention_needs_no_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    from tests.harness.families import model_of

    config = model_of("deepseek-v3", vocab_size=512).config
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    given = ["--model", str(tmp_path), "--ranks", "2", "--context", "1K", "--tensor", "1", "--zero", "1"]
    assert main(["fit", *given]) == 0
    assert "take hdpcomm train" in capsys.readouterr().out


@pytest.mark.parametrize("mesh", [["--expert", "2"], ["--pipeline", "2", "--expert", "2"]], ids=["whole", "stages"])
def test_experts_that_no_run_would_share(mesh: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, interleave_moe_layer_step=2,
        pad_token_id=0,
    ).save_pretrained(tmp_path)  # fmt: skip
    assert main(["fit", "--model", str(tmp_path), "--ranks", "4", "--tensor", "1", "--context", "4K", *mesh]) == 6
    assert "Llama4ForCausalLM has no layer with experts that can be shared" in capsys.readouterr().err
