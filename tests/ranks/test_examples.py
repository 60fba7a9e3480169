"""The programs in examples/ at tiny size."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(path, words):
    """Stdout of an example on this rank; in a process that has imported torch already, as torchrun starts it."""
    told = io.StringIO()
    given, sys.argv = sys.argv, [path, *words]
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = given
        if path.split(os.sep)[-1].startswith("trl"):
            from tests.harness.tiny_huggingface import leave

            leave()
    return told.getvalue()


@pytest.fixture
def started(ranks):
    def start(name, *words):
        told, *others = ranks(2, run, str(EXAMPLES / name), [str(word) for word in words], timeout=120)
        assert others == [""]  # rank 0 alone reports
        return told

    return start


def losses(told):
    return [float(line.split("loss ")[1].split(",")[0]) for line in told.splitlines() if "loss " in line]


def test_own_loop(started):
    told = started("own_loop.py", "4", "2500")
    assert len(losses(told)) == 4
    assert losses(told)[-1] < losses(told)[0]


@pytest.mark.parametrize(("generators", "lines"), [(0, 4), (1, 3)], ids=["all do both", "one only generates"])
def test_grpo(started, generators, lines):
    told = started("grpo.py", "--steps", "12", "--prompts", "2", "--answers", "8", "--generators", generators)
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in told.splitlines()]
    assert len(rewards) == lines  # a batch behind, there is none in the first step
    assert all(0.0 <= reward <= 1.0 for reward in rewards)


def test_pipeline(started):
    told = started("pipeline.py", "4", "2500")
    assert len(losses(told)) == 4
    assert losses(told)[-1] < losses(told)[0]
    assert "micro-batches on 1 pipelines" in told


def test_tensor_parallel(started):
    told = started("tensor_parallel.py", "--steps", "4", "--tokens", "2500")
    assert len(losses(told)) == 4
    assert losses(told)[-1] < losses(told)[0]
    assert "micro-batches on 1 HDP ranks" in told


def test_lora(started, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "data.txt").write_text("a text that repeats itself; " * 60)
    (tmp_path / "more.txt").write_text("short")
    words = [tmp_path / "model", tmp_path / "data.txt", tmp_path / "more.txt", "--out", tmp_path / "adapter"]
    told = started("lora.py", *words, "--steps", "6", "--context", "400")
    assert losses(told)[-1] < losses(told)[0]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter")
    changed = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert changed
    assert all(torch.count_nonzero(p) for p in changed)


@pytest.fixture
def chat_model(tmp_path):
    from tests.harness.tiny_huggingface import tiny
    from tests.ranks.train.test_huggingface_sft import tokenizer

    tiny().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("lora", [[], ["--lora", "2"]], ids=["whole", "adapters"])
def test_trl_sft(started, chat_model, tmp_path, lora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    say = lambda role, count: {"role": role, "content": " ".join(f"w{i % 40}" for i in range(count))}
    chats = [{"messages": [say("user", 1 + 5 * i % 7), say("assistant", 1 + 9 * i % 31)]} for i in range(16)]
    data = write_lines(tmp_path / "chats.jsonl", chats)
    started("trl_sft.py", chat_model, data, "--out", tmp_path / "out", "--context", "64", "--steps", "2", *lora)
    before = AutoModelForCausalLM.from_pretrained(chat_model)
    trained = AutoModelForCausalLM.from_pretrained(chat_model if lora else tmp_path / "out")
    if lora:
        trained = PeftModel.from_pretrained(trained, tmp_path / "out").merge_and_unload()
    changed = [name for name, p in trained.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert len(changed) >= (8 if lora else 15)


def test_trl_grpo(started, chat_model, tmp_path):
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": f"w{i} w{i + 1}", "answer": "w3"} for i in range(4)]
    data = write_lines(tmp_path / "questions.jsonl", rows)
    started("trl_grpo.py", chat_model, data, "--out", tmp_path / "out", "--length", "6", "--steps", "1")
    assert all(p.isfinite().all() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "out").parameters())


def test_long_context(started):
    told = started("long_context.py", "--length", "3000", "--memory", "0.015", "--steps", "1")
    assert "3,000 tokens on 2 ranks" in told
    assert "0 of 6 layers recomputed" not in told
    used, limit = told.split(" of the tokens offloaded, ")[1].split(" MiB")[0].split(" of ")
    assert int(used) <= int(limit)


def test_two_hosts(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "data.txt").write_text("some text to learn; " * 100)
    small = ["--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24", "--steps", "2"]
    small += ["--context", "200", "--tokens-per-step", "400", "--data", str(tmp_path / "data.txt")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hosts = [
        subprocess.Popen(
            [EXAMPLES / "two_hosts.sh", "127.0.0.1", str(node), *small],
            env=os.environ | {"PATH": path, "PORT": str(port), "RANKS_PER_HOST": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [host.communicate(timeout=150) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "on 2 ranks" in outputs[0][0]
    assert outputs[1][0] == ""
