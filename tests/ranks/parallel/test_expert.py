"""Expert parallelism inside HDP: gradients of one process, bytes, checkpoints, and clear errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import Error, InvalidUsage, Mismatch
from hdpcomm.measure.costs import profile_samples
from hdpcomm.models import Llama, LlamaConfig, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, CostModel, Planner, Tree
from hdpcomm.run.model import spec_of
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness import pipelines
from tests.harness.pipelines import COST, SEED, FixedPlanner, tokens_of, wanted
from tests.harness.plain_llama import batch_gradients
from tests.harness.thirty_steps import check_thirty_steps
from tests.ranks.parallel.test_pipeline import LIMIT

CONFIG = LlamaConfig(
    vocabulary=62, layers=3, hidden=32, heads=4, kv_heads=2, ffn=24, experts=4, top_k=2,
    router_aux_loss=0.05, router_z_loss=0.02,
)  # fmt: skip
LENGTHS = (50, 3, 17, 30, 8, 2, 1, 12)
CROSSED = [((0, 2), (0,)), ((3,), (1,)), ((1, 3), (2, 6)), ((2, 0), (3,)), ((0,), (4,)), ((0,), (5,)), ((0,), (7,))]
"""Rings across expert groups, which would wait for each other if ranks paired their micro-batches by number; rank 0 has
five, rank 1 has one."""


def trainer_of(comm, planner, config, dtype, expert, *, recompute="none", offload=False, lr=0.0, **options):
    mesh = Mesh(comm, tensor=planner.cluster.tensor, expert=expert)
    # Only the first rank has the weights that count.
    model = Llama(config, seed=SEED + comm.rank, dtype=dtype)
    expert_parallel(model, mesh)
    tensor_parallel(model, mesh)
    set_recompute(model, recompute)
    if offload:
        pool = PinnedPool(8 << 20, device="cpu")
        options["offload"] = ActivationOffload(pool, model, min_bytes=1, resident_layers=0)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=lr), planner, mesh, **options)


def part_of(model, name):
    groups = [group for group in (model.tensor, model.expert) if group is not None]
    return next((group.shards[name] for group in groups if name in group.shards), None)


def one_step(planner, config, dtype, expert, lengths=LENGTHS, **options):
    """On each rank, a thread: (metrics, gradients by (name, part), bytes that the trainer offloaded)."""
    sequences = tokens_of(lengths, config)
    torch.set_num_threads(1)
    with hdp.init() as comm:
        trainer = trainer_of(comm, planner, config, dtype, expert, max_grad_norm=None, **options)
        metrics = trainer.step(lengths, lambda i: sequences[i])
        moved = 0 if trainer.offload is None else trainer.offload.stats().stored_bytes
        named = trainer.model.named_parameters()
        return metrics, {(name, part_of(trainer.model, name)): p.grad.clone() for name, p in named}, moved


def check(results, config, dtype, lengths=LENGTHS, rows=None):
    limit = LIMIT[dtype]
    loss, gradients = wanted(config, dtype, tuple(lengths))
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    seen = {}
    for metrics, own, _ in results:
        assert metrics == results[0][0]
        assert metrics.loss == pytest.approx(loss, rel=limit)
        assert metrics.grad_norm == pytest.approx(float(norm), rel=10 * limit)
        for (name, part), gradient in own.items():
            want = gradients[name] if part is None else part.take(gradients[name])
            assert torch.equal(seen.setdefault((name, part), gradient), gradient), f"{name} differs between ranks"
            error = (gradient - want).norm()
            assert error <= limit * (want.norm() + 1e-6 * norm), f"{name}: {error:.2e} of {want.norm():.2e}"
    assert {name for name, _ in seen} == set(gradients)
    assert results[0][0].expert_tokens_mean == (rows or sum(lengths)) * config.top_k / config.experts
    assert results[0][0].expert_tokens_dropped == 0


@pytest.mark.parametrize(
    ("expert", "how", "dtype"),
    [
        (2, "plain", torch.float32),
        *[(expert, how, torch.float64) for expert in (2, 4) for how in ("plain", "recompute", "offload")],
    ],
)
def test_gradients_are_those_of_one_process(expert, how, dtype):
    planner = FixedPlanner(4, 1, CROSSED, ratio=0.6 if how == "offload" else 0.0)
    more = {"offload": how == "offload", "recompute": "full" if how == "recompute" else "none"}
    results = run_threads(lambda: one_step(planner, CONFIG, dtype, expert, **more), 4)
    check(results, CONFIG, dtype)
    assert (results[0][2] > 0) == (how == "offload")


@pytest.mark.parametrize("transport", ["shm", "sim"])
def test_short_sequences_and_ranks_without_tokens(transport):
    planner = FixedPlanner(2, 1, [((0, 1), (0,)), ((1,), (1, 2)), ((1, 0), (3,)), ((1,), (4,))])
    config, lengths = dataclasses.replace(CONFIG, layers=1, top_k=1), (1, 2, 1, 3, 1)
    results = run_threads(lambda: one_step(planner, config, torch.float64, 2, lengths), 2, transport=transport)
    check(results, config, torch.float64, lengths)


def test_bf16_where_the_last_pass_has_no_tokens_of_its_own():
    planner = FixedPlanner(2, 1, [((0, 1), (0,)), ((0,), (1,)), ((0,), (2,))])
    # Tokens whose two best experts are so close that bf16 takes another one would be off by 17%; here there are none.
    config, lengths = dataclasses.replace(CONFIG, layers=1), (20, 31, 9)
    _, gradients = wanted(config, torch.float64, lengths)
    for _, own, _ in run_threads(lambda: one_step(planner, config, torch.bfloat16, 2, lengths), 2):
        for (name, part), gradient in own.items():
            if part is not None:
                want = part.take(gradients[name])
                assert (gradient - want).norm() <= 0.02 * want.norm(), name


def test_beside_tensor_parallelism():
    config = dataclasses.replace(CONFIG, layers=2, ffn=25)  # experts are not cut
    lengths = (20, 2, 9, 7)
    planner = FixedPlanner(2, 1, [((0,), (0, 1)), ((0, 1), (3,)), ((0,), (2,))], tensor=2)
    results = run_threads(lambda: one_step(planner, config, torch.float64, 2, lengths), 4)
    check(results, config, torch.float64, lengths, rows=22 + 8 + 10)  # blocks of tensor ranks are filled up


def greedy(model):
    """All tokens go to the experts 0 and 1."""
    with torch.no_grad():
        model.embedding.weight[:, 0] = 5.0
        for block in model.blocks:
            block.ffn.router.weight.zero_()
            block.ffn.router.weight[0, 0], block.ffn.router.weight[1, 0] = 3.0, 2.0
    return model


def test_all_tokens_to_the_experts_of_one_rank():
    config = dataclasses.replace(CONFIG, layers=2, tied_embeddings=False)
    lengths = (20, 2, 9)
    loss, gradients = batch_gradients(greedy(Llama(config, dtype=torch.float64)), tokens_of(lengths, config))
    sequences = tokens_of(lengths, config)

    def rank():
        with hdp.init() as comm:
            mesh = Mesh(comm, expert=2)
            model = expert_parallel(greedy(Llama(config, dtype=torch.float64)), mesh)
            planner = FixedPlanner(2, 1, [((0,), (0,)), ((0, 1), (1, 2))])
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, mesh, max_grad_norm=None)
            done = trainer.step(lengths, lambda i: sequences[i])
            assert (done.expert_tokens_max, done.expert_tokens_mean) == (sum(lengths), sum(lengths) / 2)
            assert done.loss == pytest.approx(loss, rel=1e-10)
            return {(name, part_of(model, name)): p.grad.clone() for name, p in model.named_parameters()}

    for own in run_threads(rank, 2):
        for (name, part), gradient in own.items():
            want = gradients[name] if part is None else part.take(gradients[name])
            assert (gradient - want).norm() <= 1e-10 * gradients[name].norm(), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_are_those_of_rows_that_leave_the_rank(ranks):
    """Twice through one layer in one graph, with unequal numbers of tokens, one rank without."""
    config, itemsize = dataclasses.replace(CONFIG, layers=1), 8

    def rank():
        with hdp.init() as comm:
            model = expert_parallel(Llama(config, dtype=torch.float64), Mesh(comm, expert=ranks))
            layer = model.blocks[0].ffn
            x = torch.randn(5 * comm.rank, config.hidden, dtype=torch.float64, requires_grad=True)
            before = comm.stats()["bytes_sent"]
            middle, logits = layer(x)
            sent = comm.stats()["bytes_sent"] - before
            local = config.experts // ranks
            chosen = logits.topk(2).indices // local
            leave = int((chosen != comm.rank).sum())
            table = torch.empty(ranks, ranks, dtype=torch.int64)
            comm.all_gather(table, chosen.flatten().bincount(minlength=ranks))
            come = int(table[:, comm.rank].sum() - table[comm.rank, comm.rank])  # and their results leave
            counts = (ranks - 1) * local * 8
            assert sent == (leave + come) * config.hidden * itemsize + counts
            twice, again = layer(middle)
            chosen = again.topk(2).indices // local
            table = torch.empty(ranks, ranks, dtype=torch.int64)
            comm.all_gather(table, chosen.flatten().bincount(minlength=ranks))
            moved = leave + come + int((chosen != comm.rank).sum())
            moved += int(table[:, comm.rank].sum() - table[comm.rank, comm.rank])
            before = comm.stats()["bytes_sent"]
            (middle.sum() + twice.square().sum()).backward()
            assert comm.stats()["bytes_sent"] - before == moved * config.hidden * itemsize
            return x.grad.shape[0]

    assert run_threads(rank, ranks) == [5 * r for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_dispatched_bytes_are_those_that_are_predicted(ranks):
    """Whatever experts routers prefer, ranks with as many tokens of one kind send what the model's shape tells."""
    config, tokens = dataclasses.replace(CONFIG, layers=1), 8000

    def rank():
        with hdp.init() as comm:
            model = expert_parallel(Llama(config, dtype=torch.float64), Mesh(comm, expert=ranks))
            generator = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(tokens, config.hidden, dtype=torch.float64, generator=generator, requires_grad=True)
            before = comm.stats()["bytes_sent"]
            model.blocks[0].ffn(x)[0].sum().backward()
            return comm.stats()["bytes_sent"] - before

    spec = dataclasses.replace(spec_of(config), dtype_bytes=8)
    predicted = tokens * spec.dispatch_bytes_per_token(ranks)
    assert sum(run_threads(rank, ranks)) / ranks == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(("ranks", "expert"), [(3, 3), (4, 2)])
def test_costs_are_measured_with_the_experts_where_they_are(ranks, expert):
    """Also in groups that leave a rank over, which then runs passes without tokens."""
    config = dataclasses.replace(CONFIG, layers=1, experts=6)

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = expert_parallel(Llama(config), Mesh(comm, expert=expert))
            samples = profile_samples(model, comm, longest=64)
            assert all(parameter.grad is None for parameter in model.parameters())
            return samples

    samples, *others = run_threads(rank, ranks)
    assert all(other == samples for other in others)
    beside = [sample for sample in samples if sample.expert > 1]
    assert [(sample.expert, sample.ranks, sample.lengths) for sample in beside] == [(expert, 1, (64,))]
    assert {sample.ranks for sample in samples} == {1, 2, ranks}
    assert all(sample.processor_s > 0 for sample in samples)
    costs = CostModel.fit(samples)
    assert 0 <= costs.experts <= costs.linear


def test_trees():
    """Losses of routers are those of the trajectories, also of plain sequences beside trees; see test_sliced_trees."""
    tree = Tree(parents=(-1, 0, 0), lengths=(9, 12, 7))
    lengths = (tree, 25)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(62, (28,), generator=generator), torch.randint(62, (25,), generator=generator)]
    config = dataclasses.replace(CONFIG, layers=1)

    def rank(expert):
        with hdp.init() as comm:
            planner = Planner(None, ClusterSpec(comm.size, 64), cost_model=COST)
            trainer = trainer_of(comm, planner, config, torch.float64, expert)
            done = trainer.step(lengths, lambda i: tokens[i])
            total = trainer.evaluate(lengths, lambda i: tokens[i])
            comm.all_reduce(total)
            return done.loss, done.grad_norm, float(total[0] / total[1])

    whole = Llama(config, seed=SEED, dtype=torch.float64)
    tree, alone = tokens
    want = batch_gradients(whole, [torch.cat((tree[:9], tree[9:21])), torch.cat((tree[:9], tree[21:])), alone])[0]
    assert run_threads(rank, 1, 1)[0][::2] == pytest.approx((want, want), rel=1e-10)
    want = run_threads(rank, 1, 1)[0]
    for found in run_threads(rank, 2, 2):
        assert found == pytest.approx(want, rel=1e-10)


def test_thirty_training_steps_and_checkpoints_are_those_of_one_process():
    config = dataclasses.replace(CONFIG, vocabulary=16, layers=2, hidden=16, heads=2, kv_heads=1, ffn=12)

    def trainer(comm):
        planner = Planner(None, ClusterSpec(comm.size, 200 // comm.size), cost_model=COST)
        return trainer_of(comm, planner, config, torch.float64, 2 if comm.size > 1 else 1)

    check_thirty_steps(trainer, config)


def test_replicas_of_an_expert_that_differ_are_found():
    config, lengths = dataclasses.replace(CONFIG, layers=1), (8, 8, 8, 8)
    sequences = tokens_of(lengths, config)

    def rank():
        with hdp.init() as comm:
            planner = FixedPlanner(4, 1, [((r,), (r,)) for r in range(4)])
            trainer = trainer_of(comm, planner, config, torch.float32, 2)
            trainer.step(lengths, lambda i: sequences[i])
            trainer.check_replicas()
            if comm.rank == 3:
                with torch.no_grad():
                    trainer.model.blocks[0].ffn.out[1] += 0.5
            try:
                trainer.check_replicas()
            except Error as error:
                return f"{type(error).__name__}: {error}"

    told = run_threads(rank, 4)
    for each in (told[1], told[3]):
        assert each.startswith("Mismatch: the weights of ranks [3] are not those of ranks [1] (blocks.0.ffn.out")


def errors_of(make, world=2):
    """What ``make(comm)`` raises on each rank."""

    def rank():
        with hdp.init() as comm:
            with pytest.raises((InvalidUsage, Mismatch)) as caught:
                make(comm)
            comm.barrier()  # the communicator still works
            return f"{type(caught.value).__name__}: {caught.value}"

    return run_threads(rank, world)


def make(comm, *, model=None, mesh=None):
    mesh = mesh or Mesh(comm, expert=2)
    model = model or expert_parallel(Llama(CONFIG), mesh)
    planner = Planner(None, ClusterSpec(2, 100), cost_model=COST)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, mesh)


def tree_without_weights(comm):
    """In a loop of one's own."""
    places = {
        "positions": torch.tensor([0, 1, 1]),
        "cu_seqlens": Tree((-1, 0, 0), (1, 1, 1)),
        "comm": comm.subset([comm.rank]),
    }
    Llama(CONFIG)(torch.arange(3), **places, labels=torch.tensor([1, 2]), label_rows=torch.tensor([0, 0]))


def twice(comm):
    mesh = Mesh(comm, expert=2)
    expert_parallel(expert_parallel(Llama(CONFIG), mesh), mesh)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda comm: expert_parallel(torch.nn.Linear(2, 2), Mesh(comm, expert=2)), "got a Linear; it cuts"),
        (
            lambda comm: expert_parallel(Llama(dataclasses.replace(CONFIG, experts=3)), Mesh(comm, expert=2)),
            "blocks.0.ffn has 3 experts, which 2 ranks cannot share evenly",
        ),
        (
            lambda comm: expert_parallel(Llama(dataclasses.replace(CONFIG, experts=0)), Mesh(comm, expert=2)),
            "Llama has no layer with experts",
        ),
        (tree_without_weights, "label_rows were given, and routers add losses: give router_weights, too"),
        (twice, "have been cut by expert_parallel() already"),
        (lambda comm: make(comm, model=Llama(CONFIG)), "are on the ranks [], and the expert ranks of the mesh are [0"),
        (
            lambda comm: Trainer(
                model := expert_parallel(Llama(CONFIG), Mesh(comm, expert=2)),
                torch.optim.SGD(model.parameters(), lr=0.1),
                Planner(None, ClusterSpec(2, 100), cost_model=COST),
                comm,
            ),
            "with this mesh, and the mesh to the trainer",
        ),
        (lambda comm: Mesh(comm, expert=3), "expert must divide 2"),
        (lambda _: LlamaConfig(experts=2, top_k=3), "top_k is 3 of 2 experts"),
        (lambda _: LlamaConfig(experts=2, router_z_loss=-1), "router_z_loss is -1"),
    ],
)
def test_what_does_not_fit_is_said(attempt, message):
    assert all(message in each for each in errors_of(attempt))


UNEQUAL = [((0, 1), (0,)), ((0,), (1,)), ((0,), (2, 6)), ((0,), (3,)), ((1,), (4,)), ((0,), (5, 7))]
"""Pipelines of 5 and 2 micro-batches."""


def one_step_of_pipelines(planner, config, lengths, *, recompute="none", offload=False):
    """As :func:`one_step`; parameters by their names in the model."""
    sequences = tokens_of(lengths, config)
    torch.set_num_threads(1)
    with hdp.init() as comm:
        mesh = Mesh(comm, pipeline=2, tensor=planner.cluster.tensor, expert=2)
        model = Llama(config, seed=SEED + 10 * mesh.hdp_rank + 100 * mesh.tensor_rank, dtype=torch.float64)
        stages = split_model(model, 2 * planner.cluster.chunks)[mesh.stage :: 2]
        for stage in stages:
            expert_parallel(stage, mesh)
            tensor_parallel(stage, mesh)
            set_recompute(stage, recompute)
        options = {}
        if offload:
            pool, layers = PinnedPool(8 << 20, device="cpu"), [block for stage in stages for block in stage.blocks]
            options["offload"] = ActivationOffload(pool, layers, min_bytes=1, resident_layers=0)
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.0)
        trainer = Trainer(stages, optimizer, planner, mesh, max_grad_norm=None, **options)
        metrics = trainer.step(lengths, lambda i: sequences[i])
        total = trainer.evaluate(lengths, lambda i: sequences[i])
        comm.all_reduce(total)
        assert float(total[0] / total[1]) == pytest.approx(metrics.loss, rel=1e-9)
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()["model"].items()}
        for name, tensor in Llama(config, seed=SEED, dtype=torch.float64).state_dict().items():
            assert torch.equal(state[name], tensor)
        gradients = {
            (stage.name_in_model(name), part_of(stage, name)): p.grad.clone()
            for stage in stages
            for name, p in stage.named_parameters()
        }
        return metrics, gradients, 0 if trainer.offload is None else trainer.offload.stats().stored_bytes


@pytest.mark.parametrize(
    ("how", "chunks", "tensor"),
    [("plain", 1, 1), ("recompute", 2, 1), ("offload", 1, 1), ("plain", 1, 2)],
)
def test_beside_pipelines(how, chunks, tensor):
    config = dataclasses.replace(CONFIG, layers=2 * chunks, tied_embeddings=False)
    planner = FixedPlanner(2, 2, UNEQUAL, ratio=0.6 if how == "offload" else 0.0, chunks=chunks, tensor=tensor)
    more = {"offload": how == "offload", "recompute": "full" if how == "recompute" else "none"}
    lengths = (50, 4, 18, 30, 8, 2, 2, 12)
    results = run_threads(lambda: one_step_of_pipelines(planner, config, lengths, **more), 4 * tensor)
    rows = sum(lengths)
    if tensor > 1:  # blocks of tensor ranks are filled up
        rows += sum(sum(lengths[s] for s in own) % 2 for ranks, own in UNEQUAL if len(ranks) == 1)
        rows += 2 * (lengths[0] // 2 % 2)
    check(results, config, torch.float64, lengths, rows=rows)
    assert (results[0][2] > 0) == (how == "offload")


def test_router_losses_of_stages_in_the_middle():
    planner, lengths = FixedPlanner(1, 3, [((0,), (0, 1)), ((0,), (2,))]), (20, 3, 9)
    results = run_threads(lambda: pipelines.one_step(planner, CONFIG, torch.float64, lengths), 3)
    pipelines.check_gradients([r[1] for r in results], results[0][0], CONFIG, torch.float64, lengths, 1e-10)
