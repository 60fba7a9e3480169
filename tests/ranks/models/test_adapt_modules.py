"""Plain modules in the trainer's form, and recomputation of layers whose attention finds its pack by itself."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hdpcomm as hdp
from hdpcomm.attention import carry_pack, packed_attention, packing
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer

LENGTHS = (30, 4, 9, 1)
COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)) for t in self.qkv(x).chunk(3, dim=-1))
        return x + packed_attention(q, k, v).flatten(-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(32, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens, positions):
        x = self.embedding(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model_of():
    torch.manual_seed(0)
    return Model().double()


def fetch(i):
    return torch.arange(LENGTHS[i]) * (i + 3) % 32


def unsharded():
    model, total = model_of(), 0.0
    for i, length in enumerate(LENGTHS):
        with packing(None, [0, length]):
            logits = model(fetch(i), torch.arange(length))
        total = total + nn.functional.cross_entropy(logits[:-1], fetch(i)[1:], reduction="sum")
    (total / (sum(LENGTHS) - len(LENGTHS))).backward()
    return total.item() / (sum(LENGTHS) - len(LENGTHS)), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("recompute", ["none", "full", 1])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_has_the_gradients_of_the_unsharded_module(ranks, recompute):
    models = [adapt(model_of(), recompute=recompute) for _ in range(ranks)]

    def main():
        comm = hdp.init()
        planner = Planner(None, ClusterSpec(comm.size, 48 // comm.size), "balanced", COST)
        model = models[comm.rank]
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, comm, max_grad_norm=None)
        return trainer.step(LENGTHS, fetch).loss

    loss, gradients = unsharded()
    assert run_threads(main, ranks, timeout=60.0) == [pytest.approx(loss, rel=1e-12)] * ranks
    for model in models:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)


def test_recomputation_on_a_thread_that_never_saw_the_pack():
    plain, again = (adapt(model_of(), recompute=which) for which in ("none", "full"))
    places = {"positions": torch.arange(9), "cu_seqlens": torch.tensor([0, 9]), "comm": None}
    plain(fetch(2), **places).square().sum().backward()
    thread = threading.Thread(target=again(fetch(2), **places).square().sum().backward)
    thread.start()
    thread.join()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(4, 4), "Linear does not make logits .* of int64 tokens .*RuntimeError"),
        (nn.Sequential(nn.Embedding(8, 4), nn.LSTM(4, 8)), r"\(it gave tuple\)"),
    ],
)
def test_modules_that_make_no_logits_of_tokens_are_refused(module, reason):
    with pytest.raises(InvalidUsage, match=reason):
        adapt(module)


def test_ones_own_checkpoints_carry_the_pack():
    layer = Layer()
    x = torch.randn(9, 16, requires_grad=True)
    with packing(None, [0, 4, 9]):
        (want,) = torch.autograd.grad(layer(x).sum(), x)
        kept = checkpoint(layer, x, use_reentrant=False, context_fn=carry_pack).sum()
        lost = checkpoint(layer, x, use_reentrant=False).sum()
    with packing(None, [0, 9]):  # not the pack of the forward
        assert torch.equal(torch.autograd.grad(kept, x, retain_graph=True)[0], want)
        assert torch.equal(torch.autograd.grad(kept, x)[0], want)
    with pytest.raises(InvalidUsage, match=r"context_fn=hdpcomm\.attention\.carry_pack"):
        lost.backward()


def test_what_has_the_form_is_returned_as_it_is():
    llama = Llama(LlamaConfig(layers=2, hidden=16, ffn=24))
    assert adapt(llama, recompute="full") is llama


def test_recomputed_llamas_have_the_same_gradients():
    models = [adapt(Llama(LlamaConfig(layers=3, hidden=16, ffn=24)), recompute=which) for which in ("none", 2)]
    places = {"positions": torch.arange(9), "cu_seqlens": torch.tensor([0, 9]), "comm": None}
    with hdp.init() as comm:
        for model in models:
            model(fetch(2), **{**places, "comm": comm}, labels=fetch(2)).backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_is_refused():
    with pytest.raises(InvalidUsage, match="Model is none: it computes its logits itself"):
        adapt(model_of(), chunk_tokens=8)
    with pytest.raises(InvalidUsage, match=r"has no nn.ModuleList of layers"):
        adapt(nn.Sequential(nn.Embedding(3, 3)), recompute="full")
