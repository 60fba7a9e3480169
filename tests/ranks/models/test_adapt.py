"""Models of transformers in the trainer: loss and gradients of the unsharded model, for many families."""

import sys
import threading

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import AdaptedCausalLM, adapt, from_pretrained, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer

transformers = pytest.importorskip("transformers", minversion="4.54")

from tests.harness.families import FAMILIES, LENGTHS, config_of, model_of, sequences, unsharded  # noqa: E402
from tests.harness.pipelines import FixedPlanner  # noqa: E402

COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4, ring_step=1e-4)
CU = torch.tensor([0, 5, 9], dtype=torch.int32)
PLACES = {"positions": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]), "cu_seqlens": CU, "comm": None}
IDS = torch.arange(9) + 3


def planner_of(ranks, policy="balanced"):
    return Planner(None, ClusterSpec(ranks, 160 // ranks), policy, COST)


def step(models, planner=None, *, pool_bytes=0, **options):
    """Metrics and gradients of one step on as many ranks as there are models, adapted with ``options``."""

    def main():
        comm = hdp.init()
        model = adapt(models[comm.rank], **options)
        offload = None
        if pool_bytes:
            offload = ActivationOffload(PinnedPool(pool_bytes, device="cpu"), model, resident_layers=0, min_bytes=1)
        trainer = Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.0), planner or planner_of(comm.size), comm,
            max_grad_norm=None, offload=offload,
        )  # fmt: skip
        metrics = trainer.step(LENGTHS, lambda i: sequences()[i])
        return metrics, {name: p.grad for name, p in models[comm.rank].named_parameters() if p.grad is not None}

    return run_threads(main, len(models), timeout=60.0)


def check(results, wanted, limit=1e-5):
    loss, gradients = wanted
    for metrics, found in results:
        assert metrics.loss == pytest.approx(loss, rel=limit)
        for name, gradient in gradients.items():
            error = float((found[name] - gradient).norm())
            assert error <= limit * float(gradient.norm()) + 1e-9, (
                f"{name}: {error:.1e} of {float(gradient.norm()):.1e}"
            )


@pytest.fixture(scope="module")
def wanted():
    return {family: unsharded(model_of(family)) for family in FAMILIES}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_gradients_of_the_unsharded_model(family, ranks, wanted):
    check(step([model_of(family) for _ in range(ranks)]), wanted[family])


@pytest.mark.parametrize("policy", ["static", "naive"])
def test_every_policy_has_them(policy, wanted):
    check(step([model_of("qwen3-moe") for _ in range(3)], planner_of(3, policy)), wanted["qwen3-moe"])


BY_HAND = [((2, 0, 3), (0, 2)), ((3, 2, 1, 0), (1,)), ((1,), (3,)), ((1, 3), (4, 5))]
"""One token on four ranks, so three of them hold none of it."""


@pytest.mark.parametrize("family", ["llama", "llama4", "gpt-oss", "mixtral"])
def test_ranks_without_a_token(family, wanted):
    check(step([model_of(family) for _ in range(4)], FixedPlanner(4, 1, BY_HAND)), wanted[family])


@pytest.mark.parametrize("recompute", ["full", 1])
@pytest.mark.parametrize("family", ["gemma3", "llama4", "mixtral"])
def test_recomputation_changes_nothing(family, recompute, wanted):
    check(step([model_of(family) for _ in range(4)], FixedPlanner(4, 1, BY_HAND), recompute=recompute), wanted[family])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offload_changes_nothing(recompute, wanted):
    models = [model_of("qwen3") for _ in range(2)]
    planner = FixedPlanner(2, 1, [((0, 1), (2,)), ((0,), (0, 1)), ((1,), (3, 4, 5))], ratio=1.0)
    results = step(models, planner, pool_bytes=8 << 20, recompute=recompute)
    check(results, wanted["qwen3"])
    assert results[0][0].offloaded_bytes > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunks_of_the_loss_change_nothing(family, wanted):
    check(step([model_of(family) for _ in range(2)], chunk_tokens=7), wanted[family])


class Head(torch.nn.Linear):
    """A head of its own kind: the chunks of the loss have to go through its forward."""

    def forward(self, x):
        return super().forward(x) * 1.0


def test_a_head_that_is_more_than_a_matrix(wanted):
    models = [model_of("gemma3") for _ in range(2)]
    for model in models:
        model.lm_head.__class__ = Head
    check(step(models, FixedPlanner(2, 1, [((0, 1), (0, 1, 2)), ((1,), (3, 4, 5))]), chunk_tokens=7), wanted["gemma3"])


def test_logits_are_the_models():
    model = model_of("cohere")
    want = torch.cat([model(input_ids=IDS[None, a:b]).logits[0] for a, b in ((0, 5), (5, 9))])
    torch.testing.assert_close(adapt(model)(IDS, **PLACES), want)


def test_recomputed_layers_keep_less_and_can_be_chosen_again():
    model = adapt(model_of("llama"), recompute=1)

    def saved():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            model(IDS, **PLACES, labels=IDS)
        return sum(kept)

    one = saved()
    assert set_recompute(model, "none") == 0
    none = saved()
    assert set_recompute(model, "full") == 2
    assert saved() < one < none
    assert set_recompute(model, 0) == 0
    assert saved() == none
    layers = model.causal_lm.model.layers
    assert all("forward" not in vars(layer) for layer in layers)
    for bad in ("some", 3, -1, True):
        with pytest.raises(InvalidUsage, match="give 'none', 'full' or a number of layers from 0 to 2"):
            set_recompute(model, bad)


def test_recomputation_on_a_thread_that_never_saw_the_pack():
    plain, again = (adapt(model_of("llama"), recompute=which) for which in ("none", "full"))
    plain(IDS, **PLACES, labels=IDS).backward()
    thread = threading.Thread(target=again(IDS, **PLACES, labels=IDS).backward)
    thread.start()
    thread.join()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_from_a_folder_and_from_a_configuration(tmp_path):
    new = [from_pretrained(config_of("qwen3"), seed=seed) for seed in (5, 5, 6)]
    assert isinstance(new[0], AdaptedCausalLM)
    assert torch.equal(new[0](IDS, **PLACES), new[1](IDS, **PLACES))
    assert not torch.equal(new[0](IDS, **PLACES), new[2](IDS, **PLACES))
    new[0].model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert again.training
    torch.testing.assert_close(again(IDS, **PLACES), new[0](IDS, **PLACES))
    assert from_pretrained(str(tmp_path), dtype=torch.bfloat16)(IDS, **PLACES).dtype == torch.bfloat16
    with pytest.raises(InvalidUsage, match=r"is no folder with a config\.json"):
        from_pretrained(tmp_path / "nothing")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidUsage, match="has no weights"):
        from_pretrained(tmp_path)


def test_a_configuration_and_other_models_of_it_stay_as_they_are():
    config = config_of("qwen3")
    other = transformers.AutoModelForCausalLM.from_config(config)
    before, attention, want = config.to_dict(), config._attn_implementation, other(IDS[None]).logits
    loaded = [from_pretrained(config, dtype=dtype).model for dtype in (torch.float64, torch.float32)]
    assert (config.to_dict(), config._attn_implementation) == (before, attention)
    assert [model.config.dtype for model in loaded] == [torch.float64, torch.float32]
    assert torch.equal(other(IDS[None]).logits, want)


def test_threads_load_at_the_same_time(tmp_path):
    """transformers changes its own class while it loads; threads in each other's way leave it changed for good."""
    model_of("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    config, start = config_of("qwen3", tie_word_embeddings=True), threading.Barrier(3)

    def main():
        start.wait(30)
        loaded = [from_pretrained(source, check=False).model for source in (tmp_path, config, tmp_path)]
        return [model.lm_head.weight is model.model.embed_tokens.weight for model in loaded]

    interval, before = sys.getswitchinterval(), transformers.PreTrainedModel.tie_weights
    sys.setswitchinterval(1e-5)
    try:
        assert run_threads(main, 3, timeout=60.0) == [[True] * 3] * 3
        assert transformers.PreTrainedModel.tie_weights is before
    finally:
        sys.setswitchinterval(interval)
        transformers.PreTrainedModel.tie_weights = before
    assert torch.get_default_dtype() == torch.float32


REFUSED = [
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1; set"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layers of the type linear_attention"),
    ("gemma3", {"use_bidirectional_attention": True}, "not a causal decoder"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_what_cannot_be_made_right_is_refused(family, changes, message):
    model = model_of(family)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(InvalidUsage, match=message):
        adapt(model)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(InvalidUsage, match="LlamaModel is a transformers model without a head"):
        adapt(model_of("llama").model)


def test_a_router_that_tells_nothing_of_its_loss_is_refused():
    model = model_of("mixtral")
    del model.num_experts_per_tok
    with pytest.raises(InvalidUsage, match="MixtralForCausalLM does not tell router_aux_loss_coef"):
        adapt(model)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_grow_with_the_sequence(kind):
    """Up to the length at which they begin to change, they are like any other."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    model = adapt(model_of("llama", rope_parameters=rope, max_position_embeddings=64 if kind == "longrope" else 16))
    places = {"positions": torch.arange(16), "cu_seqlens": torch.tensor([0, 16]), "comm": None}
    assert model(torch.arange(16), **places).shape == (16, 97)
    places = {"positions": torch.arange(17), "cu_seqlens": torch.tensor([0, 17]), "comm": None}
    with pytest.raises(InvalidUsage, match=rf"17 tokens was given.*\({kind}\) changes its frequencies above 16"):
        model(torch.arange(17), **places)


def test_a_model_that_mixes_tokens_elsewhere_is_found_out():
    class Mixing(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x + 0.1 * x.roll(1, dims=1))

    model = model_of("llama")
    model.model.layers[0].mlp = Mixing(model.model.layers[0].mlp)
    with pytest.raises(InvalidUsage, match="gives other logits on a pack than on each of its sequences alone"):
        adapt(model)
    assert model.config._attn_implementation == "eager"  # as it was given
    assert adapt(model, check=False)(IDS, **PLACES).shape == (9, 97)


def test_the_check_leaves_the_mode_of_each_module():
    model = model_of("llama")
    model.model.layers[1].eval()
    adapt(model)
    assert model.training
    assert not model.model.layers[1].mlp.training


@pytest.mark.parametrize(("family", "ranks"), [("qwen3", 3), ("mixtral", 2)])
def test_sharded_training_in_bf16_and_what_is_exported(family, ranks, tmp_path):
    """Parameters are views of flat memory then; a folder that transformers reads comes out all the same."""
    models = [model_of(family) for _ in range(ranks)]

    def main():
        comm = hdp.init()
        model = adapt(models[comm.rank])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = Trainer(model, optimizer, planner_of(comm.size), comm, zero=1, dtype=torch.bfloat16)
        return [trainer.step(LENGTHS, lambda i: sequences()[i]).loss for _ in range(5)]

    results = run_threads(main, ranks, timeout=60.0)
    assert results[0][-1] < results[0][0] - 0.1
    assert results == [results[0]] * ranks
    models[0].save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(models[-1].named_parameters())[name]), name


def test_another_model_of_the_same_configuration_keeps_its_attention():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    reference, trained = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    tokens = torch.arange(6)[None]
    before = reference(tokens).logits
    adapt(trained)
    assert torch.equal(reference(tokens).logits, before)
    assert config._attn_implementation == reference.config._attn_implementation
    assert trained.model.layers[0].self_attn.config is trained.config
