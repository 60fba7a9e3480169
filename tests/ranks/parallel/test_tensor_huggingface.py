"""Tensor parallelism of transformers' models by their own plans: gradients of the whole model on one process."""

from __future__ import annotations

import copy

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel, tensor_parallel
from hdpcomm.parallel.tensor import own_part
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST, part_of

pytest.importorskip("transformers", minversion="4.54")

from tests.harness.families import LENGTHS, model_of, sequences, unsharded

MODELS = {
    "llama": {"num_key_value_heads": 1, "mlp_bias": True, "attention_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {},
    "gemma3": {},
}
EXPERTS = ("mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v32")


def model(family, **changes):
    made = model_of(family, vocab_size=100, **MODELS.get(family, {}), **changes)
    if family in EXPERTS:
        made.set_experts_implementation("eager")  # the other ways know fp32 and bf16 only
    return made.double()


def step(family, ranks, tensor, how="plain", expert=1):
    """On each rank, a thread: metrics and gradients of one step, by (name, part)."""
    models = [model(family) for _ in range(ranks)]  # transformers makes models of one thread at a time

    def main():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, tensor=tensor, expert=expert)
            cut = tensor_parallel(expert_parallel(adapt(models[comm.rank]), mesh), mesh)
            set_recompute(cut, "full" if how == "recompute" else "none")
            cluster = ClusterSpec(mesh.hdp, 160 // mesh.hdp, tensor=tensor)
            offload = None
            if how == "offload":
                pool = PinnedPool(8 << 20, device="cpu")
                offload = ActivationOffload(pool, cut, resident_layers=0, min_bytes=1)
            planner = Planner(None, cluster, cost_model=COST)
            optimizer = torch.optim.SGD(cut.parameters(), lr=0.0)
            trainer = Trainer(cut, optimizer, planner, mesh, max_grad_norm=None, offload=offload)
            done = trainer.step(LENGTHS, lambda i: sequences()[i])
            state = trainer.state_dict()["model"]
            shards = {} if cut.expert is None else cut.expert.shards
            learning = {name: p.grad for name, p in cut.named_parameters() if p.grad is not None}  # indexers do not
            gradients = {(name, part_of(cut, name) or shards.get(name)): g.clone() for name, g in learning.items()}
            return done, gradients, copy.deepcopy(state)

    return run_threads(main, ranks)


# transformers computes norms, rotary tables and losses in fp32: no 1e-10 here.
@pytest.mark.parametrize(
    ("family", "ranks", "tensor", "how", "expert"),
    [
        ("llama", 4, 2, "plain", 1),
        ("llama", 2, 2, "recompute", 1),
        ("llama", 2, 2, "offload", 1),
        ("qwen3", 4, 2, "plain", 1),
        ("qwen3", 4, 4, "recompute", 1),
        ("mistral", 4, 2, "plain", 1),
        ("gemma3", 4, 2, "plain", 1),
        ("granite", 2, 2, "plain", 1),
        ("cohere", 2, 2, "plain", 1),
        ("gemma3", 2, 2, "recompute", 1),
        ("mixtral", 2, 2, "plain", 1),
        ("mixtral", 4, 2, "recompute", 2),
        ("mixtral", 4, 4, "offload", 1),
        ("qwen3-moe", 4, 2, "plain", 1),
        ("qwen3-moe", 4, 2, "plain", 2),
        ("qwen3-moe", 2, 2, "offload", 1),
        ("deepseek-v3", 4, 2, "plain", 1),
        ("deepseek-v3", 2, 2, "recompute", 1),
        ("deepseek-v32", 4, 2, "plain", 1),
        ("deepseek-v32", 2, 2, "offload", 1),
        ("deepseek-v32", 4, 2, "recompute", 2),
    ],
)
def test_gradients_are_those_of_the_whole_model(family, ranks, tensor, how, expert):
    whole = model(family)
    loss, gradients = unsharded(whole)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    results = step(family, ranks, tensor, how, expert)
    found = {key: gradient for _, own, _ in results for key, gradient in own.items()}
    for done, own, state in results:
        assert done.loss == pytest.approx(loss, rel=1e-5)
        assert done.grad_norm == pytest.approx(float(norm), rel=1e-5)
        for (name, part), gradient in own.items():
            assert torch.equal(gradient, found[name, part]), f"{name} differs between ranks"
            want = gradients[name.removeprefix("model.")]
            want = want if part is None else own_part(want, part)
            error = (gradient - want).norm()
            assert error <= 1e-5 * want.norm() + 1e-9, f"{name}: {error:.1e} of {want.norm():.1e}"
        for name, tensor_ in whole.state_dict().items():
            assert torch.equal(state[f"model.{name}"], tensor_), name
    assert {name for name, _ in found} == {f"model.{name}" for name in gradients}


def test_latent_heads_that_are_not_shared_evenly():
    models = [model("deepseek-v3") for _ in range(3)]

    def main():
        uneven = pytest.raises(InvalidUsage, match="self_attn has 4 heads, which 3 tensor ranks cannot share evenly")
        with hdp.init() as comm, uneven:
            tensor_parallel(adapt(models[comm.rank], check=False), Mesh(comm, tensor=3))

    run_threads(main, 3)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("phi4", "asks for colwise_gather_output, rowwise_split_input"),
        ("gpt-neox", "attention.query_key_value has 96 columns where the layer of rows takes 32"),
        ("gpt-oss", "has no tensor parallel plan"),
        ("kimi-linear", "has linear or state-space layers"),
        ("mamba2", "has no tensor parallel plan"),
        ("qwen3-next", "has linear or state-space layers"),
    ],
)
def test_plans_that_are_not_followed(family, message):
    models = [model(family) for _ in range(2)]

    def main():
        with hdp.init() as comm:
            with pytest.raises(InvalidUsage) as caught:
                tensor_parallel(adapt(models[comm.rank], check=False), Mesh(comm, tensor=2))
            comm.barrier()
            return str(caught.value)

    assert all(message in told for told in run_threads(main, 2))


def test_a_layer_that_does_more_than_its_plan_tells_is_found():
    models = [model("llama") for _ in range(2)]

    def main():
        with hdp.init() as comm:
            adapted = adapt(models[comm.rank])
            mlp = adapted.causal_lm.base_model.layers[0].mlp
            mlp.register_forward_hook(lambda _module, _args, out: out + out.shape[1])
            with pytest.raises(InvalidUsage, match="gives other logits than whole"):
                tensor_parallel(adapted, Mesh(comm, tensor=2))

    run_threads(main, 2)
