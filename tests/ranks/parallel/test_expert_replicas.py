"""Replicas of busy experts: gradients of one process, rows that are shared, and where replicas are placed."""

from __future__ import annotations

import dataclasses
import itertools
import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt, set_recompute
from hdpcomm.models.expert_group import ExpertPlacement, place_replicas
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.run import RunConfig
from hdpcomm.run.memory import predict_memory
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST, SEED, FixedPlanner, tokens_of, wanted
from tests.ranks.parallel.test_expert import CONFIG, CROSSED, LENGTHS, part_of
from tests.ranks.parallel.test_expert_runs import common
from tests.ranks.parallel.test_pipeline_runs import data  # noqa: F401

MANY = dataclasses.replace(CONFIG, experts=8, top_k=2)
STEPS = 3
PIPELINED = [((0, 1), (0, 3)), ((0,), (1, 2)), ((1,), (5,)), ((0,), (4, 6, 7))]


def steps(
    planner,
    expert,
    *,
    config=MANY,
    replicas=1,
    recompute="none",
    zero=0,
    lr=0.0,
    offload=False,
    batches=(LENGTHS,) * STEPS,
):
    """On each rank, a thread: metrics of the steps, the gradients of the last one, copies of each layer's experts after
    each step, and the whole model's state."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        stages, tensor = planner.cluster.pipeline, planner.cluster.tensor
        mesh = Mesh(comm, pipeline=stages, tensor=tensor, expert=expert, expert_replicas=replicas)
        model = Llama(config, seed=SEED, dtype=torch.float64)
        parts = [model] if stages == 1 else split_model(model, stages)[mesh.stage :: stages]
        for part in parts:
            tensor_parallel(expert_parallel(part, mesh), mesh)
            set_recompute(part, recompute)
        pool = ActivationOffload(PinnedPool(8 << 20, device="cpu"), model, min_bytes=1, resident_layers=0)
        optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=lr)
        trainer = Trainer(
            parts[0] if stages == 1 else parts, optimizer, planner, mesh, max_grad_norm=None, zero=zero,
            offload=pool if offload else None,
        )  # fmt: skip
        done, placed = [], []
        for lengths in batches:
            sequences = tokens_of(lengths, config)
            done.append(trainer.step(lengths, lambda i, of=sequences: of[i]))
            loads = trainer.runner.passes.loads
            placed.append([None if load.placement is None else load.placement.copies.tolist() for load in loads])
        gradients = {
            (part.name_in_model(name) if stages > 1 else name, part_of(part, name)): p.grad.clone()
            for part in parts
            for name, p in part.named_parameters()
            if not zero
        }
        return done, gradients, placed, trainer.state_dict()["model"]


def check(results, config=MANY, lengths=LENGTHS):
    loss, want = wanted(config, torch.float64, tuple(lengths))
    norm = torch.stack([each.norm() for each in want.values()]).norm()
    seen = {}
    for done, gradients, placed, _ in results:
        assert done == results[0][0]
        assert any(copies and max(copies) > 1 for copies in placed[-2])  # of the last step
        first, *_, last = done
        assert first.expert_imbalance == first.expert_imbalance_before == last.expert_imbalance_before > 1
        assert 1 <= last.expert_imbalance < last.expert_imbalance_before
        assert (last.expert_tokens_max, last.expert_tokens_dropped) == (first.expert_tokens_max, 0)
        for each in done:
            assert each.loss == pytest.approx(loss, rel=1e-12)
            assert each.grad_norm == pytest.approx(float(norm), rel=1e-9)
        for (name, part), gradient in gradients.items():
            value = want["embedding.weight" if name == "head.weight" and name not in want else name]
            value = value if part is None else part.take(value)
            assert torch.equal(seen.setdefault((name, part), gradient), gradient), f"{name} differs between ranks"
            assert (gradient - value).norm() <= 1e-10 * (value.norm() + 1e-6 * norm), name


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("expert", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_gradients_are_those_of_one_process(expert, replicas, recompute):
    results = run_threads(lambda: steps(FixedPlanner(4, 1, CROSSED), expert, replicas=replicas, recompute=recompute), 4)
    check(results)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero(zero):
    check(run_threads(lambda: steps(FixedPlanner(4, 1, CROSSED), 4, zero=zero), 4))


def test_offload():
    check(run_threads(lambda: steps(FixedPlanner(4, 1, CROSSED, ratio=0.6), 2, offload=True), 4))


@pytest.mark.parametrize(("recompute", "split"), [("none", False), ("full", False), ("none", True)])
def test_pipelines(recompute, split):
    config = dataclasses.replace(MANY, layers=4)
    planner = FixedPlanner(2, 2, PIPELINED, split=split)
    check(run_threads(lambda: steps(planner, 2, config=config, recompute=recompute), 4), config)


def test_tensor_ranks():
    planner = FixedPlanner(2, 1, PIPELINED, tensor=2)
    config = dataclasses.replace(MANY, router_aux_loss=0.0, router_z_loss=0.0, vocabulary=62)
    check(run_threads(lambda: steps(planner, 2, config=config), 4), config)


def test_rank_without_tokens():
    """The last of four ranks never has any, and holds replicas."""
    planner = FixedPlanner(4, 1, [((0, 1), (0, 3)), ((2,), (1, 2)), ((0,), (4, 5, 6, 7))])
    check(run_threads(lambda: steps(planner, 4), 4))


def test_placements_that_change_follow_training_without_replicas():
    """Each step other sequences and other weights: the weights are those of a run without replicas."""
    batches = [tuple(LENGTHS[place:] + LENGTHS[:place]) for place in range(6)]
    planner = FixedPlanner(4, 1, CROSSED)
    with_copies, without = (
        run_threads(lambda n=n: steps(planner, 4, replicas=n, lr=0.2, batches=batches), 4) for n in (1, 0)
    )
    placements = [str(placed) for placed in with_copies[0][2]]
    assert len(set(placements)) > 2
    for name, value in without[0][3].items():
        assert (with_copies[0][3][name] - value).norm() <= 1e-10 * value.norm(), name
    for one, other in zip(with_copies[0][0], without[0][0], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        assert one.expert_tokens_max == other.expert_tokens_max
        assert other.expert_imbalance == other.expert_imbalance_before


def test_loaded_state_begins_without_replicas():
    def run_rank():
        torch.set_num_threads(1)
        sequences = tokens_of(LENGTHS, MANY)
        with hdp.init() as comm:
            mesh = Mesh(comm, expert=2, expert_replicas=1)
            model = expert_parallel(Llama(MANY, seed=SEED, dtype=torch.float64), mesh)
            planner = FixedPlanner(2, 1, PIPELINED)
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, mesh)
            trainer.step(LENGTHS, lambda i: sequences[i])
            trainer.load_state_dict(trainer.state_dict())
            assert all(load.placement is None for load in trainer.runner.passes.loads)
            again = trainer.step(LENGTHS, lambda i: sequences[i])
            assert again.expert_imbalance == again.expert_imbalance_before

    run_threads(run_rank, 2)


@pytest.mark.parametrize(
    ("family", "how"), [("mixtral", "eager"), ("mixtral", "grouped"), ("qwen3-moe", "recompute"), ("gpt-oss", "eager")]
)
def test_models_of_transformers(family, how):
    pytest.importorskip("transformers", minversion="5.0")
    from tests.harness.families import LENGTHS as lengths
    from tests.harness.families import sequences, unsharded
    from tests.ranks.parallel.test_expert_huggingface import model

    loss, want = unsharded(model(family, how))
    models = [model(family, how) for _ in range(2)]

    def run_rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, expert=2, expert_replicas=1)
            cut = expert_parallel(adapt(models[comm.rank]), mesh)
            set_recompute(cut, "full" if how == "recompute" else "none")
            planner = Planner(None, ClusterSpec(2, 80), cost_model=COST)
            trainer = Trainer(cut, torch.optim.SGD(cut.parameters(), lr=0.0), planner, mesh, max_grad_norm=None)
            done = [trainer.step(lengths, lambda i: sequences()[i]) for _ in range(STEPS)]
            shards = cut.expert.shards
            gradients = {(name, shards.get(name)): p.grad.clone() for name, p in cut.named_parameters()}
            return done, gradients, [load.placement for load in trainer.runner.passes.loads]

    for done, gradients, placed in run_threads(run_rank, 2):
        assert any(placed)
        assert done[-1].expert_imbalance < done[-1].expert_imbalance_before
        assert done[-1].loss == pytest.approx(loss, rel=1e-5)
        for (name, part), gradient in gradients.items():
            value = want[name.removeprefix("model.")]
            value = value if part is None else part.take(value)
            assert (gradient - value).norm() <= 1e-5 * value.norm() + 1e-9, name


def busiest(rows, held, ranks):
    """Rows of the busiest rank, where copies of an expert share its rows equally."""
    size = len(rows) // ranks
    places = [[*range(rank * size, rank * size + size), *others] for rank, others in enumerate(held)]
    copies = [sum(expert in here for here in places) for expert in range(len(rows))]
    return max(sum(rows[expert] / copies[expert] for expert in here) for here in places)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_placements_help_and_are_possible(draws):
    ranks, size = draws.draw(st.integers(1, 6)), draws.draw(st.integers(1, 5))
    rows = draws.draw(st.lists(st.integers(0, 1000) | st.just(0), min_size=ranks * size, max_size=ranks * size))
    replicas = draws.draw(st.integers(0, 4))
    held = place_replicas(rows, ranks, replicas)
    assert len(held) == ranks
    for rank, others in enumerate(held):
        own = range(rank * size, rank * size + size)
        assert len(others) <= replicas
        assert len({*others, *own}) == len(others) + size
        assert others == sorted(others)
        assert all(0 <= expert < ranks * size for expert in others)
    assert busiest(rows, held, ranks) <= busiest(rows, [[]] * ranks, ranks) * (1 + 1e-9)
    if any(held):
        assert busiest(rows, held, ranks) < busiest(rows, [[]] * ranks, ranks)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_of_an_expert_are_shared_equally_by_its_copies(draws):
    ranks, size, tokens = draws.draw(st.integers(1, 4)), draws.draw(st.integers(1, 4)), draws.draw(st.integers(0, 30))
    rows = draws.draw(st.lists(st.integers(0, 100), min_size=ranks * size, max_size=ranks * size))
    held = place_replicas(rows, ranks, draws.draw(st.integers(0, 3)))
    expert = st.integers(0, ranks * size - 1)
    chosen = torch.tensor(draws.draw(st.lists(expert, min_size=2 * tokens, max_size=2 * tokens)), dtype=torch.int64)
    placements = [ExpertPlacement.of(held, ranks * size, rank, torch.device("cpu")) for rank in range(ranks)]
    for rank, placement in enumerate(placements):
        places = placement.spread(chosen.view(-1, 2), rank)
        assert torch.equal(placement.expert_of[places].flatten(), chosen)
        for each in range(ranks * size):
            own = placement.places_of[each, : placement.copies[each]].tolist()
            counts = [int((places == place).sum()) for place in own]
            assert max(counts) - min(counts) <= 1
            assert len(set(own)) == len(own)
        assert len(placement.sent) == sum(placement.sends)
    for source, target in itertools.product(range(ranks), repeat=2):
        assert placements[source].sends[target] == placements[target].gets[source]


def test_replicas_need_expert_ranks():
    with hdp.init() as comm:
        with pytest.raises(InvalidUsage, match="give ranks that share experts, too"):
            Mesh(comm, expert_replicas=1)
        with pytest.raises(InvalidUsage, match="expert_replicas is -1"):
            Mesh(comm, expert_replicas=-1)


def test_predicted_memory_counts_replicas():
    """Weights of each layer that is kept, and weights and gradients of the one whose backward pass runs."""
    model = LlamaConfig(layers=3, hidden=16, heads=2, kv_heads=1, ffn=12, experts=4)
    config = RunConfig(model=model, expert=2, expert_replicas=2, capacity=64)
    (with_copies,), (without,) = (
        predict_memory(dataclasses.replace(config, expert_replicas=count), 2) for count in (2, 0)
    )
    copies = 2 * (3 * 12 * 16) * 4
    assert (without.replicas, with_copies.replicas) == (0, copies)
    for recompute, count in ((0, 5), (1, 4), (3, 2)):
        assert with_copies.peak_bytes(64, recompute) == without.peak_bytes(64, recompute) + count * copies
    pair = dataclasses.replace(with_copies, in_flight=2.0), dataclasses.replace(without, in_flight=2.0)
    assert pair[0].peak_bytes(64, 1) == pair[1].peak_bytes(64, 1) + 6 * copies
    assert predict_memory(dataclasses.replace(config, dtype="bf16"), 2)[0].replicas == copies / 2


def test_a_run_with_replicas(data, tmp_path, monkeypatch):  # noqa: F811
    options = ["--experts", "4", "--expert", "2", "--expert-replicas", "1", "--context", "300", "--steps", "3"]
    assert main([*common(data, monkeypatch), *options, "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["expert_imbalance"] == rows[0]["expert_imbalance_before"] >= 1
    assert all(1 <= row["expert_imbalance"] <= row["expert_imbalance_before"] + 0.1 for row in rows)
    with pytest.raises(InvalidUsage, match="expert_replicas is 1 and expert 1"):
        RunConfig(model=LlamaConfig(experts=4), expert_replicas=1)


def test_sizes_of_a_mesh_by_name():
    pytest.importorskip("transformers")
    from hdpcomm.integrations.huggingface_options import mesh_sizes, mesh_text

    sizes = mesh_sizes({"expert": 2, "expert_replicas": 1})
    assert sizes == {"tensor": 1, "expert": 2, "expert_replicas": 1}
    assert mesh_text(sizes) == "mesh={'expert': 2, 'expert_replicas': 1}"
    assert mesh_text(mesh_sizes({"expert_replicas": 0})) == ""
    for wrong in ({"expert": 0}, {"expert_replicas": -1}, {"replicas": 1}):
        with pytest.raises(InvalidUsage):
            mesh_sizes(wrong)
