"""The planning Trainer with what transformers' Trainer offers: LoRA, checkpoints, evaluation, generation, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, padded, tiny, weights  # noqa: E402

COSTS = CostModel(attention=1e-9, linear=1e-6)  # the same plans in each run
ADAM = {"optim": "adamw_torch", "learning_rate": 0.01}


def plain() -> Any:
    model = tiny()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def with_lora() -> Any:
    torch.manual_seed(5)
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # 0 at first: lora_A would have no gradient in the first step
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def on_rank(fn: Callable[..., Any], *args: Any) -> Any:
    """What a rank runs: the planning Trainer, in a process that other tests use afterwards."""
    from hdpcomm.integrations.huggingface import Trainer

    try:
        return fn(Trainer, *args)
    finally:
        leave()


def in_this_process(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(transformers.Trainer, *args)
    finally:
        leave()


def trainer_of(kind: Any, model: Any, out: str, batch: int, accumulate: int = 1, **changed: Any) -> Any:
    given = {name: changed.pop(name) for name in ("cost_model", "capacity") if name in changed}
    rows = documents()
    args = arguments(Path(out), batch, accumulate, **changed)
    return kind(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=padded, **given)


def train(kind: Any, make: Callable[[], Any], out: str, batch: int, accumulate: int, changed: dict[str, Any]) -> Any:
    """(weights, losses, what has a gradient)."""
    model = make()
    trainer = trainer_of(kind, model, out, batch, accumulate, **changed)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return weights(model), losses, [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (with_lora, ADAM),
        (with_lora, {"gradient_checkpointing": True}),
        (plain, {"gradient_checkpointing": True}),
        (plain, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        (plain, {"average_tokens_across_devices": False}),
    ],
)
def test_same_weights_as_transformers(
    ranks: Any, tmp_path: Path, make: Callable[[], Any], changed: dict[str, Any]
) -> None:
    found = ranks(2, on_rank, train, make, str(tmp_path / "a"), 3, 2, changed)
    expected, losses, trained = in_this_process(train, make, str(tmp_path / "b"), 6, 2, changed)
    for its_weights, its_losses, its_trained in found:
        assert its_trained == trained
        for name, value in expected.items():
            torch.testing.assert_close(its_weights[name], value, rtol=0, atol=1e-5, msg=name)
        assert its_losses == pytest.approx(losses, abs=2e-4)


def compiled(kind: Any, make: Callable[[], Any], out: str, batch: int, changed: dict[str, Any]) -> Any:
    """As :func:`train`, with an evaluation; and how many graphs torch has compiled."""
    from torch._dynamo.utils import counters

    counters.clear()
    model = make()
    trainer = trainer_of(kind, model, out, batch, **changed)
    trainer.train()
    names = [name for name, _ in model.named_parameters()]
    return weights(model), trainer.evaluate()["eval_loss"], names, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("make", "changed"), [(plain, {"gradient_checkpointing": True}), (with_lora, {})])
def test_compiled_layers(ranks: Any, tmp_path: Path, make: Callable[[], Any], changed: dict[str, Any]) -> None:
    eager, found = (
        ranks(2, on_rank, compiled, make, str(tmp_path / "a"), 3, {**ADAM, **changed, **more}, timeout=300)
        for more in ({}, {"torch_compile_backend": "aot_eager"})
    )
    for one, other in zip(found, eager, strict=True):
        assert one[1:3] == (pytest.approx(other[1], abs=2e-4), other[2])
        for name, value in other[0].items():
            torch.testing.assert_close(one[0][name], value, rtol=0, atol=1e-5, msg=name)
        assert other[3] == 0
        assert 1 <= one[3] <= 2  # the first layer beneath LoRA has an input without gradient


def in_fp8(_kind: Any, make: Callable[[], Any], out: str, changed: dict[str, Any]) -> Any:
    """(losses, evaluation, names in the saved model)."""
    from hdpcomm.integrations.huggingface import Trainer

    data = {"train_dataset": documents(), "eval_dataset": documents(), "data_collator": padded}
    trainer = Trainer(model=make(), args=arguments(Path(out), 3, 1, **ADAM), **data, **changed)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], sorted(weights(trainer.model))


@pytest.mark.parametrize("make", [plain, with_lora])
def test_layers_in_fp8(ranks: Any, tmp_path: Path, make: Callable[[], Any]) -> None:
    pytest.importorskip("torchao")
    wide, narrow = (
        ranks(2, on_rank, in_fp8, make, str(tmp_path), changed, timeout=200)[0]
        for changed in ({"zero": 1}, {"zero": 1, "fp8": "rowwise"})
    )
    assert narrow[:2] == (pytest.approx(wide[0], rel=0.02), pytest.approx(wide[1], rel=0.02))
    assert narrow[0] != wide[0]
    assert narrow[2] == wide[2]


def resumed(kind: Any, make: Callable[[], Any], out: str, costs: CostModel | None) -> Any:
    """(weights of 6 steps at a stretch, those of 3 and 3, losses of both, steps of the second)."""
    changed = ADAM | {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "cost_model": costs}
    whole = trainer_of(kind, make(), out, 2, **changed)
    whole.train()
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)  # all must come from the checkpoint
    rest = trainer_of(kind, other, out, 2, **changed)
    rest.train(resume_from_checkpoint=f"{out}/checkpoint-3")
    logged = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (whole, rest)]
    return weights(whole.model), weights(rest.model), logged, rest.state.global_step


@pytest.mark.parametrize(("make", "costs"), [(plain, COSTS), (with_lora, COSTS), (plain, None)])
def test_resumed_run_equals_an_uninterrupted_one(
    ranks: Any, tmp_path: Path, make: Callable[[], Any], costs: CostModel | None
) -> None:
    for whole, rest, logged, steps in ranks(2, on_rank, resumed, make, str(tmp_path), costs):
        assert steps == 6
        assert logged[0] == pytest.approx(logged[1], abs=1e-4)
        for name, value in whole.items():
            # Plans that are made by measured costs differ from run to run, and so does the order of sums.
            torch.testing.assert_close(rest[name], value, rtol=0, atol=0 if costs else 1e-5, msg=name)


def generated(kind: Any, out: str) -> Any:
    """(logits and text before adapting, after it, after training, of a new model with the trained weights)."""
    prompt = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 6, 7, 8]])  # the second with padding on its left
    options = {"attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1]]), "max_new_tokens": 8, "do_sample": False}
    options["pad_token_id"] = 0

    def of(model: Any) -> Any:
        with torch.no_grad():
            return model(prompt, attention_mask=options["attention_mask"]).logits, model.generate(prompt, **options)

    model = plain().eval()
    before = of(model)
    trainer = trainer_of(kind, model, out, 2)
    with trainer.original_attention():
        adapted = of(model)
    trainer.train()
    model.eval()
    inside = model.config._attn_implementation
    with trainer.original_attention():
        trained = of(model)
    assert model.config._attn_implementation == inside == "hdpcomm"
    with pytest.raises(RuntimeError, match="by hand"), trainer.original_attention():
        raise RuntimeError("by hand")
    assert model.config._attn_implementation == "hdpcomm"
    trainer.save_model(out)  # on rank 0
    trainer.comm.barrier()
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    return before, adapted, trained, of(again.eval())


def test_generation_with_the_original_attention(ranks: Any, tmp_path: Path) -> None:
    before, adapted, trained, again = ranks(2, on_rank, generated, str(tmp_path))[0]
    for one, other in ((before, adapted), (trained, again)):
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-6)  # lean layers round otherwise
        assert torch.equal(one[1], other[1])
    assert not torch.equal(before[0], trained[0])


def evaluated(kind: Any, out: str, batch: int) -> Any:
    changed = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": batch}
    trainer = trainer_of(kind, plain(), out, batch, **changed)
    trainer.train()
    history = trainer.state.log_history
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    predicted = trainer.predict(documents()[:4]).predictions
    # Training goes on after an evaluation.
    return losses, [entry["loss"] for entry in history if "loss" in entry], predicted


def test_evaluation_while_training(ranks: Any, tmp_path: Path) -> None:
    batch = 3
    found = ranks(2, on_rank, evaluated, str(tmp_path / "a"), batch)
    expected = in_this_process(evaluated, str(tmp_path / "b"), batch * 2)
    assert len(expected[0]) == 2
    for losses, trained, predicted in found:
        assert trained == pytest.approx(expected[1], abs=2e-4)
        assert losses == pytest.approx(found[0][0], abs=1e-6)
        # transformers takes the mean of the batches' means, which depends on how ranks cut them.
        assert losses == pytest.approx(expected[0], rel=0.05)
        assert predicted.shape == expected[2].shape


def refused(_kind: Any, out: str, changed: dict[str, Any], options: dict[str, Any], told: str) -> None:
    from hdpcomm.integrations.huggingface import Trainer

    with pytest.raises(InvalidUsage, match=told):
        Trainer(model=tiny(), args=arguments(Path(out), 2, 1, **changed), train_dataset=documents(), **options)


@pytest.mark.parametrize(
    ("changed", "options", "told"),
    [
        ({"torch_compile": True}, {"mesh": {"tensor": 2}}, "torch_compile=True with mesh=.*'tensor': 2"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True .*give capacity="),
        ({"torch_empty_cache_steps": 2}, {}, "torch_empty_cache_steps=2 .*in a callback"),
        ({}, {"capacity": 0}, "capacity"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused(
    tmp_path: Path, changed: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    in_this_process(refused, str(tmp_path), changed, options, told)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("fp16", True, "fp16=True .*bf16=True"), ("deepspeed", "zero.json", "deepspeed .*give zero=3"),
     ("fsdp", ["full_shard"], "full_shard.*give zero=3"), ("_n_gpu", 2, "2 GPUs .*a process for each"),
     ("activation_offloading", True, "activation_offloading .*give offload= and capacity="),
     ("use_liger_kernel", True, "use_liger_kernel=True .*no whole logits"),
     ("optim", "adalomo", "optim=adalomo .*updates in the backward pass")],
)  # fmt: skip
def test_arguments_that_this_machine_cannot_take_are_refused(tmp_path: Path, name: str, value: Any, told: str) -> None:
    """transformers itself checks these against the machine, so they are set behind its back."""
    from hdpcomm.integrations.huggingface import Trainer

    class Late(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            setattr(self.args, name, value)

    class Planning(Trainer.__bases__[0], Late):  # type: ignore[misc]
        pass

    try:
        with pytest.raises(InvalidUsage, match=told):
            Planning(model=tiny(), args=arguments(tmp_path, 2, 1), train_dataset=documents(), data_collator=padded)
    finally:
        leave()


class OtherLoss(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_a_loss_that_would_not_be_computed_is_refused(tmp_path: Path) -> None:
    from hdpcomm.integrations.huggingface import HybridDataParallel

    class Unknown(HybridDataParallel, OtherLoss):
        pass

    class Known(HybridDataParallel, OtherLoss):
        computes_token_loss = True

    given = {"train_dataset": documents(), "data_collator": padded}
    try:
        with pytest.raises(InvalidUsage, match=r"OtherLoss\.compute_loss is not called"):
            Unknown(model=tiny(), args=arguments(tmp_path, 2, 1), **given)
        Known(model=tiny(), args=arguments(tmp_path, 2, 1), **given).train()
    finally:
        leave()
