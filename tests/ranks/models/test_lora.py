"""LoRA by peft, unchanged: gradients of the unsharded model for what it trains, nothing for the rest."""

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.parallel import expert_parallel, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer

pytest.importorskip("transformers", minversion="4.54")
peft = pytest.importorskip("peft")

from tests.harness.families import LENGTHS, model_of, sequences, unsharded  # noqa: E402
from tests.harness.pipelines import COST, part_of  # noqa: E402
from tests.ranks.models.test_adapt import planner_of  # noqa: E402

TARGETS = {
    "layers": ["q_proj", "down_proj"],
    "head": ["q_proj", "lm_head"],
    "all": "all-linear",
    "columns": ["k_proj", "v_proj", "up_proj"],
    "fused": ["in_proj_qkv", "in_proj_b", "in_proj", "qkv_proj", "gate_up_proj"],
}


def lora_of(targets, family="qwen3", changes=None, **options):
    options = {"lora_dropout": 0.0, **options}
    config = peft.LoraConfig(r=2, target_modules=TARGETS[targets], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model_of(family, tie_word_embeddings=False, **(changes or {})), config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize(("targets", "recompute"), [("layers", "none"), ("layers", "full"), ("head", "none")])
def test_a_step_has_the_gradients_of_the_unsharded_model(targets, recompute):
    loss, gradients = unsharded(lora_of(targets))
    assert gradients
    assert all("lora_" in name for name in gradients)
    models = [lora_of(targets) for _ in range(3)]

    def main():
        comm = hdp.init()
        model = adapt(models[comm.rank], recompute=recompute, chunk_tokens=10)
        trained = [p for p in model.parameters() if p.requires_grad]
        trainer = Trainer(model, torch.optim.SGD(trained, lr=0.0), planner_of(comm.size), comm, max_grad_norm=None)
        return trainer.step(LENGTHS, lambda i: sequences()[i]).loss

    assert run_threads(main, 3, timeout=60.0) == [pytest.approx(loss, rel=1e-5)] * 3
    for model in models:
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (name in gradients)
            if name in gradients:
                error = float((parameter.grad - gradients[name]).norm())
                assert error <= 1e-5 * float(gradients[name].norm()) + 1e-9, name


SMALL = {"vocab_size": 100}
BIASED = {**SMALL, "mlp_bias": True, "attention_bias": True, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("family", "changes", "targets", "ranks", "tensor", "recompute"),
    [
        ("llama", BIASED, "all", 2, 2, "none"),
        ("llama", BIASED, "columns", 4, 4, "full"),
        ("qwen3", SMALL, "head", 4, 2, "none"),
        ("qwen3", SMALL, "layers", 4, 2, "full"),
        ("mixtral", SMALL, "columns", 2, 2, "none"),
        ("qwen3.5", SMALL, "fused", 4, 4, "none"),
        ("falcon-h1", SMALL, "fused", 4, 2, "full"),
        ("phi4", SMALL, "fused", 4, 4, "none"),
    ],
)
def test_tensor_ranks_have_parts_of_the_gradients_of_the_whole_model(
    family, changes, targets, ranks, tensor, recompute
):
    loss, gradients = unsharded(lora_of(targets, family, changes))
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    models = [lora_of(targets, family, changes) for _ in range(ranks)]

    def main():
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm, tensor=tensor)
            model = tensor_parallel(adapt(models[comm.rank], recompute=recompute), mesh)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
            planner = Planner(None, ClusterSpec(mesh.hdp, 160 // mesh.hdp, tensor=tensor), cost_model=COST)
            done = Trainer(model, optimizer, planner, mesh, max_grad_norm=None).step(LENGTHS, lambda i: sequences()[i])
            own = [(name, part_of(model, name), p.grad) for name, p in model.named_parameters() if p.grad is not None]
            return done, own

    for done, own in run_threads(main, ranks, timeout=60.0):
        assert (done.loss, done.grad_norm) == pytest.approx((loss, float(norm)), rel=1e-5)
        assert {name.removeprefix("model.") for name, _, _ in own} == gradients.keys()
        for name, part, gradient in own:
            want = gradients[name.removeprefix("model.")]
            want = want if part is None else part.take(want)
            assert (gradient - want).norm() <= 1e-5 * want.norm() + 1e-7, name
        cut = {name.split(".")[-4] + name.split(".")[-3] for name, part, _ in own if part is not None}
        columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", *TARGETS["fused"])
        assert cut <= {f"{name}lora_B" for name in columns} | {"o_projlora_A", "down_projlora_A"}


@pytest.mark.parametrize(
    ("family", "targets", "options", "reason"),
    [
        ("qwen3", "layers", {"lora_dropout": 0.1}, r"Linear, and .* LoRA of it without dropout, only"),
        ("qwen3", "layers", {"use_dora": True}, r"Linear, and .* LoRA of it without dropout, only"),
        ("mixtral", "all", {}, r"adapters on the experts of layers\.0\.mlp"),
    ],
    ids=["dropout", "dora", "experts"],
)
def test_adapters_that_tensor_ranks_cannot_cut(family, targets, options, reason):
    models = [lora_of(targets, family, SMALL, **options) for _ in range(2)]

    def main():
        with hdp.init() as comm, pytest.raises(InvalidUsage, match=reason):
            tensor_parallel(adapt(models[comm.rank], check=False), hdp.Mesh(comm, tensor=2))

    run_threads(main, 2)


def test_adapters_on_experts_that_expert_ranks_cannot_share():
    models = [lora_of("all", "mixtral") for _ in range(2)]

    def main():
        with hdp.init() as comm, pytest.raises(InvalidUsage, match=r"layers\.0\.mlp\.experts has adapters of LoRA"):
            expert_parallel(adapt(models[comm.rank], check=False), hdp.Mesh(comm, expert=2))

    run_threads(main, 2)


def test_methods_that_add_tokens_are_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(InvalidUsage, match="PROMPT_TUNING puts tokens of its own"):
        adapt(peft.get_peft_model(model_of("qwen3"), config))
