"""Indexers of DeepSeek-V3.2 and GLM-5 that learn, beside transformers' own layers in one process."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import sys

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import positions, shard, unshard
from hdpcomm.models import indexers
from hdpcomm.parallel import split_model
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.ranks.models.test_indexed_models import CU, KINDS, SIZES, made, plain, tokens

transformers = pytest.importorskip("transformers")

COEFFICIENT = 0.7
STEPS = int(os.environ.get("HDPCOMM_TEST_INDEXER_STEPS", "20"))


def labels():
    found = torch.full((CU[-1],), -100)
    for a, b in itertools.pairwise(CU):
        found[a : b - 1] = tokens()[a + 1 : b]
    found[5:9] = -100
    return found


def shared_glm():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("glm_moe_dsa", **SIZES, indexer_types=["full", "shared", "full"])
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS = {**{kind: lambda kind=kind: copy.deepcopy(made(kind)) for kind in KINDS}, "glm, shared": shared_glm}


def index_scores(indexer, hidden, q_resid, embeddings):
    """As the layer has them, with a way back to its own parameters alone."""
    interleaved = "apply_rotary_pos_emb_interleave" in inspect.getsource(type(indexer).forward)
    name = "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"
    rotate = getattr(sys.modules[type(indexer).__module__], name)
    q = indexer.wq_b(q_resid.detach()).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden.detach())).unsqueeze(2)
    cut = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    (q_rot, q_rest), (k_rot, k_rest) = (torch.split(x, cut, dim=-1) for x in (q, k))
    q_rot, k_rot = rotate(q_rot, k_rot, *embeddings, unsqueeze_dim=2)
    q, k = torch.cat((q_rot, q_rest), -1), torch.cat((k_rot, k_rest), -1)[:, :, 0]
    weights = indexer.weights_proj(hidden.detach()) * indexer.n_heads**-0.5 * indexer.head_dim**-0.5
    return (torch.relu(torch.einsum("bthd,bsd->bths", q, k)) * weights[..., None]).sum(2)[0]


def wanted(name, stage):
    """The sum of all losses, and its gradients, each sequence by itself, with transformers' eager attention."""
    model = MODELS[name]()
    model.set_attn_implementation("eager")
    for layer in model.modules():
        if stage == "dense" and hasattr(layer, "index_topk"):
            layer.index_topk = 1000
    scores, maps = [], []
    for layer in model.model.layers:
        attention = layer.self_attn

        def keep(module, args, _, scores=scores):
            hidden, q_resid, embeddings = args[:3]
            scores.append(index_scores(module, hidden, q_resid, embeddings))

        if attention.indexer is not None:
            attention.indexer.register_forward_hook(keep)
            attention.register_forward_hook(lambda _, __, out: maps.append(out[1][0].detach()))
    total = torch.zeros(())
    for a, b in itertools.pairwise(CU):
        own = labels()[a:b]
        logits = model(tokens()[a:b][None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, own, ignore_index=-100, reduction="sum")
        for index, attention in zip(scores, maps, strict=True):
            p = attention.sum(0) / attention.shape[0]
            share = index.masked_fill(p == 0, -1e30).log_softmax(-1)
            loss = (torch.xlogy(p, p) - p * share).sum(-1)
            total = total + COEFFICIENT * loss[own != -100].sum()
        scores.clear()
        maps.clear()
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", ["sparse", "dense"])
def test_losses_and_gradients(name, stage):
    """1 to 3 ranks, of which some have no token, recomputed or not."""
    total, gradients = wanted(name, stage)
    assert any("indexer" in each for each in gradients)
    for size, recompute in ((1, "none"), (2, "full"), (3, "none")):
        models = [MODELS[name]() for _ in range(size)]

        def body(models=models, size=size, recompute=recompute):
            torch.set_num_threads(1)
            with hdp.init() as comm:
                model = hdp.adapt(models[comm.rank], recompute=recompute, indexer_loss=COEFFICIENT, indexer_stage=stage)
                place = {"rank": comm.rank, "size": size}
                loss = model(
                    shard(tokens(), CU, **place),
                    positions=positions(CU, **place),
                    cu_seqlens=torch.tensor(CU, dtype=torch.int32),
                    comm=comm,
                    labels=shard(labels(), CU, **place),
                )
                loss.backward()
                sums = loss.detach().clone()
                comm.all_reduce(sums)
                found = {}
                for each, p in model.named_parameters():
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    comm.all_reduce(gradient)
                    found[plain(each)] = gradient
                return float(sums), found

        for found, own in run_threads(body, size):
            assert found == pytest.approx(total, rel=1e-5)
            for each, want in gradients.items():
                assert (own[each] - want).norm() <= 2e-5 * want.norm() + 1e-7, each


@pytest.mark.parametrize("stage", [None, "sparse", "dense"])
def test_a_rank_without_tokens(stage):
    """A pack of one token on two ranks."""
    learns = {} if stage is None else {"indexer_loss": 1.0, "indexer_stage": stage}

    def body():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = hdp.adapt(MODELS["deepseek_v32"](), **learns)
            place = {"rank": comm.rank, "size": 2}
            own = shard(torch.tensor([3]), [0, 1], **place)
            where = {"positions": positions([0, 1], **place), "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}
            loss = model(own, **where, comm=comm, labels=own)
            loss.backward()
            return float(loss.detach())

    assert sum(run_threads(body, 2)) > 0


@pytest.mark.parametrize(("ranks", "pipeline"), [(2, 2), (6, 3)])
def test_pipelines(ranks, pipeline):
    """Losses of both stages, and without indexers that learn, are those of one rank, on shards that are as even as the
    costs say; the stage in the middle makes its own."""
    cost = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4, key_limit=5, limited=0.9)
    layers = [2, 1] if pipeline == 2 else None

    def run(ranks, pipeline):
        models = [MODELS["deepseek_v32"]() for _ in range(ranks)]

        def body():
            torch.set_num_threads(1)
            with hdp.init() as comm:
                losses, mesh = [], hdp.Mesh(comm, pipeline=pipeline)
                for learns in ("dense", "sparse", None):
                    given = {} if learns is None else {"indexer_loss": 1.0, "indexer_stage": learns}
                    model = hdp.adapt(models[comm.rank], check=False, **given)
                    parts = (
                        [model]
                        if pipeline == 1
                        else [split_model(model, pipeline, layers=layers, check=False)[mesh.stage]]
                    )
                    sizes = {} if pipeline == 1 else {"pipeline": pipeline}
                    planner = Planner(None, ClusterSpec(mesh.hdp, 120 // mesh.hdp, **sizes), cost_model=cost)
                    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
                    trainer = Trainer(parts[0] if pipeline == 1 else parts, optimizer, planner, mesh)
                    fetch = lambda i: torch.randint(
                        16, ((60, 13, 2, 31)[i],), generator=torch.Generator().manual_seed(i)
                    )
                    losses += [trainer.step([60, 13, 2, 31], fetch).loss for _ in range(3)]
                return losses

        return run_threads(body, ranks)

    (one,) = run(1, 1)
    assert one[2] < one[0]
    for found in run(ranks, pipeline):
        assert found == pytest.approx(one, rel=1e-4)


@pytest.mark.timeout(1500)
def test_training_in_both_stages_is_the_same_on_any_ranks(monkeypatch):
    """Warm-up of the indexers alone, then all parameters; losses, and what the trained layers choose of a pack, which
    ``pytest -s`` shows. ``HDPCOMM_TEST_INDEXER_STEPS=200``: 200 steps on 1 and 4 ranks."""
    cost = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4)
    kept, choose = {}, indexers.index_top_k

    def noting(*given, comm, **options):
        chosen = choose(*given, comm=comm, **options)
        kept.setdefault(0 if comm is None else comm.rank, []).append(chosen)
        return chosen

    monkeypatch.setattr(indexers, "index_top_k", noting)

    def run(size):
        torch.manual_seed(0)
        dense = SIZES | {"first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3}  # experts know no fp64
        config = transformers.AutoConfig.for_model("deepseek_v32", **dense)
        model = transformers.AutoModelForCausalLM.from_config(config).double()
        models = [copy.deepcopy(model) for _ in range(size)]

        def body():
            torch.set_num_threads(1)
            with hdp.init() as comm:
                losses = []
                for stage in ("dense", "sparse"):
                    for name, p in models[comm.rank].named_parameters():
                        p.requires_grad_(stage == "sparse" or "indexer" in name)
                    model = hdp.adapt(models[comm.rank], indexer_loss=1.0, indexer_stage=stage)
                    planner = Planner(None, ClusterSpec(comm.size, 120 // comm.size), cost_model=cost)
                    learn = [p for p in model.parameters() if p.requires_grad]
                    trainer = Trainer(model, torch.optim.AdamW(learn, lr=3e-3), planner, comm)
                    for step in range(STEPS // 2):
                        lengths = [60, 13, 2, 31]

                        def fetch(i, step=step, lengths=lengths):
                            draw = torch.Generator().manual_seed(10 * step + i)
                            return torch.randint(16, (lengths[i],), generator=draw)

                        losses.append(trainer.step(lengths, fetch).loss)
                place = {"rank": comm.rank, "size": comm.size}
                pack = {"positions": positions(CU, **place), "cu_seqlens": CU, "comm": comm}
                kept[comm.rank] = []
                with torch.no_grad():
                    model(shard(tokens(), CU, **place), **pack)
                return losses

        losses = run_threads(body, size, timeout=600.0)[0]
        layers = zip(*(kept.pop(rank) for rank in range(size)), strict=True)
        return losses, [unshard(list(parts), CU) for parts in layers]

    (one, alone), (four, shared) = run(1), run(4)
    for layer, (a, b) in enumerate(zip(alone, shared, strict=True)):
        print(f"layer {layer}: of {len(a)} tokens, {int((a == b).all(1).sum())} have the same keys on 1 and 4 ranks")
        print(
            *(f"  {token:2}: {[each for each in row if each >= 0]}" for token, row in enumerate(a.tolist())), sep="\n"
        )
        assert (a == b).all(1).sum() >= len(a) - 3  # scores are in fp32, and may round otherwise
    half = STEPS // 2
    assert four == pytest.approx(one, abs=1e-6)
    assert one[half - 1] < one[0]
    assert one[-1] < one[half]


def test_what_cannot_learn_is_refused():
    with pytest.raises(hdp.InvalidUsage, match="indexer_stage is 'warm'; choose from dense, sparse"):
        hdp.adapt(MODELS["deepseek_v32"](), indexer_loss=1.0, indexer_stage="warm")
    with pytest.raises(hdp.InvalidUsage, match="indexer_loss is -1"):
        hdp.adapt(MODELS["deepseek_v32"](), indexer_loss=-1.0)
    llama = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    with pytest.raises(hdp.InvalidUsage, match="has no indexer; leave it out"):
        hdp.adapt(transformers.AutoModelForCausalLM.from_config(llama), indexer_loss=1.0)
    with pytest.raises(hdp.InvalidUsage, match="are for causal LMs of transformers"):
        hdp.adapt(torch.nn.Embedding(4, 4), indexer_loss=1.0)


def test_an_indexer_learns_nothing_by_default():
    given = MODELS["deepseek_v32"]()
    hdp.adapt(given, indexer_loss=1.0, indexer_stage="dense")  # an earlier stage leaves nothing behind
    model = hdp.adapt(given)
    where = {"positions": positions(CU, rank=0, size=1), "cu_seqlens": torch.tensor(CU, dtype=torch.int32)}
    model(tokens(), **where, comm=None, labels=labels()).backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "indexer" in name)
