"""Losses of logits, and noise on embeddings, in transformers' Trainer with plans: those of transformers itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hdpcomm.attention import SlicedSequence, packing  # noqa: E402
from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.integrations.huggingface import Trainer  # noqa: E402
from hdpcomm.integrations.huggingface_losses import add_noise, token_loss  # noqa: E402
from hdpcomm.models.heads import TOKEN  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, padded, tiny, weights  # noqa: E402

COST = CostModel(1e-9, 1e-6, 1e-4)


def pairs(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = outputs.logits[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten()
    return logits[labels != -100], labels[labels != -100]


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = F.cross_entropy(*pairs(outputs, labels), reduction="none")
    return (loss * (1 - (-loss).exp()) ** 2).sum() / num_items_in_batch


def squared(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    logits, labels = pairs(outputs, labels)
    return (logits.softmax(-1) - F.one_hot(labels, logits.shape[1])).square().sum(-1).mean()


def unshifted(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten())


def trained(kind: Any, out: str, batch: int, accumulate: int, changed: dict[str, Any], options: dict[str, Any]) -> Any:
    """(weights, losses) after 3 steps."""
    torch.set_num_threads(1)
    args = arguments(Path(out), batch, accumulate, max_steps=3, **changed)
    try:
        trainer = kind(model=tiny(), args=args, train_dataset=documents(), data_collator=padded, **options)
        trainer.train()
        whole = trainer.model.state_dict(keep_vars=True)
        if options.get("zero") == 3:
            whole = trainer._made[1].copied_weights(whole, keep=True)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {name: value.detach().clone() for name, value in whole.items()}, losses
    finally:
        leave()


@pytest.mark.parametrize(
    ("changed", "given", "options", "accumulate"),
    [
        ({"label_smoothing_factor": 0.2}, {}, {}, 2),
        ({"label_smoothing_factor": 0.1}, {}, {"zero": 3}, 1),
        ({"label_smoothing_factor": 0.1}, {}, {"capacity": 12, "slices": 8}, 1),
        ({}, {"compute_loss_func": focal}, {}, 2),
        ({}, {"compute_loss_func": squared}, {"capacity": 12, "slices": 8}, 1),
    ],
    ids=["smoothing", "smoothing, zero 3", "smoothing, slices", "divided by the items", "mean, slices"],
)
def test_weights_are_those_of_transformers(
    ranks: Any, tmp_path: Path, changed: Any, given: Any, options: Any, accumulate: int
) -> None:
    wanted, losses = trained(transformers.Trainer, str(tmp_path / "a"), 4, accumulate, changed, given)
    with_plans = {"cost_model": COST, **given, **options}
    for found, own in ranks(2, trained, Trainer, str(tmp_path / "b"), 2, accumulate, changed, with_plans):
        assert own == pytest.approx(losses, abs=2e-4)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


def test_a_classifier_of_tokens_has_labels_of_its_own_tokens() -> None:
    found = token_loss("unshifted", unshifted, TOKEN, 5)
    logits, labels = torch.randn(6, 5), torch.randint(5, (6,))
    assert found.sum(logits, labels).item() == pytest.approx(F.cross_entropy(logits, labels, reduction="sum").item())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unshifted, r"the logits of a token the label of that token; .* labels\[\.\.\., 1:\]"),
        (lambda *given, **_: F.cross_entropy(*pairs(*given), reduction="sum"), "no mean over labelled tokens"),
        (lambda *given, **_: F.cross_entropy(*pairs(*given), reduction="none").max(), "no mean over labelled tokens"),
        (lambda *given, **_: given[0].logits[:, :-1].mean((0, 1)).std(), "no mean over labelled tokens"),
        (lambda outputs, *_, **__: outputs.loss * 2, "ended with TypeError.* have logits and nothing else"),
        (lambda *_, **__: 0.0, "gave 0.0; expected a scalar tensor"),
        (lambda *given, **_: given[0].logits, r"gave a tensor of shape \(1, 8, 64\); expected a scalar"),
    ],
)
def test_what_is_no_mean_over_tokens_is_refused(tmp_path: Path, function: Any, message: str) -> None:
    given = {"train_dataset": documents(), "data_collator": padded, "compute_loss_func": function}
    try:
        with pytest.raises(InvalidUsage, match=message):
            Trainer(model=tiny(), args=arguments(tmp_path, 2, 1), **given)
    finally:
        leave()


def test_noise_is_by_the_length_of_each_sequence() -> None:
    layer, alpha = torch.nn.Embedding(8, 64), 4.0
    torch.nn.init.zeros_(layer.weight)
    add_noise(layer, alpha)
    lengths = [4, 100, 25]
    with packing(None, torch.tensor([0, 4, 104, 129])):
        noise = layer(torch.zeros(1, 129, dtype=torch.int64))[0].detach()
        for part, length in zip(noise.split(lengths), lengths, strict=True):
            most = alpha / math.sqrt(64 * length)
            assert 0.98 * most < part.abs().max() <= most
            assert abs(part.mean()) < 0.15 * most
        assert not layer.eval()(torch.zeros(1, 129, dtype=torch.int64)).any()
    with packing(None, SlicedSequence([0, 40, 100]).slice(0)):
        found = layer.train()(torch.zeros(1, 40, dtype=torch.int64)).abs().max()
    assert 0.95 * alpha / 80 < found <= alpha / 80


def noisy(out: str, options: dict[str, Any]) -> Any:
    """(weights with noise, without, loss of an evaluation with and without the layer's hooks)."""
    torch.set_num_threads(1)
    found = []
    try:
        for alpha in (15.0, None):
            args = arguments(Path(out), 2, 1, max_steps=2, neftune_noise_alpha=alpha)
            given = {"train_dataset": documents(), "eval_dataset": documents(), "data_collator": padded}
            trainer = Trainer(model=tiny(), args=args, cost_model=COST, **given, **options)
            trainer.train()
            hooks = trainer.model.get_input_embeddings()._forward_hooks
            found.append((weights(trainer.model), trainer.evaluate()["eval_loss"], len(hooks)))
        return found
    finally:
        leave()


@pytest.mark.parametrize("options", [{}, {"capacity": 12, "slices": 8}], ids=["", "slices"])
def test_training_with_noise(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    (noise, loss, hooks), (plain, without, _) = ranks(2, noisy, str(tmp_path), options)[0]
    assert hooks == 0  # none is left
    assert math.isfinite(loss)
    assert loss != without
    difference = max(float((noise[name] - plain[name]).abs().max()) for name in plain)
    assert 1e-4 < difference < 1.0


def test_refused_with_other_losses(tmp_path: Path) -> None:
    given = {"train_dataset": documents(), "data_collator": padded, "mesh": {"tensor": 2}}
    try:
        for changed in ({"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0}):
            name = next(iter(changed))
            with pytest.raises(InvalidUsage, match=f"{name}=.* with mesh="):
                Trainer(model=tiny(), args=arguments(tmp_path, 2, 1, **changed), **given)
    finally:
        leave()
