"""Router losses that training adds to models of transformers: gradients of whole sequences on one process."""

from __future__ import annotations

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.cli.train import job_of
from hdpcomm.cli.train_options import TrainOptions
from hdpcomm.comm import Mesh
from hdpcomm.data import fold
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import RouterLosses, adapt, add_mtp
from hdpcomm.models.lora import add_lora
from hdpcomm.options import LoraOptions
from hdpcomm.parallel import split_model
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer

pytest.importorskip("transformers", minversion="5.0")

from tests.harness.families import model_of, sequences
from tests.ranks.models.test_tree_models import plans_of_routed, rollouts
from tests.ranks.parallel.test_pipeline_huggingface import model, sliced, step

LOSSES = RouterLosses(balance=0.3, z=0.05)
SIGMOID = ("deepseek-v3", "glm4-moe", "deepseek-v32")


def router_loss(scores, top_k, sigmoid, losses):
    """The losses of one layer and sequence, all of whose tokens but the last have a label."""
    tokens, experts = scores.shape
    shares = scores.sigmoid() if sigmoid else scores.exp()
    shares = shares / shares.sum(1, keepdim=True)
    chosen = scores.sort(descending=True).indices[:, :top_k].flatten()
    balance = sum(((chosen == i).sum() / tokens) * shares[:, i].mean() for i in range(experts)) * experts
    squares = scores[:-1].exp().sum(1).log().square().sum()
    return losses.balance * balance * (tokens - 1) + losses.z * squares


def oracle(whole, texts, losses, sigmoid):
    """Mean loss of the trained tokens and its gradients: transformers' forward on each sequence, and plain code."""
    whole.config.output_router_logits = False
    scores = []
    routers = [module for module in whole.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for router in routers:
        router.register_forward_hook(lambda _, __, out: scores.append(out[0].double()))
    labels, loss = sum(len(tokens) - 1 for tokens in texts), 0.0
    for tokens in texts:
        if len(tokens) == 1:
            continue
        scores.clear()
        total = whole(input_ids=tokens[None], labels=tokens[None], use_cache=False).loss.double() * (len(tokens) - 1)
        assert len(scores) == len(routers) > 0
        for each in scores:
            total = total + router_loss(each, 2, sigmoid, losses) / len(routers)
        (total / labels).backward()
        loss += total.item() / labels
    return loss, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def check(name, results, losses=LOSSES):
    """Compares the results of ``step`` with the oracle."""
    loss, gradients = oracle(model(name), sequences(), losses, name in SIGMOID)
    seen = set()
    for done, own, _ in results:
        assert done.loss == pytest.approx(loss, rel=1e-5)
        for (key, part), gradient in own.items():
            seen.add(key)
            want = gradients[key.removeprefix("model.")]
            want = want if part is None else part.take(want)
            error = (gradient - want).norm()
            assert error <= 1e-5 * want.norm() + 1e-9, f"{key}: {error:.1e} of {want.norm():.1e}"
    assert {f"model.{key}" for key in gradients} <= seen


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "options"),
    [
        ("deepseek-v3", 2, {}, {}),
        ("glm4-moe", 2, {}, {"how": "recompute"}),
        ("glm4-moe", 2, {"expert": 2}, {}),
        ("glm4-moe", 2, {"tensor": 2}, {}),
        ("deepseek-v3", 2, {"pipeline": 2}, {}),  # the first stage has no experts
        ("deepseek-v32", 4, {"pipeline": 2, "tensor": 2}, {}),
        ("qwen3-moe", 2, {"expert": 2}, {}),  # in the place of its configuration's loss
        ("gpt-oss", 2, {"pipeline": 2}, {"how": "offload"}),
        ("mixtral-4", 2, {"pipeline": 2}, {"chunks": 2, "split": True}),
        ("qwen3-next", 2, {}, {}),
    ],
)
def test_gradients_are_those_of_whole_sequences(name, ranks, sizes, options):
    check(name, step(name, ranks, sizes, losses=LOSSES, **options))


@pytest.mark.parametrize("name", ["glm4-moe", "mixtral"])
@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2}], ids=["whole", "stages"])
def test_slices(name, sizes):
    check(name, step(name, 2, sizes, losses=LOSSES, planner=sliced(2, sizes)))


@pytest.mark.parametrize("plan", ["2 ranks", "cut", "slices", "slices in stages"])
def test_trees(plan):
    texts = rollouts()[0]
    folded = fold(texts)
    planner = plans_of_routed(folded)[plan]
    stages = planner.cluster.pipeline
    models = [model_of("glm4-moe") for _ in range(planner.cluster.ranks * stages)]

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, pipeline=stages)
            part = adapt(models[comm.rank], check=False, router_losses=LOSSES)
            part = part if stages == 1 else split_model(part, stages)[mesh.stage]
            optimizer = torch.optim.SGD(part.parameters(), lr=0.0)
            trainer = Trainer(part, optimizer, planner, mesh, max_grad_norm=None)
            done = trainer.step([f.tree for f in folded], lambda i: (folded[i].tokens, folded[i].weights))
            name = part.name_in_model if stages > 1 else str
            return done.loss, {name(key): p.grad for key, p in part.named_parameters() if p.grad is not None}

    loss, gradients = oracle(model_of("glm4-moe"), [torch.tensor(tokens) for tokens in texts], LOSSES, sigmoid=True)
    seen = {}
    for found, own in run_threads(rank, len(models), timeout=60.0):
        assert found == pytest.approx(loss, rel=1e-5)
        seen |= own
    for key, gradient in gradients.items():
        error = float((seen["model." + key] - gradient).norm())
        assert error <= 1e-5 * float(gradient.norm()) + 1e-9, (key, error)


@pytest.mark.parametrize("losses", [RouterLosses(balance=0.2), RouterLosses(z=0.2), RouterLosses()], ids=repr)
def test_one_of_both_losses(losses):
    check("deepseek-v3", step("deepseek-v3", 2, {"pipeline": 2}, losses=losses), losses)


def test_layers_ahead_add_none():
    tokens = sequences()[0]
    places = {"positions": torch.arange(len(tokens)), "cu_seqlens": torch.tensor([0, len(tokens)]), "comm": None}
    found = []
    for depths in (0, 2):
        made = model_of("glm4-moe")
        if depths:
            add_mtp(made, depths)
        with torch.no_grad():
            found.append(adapt(made, router_losses=LOSSES)(tokens, **places, labels=tokens.flip(0)))
    assert torch.equal(*found)


def test_adapters_keep_the_losses():
    pytest.importorskip("peft")
    adapted = add_lora(adapt(model_of("glm4-moe"), router_losses=LOSSES), LoraOptions(2, 4, ("q_proj",)))
    assert adapted.router_losses == LOSSES
    assert adapted.loss_terms.losses == LOSSES


def test_options_of_the_command(tmp_path):
    model_of("glm4-moe").config.save_pretrained(tmp_path)
    given = {"model": tmp_path, "tokenizer": "bytes", "data": (str(tmp_path),)}
    losses = [
        job_of(TrainOptions(**given, **more), ranks=1).config.model.router_losses
        for more in (
            {},
            {"router_aux_loss": 0.0},
            {"router_aux_loss": 0.2, "router_z_loss": 0.1},
            {"router_z_loss": 0.1},
        )
    ]
    assert losses == [None, RouterLosses(), RouterLosses(0.2, 0.1), RouterLosses(z=0.1)]


@pytest.mark.parametrize("family", ["llama", "llama4", "kimi-linear"])
def test_models_without_known_routers_are_refused(family):
    with pytest.raises(InvalidUsage, match=r"router_losses were given for \w+, which does not tell the logits"):
        adapt(model_of(family), router_losses=LOSSES)


def test_modules_and_factors_that_are_refused():
    with pytest.raises(InvalidUsage, match="router_losses are for causal LMs"):
        adapt(torch.nn.Embedding(4, 4), router_losses=LOSSES)
    with pytest.raises(InvalidUsage, match="z is -1"):
        RouterLosses(z=-1)
