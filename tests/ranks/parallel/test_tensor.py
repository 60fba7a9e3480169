"""Tensor parallelism beside HDP: gradients of one process, and clear errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.models import Llama, LlamaConfig, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import tensor_parallel
from hdpcomm.plan import ClusterSpec, CostModel, Planner, Tree
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST, SEED, FixedPlanner, check_gradients, part_of, tokens_of, wanted
from tests.harness.thirty_steps import check_thirty_steps
from tests.ranks.parallel.test_pipeline import LENGTHS, LIMIT, UNEVEN

CONFIG = LlamaConfig(vocabulary=62, layers=3, hidden=32, heads=4, kv_heads=2, ffn=48)


def trainer_of(comm, planner, config, dtype, *, recompute="none", offload=False, lr=0.0, **options):
    mesh = Mesh(comm, tensor=planner.cluster.tensor)
    # Only the first HDP rank's first tensor rank has the weights that count.
    model = Llama(config, seed=SEED + comm.rank, dtype=dtype)
    tensor_parallel(model, mesh)
    set_recompute(model, recompute)
    if offload:
        pool = PinnedPool(8 << 20, device="cpu")
        options["offload"] = ActivationOffload(pool, model, min_bytes=1, resident_layers=0)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=lr), planner, mesh, **options)


def one_step(planner, config, dtype, lengths, **options):
    """On each rank, a thread: (metrics, gradients by (name, part), bytes that the trainer offloaded)."""
    sequences = tokens_of(lengths, config)
    torch.set_num_threads(1)
    with hdp.init() as comm:
        trainer = trainer_of(comm, planner, config, dtype, max_grad_norm=None, **options)
        metrics = trainer.step(lengths, lambda i: sequences[i])
        moved = 0 if trainer.offload is None else trainer.offload.stats().stored_bytes
        named = trainer.model.named_parameters()
        return metrics, {(name, part_of(trainer.model, name)): p.grad.clone() for name, p in named}, moved


def check(results, config, dtype, lengths):
    check_gradients([r[1] for r in results], results[0][0], config, dtype, lengths, LIMIT[dtype])
    assert all(r[0] == results[0][0] for r in results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("how", ["plain", "recompute", "offload"])
def test_gradients_are_those_of_one_process(how, dtype):
    planner = FixedPlanner(2, 1, UNEVEN, ratio=0.6 if how == "offload" else 0.0, tensor=2)
    more = {"offload": how == "offload", "recompute": "full" if how == "recompute" else "none"}
    results = run_threads(lambda: one_step(planner, CONFIG, dtype, LENGTHS, **more), 4)
    check(results, CONFIG, dtype, LENGTHS)
    assert all((moved > 0) == (how == "offload") for _, _, moved in results)


def test_tensor_ranks_take_from_a_queue_together():
    cost = CostModel(attention=1e-4, linear=1e-2, fixed=1e-3, ring_step=1e-3)
    planner = Planner(None, ClusterSpec(2, 60, tensor=2), cost_model=cost, queue=True)
    results = run_threads(lambda: one_step(planner, CONFIG, torch.float64, LENGTHS), 4)
    check(results, CONFIG, torch.float64, LENGTHS)
    assert results[0][0].queued == planner.plan(LENGTHS).queued > 0


@pytest.mark.parametrize(
    ("ranks", "tensor", "config"),
    [
        (4, 4, LlamaConfig(vocabulary=64, layers=2, hidden=32, heads=4, kv_heads=2, ffn=48)),  # 2 ranks a KV head
        (3, 3, LlamaConfig(vocabulary=63, layers=2, hidden=24, heads=6, kv_heads=1, ffn=48, tied_embeddings=False)),
        (4, 2, LlamaConfig(vocabulary=62, layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, tied_embeddings=False)),
    ],
)
def test_kv_heads_that_ranks_share(ranks, tensor, config):
    planner = FixedPlanner(ranks // tensor, 1, [((0,), (0, 1)), ((ranks // tensor - 1,), (2,))], tensor=tensor)
    lengths = (20, 2, 9)
    check(run_threads(lambda: one_step(planner, config, torch.float64, lengths), ranks), config, torch.float64, lengths)


@pytest.mark.parametrize("transport", ["shm", "sim"])
def test_short_sequences_and_no_tokens_on_a_rank(transport):
    planner = FixedPlanner(2, 1, [((0, 1), (0,)), ((1,), (1, 2)), ((1, 0), (3,))], tensor=2)
    lengths = (1, 2, 1, 3)
    results = run_threads(lambda: one_step(planner, CONFIG, torch.float32, lengths), 4, transport=transport)
    check(results, CONFIG, torch.float32, lengths)


def test_bf16():
    planner = FixedPlanner(1, 1, [((0,), (0, 1)), ((0,), (2,))], tensor=2)
    narrow = run_threads(lambda: one_step(planner, CONFIG, torch.bfloat16, (50, 3, 19)), 2)
    assert narrow[0][0].loss == pytest.approx(wanted(CONFIG, torch.float64, (50, 3, 19))[0], rel=1e-2)


def test_logits_and_trees_are_those_of_one_process():
    tree = Tree(parents=(-1, 0, 0), lengths=(9, 12, 7))
    lengths = (tree, 25)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(62, (28,), generator=generator), torch.randint(62, (25,), generator=generator)]

    def loss(logits, labels, weights=1.0):
        return (weights * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()

    def rank(tensor):
        with hdp.init() as comm:
            planner = Planner(None, ClusterSpec(comm.size // tensor, 64, tensor=tensor), cost_model=COST)
            found = []
            for how in (None, loss):
                trainer = trainer_of(comm, planner, CONFIG, torch.float64, loss=how)
                done = trainer.step(lengths, lambda i: tokens[i])
                found += [done.loss, done.grad_norm]
                total = trainer.evaluate(lengths, lambda i: tokens[i])
                comm.all_reduce(total)
                found.append(float(total[0] / total[1]))
            return found

    want = run_threads(rank, 1, 1)[0]
    assert want[:3] == pytest.approx(want[3:], rel=1e-12)
    for found in run_threads(rank, 4, 2):
        assert found == pytest.approx(want, rel=1e-10)


def errors_of(make, world=2):
    """What ``make(comm)`` raises on each rank."""

    def rank():
        with hdp.init() as comm:
            with pytest.raises((InvalidUsage, Mismatch)) as caught:
                make(comm)
            comm.barrier()  # the communicator still works
            return f"{type(caught.value).__name__}: {caught.value}"

    return run_threads(rank, world)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 1, "kv_heads": 1}, "has 1 query heads and 1 KV heads, which 2 tensor ranks cannot"),
        ({"ffn": 47}, "blocks.0.ffn.out takes 47 columns, which 2 tensor ranks cannot"),
        ({"vocabulary": 61}, "a vocabulary of 61 cannot be shared evenly by 2 tensor ranks"),
        ({"heads": 6, "hidden": 36, "kv_heads": 3}, "blocks.0.attention has 6 query heads and 3 KV heads"),
    ],
)
def test_sizes_that_do_not_divide(changes, message):
    config = dataclasses.replace(CONFIG, **changes)
    told = errors_of(lambda comm: tensor_parallel(Llama(config), Mesh(comm, tensor=2)))
    assert all(each.startswith("InvalidUsage: ") and message in each for each in told)


def make(comm, *, model=None, cluster=None, mesh=None, kind=torch.optim.SGD):
    mesh = mesh or Mesh(comm, tensor=2)
    model = model or tensor_parallel(Llama(CONFIG), mesh)
    cluster = cluster or ClusterSpec(1, 100, tensor=2)
    optimizer = kind([parameter for parameter in model.parameters() if parameter.ndim == 2], lr=0.1)
    return Trainer(model, optimizer, Planner(None, cluster, cost_model=COST), mesh)


def twice(comm):
    mesh = Mesh(comm, tensor=2)
    tensor_parallel(tensor_parallel(Llama(CONFIG), mesh), mesh)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda comm: tensor_parallel(torch.nn.Linear(2, 2), Mesh(comm, tensor=2)), "got a Linear; it cuts"),
        (twice, "has been cut by tensor_parallel() already"),
        (lambda comm: make(comm, model=Llama(CONFIG)), "ranks [], and the tensor ranks of the mesh are [0, 1]"),
        (lambda comm: make(comm, cluster=ClusterSpec(2, 100)), "plans for 2 ranks of 1 x 1 devices"),
        (lambda comm: make(comm, mesh=Mesh(comm, pipeline=2)), "the model is a Llama; give this rank's stages"),
        (lambda comm: make(comm, kind=torch.optim.Muon), "Muon may look at more than one element of a parameter"),
        (lambda comm: make(comm, kind=torch.optim.Adafactor), "on a mesh with tensor or expert ranks use one of"),
    ],
)
def test_what_does_not_fit_is_said(attempt, message):
    assert all(message in each for each in errors_of(attempt))


def test_ranks_with_other_models_are_told():
    def other(comm):
        mesh = Mesh(comm)
        model = Llama(dataclasses.replace(CONFIG, layers=1 + (comm.rank == 1)))
        make(comm, model=model, mesh=mesh, cluster=ClusterSpec(2, 100))

    told = errors_of(other)
    assert told[0].startswith("Mismatch: rank 0 has another mesh or another model than the ranks [1]")
    assert "than the ranks [0]" in told[1]


def test_thirty_training_steps_and_checkpoints_are_those_of_one_process():
    config = LlamaConfig(vocabulary=16, layers=2, hidden=16, heads=4, kv_heads=1, ffn=16)

    def trainer(comm):
        tensor = 2 if comm.size > 1 else 1
        planner = Planner(None, ClusterSpec(comm.size // tensor, 200 // comm.size, tensor=tensor), cost_model=COST)
        return trainer_of(comm, planner, config, torch.float64)

    check_thirty_steps(trainer, config)
