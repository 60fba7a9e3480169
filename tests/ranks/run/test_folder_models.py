"""A model of a Hugging Face folder from chats to an export that has learned them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from hdpcomm.cli.main import main
from hdpcomm.data import FolderEncoder, open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.weights import _Files
from hdpcomm.run import folder_model, read_metrics
from tests.harness.tokenizers import save_tokenizer
from tests.harness.warm_python import Python

transformers = pytest.importorskip("transformers")

ANSWERS = {"the cat": "sat on the mat", "the dog": "and the cat sat on the dog", "the mat": "the the the mat"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3: a configuration, a tokenizer, a chat template."""
    path = save_tokenizer(tmp_path_factory.mktemp("qwen3"), chat_template=TEMPLATE)
    config = transformers.Qwen3Config(
        vocab_size=FolderEncoder(path).vocabulary, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=128,
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=None, eos_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(path)
    return path


def test_killed_resumed_exported_and_generates(folder: Path, tmp_path: Path) -> None:
    chats, out, model = tmp_path / "chat.jsonl", tmp_path / "run", tmp_path / "model"
    with chats.open("w") as file:
        for question, answer in ANSWERS.items():
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    arguments = ["train", "--model", str(folder), "--data", str(chats), "--out", str(out), "--trackers", "none"]
    arguments += ["--steps", "60", "--lr", "0.01", "--context", "64", "--tokens-per-step", "256", "--save-every", "5"]
    with Python(["-m", "hdpcomm.cli.main", *arguments, "--ranks", "2"]) as process:
        while not process.stderr.readline().startswith("hdpcomm: step 12/"):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert main([*arguments, "--ranks", "1", "--resume", "auto", "--export", str(model)]) == 0
    losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl")]
    assert len(losses) == 60
    assert losses[-1] < 0.05 < losses[0]
    # Only what the assistant wrote counts: the loss of a memorised answer, not of a question that nothing foretells.
    trained = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert type(trained).__name__ == "Qwen3ForCausalLM"
    for question, answer in ANSWERS.items():
        asked = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = trained.generate(**given, max_new_tokens=30, do_sample=False, pad_token_id=0)
        assert tokenizer.decode(written[0, given["input_ids"].shape[1] :]) == f"{answer}<end>"
    assert folder_model(model).weights
    assert folder_model(model).digest == folder_model(folder).digest


def test_weights_of_the_folder_are_used(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    made = transformers.AutoModelForCausalLM.from_config(config)
    for weights in made.parameters():
        weights.data.zero_()
    source = tmp_path / "zeros"
    made.save_pretrained(source)
    text, out = tmp_path / "a.txt", tmp_path / "out.json"
    text.write_text("the cat sat on the mat " * 8)
    common = ["--data", str(text), "--steps", "1", "--ranks", "1", "--context", "64", "--tokens-per-step", "64"]
    assert main(["train", "--model", str(source), "--tokenizer", str(folder), *common, "--json", str(out)]) == 0
    vocabulary = folder_model(source).vocabulary
    assert json.loads(out.read_text())["steps"][0]["loss"] == pytest.approx(math.log(vocabulary), rel=1e-5)
    assert "Qwen3ForCausalLM of" in capfd.readouterr().out
    # Without a tokenizer of its own, a model is trained on bytes.
    assert main(["train", "--model", str(source), *common, "--json", str(out)]) == 0
    assert open_corpus([text], context=64).encoder == "bytes"


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "names ../elsewhere.safetensors, which is outside"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names /etc/passwd, which is outside of this folder"),
        ({"weight_map": ["a"]}, "no index of a model's weights"),
        ([], "no index of a model's weights"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(index: object, told: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidUsage, match=re.escape(told)):
        _Files(tmp_path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_audio"])
def test_a_model_with_an_encoder_is_exported_as_it_came(family: str, tmp_path: Path) -> None:
    """Trained on text alone: the encoder keeps its weights, and the processor's files go along."""
    from hdpcomm.models.media import auto_class
    from tests.harness.tiny_media import config_of

    source, exported, text = tmp_path / "model", tmp_path / "exported", tmp_path / "text.txt"
    config = config_of(family)
    config.text_config.vocab_size = 320
    auto_class(family).from_config(config, dtype=torch.float32).save_pretrained(source)
    (source / "preprocessor_config.json").write_text("{}")
    text.write_text("some words and others " * 30)
    options = ["--steps", "2", "--context", "128", "--tokens-per-step", "256", "--ranks", "1", "--tokenizer", "bytes"]
    assert main(["train", "--model", str(source), "--data", str(text), *options, "--export", str(exported)]) == 0
    before, after = (auto_class(family).from_pretrained(path).state_dict() for path in (source, exported))
    same = {name: torch.equal(before[name], after[name]) for name in before}
    assert after.keys() == before.keys()
    assert all(equal for name, equal in same.items() if "visual" in name or "audio_tower" in name)
    assert not all(equal for name, equal in same.items() if "language_model" in name)
    assert (exported / "preprocessor_config.json").is_file()
