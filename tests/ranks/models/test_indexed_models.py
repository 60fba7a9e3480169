"""DeepSeek-V3.2 and GLM-5 of transformers over several ranks: the outputs and gradients of the models themselves.

Index heads are many, as in real models: with few of them scores of exactly 0 are common, of which torch.topk takes any.
"""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import as_pack, positions, shard, unshard
from hdpcomm.models import indexers
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer, pack_shard
from hdpcomm.train.losses.shards import pack_of

transformers = pytest.importorskip("transformers")

KINDS = ("deepseek_v32", "glm_moe_dsa")
LENGTHS = (37, 1, 9, 20)
CU = [0, 37, 38, 47, 67]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "index_n_heads": 32, "index_head_dim": 16,
    "index_topk": 5, "max_position_embeddings": 512,
}  # fmt: skip


@functools.cache
def made(kind, rank=12):
    """``rank``: of the latent, which travels where it is less than the keys and values of all heads."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | {"kv_lora_rank": rank})
    return transformers.AutoModelForCausalLM.from_config(config)


def tokens():
    return torch.randint(64, (CU[-1],), generator=torch.Generator().manual_seed(1))


@functools.cache
def wanted(kind, rank):
    """Logits of each sequence by itself, and the gradients of the sum of their squares."""
    model = copy.deepcopy(made(kind, rank))
    model.set_attn_implementation("eager")
    parts = [model(tokens()[a:b][None]).logits[0] for a, b in itertools.pairwise(CU)]
    logits = torch.cat(parts)
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain(name):
    return name.removeprefix("model.") if name.startswith("model.model.") or name == "model.lm_head.weight" else name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "recompute", "rank"),
    [(1, "none", 12), (2, "none", 12), (3, "none", 12), (2, "full", 12), (2, "none", 100)],
)
def test_outputs_and_gradients(kind, size, recompute, rank):
    logits, gradients = wanted(kind, rank)
    models = [copy.deepcopy(made(kind, rank)) for _ in range(size)]

    def body():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = hdp.adapt(models[comm.rank], recompute=recompute)
            place = {"rank": comm.rank, "size": comm.size}
            out = model(
                shard(tokens(), CU, **place),
                positions=positions(CU, **place),
                cu_seqlens=torch.tensor(CU, dtype=torch.int32),
                comm=comm,
            )
            out.square().sum().backward()
            found = {}
            for name, p in model.named_parameters():
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                comm.all_reduce(gradient)
                found[plain(name)] = gradient
            return out.detach(), found

    told = run_threads(body, size)
    found = unshard([each[0] for each in told], CU)
    assert (found - logits).abs().max() < 1e-5 * logits.abs().max()
    for _, own in told:
        assert own.keys() >= gradients.keys()
        for name, want in gradients.items():
            assert (own[name] - want).norm() <= 1e-5 * want.norm() + 1e-8, name


def test_latents_travel(monkeypatch):
    """Each row that is fetched has the latent and the rotary key, 20 elements, in place of 4 heads of 16 and 8.

    In fp64 (so without experts), as another rounding in a layer may change what the next one chooses.
    """
    sizes = SIZES | {"kv_lora_rank": 12, "first_k_dense_replace": 3}
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("deepseek_v32", **sizes))
    made.double()

    def sent():
        with hdp.init() as comm:
            model = hdp.adapt(copy.deepcopy(made), check=False)
            place = {"rank": comm.rank, "size": comm.size}
            pack = {"positions": positions(CU, **place), "cu_seqlens": CU, "comm": comm}
            before = comm.stats()["bytes_sent"]
            with torch.no_grad():
                model(shard(tokens(), CU, **place), **pack)
            return comm.stats()["bytes_sent"] - before

    latents = sum(run_threads(sent, 2))
    monkeypatch.setattr(indexers, "absorbed", lambda *_: None)
    expanded = sum(run_threads(sent, 2))
    rows = (expanded - latents) / (8 * (4 * (16 + 8) - 20))
    assert rows == int(rows)
    assert 20 < rows < 3 * 67  # of three layers


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_any_ranks(kind):
    """Losses of five steps on 1 and 3 ranks, the optimizer cut or not; every layer chooses 5 keys of up to 60. Shards
    are as even as the costs say."""
    cost = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4)

    def run(size, zero, cost=cost):
        models = [copy.deepcopy(made(kind)) for _ in range(size)]

        def body():
            torch.set_num_threads(1)
            with hdp.init() as comm:
                model = hdp.adapt(models[comm.rank])
                planner = Planner(None, ClusterSpec(comm.size, 90 // comm.size), cost_model=cost)
                trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), planner, comm, zero=zero)
                losses = []
                for step in range(5):
                    lengths = [60, 13, 2]

                    def fetch(i, step=step, lengths=lengths):
                        draw = torch.Generator().manual_seed(10 * step + i)
                        return torch.randint(64, (lengths[i],), generator=draw)

                    losses.append(trainer.step(lengths, fetch).loss)
                return losses

        return run_threads(body, size)[0]

    one = run(1, 0)
    for size, zero in ((3, 0), (2, 1)):
        assert run(size, zero) == pytest.approx(one, abs=2e-5)
        assert run(size, zero, replace(cost, key_limit=5, limited=0.9)) == pytest.approx(one, abs=2e-5)


def test_what_is_measured_knows_the_limit():
    """A planner of measurements has the model's 5 keys; the plan hands them to shards, and to what is read ahead."""
    model = hdp.adapt(copy.deepcopy(made(KINDS[0])))
    assert indexers.key_limit(model)[0] == 5
    assert 0 < indexers.key_limit(model)[1] < 1

    def body():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            planner = Planner.measured(copy.deepcopy(model), comm, capacity=60, longest=32)
            assert planner.cost_model.key_limit == 5
            planner = planner.with_costs(replace(planner.cost_model, limited=0.9), planner.cluster)
            plan = planner.plan([110, 5])
            assert plan.limit == (5.0, 0.9)
            (wide,) = [each for each in plan.micro_batches if each.ranks == (0, 1)]
            whole = {each.id: torch.arange(each.length) for each in wide.sequences}
            own = pack_shard(wide, whole.get, comm=comm, device=comm.device, limit=plan.limit)
            lengths = (each.length for each in wide.sequences)
            parts = as_pack(pack_of(lengths, comm.size, plan.limit)).reads(comm.rank, comm.size)
            assert own.positions.tolist() == [x for _, start, stop in parts for x in range(start, stop)]
            return own.positions + 1

    found = [(0.1 * seen + 0.9 * seen.clamp(max=5)).sum() for seen in run_threads(body, 2)]
    assert abs(found[0] - found[1]) < 0.02 * found[0]


def test_a_cache_is_refused_and_generation_is_the_models_own():
    model = copy.deepcopy(made(KINDS[0])).eval()
    prompt = tokens()[:9][None]
    want = model.generate(prompt, max_new_tokens=4, do_sample=False)
    hdp.adapt(model)
    with pytest.raises(hdp.InvalidUsage, match="a cache was given to a model that chooses its keys"):
        model(prompt, use_cache=True)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), want)


def test_another_make_of_indexer_is_refused():
    class OtherIndexer(torch.nn.Module):
        pass

    model = copy.deepcopy(made(KINDS[0]))
    model.model.layers[0].self_attn.indexer = OtherIndexer()
    with pytest.raises(hdp.InvalidUsage, match="chooses its keys by a OtherIndexer, which packs do not know"):
        hdp.adapt(model)
