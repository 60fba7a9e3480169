"""TRL's SFTTrainer with plans: the same weights as SFTTrainer itself in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

from trl import SFTConfig, SFTTrainer  # noqa: E402

from hdpcomm.integrations.huggingface import HybridDataParallel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, leave, tiny, tiny_experts, weights  # noqa: E402

WORDS = [f"w{i}" for i in range(40)]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<bot> {% generation %}{{ message['content'] }}"
    " <end>{% endgeneration %}{% else %}<user> {{ message['content'] }} <end>{% endif %} {% endfor %}"
)
TALKS = [(3, 5), (11, 2, 1, 7), (1, 1), (20, 9), (2, 30), (6, 4, 3, 3), (5, 8), (1, 12), (9, 9), (4, 1), (2, 2), (7, 3)]


METRICS = ("entropy", "mean_token_accuracy", "num_tokens")


class PlanningSFT(HybridDataParallel, SFTTrainer):  # type: ignore[misc]
    pass


def tokenizer() -> Any:
    words = ["<pad>", "<user>", "<bot>", "<end>", "<unk>", *WORDS]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


def talks() -> Any:
    """Conversations; the numbers are words of user and assistant in turn."""
    draw = torch.Generator().manual_seed(2)
    say = lambda n: " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=draw).tolist())
    roles = ("user", "assistant")
    rows = [[{"role": roles[i % 2], "content": say(n)} for i, n in enumerate(talk)] for talk in TALKS]
    return datasets.Dataset.from_dict({"messages": rows})


def trainer_of(kind: Any, out: str, batch: int, accumulate: int, changed: dict[str, Any], **given: Any) -> Any:
    args = arguments(Path(out), batch, accumulate).to_dict() | {"assistant_only_loss": True} | changed
    names = SFTConfig.__dataclass_fields__
    config = SFTConfig(**{name: value for name, value in args.items() if name in names})
    if "model" not in given:
        given["model"] = tiny()
        given["model"].config.use_cache = False
    given |= {"train_dataset": talks(), "eval_dataset": talks(), "processing_class": tokenizer()}
    return kind(args=config, **given)


def train(kind: Any, out: str, batch: int, accumulate: int, changed: dict[str, Any], lora: bool) -> Any:
    torch.manual_seed(7)
    given = {"peft_config": peft.LoraConfig(r=2, target_modules="all-linear")} if lora else {}
    try:
        trainer = trainer_of(kind, out, batch, accumulate, changed, **given)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        losses = [entry["loss"] for entry in logged]
        metrics = [[entry[name] for name in METRICS] for entry in logged]
        return weights(trainer.model), losses, metrics, trainer.evaluate()["eval_loss"]
    finally:
        leave()


@pytest.mark.parametrize(
    ("changed", "lora"),
    [
        ({"max_length": 32}, False),  # rows with padding
        ({"max_length": 32, "learning_rate": 2.0}, True),
        ({"max_length": None, "padding_free": True, "assistant_only_loss": False}, False),
        ({"max_length": 64, "packing": True}, False),  # packs: 4, one for each batch of a step
        ({"max_length": 32, "loss_type": "dft", "learning_rate": 1.0}, False),
        ({"max_length": 32, "label_smoothing_factor": 0.1}, False),
    ],
)
def test_weights_and_losses_are_those_of_sft_trainer(
    ranks: Any, tmp_path: Path, changed: dict[str, Any], lora: bool
) -> None:
    batch = 1 if "packing" in changed else 3
    found = ranks(2, train, PlanningSFT, str(tmp_path / "a"), batch, 2, changed, lora)
    expected, logged, metrics, evaluated = train(SFTTrainer, str(tmp_path / "b"), 2 * batch, 2, changed, lora)
    for its_weights, losses, its_metrics, _ in found:
        for name, value in expected.items():
            torch.testing.assert_close(its_weights[name], value, rtol=0, atol=1e-5, msg=name)
        assert losses == pytest.approx(logged, abs=2e-4)
        for its, wanted in zip(its_metrics, metrics, strict=True):
            # TRL takes the mean of the batches' means; those of one process have the rows of both ranks.
            assert its == pytest.approx(wanted, abs=2e-4)
    assert found[0][3] == pytest.approx(evaluated, rel=0.05)  # the mean of batches' means, of smaller batches


@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_of_routers_has_the_trainers_weight(tmp_path: Path, lora: bool) -> None:
    """On batches of one sequence, where its mean is that of transformers."""
    changed = {"router_aux_loss_coef": 5.0, "max_steps": 3, "learning_rate": 0.5}
    found = {}
    for kind in (PlanningSFT, SFTTrainer):
        given: dict[str, Any] = {"model": tiny_experts()}
        if lora:
            torch.manual_seed(5)
            given["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "gate"])
        try:
            trainer = trainer_of(kind, str(tmp_path / kind.__name__), 1, 1, changed, **given)
            trainer.train()
            found[kind] = weights(trainer.model)
        finally:
            leave()
    for name, value in found[SFTTrainer].items():
        torch.testing.assert_close(found[PlanningSFT][name], value, rtol=0, atol=1e-5, msg=name)
