"""Models with multi-head latent attention and linear layers in the trainer: the same gradients by every way."""

from itertools import pairwise

import pytest
import torch

from hdpcomm.attention import packing
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.models.indexers import sends_latent
from hdpcomm.models.mixers import mixers_of
from hdpcomm.plan import SequenceFragment

pytest.importorskip("transformers", minversion="5.23")

from tests.harness import pipelines
from tests.harness.families import model_of, unsharded
from tests.ranks.models.test_adapt import BY_HAND, CU, IDS, PLACES, FixedPlanner, check, planner_of, step

HYBRID = ("deepseek-v3", "deepseek-v32", "qwen3-next", "kimi-linear", "mamba2")


@pytest.fixture(scope="module")
def wanted():
    return {family: unsharded(model_of(family)) for family in HYBRID}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", HYBRID)
def test_ranks_without_a_token(family, recompute, wanted):
    check(step([model_of(family) for _ in range(4)], FixedPlanner(4, 1, BY_HAND), recompute=recompute), wanted[family])


@pytest.mark.parametrize("policy", ["static", "naive"])
@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-next"])
def test_every_policy(family, policy, wanted):
    check(step([model_of(family) for _ in range(3)], planner_of(3, policy)), wanted[family])


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"pool_bytes": 8 << 20}], ids=["plain", "full", "pool"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
# the second with the loss of its router
@pytest.mark.parametrize("family", ["deepseek-v32", "qwen3-next", "kimi-linear", "mamba2"])
def test_sequences_in_slices(family, ranks, options, wanted):
    everyone, cuts = tuple(reversed(range(ranks))), (0, 40, 41, 43, 70, 90)
    batches = [(everyone, SequenceFragment(2, a, b)) for a, b in pairwise(cuts)]
    batches += [((ranks - 1,), SequenceFragment(0, a, b)) for a, b in pairwise((0, 20, 37))]
    planner = pipelines.FixedPlanner(
        ranks, 1, [((0,), (1, 3)), *batches, (everyone, (4, 5))], ratio=0.6 if "pool_bytes" in options else 0.0
    )
    check(step([model_of(family) for _ in range(ranks)], planner, **options), wanted[family])


@pytest.mark.parametrize("send", ["latent", "kv"])
@pytest.mark.parametrize("family", ["deepseek-v3", "kimi-linear"])
def test_whatever_mla_sends(family, send, wanted, monkeypatch):
    chosen = []
    monkeypatch.setattr("hdpcomm.attention.api.choose_send", lambda *_: chosen.append(send) or send)
    planner = FixedPlanner(3, 1, [((0, 2, 1), (0, 1, 2)), ((1,), (3, 4, 5))])
    check(step([model_of(family) for _ in range(3)], planner), wanted[family])
    assert chosen


@pytest.mark.parametrize("family", HYBRID)
def test_outside_of_a_pack_the_layers_are_transformers_own(family):
    plain, model = model_of(family).eval(), model_of(family).eval()
    adapt(model, lean=False)
    if family != "mamba2":
        model.set_attn_implementation("eager")
    want, found = (each(input_ids=IDS[None], use_cache=False).logits for each in (plain, model))
    assert torch.equal(found, want)


def test_a_weight_that_is_more_than_a_matrix_is_left_to_the_layer():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2.0

    models = [model_of("deepseek-v3").eval() for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.__class__ = Scaled
    adapted = adapt(models[0])
    assert not sends_latent(models[0].model.layers[0].self_attn)
    want = torch.cat([models[1](input_ids=IDS[None, a:b]).logits[0] for a, b in ((0, 5), (5, 9))])
    torch.testing.assert_close(adapted(IDS, **PLACES), want)


@pytest.mark.parametrize("family", ["qwen3-next", "mamba2"])
def test_batches_are_refused(family):
    model = adapt(model_of(family)).model
    with packing(None, CU), pytest.raises(InvalidUsage, match="the convolution has a batch of 2"):
        model.base_model(input_ids=IDS[None].repeat(2, 1), use_cache=False)


def test_caches_of_states_are_refused():
    model = adapt(model_of("mamba2")).model.eval()
    with packing(None, CU), pytest.raises(InvalidUsage, match="pass use_cache=False"):
        model.base_model(input_ids=IDS[None], use_cache=True)


def test_layers_of_unknown_functions_are_refused(monkeypatch):
    model = model_of("qwen3-next")
    assert len(mixers_of(model)) == 1
    monkeypatch.setattr("hdpcomm.models.mixers._MIXING", {"another_rule": None})
    with pytest.raises(InvalidUsage, match=r"layers of the type linear_attention.*as in release 5\.23"):
        adapt(model)
