"""TRL's trainers of policies and preferences with plans: the weights and logs of the same trainer under DDP."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.integrations.huggingface import HybridDataParallel  # noqa: E402
from hdpcomm.integrations.row_passes import RowPasses  # noqa: E402
from hdpcomm.plan import Tree  # noqa: E402
from tests.harness.pipelines import COST  # noqa: E402
from tests.harness.tiny_huggingface import arguments, leave, tiny, weights  # noqa: E402
from tests.ranks.train.test_huggingface_sft import WORDS, tokenizer  # noqa: E402

ANSWERS = (3, 11, 1, 20, 2, 6, 5, 30, 9, 4, 2, 7, 8, 1, 3, 16)
"""Tokens of the answers of a rank, more than it needs."""


class PlannedGRPO(HybridDataParallel, GRPOTrainer):  # type: ignore[misc]
    pass


class PlannedDPO(HybridDataParallel, DPOTrainer):  # type: ignore[misc]
    pass


class CannedRLOO(RLOOTrainer):  # type: ignore[misc]
    """It takes no function for rollouts."""

    def _generate_single_turn(self, prompt_ids: list[Any], *_: Any) -> Any:
        return answers_of(self, len(prompt_ids))


class PlannedRLOO(HybridDataParallel, CannedRLOO):
    pass


class PlannedKTO(HybridDataParallel, KTOTrainer):  # type: ignore[misc]
    pass


class PlannedReward(HybridDataParallel, RewardTrainer):  # type: ignore[misc]
    pass


CONFIGS = {
    GRPOTrainer: GRPOConfig,
    DPOTrainer: DPOConfig,
    RLOOTrainer: RLOOConfig,
    KTOTrainer: KTOConfig,
    RewardTrainer: RewardConfig,
}


def words(count: int, seed: int) -> str:
    draw = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (count,), generator=draw).tolist())


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split())) % 5) for completion in completions]


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    answers = answers_of(trainer, len(prompts))
    chances = [[-3.5] * len(answer) for answer in answers]
    tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": tokens, "completion_ids": answers, "logprobs": chances}


def answers_of(trainer: Any, count: int) -> list[list[int]]:
    """By rank and number of the call: those of generation would depend on what each process drew before."""
    trainer.calls = getattr(trainer, "calls", 0) + 1
    draw = torch.Generator().manual_seed(100 * trainer.calls + trainer.accelerator.process_index)
    return [torch.randint(5, 45, (ANSWERS[i],), generator=draw).tolist() for i in range(count)]


def train(kind: Any, out: str, changed: dict[str, Any], lora: bool) -> Any:
    torch.manual_seed(7)
    try:
        return trained(kind, out, changed, lora)
    finally:
        gc.collect()  # DDP's reducer, before its process group
        leave()


def trained(kind: Any, out: str, changed: dict[str, Any], lora: bool) -> Any:
    task = "SEQ_CLS" if issubclass(kind, RewardTrainer) else None
    given = {"peft_config": peft.LoraConfig(r=2, target_modules="all-linear", task_type=task)} if lora else {}
    trainer = trainer_of(kind, out, changed, **given)
    trees, score = 0, RowPasses.score

    def counted(*own: Any, **more: Any) -> Any:
        nonlocal trees
        scored = score(*own, **more)
        trees += sum(isinstance(item, Tree) for item in scored.planned.lengths)
        return scored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowPasses, "score", counted)
        # measured costs of so small a model say now one and now the other
        patch.setattr("hdpcomm.measure.memory.profile_cost_model", lambda *_, **__: COST)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    history[0]["trees"] = trees
    trainer.accelerator.wait_for_everyone()
    return weights(trainer.model), history


def trainer_of(kind: Any, out: str, changed: dict[str, Any], **given: Any) -> Any:
    [config] = [config for trainer, config in CONFIGS.items() if issubclass(kind, trainer)]
    of_policy = config in (GRPOConfig, RLOOConfig)
    args = arguments(Path(out), 4, 2).to_dict() | {"learning_rate": 0.5, "bf16": False, "gradient_checkpointing": False}
    if of_policy:
        args |= {"num_generations": 4, "max_completion_length": 32}
    names = config.__dataclass_fields__
    folder = Path(out).parent / "model"  # a reference is read from where the model came from
    if "model" not in given:
        name = "SequenceClassification" if config is RewardConfig else "CausalLM"
        auto = getattr(transformers, f"AutoModelFor{name}")
        given["model"] = auto.from_pretrained(folder, attn_implementation="eager")
    prompts = [words(n, n) for n in (3, 9, 5, 14, 2, 7, 12, 4)]
    if of_policy:
        rows = {"prompt": prompts}
        given = {"reward_funcs": reward} | ({"rollout_func": rollouts} if config is GRPOConfig else {}) | given
    elif config is KTOConfig:
        rows = {"prompt": prompts * 2, "completion": [words(n, 50 + n) for n in ANSWERS], "label": [True, False] * 8}
    else:
        rows = {
            "prompt": prompts * 2,
            "chosen": [words(n, 50 + n) for n in ANSWERS],
            "rejected": [words(n, 90 + n) for n in reversed(ANSWERS)],
        }
        if config is RewardConfig:
            rows["margin"] = [i / 8 for i in range(len(ANSWERS))]
    args = {name: value for name, value in (args | changed).items() if name in names}
    return kind(
        args=config(**args), processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict(rows), **given,
    )  # fmt: skip


def check(
    ranks: Any, tmp_path: Path, kinds: tuple[Any, Any], changed: dict[str, Any], lora: bool = False, model: Any = None
) -> None:
    model = tiny() if model is None else model
    model.save_pretrained(tmp_path / "model")
    planned, plain = (ranks(2, train, kind, str(tmp_path / kind.__name__), changed, lora) for kind in kinds)
    for (found, history), (wanted, logged) in zip(planned, plain, strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
        assert len(history) == len(logged) == changed.get("max_steps", 4)
        for mine, theirs in zip(history, logged, strict=True):
            # A model that is its reference yet has rewards of 0, up to rounding, which then says which is higher.
            ties = {"rewards/accuracies"} if abs(theirs.get("rewards/margins", 1.0)) < 1e-6 else set()
            for key in set(theirs) - UNLIKE - ties:
                assert mine[key] == pytest.approx(theirs[key], abs=2e-4), key
    if kinds[0] in (PlannedGRPO, PlannedReward, PlannedRLOO):
        assert all(history[0]["trees"] for _, history in planned), "each prompt is computed once"
    before = weights(model)
    assert lora or max(float((found[name] - value).abs().max()) for name, value in before.items()) > 1e-3


UNLIKE = {"trees", "step_time", "logits/chosen", "logits/rejected", "mean_token_accuracy", "epoch"}
"""What takes time, or needs logits."""

GRPO = [
    ({"loss_type": "grpo", "beta": 0.1}, False),
    ({"loss_type": "dapo", "temperature": 0.7, "num_iterations": 2}, False),
    ({"loss_type": "dr_grpo", "beta": 0.05, "gradient_checkpointing": True}, True),
    ({"loss_type": "bnpo", "importance_sampling_level": "sequence", "num_iterations": 2}, False),
    ({"loss_type": "grpo", "entropy_coef": 0.05}, False),
    # two steps: later ones may take another of two tokens with nearly the same entropy
    ({"loss_type": "grpo", "top_entropy_quantile": 0.5, "max_steps": 2}, False),
]


@pytest.mark.parametrize(("changed", "lora"), GRPO, ids=[f"{c['loss_type']}-{i}" for i, (c, _) in enumerate(GRPO)])
def test_weights_and_logs_are_those_of_grpo_trainer(
    ranks: Any, tmp_path: Path, changed: dict[str, Any], lora: bool
) -> None:
    check(ranks, tmp_path, (PlannedGRPO, GRPOTrainer), changed, lora)


@pytest.mark.parametrize(
    ("changed", "lora"),
    [({}, False), ({"loss_type": ["ipo"], "beta": 0.3}, False), ({"loss_type": ["sigmoid", "sft"]}, True)],
    ids=["sigmoid", "ipo", "two losses, LoRA"],
)
def test_weights_and_logs_are_those_of_dpo_trainer(
    ranks: Any, tmp_path: Path, changed: dict[str, Any], lora: bool
) -> None:
    check(ranks, tmp_path, (PlannedDPO, DPOTrainer), changed, lora)


def test_weights_and_logs_are_those_of_rloo_trainer(ranks: Any, tmp_path: Path) -> None:
    check(ranks, tmp_path, (PlannedRLOO, CannedRLOO), {"beta": 0.1})


def test_weights_and_logs_are_those_of_kto_trainer(ranks: Any, tmp_path: Path) -> None:
    """Its divergence is a second call of the model."""
    check(ranks, tmp_path, (PlannedKTO, KTOTrainer), {"beta": 0.3})


@pytest.mark.parametrize(
    ("changed", "lora"), [({"center_rewards_coefficient": 0.1}, False), ({}, True)], ids=["centred", "LoRA"]
)
def test_weights_and_logs_are_those_of_reward_trainer(
    ranks: Any, tmp_path: Path, changed: dict[str, Any], lora: bool
) -> None:
    model = tiny("SequenceClassification", num_labels=1)
    check(ranks, tmp_path, (PlannedReward, RewardTrainer), changed, lora, model)


def generating(out: str) -> Any:
    try:
        trainer = trainer_of(PlannedGRPO, out, {"max_steps": 2, "num_iterations": 2}, rollout_func=None)
        trainer.train()
        return weights(trainer.model), trainer.state.log_history[0]
    finally:
        gc.collect()
        leave()


def test_answers_that_the_model_samples(ranks: Any, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "model")
    (one, history), (other, _) = ranks(2, generating, str(tmp_path / "run"))
    assert history["hdp_tokens"] > 0
    assert history["completions/mean_length"] > 1
    for name, value in one.items():
        assert torch.equal(value, other[name])


@pytest.mark.parametrize(
    ("kind", "changed", "refused"),
    [
        (PlannedDPO, {"use_weighting": True}, "use_weighting=True"),
        (PlannedDPO, {"padding_free": True}, "padding_free=True .*drop padding"),
        (PlannedGRPO, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
    ],
)
def test_what_needs_logits_is_refused(tmp_path: Path, kind: Any, changed: dict[str, Any], refused: str) -> None:
    tiny().save_pretrained(tmp_path / "model")
    try:
        with pytest.raises(InvalidUsage, match=refused):
            trainer_of(kind, str(tmp_path / "run"), changed)
    finally:
        leave()


def save_model_that_drops_out(folder: Path) -> None:
    """TRL's ``disable_dropout`` looks for ``nn.Dropout``, which this one has none of."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = transformers.SeedOssConfig(**sizes, **heads, residual_dropout=0.1, attention_dropout=0.0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_a_model_that_drops_out_is_refused(tmp_path: Path) -> None:
    save_model_that_drops_out(tmp_path / "model")
    try:
        with pytest.raises(InvalidUsage, match="two forward passes of the model in training mode differ"):
            trainer_of(PlannedDPO, str(tmp_path / "run"), {})
    finally:
        leave()
