"""The planning Trainer with classifiers of sequences and tokens: losses, gradients and outputs of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.models import adapt  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, in_float64, leave, tiny, weights  # noqa: E402

COST = CostModel(1e-9, 1e-6, 1e-4)
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("SequenceClassification", {"num_labels": 3}),
    "a number": ("SequenceClassification", {"num_labels": 1}),
    "two numbers": ("SequenceClassification", {"num_labels": 2, "problem_type": "regression"}),
    "several classes": ("SequenceClassification", {"num_labels": 3}),
    "tokens": ("TokenClassification", {"num_labels": 3, "classifier_dropout": 0.0}),
}
SLICES = {"capacity": 12, "slices": 8}


def classifier(head: str, **changed: Any) -> Any:
    kind, config = HEADS[head]
    return tiny(kind, pad_token_id=0, **config, **changed)


def rows_of(head: str) -> list[dict[str, Any]]:
    """Documents with labels; some end with the token of padding, which classifies nothing."""
    rows = documents()
    for i, row in enumerate(rows):
        tokens = row["input_ids"] = row["input_ids"] + [0] * (i % 3)
        row["labels"] = {
            "classes": i % 3,
            "a number": i / 8,
            "two numbers": [i / 8, 1 - i / 4],
            "several classes": [float(i % 2), 1.0, float(i % 3 == 0)],
            "tokens": [-100 if t % 3 == 0 else t % 3 for t in range(len(tokens) + 1)][1:],
        }[head]
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = lambda name, value: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
    masks = [{"mask": [1] * len(row["input_ids"])} for row in rows]
    of_tokens = all(isinstance(row["labels"], list) and len(row["labels"]) == len(row["input_ids"]) for row in rows)
    labels = fill("labels", -100) if of_tokens else torch.tensor([row["labels"] for row in rows])
    mask = torch.tensor([row["mask"] + [0] * (longest - len(row["mask"])) for row in masks])
    return {"input_ids": fill("input_ids", 0), "attention_mask": mask, "labels": labels}


def on_rank(fn: Any, *args: Any) -> Any:
    from hdpcomm.integrations.huggingface import Trainer

    try:
        return fn(Trainer, *args)
    finally:
        leave()


def step_in_float64(kind: Any, folder: str, head: str, batch: int, options: dict[str, Any]) -> Any:
    """(loss, gradients) of a step of all documents."""
    torch.set_num_threads(1)
    model = in_float64(classifier(head))
    before = weights(model)
    args = arguments(Path(folder), batch, 1, max_steps=1, learning_rate=1.0, max_grad_norm=0)
    rows = rows_of(head)
    trainer = kind(model=model, args=args, train_dataset=rows, data_collator=padded, cost_model=COST, **options)
    trainer.train()
    after = weights(model)
    return trainer.state.log_history[0]["loss"], {name: before[name] - after[name] for name in before}


def losses_alone(model: Any, row: dict[str, Any]) -> list[torch.Tensor]:
    """Losses of a sequence by itself, or of its labelled tokens (in float64, and transformers' would be in float32)."""
    tokens, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    if isinstance(model, transformers.LlamaForTokenClassification):
        pairs = zip(model(input_ids=tokens).logits[0], labels[0], strict=True)
        return [torch.nn.functional.cross_entropy(*pair) for pair in pairs if pair[1] >= 0]
    return [model(input_ids=tokens, labels=labels if labels.dtype == torch.int64 else labels.double()).loss]


@pytest.mark.parametrize(("size", "options"), [(1, {}), (2, {}), (3, {}), (2, SLICES)])
def test_gradients_are_those_of_each_sequence_alone(ranks: Any, tmp_path: Path, size: int, options: Any) -> None:
    for head in HEADS:
        model = in_float64(classifier(head))
        losses = [loss for row in rows_of(head) for loss in losses_alone(model, row)]
        wanted = torch.stack(losses).mean()
        wanted.backward()
        for loss, found in ranks(size, on_rank, step_in_float64, str(tmp_path), head, 12 // size, options):
            assert loss == pytest.approx(wanted.item(), rel=1e-6)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10)


def metrics_of(predicted: Any) -> dict[str, float]:
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def with_lora() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
    model = peft.get_peft_model(classifier("classes"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def trains(kind: Any, folder: str, head: str, batch: int, lora: bool, options: dict[str, Any], resume: bool) -> Any:
    """(weights after four steps, losses, metrics, predictions) where the last two steps may be those of a resumed
    run."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = with_lora() if lora else classifier(head)
    changed = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01}
    args = arguments(Path(folder), batch, 1, **changed)
    rows = rows_of(head)
    more = {"compute_metrics": metrics_of} if head == "classes" else {}
    trainer = kind(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=padded, **more, **options
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    found = trainer.predict(rows)
    trainer.save_model(f"{folder}/last")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    whole = {} if options.get("zero") == 3 else weights(model)
    return whole, losses, found.metrics.get("test_right"), torch.from_numpy(found.predictions)


@pytest.mark.parametrize(
    ("size", "head", "lora", "options"),
    [
        (3, "a number", False, {}),
        (2, "tokens", False, {"zero": 1}),
        (2, "classes", False, {"zero": 3, **SLICES}),
        (2, "classes", True, {}),
    ],
    ids=["regression", "tokens, zero 1", "classes, zero 3, slices", "classes, LoRA"],
)
def test_training_and_evaluation_are_those_of_transformers(
    ranks: Any, tmp_path: Path, size: int, head: str, lora: bool, options: dict[str, Any]
) -> None:
    plain, planned = str(tmp_path / "plain"), str(tmp_path / "planned")
    expected, losses, right, outputs = trains(transformers.Trainer, plain, head, 12, lora, {}, False)
    leave()
    for options_here, number, resume in ((options, size, False), ({}, 1, True)):
        more = {"cost_model": COST, **options_here}
        for its_weights, its_losses, its_right, its_outputs in ranks(
            number, on_rank, trains, planned, head, 12 // number, lora, more, resume
        ):
            assert its_losses == pytest.approx(losses, abs=2e-4)
            assert its_right == right
            torch.testing.assert_close(its_outputs, outputs, rtol=0, atol=1e-4)
            for name, value in its_weights.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)
    if not lora:
        saved = type(classifier(head)).from_pretrained(f"{planned}/last")
        for name, value in saved.named_parameters():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)


def accumulates(kind: Any, folder: str, batch: int, accumulate: int) -> Any:
    args = arguments(Path(folder), batch, accumulate)
    trainer = kind(model=classifier("classes"), args=args, train_dataset=rows_of("classes"), data_collator=padded)
    trainer.train()
    return weights(trainer.model)


def test_the_loss_is_the_mean_over_the_sequences_of_a_step(ranks: Any, tmp_path: Path) -> None:
    """transformers adds up the means of the batches of a step."""
    expected = accumulates(transformers.Trainer, str(tmp_path), 12, 1)
    leave()
    for found in ranks(2, on_rank, accumulates, str(tmp_path), 2, 3):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


def test_other_heads_are_refused(tmp_path: Path) -> None:
    from hdpcomm.integrations.huggingface import Trainer

    config = transformers.BertConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(InvalidUsage, match=r"BertForTokenClassification .* without a head that is known"):
        adapt(transformers.BertForTokenClassification(config))
    classifier("classes").save_pretrained(tmp_path)
    with pytest.raises(InvalidUsage, match="holds a LlamaForSequenceClassification"):
        Trainer(model=str(tmp_path), args=arguments(tmp_path, 1, 1), train_dataset=[])
    leave()
