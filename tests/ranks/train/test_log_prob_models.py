"""Losses of log-probabilities with models of transformers: beside their own logits on each sequence alone."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, Planner, Tree, trees_of_prompts
from hdpcomm.testing import run_threads
from hdpcomm.train import IGNORE, GroupLoss, Trainer, rollout
from hdpcomm.train.losses import dpo, grpo
from tests.harness.pipelines import COST
from tests.harness.plain_losses import PLAIN

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = ((6, 30), (6, 2), (6, 9), (6, 1), (3, 17), (3, 4))
LENGTHS = [a + b for a, b in SIZES]
SMALL = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3, tied": lambda: transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "gemma 2, soft cap": lambda: transformers.Gemma2Config(**SMALL, final_logit_softcapping=5.0, sliding_window=8),
    "granite, scaled": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=3.0),
    "llama 4, chunks, which know no trees": lambda: transformers.Llama4TextConfig(
        **SMALL,
        intermediate_size_mlp=40,
        num_local_experts=2,
        attention_chunk_size=8,
        interleave_moe_layer_step=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


@functools.cache
def drawn(family):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # logits that differ
    return model


@functools.cache
def drawn_adapters(targets):
    model = peft.get_peft_model(copy.deepcopy(drawn("llama")), peft.LoraConfig(r=2, target_modules=list(targets)))
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def batch():
    draw = torch.Generator().manual_seed(8)
    prompts = {n: torch.randint(48, (n,), generator=draw) for n, _ in SIZES}
    return [
        rollout(
            prompts[a], torch.randint(48, (b,), generator=draw), advantages=float(torch.randn((), generator=draw)),
            old_log_probs=-3.9, ref_log_probs=-4.0,
        )
        for a, b in SIZES
    ]  # fmt: skip


def own_log_probs(model, each, temperature=1.0):
    logits = model(each["tokens"][None]).logits[0].float() / temperature
    where = each["labels"] != IGNORE
    return logits.log_softmax(-1)[where].gather(1, each["labels"][where][:, None])[:, 0], where


def alone(model, name):
    """(loss, gradients) by transformers' own logits and plain losses."""
    loss, plain = PLAIN[name]
    policies, columns = [], []
    for each in batch():
        policy, where = own_log_probs(model, each, loss.temperature)
        policies.append(policy)
        own = {key: torch.as_tensor(x).expand(len(where))[where] for key, x in each.items()}
        columns.append({**own, "entropies": torch.zeros(len(policy))})
    total = plain(policies, columns)
    total.backward()
    return total.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def step(model, name, comm, *, trees=(), recompute=0):
    planner = Planner(None, ClusterSpec(comm.size, 48), cost_model=COST)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    adapted = hdp.adapt(model, recompute=recompute)
    made = batch()
    trainer = Trainer(adapted, optimizer, planner, comm, max_grad_norm=None, loss=PLAIN[name][0])
    groups = [0, 0, 1, 1, 2, 2] if name.startswith("dpo") else None
    metrics = trainer.step(LENGTHS, made.__getitem__, trees=trees, groups=groups)
    return metrics, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def same(found, wanted, rounded=None):
    """``rounded``: what transformers' own code in float32 gives, whose error is allowed on top."""
    for key, gradient in wanted.items():
        error = 0.0 if rounded is None else (rounded[key] - gradient).norm()
        assert (found[key] - gradient).norm() <= 1e-5 * (1e-2 + gradient.norm()) + error, key


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("name", "recompute"), [("grpo", 0), ("dpo", 1), ("gspo", 1)])
def test_gradients_are_those_of_transformers_own_logits(family, name, recompute):
    loss, gradients = alone(copy.deepcopy(drawn(family)).double(), name)
    rounded = alone(copy.deepcopy(drawn(family)), name)[1]
    trees = trees_of_prompts(LENGTHS, [(a, a) for a, _ in SIZES])

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            return step(copy.deepcopy(drawn(family)), name, comm, trees=trees, recompute=recompute)

    for metrics, found in run_threads(rank, 2):
        assert metrics.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        same(found, gradients, rounded)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "lm_head")], ids=["layers", "layers and head"])
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_adapters_with_the_base_as_reference(targets, name):
    """A head with an adapter is more than a matrix: its logits are made another way."""

    plain = copy.deepcopy(drawn_adapters(targets))
    with torch.no_grad(), plain.disable_adapter():
        references = [own_log_probs(plain, each)[0] for each in batch()]
    loss, gradients = alone(plain, name)

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = copy.deepcopy(drawn_adapters(targets))
            metrics, found = step(model, name, comm)
            planner = Planner(None, ClusterSpec(comm.size, 48), cost_model=COST)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
            trainer = Trainer(hdp.adapt(model), optimizer, planner, comm)
            with model.disable_adapter():
                scored, _ = trainer.log_probs(LENGTHS, batch().__getitem__)
            return metrics, found, scored

    for metrics, found, scored in run_threads(rank, 2):
        assert metrics.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        same(found, gradients)
        for each, mine, theirs in zip(batch(), scored, references, strict=True):
            assert torch.allclose(mine[each["labels"] != IGNORE], theirs, rtol=0, atol=1e-5)


def test_two_epochs_over_one_batch_and_gradients_that_go_on():
    """The second step starts from the weights of the first; both beside plain code."""
    plain = copy.deepcopy(drawn("llama"))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        wanted.append(alone(plain, "grpo")[0])
        optimizer.step()

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = hdp.adapt(copy.deepcopy(drawn("llama")))
            planner = Planner(None, ClusterSpec(comm.size, 48), cost_model=COST)
            own = torch.optim.SGD(model.parameters(), lr=0.05)
            trainer = Trainer(model, own, planner, comm, max_grad_norm=None, loss=PLAIN["grpo"][0])
            return [trainer.step(LENGTHS, batch().__getitem__).loss for _ in range(3)]

    for found in run_threads(rank, 2):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_trees_of_a_model_with_chunks_are_refused_before_the_step():
    model = hdp.adapt(copy.deepcopy(drawn("llama 4, chunks, which know no trees")))
    with hdp.init() as comm:
        planner = Planner(None, ClusterSpec(1, 64), cost_model=COST)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, comm)
        with pytest.raises(InvalidUsage, match="chunks of attention, which know no trees; give its sequences"):
            trainer.step([Tree([-1, 0, 0], [4, 3, 5])], lambda _: pytest.fail("nothing is fetched"))


def test_adapters_that_drop_out_are_refused_for_groups():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(copy.deepcopy(drawn("llama")), config)
    with hdp.init() as comm:
        planner = Planner(None, ClusterSpec(1, 64), cost_model=COST)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        adapted = hdp.adapt(model)
        Trainer(adapted, optimizer, planner, comm, loss=grpo())
        for loss in (dpo(), GroupLoss(lambda log_probs, _: log_probs[0].sum())):
            with pytest.raises(InvalidUsage, match="two forward passes of the model"):
                Trainer(adapted, copy.copy(optimizer), planner, comm, loss=loss)
