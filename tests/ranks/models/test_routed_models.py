"""Routes of transformers' models: those that they take are given, and they take those that they are told."""

import copy
import functools

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt, set_recompute
from hdpcomm.models.moe import holds_experts
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST

pytest.importorskip("transformers", minversion="5.23")

from tests.harness.families import model_of

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3", "deepseek-v32", "qwen3-next")
LENGTHS = (37, 1, 50, 12, 5, 3)
EXPERTS, TOP_K, LAYERS, VOCABULARY = 4, 2, 2, 96


def plain(family):
    router = {} if family.startswith("deepseek") else {"output_router_logits": False}
    return model_of(family, vocab_size=VOCABULARY, **router)


@functools.cache
def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def router_layers(model):
    return [i for i, layer in enumerate(model.model.layers) if any(map(holds_experts, layer.modules()))]


@functools.cache
def routes(layers):
    generator = torch.Generator().manual_seed(7)
    return [torch.rand(n, layers, EXPERTS, generator=generator).topk(TOP_K).indices for n in LENGTHS]


class Told:
    """The forward of a router of transformers that is told its experts: weights by the formula of its family."""

    def __init__(self, block, told):
        self.block, self.told, self.forward = block, told, block.forward
        (self.experts,) = (each for each in block.children() if holds_experts(each))

    def __call__(self, x, *args, **kwargs):
        router = next(each for name, each in self.block.named_children() if name in ("gate", "router"))
        flat = x.reshape(-1, x.shape[-1])
        logits = nn.functional.linear(flat.float(), router.weight.float(), getattr(router, "bias", None))
        kind = type(self.block).__name__
        if kind.startswith("GptOss"):
            weights = logits.gather(1, self.told).softmax(-1)
        elif kind.startswith("Deepseek"):
            weights = logits.sigmoid().gather(1, self.told)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * self.block.config.routed_scaling_factor
        else:
            weights = logits.softmax(-1).gather(1, self.told)
            if kind.startswith("Mixtral") or router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
        own = self.experts.forward
        self.experts.forward = lambda hidden, _, scale: own(hidden, self.told, weights.to(scale.dtype))
        try:
            return self.forward(x, *args, **kwargs)
        finally:
            self.experts.forward = own


@functools.cache
def wanted(family):
    """(loss, gradients, routes that the model takes by itself) of each sequence by itself in one process."""
    model, total, chosen = plain(family), 0.0, []
    here = router_layers(model)
    blocks = [next(m for m in model.model.layers[i].modules() if any(map(holds_experts, m.children()))) for i in here]
    own = [block.forward for block in blocks]
    for tokens, told in zip(sequences(), routes(len(here)), strict=True):
        index = []
        handles = [
            next(each for each in block.children() if holds_experts(each)).register_forward_pre_hook(
                lambda _, given, index=index: index.append(given[1])
            )
            for block in blocks
        ]
        with torch.no_grad():
            model(input_ids=tokens[None], use_cache=False)
        chosen.append(torch.stack(index, dim=1))
        for place, (block, handle) in enumerate(zip(blocks, handles, strict=True)):
            handle.remove()
            block.forward = Told(block, told[:, place])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        total = total + nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        for block, forward in zip(blocks, own, strict=True):
            block.forward = forward
    loss = total / sum(len(tokens) - 1 for tokens in sequences())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, chosen


def run(family, ranks=1, *, given=None, pipeline=1, expert=1, tensor=1, recompute="none"):
    """On each rank: loss, gradients by what a step of SGD changes, and the routes of log_probs()."""
    whole = [plain(family) for _ in range(ranks)]

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, pipeline=pipeline, expert=expert, tensor=tensor)
            model, hdp_ranks = adapt(whole[comm.rank], check=False), ranks // pipeline // tensor
            planner = Planner(
                None, ClusterSpec(hdp_ranks, 80 // hdp_ranks, pipeline=pipeline, tensor=tensor), cost_model=COST
            )
            model = split_model(model, pipeline)[mesh.stage] if pipeline > 1 else model
            tensor_parallel(expert_parallel(model, mesh, check=False), mesh, check=False)
            set_recompute(getattr(model, "model", model) if pipeline > 1 else model, recompute)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            models = [model] if pipeline > 1 else model
            trainer = Trainer(models, optimizer, planner, mesh, max_grad_norm=None)
            own = []
            trainer.log_probs(LENGTHS, lambda i: sequences()[i], routes=own)
            before = {key: x.clone() for key, x in trainer.state_dict()["model"].items()}
            every = given or routes(len(router_layers(plain(family))))
            loss = trainer.step(LENGTHS, lambda i: {"tokens": sequences()[i], "routes": every[i]}).loss
            after = trainer.state_dict()["model"]
            return loss, {key.removeprefix("model."): before[key] - after[key] for key in before}, own

    return run_threads(rank, ranks)


def check(family, *args, **options):
    loss, gradients, chosen = wanted(family)
    for found, changed, own in run(family, *args, **options):
        assert found == pytest.approx(loss, rel=2e-6)
        for name, gradient in gradients.items():
            error = (changed[name] - gradient).norm()
            assert error <= 2e-5 * gradient.norm() + 1e-6, f"{name}: {error:.1e} of {gradient.norm():.1e}"
        for a, b in zip(own, chosen, strict=True):
            assert torch.equal(a.long().sort(-1).values, b.sort(-1).values)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, ranks):
    check(family, ranks)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "full"}, {"expert": 2}, {"expert": 2, "recompute": "full"}, {"pipeline": 2}, {"tensor": 2},
    ],
    ids=lambda each: " ".join(map(str, each)),
)  # fmt: skip
def test_meshes_and_recomputation(family, options):
    check(family, 2, **options)


def test_routes_of_all_layers_skip_those_without_experts():
    """Engines give routes of all layers; the first one of Qwen3-MoE has no experts here."""
    own = routes(1)
    every = [torch.cat((torch.full_like(each, 3), each), dim=1) for each in own]
    check("qwen3-moe", 2, given=every)


def test_gradient_checkpointing_of_transformers():
    family = "mixtral"
    loss, gradients, _ = wanted(family)
    for reentrant in (False, True):
        model = adapt(plain(family), check=False)
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.model.train()
        with hdp.init() as comm:
            planner = Planner(None, ClusterSpec(1, 80), cost_model=COST)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None)
            fetch = lambda i: {"tokens": sequences()[i], "routes": routes(LAYERS)[i]}
            assert trainer.step(LENGTHS, fetch).loss == pytest.approx(loss, rel=2e-6)
        for name, gradient in gradients.items():
            assert torch.allclose(dict(model.model.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-6)


def test_copies_of_a_model_keep_their_routes_apart():
    model = plain("mixtral")
    first = adapt(model, check=False)
    second = adapt(copy.deepcopy(first.model), check=False)
    assert first.routes_shape == second.routes_shape
    blocks = [next(m for m in each.model.modules() if "SparseMoe" in type(m).__name__) for each in (first, second)]
    assert blocks[0].forward is not blocks[1].forward
    assert blocks[1].forward.forward.__self__ is blocks[1]


def test_models_without_routers():
    with hdp.init() as comm:
        model = adapt(model_of("llama"), check=False)
        planner = Planner(None, ClusterSpec(1, 80), cost_model=COST)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, comm)
        with pytest.raises(InvalidUsage, match="for AdaptedCausalLM, which has no routers that are known"):
            trainer.log_probs(LENGTHS, lambda i: sequences()[i], routes=[])
        trainer.log_probs(LENGTHS, lambda i: sequences()[i])
