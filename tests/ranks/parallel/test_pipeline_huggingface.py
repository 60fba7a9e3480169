"""Pipelines of transformers' models: gradients of the whole model on one process, and what is refused."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner, SequenceFragment
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from hdpcomm.train.losses.shards import empty_shard
from tests.harness.pipelines import COST, FixedPlanner, part_of

pytest.importorskip("transformers", minversion="5.0")

import transformers

from tests.harness.families import LENGTHS, SIZE, model_of, sequences, unsharded

FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
MODELS = {
    "tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma3-4": ("gemma3", FOUR),
    "mixtral-4": ("mixtral", {"num_hidden_layers": 4}),
    "qwen3-next-no-aux": ("qwen3-next", {"output_router_logits": False}),
}


def model(name):
    family, changes = MODELS.get(name, (name, {}))
    made = model_of(family, vocab_size=100, **changes)
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the other ways know fp32 and bf16 only
    return made.double()


def sliced(ranks, sizes, chunks=1):
    """A plan by hand whose longest sequences run in slices, on all HDP ranks and on the last one."""
    stages, tensor = sizes.get("pipeline", 1), sizes.get("tensor", 1)
    hdp_ranks = ranks // stages // tensor
    everyone, last = tuple(range(hdp_ranks)), (hdp_ranks - 1,)
    parts = [(everyone, SequenceFragment(2, a, b)) for a, b in pairwise((0, 40, 41, 70, 90))]
    parts += [(last, SequenceFragment(0, a, b)) for a, b in pairwise((0, 20, 37))]
    batches = [((0,), (1, 3)), *parts, ((0,), (4, 5))]
    return FixedPlanner(hdp_ranks, stages, batches, chunks=chunks, tensor=tensor)


def step(name, ranks, sizes, *, how="plain", chunks=1, split=False, zero=0, planner=None, losses=None):
    """On each rank, a thread: metrics and gradients of one step, by (name, part), and the whole model's state."""
    models = [model(name) for _ in range(ranks)]  # transformers makes models of one thread at a time

    def main():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, **sizes)
            stages = split_model(adapt(models[comm.rank], router_losses=losses), mesh.pipeline * chunks)[
                mesh.stage :: mesh.pipeline
            ]
            for stage in stages:
                tensor_parallel(expert_parallel(stage, mesh), mesh)
                set_recompute(stage, "full" if how == "recompute" else "none")
            offload = None
            if how == "offload":
                pool, blocks = PinnedPool(8 << 20, device="cpu"), [block for stage in stages for block in stage.blocks]
                offload = ActivationOffload(pool, blocks, resident_layers=0, min_bytes=1)
            cluster = ClusterSpec(mesh.hdp, 160 // mesh.hdp, chunks=chunks, split_backward=split, **sizes)
            plans = planner or Planner(None, cluster, cost_model=COST)
            optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.0)
            trainer = Trainer(stages, optimizer, plans, mesh, max_grad_norm=None, offload=offload, zero=zero)
            done = trainer.step(LENGTHS, lambda i: sequences()[i])
            state = copy.deepcopy(trainer.state_dict()["model"])
            gradients = {}
            for stage in stages:
                shards = {} if stage.expert is None else stage.expert.shards
                gradients |= {
                    (stage.name_in_model(key), part_of(stage, key) or shards.get(key)): p.grad.clone()
                    for key, p in stage.named_parameters()
                    if p.grad is not None  # indexers do not learn
                }
            return done, gradients, state

    return run_threads(main, ranks)


PP, PP_TP = {"pipeline": 2}, {"pipeline": 2, "tensor": 2}


# transformers computes norms, rotary tables and losses in fp32: no 1e-10 here.
@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "options"),
    [
        ("llama", 2, PP, {}),
        ("llama", 4, PP_TP, {}),
        ("tied", 4, PP, {"how": "recompute"}),
        ("tied", 4, PP_TP, {}),
        ("qwen3", 4, PP, {"split": True}),
        ("qwen3", 4, PP_TP, {}),
        ("gemma3", 2, PP, {}),
        ("gemma3", 4, PP_TP, {"how": "recompute"}),
        ("gemma3-4", 2, PP, {"chunks": 2, "how": "offload"}),
        ("gemma3-4", 4, {"pipeline": 4}, {}),
        ("mixtral", 2, PP, {}),
        ("mixtral", 4, PP_TP, {}),
        ("mixtral", 4, {"pipeline": 2, "expert": 2}, {"how": "recompute"}),
        ("mixtral-4", 2, PP, {"chunks": 2}),
        ("mixtral-4", 4, PP, {"chunks": 2, "split": True, "how": "offload"}),
        ("mixtral-4", 4, {"pipeline": 4}, {}),
        ("qwen3-moe", 4, {"pipeline": 2, "expert": 2}, {}),  # the first stage has no experts
        ("qwen3-next", 4, PP, {}),
        ("granite", 2, PP, {}),
        ("llama4", 4, PP, {"how": "recompute"}),
        ("gpt-oss", 2, PP, {}),
        ("gpt-neox", 2, PP, {}),
        ("deepseek-v3", 2, PP, {}),
        ("deepseek-v3", 4, PP_TP, {}),
        ("deepseek-v32", 4, PP_TP, {"how": "recompute"}),
        ("mamba2", 2, PP, {}),
        ("mamba2", 4, PP_TP, {}),
        ("qwen3-next-no-aux", 2, PP, {}),
        ("qwen3-next-no-aux", 4, PP_TP, {"how": "recompute"}),
        ("kimi-linear", 4, PP_TP, {"how": "offload"}),
        ("nemotron-h", 8, {"pipeline": 2, "tensor": 4}, {}),
        ("phi4", 8, {"pipeline": 2, "tensor": 4}, {}),
    ],
)
def test_gradients_are_those_of_the_whole_model(name, ranks, sizes, options):
    check(name, step(name, ranks, sizes, **options))


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "options"),
    [
        ("llama", 2, PP, {}),
        ("llama", 4, PP, {"how": "recompute"}),
        ("tied", 4, PP_TP, {}),
        ("qwen3", 4, PP, {"how": "offload"}),
        ("gemma3-4", 4, {"pipeline": 4}, {}),
        ("gemma3-4", 4, PP, {"chunks": 2, "how": "offload"}),
        ("mixtral", 4, PP, {}),
        ("mixtral-4", 4, PP, {"chunks": 2, "how": "recompute"}),
        ("qwen3-moe", 4, PP, {"split": True}),
        ("gpt-oss", 4, PP, {"how": "recompute"}),
        ("llama4", 4, PP, {"how": "recompute"}),
        ("deepseek-v3", 2, PP, {}),
        ("deepseek-v3", 4, PP, {"how": "recompute"}),
        ("deepseek-v32", 4, PP_TP, {}),
        ("deepseek-v32", 4, PP, {"how": "offload"}),
        ("mamba2", 2, PP, {}),
        ("mamba2", 4, PP, {"how": "recompute"}),
        ("qwen3-next-no-aux", 2, PP, {}),
        ("qwen3-next-no-aux", 4, PP, {"how": "recompute"}),
        ("qwen3-next-no-aux", 4, PP, {"how": "offload"}),
        ("qwen3-next-no-aux", 2, PP, {"split": True}),
        ("kimi-linear", 4, PP, {"how": "recompute"}),
        ("mamba2", 2, PP, {"split": True}),
        ("mixtral", 4, {"pipeline": 2, "expert": 2}, {}),
        ("qwen3-next-no-aux", 4, {"pipeline": 2, "expert": 2}, {"how": "recompute"}),
        ("mixtral", 8, {"pipeline": 2, "tensor": 2, "expert": 2}, {"split": True}),
        ("mamba2", 4, PP_TP, {}),
        ("kimi-linear", 4, {"tensor": 2}, {"how": "recompute"}),
        ("falcon-h1", 4, {"tensor": 4}, {"how": "offload"}),
        ("phi4", 4, {"tensor": 2}, {}),
        ("qwen3-next-no-aux", 8, {"pipeline": 2, "tensor": 2, "expert": 2}, {"split": True}),
        ("nemotron-h", 8, {"pipeline": 2, "tensor": 2, "expert": 2}, {"how": "recompute"}),
    ],
)
def test_sequences_in_slices(name, ranks, sizes, options):
    check(name, step(name, ranks, sizes, **options, planner=sliced(ranks, sizes, options.get("chunks", 1))))


def check(name, results):
    whole = model(name)
    loss, gradients = unsharded(whole)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    found = {key: gradient for _, own, _ in results for key, gradient in own.items()}
    for done, own, state in results:
        assert done.loss == pytest.approx(loss, rel=1e-5)
        assert done.grad_norm == pytest.approx(float(norm), rel=1e-5)
        for (key, part), gradient in own.items():
            assert torch.equal(gradient, found[key, part]), f"{key} differs between ranks"
            plain = key.removeprefix("model.")
            want = gradients[plain if plain in gradients else "model.embed_tokens.weight"]  # of a tied head
            error = (gradient - (want if part is None else part.take(want))).norm()
            assert error <= 1e-5 * want.norm() + 1e-9, f"{key}: {error:.1e} of {want.norm():.1e}"
        for key, tensor in whole.state_dict().items():
            assert torch.equal(state[f"model.{key}"], tensor), key
    assert {key for key, _ in found} >= {f"model.{key}" for key in gradients}


def test_the_model_that_was_split_still_works():
    whole = adapt(model("tied"))
    there = {"positions": torch.arange(9), "cu_seqlens": torch.tensor([0, 9], dtype=torch.int32), "comm": None}
    before = whole(torch.arange(9), **there)
    first, last = split_model(whole, 2)
    assert torch.equal(whole(torch.arange(9), **there), before)
    assert torch.equal(last(first(torch.arange(9), **there), **there), before)
    names = {first.name_in_model(name) for name, _ in first.named_parameters()}
    assert {name for name in names if ".layers." in name} == {
        name for name, _ in whole.named_parameters() if ".layers.0." in name
    }
    assert last.tied is not whole.embedding.weight
    assert torch.equal(last.tied, first.tied)


def test_a_stage_without_tokens_takes_part():
    whole = adapt(model("gemma3"))
    pack = empty_shard(torch.device("cpu"))
    there = {"positions": pack.positions, "cu_seqlens": pack.cu_seqlens, "comm": None}
    first, last = split_model(whole, 2)
    boundary = first(pack.tokens, **there)
    assert boundary.shape == (0, SIZE["hidden_size"])
    x = boundary.detach().requires_grad_()
    last(x, **there, labels=pack.labels).backward()
    boundary.backward(x.grad)
    assert not last.last_layer.weight.grad.any()
    assert not first.blocks[0].mlp.gate_proj.weight.grad.any()


def gemma4(**changes):
    config = transformers.Gemma4TextConfig(
        **{**SIZE, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0} | changes
    )
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config)


def opt():
    config = transformers.OPTConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def zamba2():
    config = transformers.Zamba2Config(**{**SIZE, "num_hidden_layers": 4}, layers_block_type=["mamba", "hybrid"] * 2)
    return transformers.AutoModelForCausalLM.from_config(config)


def shared_keys():
    """As Gemma 3n and Gemma 4 have them."""
    made = model("llama")
    made.config.num_kv_shared_layers = 1
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shared_keys, "has num_kv_shared_layers=1: its last layers use keys and values of earlier ones"),
        (lambda: gemma4(hidden_size_per_layer_input=8), "needs an embedding of the tokens of its own"),
        (zamba2, "is the parameter of another layer, too, which may be on another stage"),
        (opt, "OPTForCausalLM cut into 2 stages does not give the logits of the whole model"),
    ],
    ids=["keys", "embeddings", "weights", "check"],
)
def test_models_that_cannot_be_cut(make, message):
    with pytest.raises(InvalidUsage, match=message):
        split_model(adapt(make()), 2)


def test_configurations_that_are_told():
    adapted = adapt(model("llama"))
    with pytest.raises(InvalidUsage, match="2 layers cannot be cut into 3 stages"):
        split_model(adapted, 3)
    adapted.tensor = object()
    with pytest.raises(InvalidUsage, match="has been cut for tensor or expert ranks already"):
        split_model(adapted, 2)
