"""Expert parallelism of transformers' models: gradients of the whole model on one process."""

from __future__ import annotations

import copy

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST

pytest.importorskip("transformers", minversion="5.0")

from tests.harness.families import LENGTHS, model_of, sequences, unsharded
from tests.ranks.parallel.test_pipeline_huggingface import sliced


def model(family, how="plain"):
    """In fp64 with transformers' own loop over experts; its faster ways know fp32 and bf16 only."""
    made = model_of(family)
    if how == "grouped":
        return made
    made.set_experts_implementation("eager")
    return made.double()


def step(family, ranks, expert, how="plain"):
    """On each rank, a thread: metrics, gradients of one step by (name, part), and the whole model's state."""
    models = [model(family, how) for _ in range(ranks)]  # transformers makes models of one thread at a time

    def main():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, expert=expert)
            cut = expert_parallel(adapt(models[comm.rank]), mesh)
            set_recompute(cut, "full" if how == "recompute" else "none")
            offload = None
            if how == "offload":
                pool = PinnedPool(8 << 20, device="cpu")
                offload = ActivationOffload(pool, cut, resident_layers=0, min_bytes=1)
            planner = Planner(None, ClusterSpec(mesh.hdp, 160 // mesh.hdp), cost_model=COST)
            if how == "slices":
                planner = sliced(mesh.hdp, {})
            optimizer = torch.optim.SGD(cut.parameters(), lr=0.0)
            trainer = Trainer(cut, optimizer, planner, mesh, max_grad_norm=None, offload=offload)
            done = trainer.step(LENGTHS, lambda i: sequences()[i])
            state = trainer.state_dict()["model"]
            shards = cut.expert.shards
            learning = {name: p.grad for name, p in cut.named_parameters() if p.grad is not None}  # indexers do not
            gradients = {(name, shards.get(name)): gradient.clone() for name, gradient in learning.items()}
            return done, gradients, copy.deepcopy(state)

    return run_threads(main, ranks)


# transformers computes norms, rotary tables and losses in fp32: no 1e-10 here.
@pytest.mark.parametrize(
    ("family", "ranks", "expert", "how"),
    [
        ("mixtral", 4, 2, "plain"),
        ("mixtral", 2, 2, "offload"),
        ("mixtral", 4, 4, "recompute"),
        ("qwen3-moe", 4, 2, "plain"),
        ("qwen3-moe", 4, 4, "recompute"),
        ("qwen3-moe", 2, 2, "offload"),
        ("mixtral", 2, 2, "grouped"),
        ("gpt-oss", 2, 2, "plain"),
        ("qwen3-next", 2, 2, "plain"),
        ("deepseek-v32", 4, 2, "plain"),
        ("deepseek-v32", 2, 2, "offload"),
        ("deepseek-v32", 4, 4, "recompute"),
        ("mixtral", 2, 2, "slices"),
        ("qwen3-moe", 4, 2, "slices"),
        ("qwen3-next", 2, 2, "slices"),
        ("deepseek-v32", 4, 2, "slices"),
    ],
)
def test_gradients_are_those_of_the_whole_model(family, ranks, expert, how):
    whole = model(family, how)
    loss, gradients = unsharded(whole)
    gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    results = step(family, ranks, expert, how)
    found = {key: gradient for _, own, _ in results for key, gradient in own.items()}
    for done, own, state in results:
        assert done.loss == pytest.approx(loss, rel=1e-5)
        assert done.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert done.expert_tokens_mean == sum(LENGTHS) * 2 / 4
        assert done.expert_tokens_dropped == 0
        for (name, part), gradient in own.items():
            assert torch.equal(gradient, found[name, part]), f"{name} differs between ranks"
            want = gradients[name.removeprefix("model.")]
            want = want if part is None else part.take(want)
            error = (gradient - want).norm()
            assert error <= 1e-5 * want.norm() + 1e-9, f"{name}: {error:.1e} of {want.norm():.1e}"
        for name, tensor in whole.state_dict().items():
            assert torch.equal(state[f"model.{name}"], tensor), name
    assert {name for name, _ in found} == {f"model.{name}" for name in gradients}


def only_experts(family):
    """Trains nothing but experts, of which only the first two get tokens."""
    made = model(family)
    made.requires_grad_(False)
    with torch.no_grad():
        made.get_input_embeddings().weight[:, 0] = 50.0
    for layer in made.base_model.layers:
        layer.mlp.experts.requires_grad_(True)
        with torch.no_grad():
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[0, 0], layer.mlp.gate.weight[1, 0] = 3.0, 2.0
    made.config.output_router_logits = False
    return made


def test_experts_without_tokens_where_nothing_else_is_trained():
    loss, gradients = unsharded(only_experts("mixtral"))
    models = [only_experts("mixtral") for _ in range(2)]

    def main():
        with hdp.init() as comm:
            mesh = Mesh(comm, expert=2)
            cut = expert_parallel(adapt(models[comm.rank]), mesh)
            planner = Planner(None, ClusterSpec(2, 80), cost_model=COST)
            optimizer = torch.optim.SGD([p for p in cut.parameters() if p.requires_grad], lr=0.0)
            trainer = Trainer(cut, optimizer, planner, mesh, max_grad_norm=None)
            done = trainer.step(LENGTHS, lambda i: sequences()[i])
            assert done.loss == pytest.approx(loss, rel=1e-5)
            assert done.expert_tokens_max == sum(LENGTHS)
            shards = cut.expert.shards
            return {name: (p.grad.clone(), shards[name]) for name, p in cut.named_parameters() if p.requires_grad}

    for own in run_threads(main, 2):
        for name, (gradient, part) in own.items():
            want = part.take(gradients[name.removeprefix("model.")])
            assert (gradient - want).norm() <= 1e-5 * want.norm() + 1e-12, name


@pytest.mark.parametrize(
    ("family", "expert", "message"),
    [
        ("llama", 2, "LlamaForCausalLM has no layer with experts that can be shared"),
        ("mixtral", 3, "model.model.layers.0.mlp.experts has 4 experts, which 3 ranks cannot share evenly"),
    ],
)
def test_models_that_cannot_be_shared(family, expert, message):
    models = [model_of(family) for _ in range(expert)]

    def main():
        with hdp.init() as comm:
            with pytest.raises(InvalidUsage) as caught:
                expert_parallel(adapt(models[comm.rank], check=False), Mesh(comm, expert=expert))
            comm.barrier()
            return str(caught.value)

    assert all(message in told for told in run_threads(main, expert))


def test_experts_that_do_more_than_they_tell_are_found():
    models = [model_of("mixtral") for _ in range(2)]

    def main():
        with hdp.init() as comm:
            adapted = adapt(models[comm.rank])
            experts = adapted.causal_lm.base_model.layers[0].mlp.experts
            experts.forward = lambda x, index, weights, own=experts.forward: own(x, index, weights) + index.shape[1]
            with pytest.raises(InvalidUsage, match="gives other logits than whole"):
                expert_parallel(adapted, Mesh(comm, expert=2))

    run_threads(main, 2)
