"""ZeRO-2 and ZeRO-3: gradients of random plans are those of one process, to the same bits whatever the timing.

``HDPCOMM_ZERO_PLANS=300 pytest tests/ranks/train/test_zero.py`` tries so many plans.
"""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.device.paths import StreamMark
from hdpcomm.data import fold
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, NewWeights, adapt, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, MicroBatch, Planner, SequenceInfo, StepPlan
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer, materialize
from hdpcomm.train.zero import buckets, masters
from hdpcomm.train.zero.shared_parts import SideStream
from tests.harness import families
from tests.harness.patience import PATIENCE
from tests.harness.pipelines import COST, tokens_of
from tests.harness.plain_llama import batch_gradients
from tests.ranks.train import test_tree_training as trees

PLANS = int(os.environ.get("HDPCOMM_ZERO_PLANS", "24"))
CONFIG = LlamaConfig(vocabulary=37, layers=3, hidden=16, heads=2, kv_heads=1, ffn=20)
CONFIGS = [
    CONFIG,
    replace(CONFIG, tied_embeddings=False),
    replace(CONFIG, layers=1, kv_heads=2),
    replace(CONFIG, layers=2, ffn=12, experts=4, router_aux_loss=0.05, router_z_loss=0.02),
]


class LateWork:
    """:class:`hdpcomm.train.zero.shared_parts.SideWork` as late as it may be: when it is waited for."""

    def __init__(self):
        self.queued = []

    def start(self, work):
        todo = [work]

        def wait():
            while todo:
                todo.pop()()

        return wait

    def mark(self):
        return "marked"

    def run_after(self, mark, work):
        assert mark == "marked"
        self.queued.append(work)

    def finish(self):
        while self.queued:
            self.queued.pop(0)()

    def close(self):
        assert not self.queued


class SimulatedStreams:
    """What :class:`SideStream` asks of a communicator, with streams of a simulated device in place of torch's."""

    of_thread = threading.local()

    def __init__(self, comm):
        self.device = comm.streams.device
        self.host_stream = comm.streams.host_stream

    def mark(self):
        stream = getattr(self.of_thread, "stream", self.host_stream)
        return StreamMark(self.device, lambda: stream)

    @classmethod
    @contextmanager
    def current(cls, stream):
        cls.of_thread.stream = stream
        try:
            yield
        finally:
            del cls.of_thread.stream


class RandomPlanner(Planner):
    """Hands out a plan that is drawn once; what it predicts has nothing to do with what its parts take."""

    def __init__(self, rng, ranks, lengths):
        super().__init__(None, ClusterSpec(ranks, 100_000), cost_model=COST)
        order = list(range(len(lengths)))
        rng.shuffle(order)
        self._batches = []
        while order:
            own = [order.pop() for _ in range(min(len(order), rng.choice([1, 1, 2, 3])))]
            group = rng.sample(range(ranks), rng.choice([1, 1, 1, rng.randint(1, ranks)]))
            self._batches.append((tuple(group), own))
        self._predicted = [rng.choice([0.0, 1.0, rng.random(), 50.0]) for _ in self._batches]
        self._ratio = rng.choice([0.0, 0.0, 0.5, 1.0])

    @property
    def offloads(self):
        return self._ratio > 0

    def plan(self, lengths):
        rows = zip(self._batches, self._predicted, strict=True)
        made = tuple(
            MicroBatch(i, ranks, tuple(SequenceInfo(s, lengths[s]) for s in own), self._ratio, predicted)
            for i, ((ranks, own), predicted) in enumerate(rows)
        )
        return StepPlan("by hand", self.cluster.ranks, made, 1.0, 1.0, 0.0, 0.0)


def gradients_of(trainers):
    """By name, put together from the parts of all ranks."""
    found = {}
    for trainer in trainers:
        names = {id(p): name for name, p in trainer.model.named_parameters()}
        for piece in trainer.runner.masters.pieces:
            whole = found.setdefault(
                names[id(piece.parameter)], torch.full((piece.parameter.numel(),), float("nan")).double()
            )
            whole[piece.start : piece.start + piece.gradient.numel()] = piece.gradient.flatten()
    return found


def one_step(planner, model_of, lengths, fetch, zero, *, slow=None, transport="shm", **options):
    """(losses, gradients) of one step. ``slow``: a random number generator that delays layers and reading."""

    def rank():
        torch.set_num_threads(1)
        comm = hdp.init()
        model = model_of(comm.rank)
        if slow is not None:
            for module in model.modules():
                if type(module).__name__ == "_Block":
                    module.register_forward_hook(lambda *_: time.sleep(slow.choice([0, 0, 0.004])))
                    module.register_full_backward_hook(lambda *_: time.sleep(slow.choice([0, 0, 0.004])))
        offload = None
        if getattr(planner, "offloads", False):
            offload = ActivationOffload(PinnedPool(4 << 20, device="cpu"), model, min_bytes=1, resident_layers=0)
        trained = [p for p in model.parameters() if p.requires_grad]
        trainer = Trainer(
            model,
            torch.optim.SGD(trained, lr=0.0),
            planner,
            comm,
            max_grad_norm=None,
            zero=zero,
            offload=offload,
            **options,
        )
        metrics = trainer.step(lengths, fetch)
        return metrics.loss, trainer

    results = run_threads(rank, planner.cluster.ranks, timeout=60.0 * PATIENCE, transport=transport)
    return [loss for loss, _ in results], gradients_of([trainer for _, trainer in results])


def check(found, wanted, limit=1e-12):
    losses, gradients = found
    loss, grads = wanted
    assert all(abs(each - loss) <= limit * abs(loss) for each in losses)
    for name, gradient in grads.items():
        if name in gradients:
            error = (gradients[name] - gradient.flatten()).norm()
            assert error <= limit * gradient.norm() + 1e-300, (name, float(error))
    return gradients


@pytest.mark.parametrize("seed", range(PLANS))
def test_gradients_of_random_plans(seed):
    """0 to many micro-batches a rank, rings of any ranks, offload, recomputation, tied weights, frozen parameters,
    experts; a rank may have no pass at all."""
    random_plan(seed)


def test_the_first_pass_has_the_weights_of_slow_ranks(monkeypatch):
    """No step, and no agreement on one, precedes it: as where a door looks for dropout."""
    take_over = masters.PulledWeights.take_over

    def slow(self, bucket):
        if bucket.sharding.own == 1:
            time.sleep(0.05)
        return take_over(self, bucket)

    monkeypatch.setattr(masters.PulledWeights, "take_over", slow)
    tokens, places = torch.arange(5), torch.arange(5)

    def rank():
        comm = hdp.init()
        model = Llama(CONFIG, seed=3)
        wanted = model(tokens, positions=places, cu_seqlens=torch.tensor([0, 5]), comm=None)
        planner = Planner(None, ClusterSpec(2, 100), cost_model=COST)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, comm, zero=3)
        with trainer.runner.weights():
            return wanted, model(tokens, positions=places, cu_seqlens=torch.tensor([0, 5]), comm=None)

    for wanted, found in run_threads(rank, 2, timeout=60.0 * PATIENCE):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("beside", ["thread", "late", "stream"])
@pytest.mark.parametrize("seed", range(1000, 1000 + -(-PLANS // 4)))
def test_parts_on_devices(seed, beside, monkeypatch):
    """The parts in (simulated) device memory that others import. ``late``: what moves beside the passes moves when
    somebody has to wait for it, as a stream may; ``stream``: as on a GPU, with the marks of a simulated one."""
    if beside == "late":
        monkeypatch.setattr(masters, "side_work", lambda _: LateWork())
    if beside == "stream":
        monkeypatch.setattr(masters, "side_work", lambda comm: SideStream(SimulatedStreams(comm)))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: device.create_stream())
        monkeypatch.setattr(torch.cuda, "stream", SimulatedStreams.current)
    random_plan(seed, transport="sim")


def random_plan(seed, **options):
    rng = random.Random(seed)
    config = rng.choice(CONFIGS)
    lengths = (5, *(rng.choice([1, 2, rng.randint(3, 60)]) for _ in range(rng.randint(1, 9))))
    planner = RandomPlanner(rng, rng.randint(1, 4), lengths)
    sequences = tokens_of(lengths, config)
    recompute = rng.choice(["none", 1, "full"])
    frozen = rng.choice(["", "embedding", "blocks.0", "ffn", "norm"])

    def model_of(rank):
        model = Llama(config, seed=3 + rank, dtype=torch.float64)  # only those of rank 0 count
        set_recompute(model, recompute)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
        return model

    wanted = batch_gradients(Llama(config, seed=3, dtype=torch.float64), sequences)
    found = one_step(planner, model_of, lengths, lambda i: sequences[i], rng.choice([2, 3, 3]), **options)
    found = check(found, wanted)
    assert set(found) == {name for name, p in model_of(0).named_parameters() if p.requires_grad}


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_trees(ranks, zero):
    folded = fold(*trees.rollouts())
    found = one_step(
        Planner(None, ClusterSpec(ranks, -(-180 // ranks)), cost_model=COST),
        lambda rank: Llama(trees.CONFIG, seed=3 + rank, dtype=torch.float64),
        [each.tree for each in folded],
        lambda i: (folded[i].tokens, folded[i].weights),
        zero,
    )
    check(found, trees.wanted(torch.float64), 1e-10)


def test_the_same_bits_whatever_the_timing():
    """Twenty runs, in which layers and reading are late by chance."""
    rng = random.Random(7)
    lengths = (40, 1, 7, 33, 2, 18, 5, 12)
    planner = RandomPlanner(rng, 3, lengths)
    sequences = tokens_of(lengths, CONFIG)
    delays = random.Random()
    bits = set()
    for _ in range(20):

        def fetch(i):
            time.sleep(delays.choice([0, 0, 0.01]))
            return sequences[i]

        _, found = one_step(
            planner, lambda rank: Llama(CONFIG, seed=3 + rank), lengths, fetch, delays.choice([2, 3]), slow=delays
        )
        bits.add(tuple((name, gradient.numpy().tobytes()) for name, gradient in sorted(found.items())))
    assert len(bits) == 1


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_models_of_transformers(name, zero):
    """Steps with transformers' checkpoints, evaluation between them: weights as on one rank without ZeRO, but for what
    transformers computes in fp32."""
    lengths, limit = (23, 4, 9, 1, 12, 3), 1e-4 if name == "mixtral" else 1e-7

    def run(ranks, zero):
        def rank():
            torch.set_num_threads(1)
            comm = hdp.init()
            model = families.model_of(name)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            adapted = adapt(model if name == "mixtral" else model.double())  # its experts know no fp64
            planner = Planner(None, ClusterSpec(ranks, 64), cost_model=COST)
            optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2)
            trainer = Trainer(adapted, optimizer, planner, comm, zero=zero)
            losses = []
            for step in range(3):
                losses.append(
                    trainer.step(lengths, lambda i, step=step: torch.arange(lengths[i]) * (i + 3 + step) % 31).loss
                )
                total = trainer.evaluate(lengths[:3], lambda i: torch.arange(lengths[i]) % 29)
                comm.all_reduce(total)
                losses.append(float(total[0]))
            return losses, {key: tensor.clone() for key, tensor in trainer.whole_tensors()}

        return run_threads(rank, ranks, timeout=90.0)

    ((losses, weights),) = run(1, 0)
    for found, own in run(2, zero):
        assert found == pytest.approx(losses, rel=limit)
        assert own.keys() == weights.keys()
        for key, tensor in weights.items():
            torch.testing.assert_close(own[key], tensor, rtol=100 * limit, atol=limit)


def test_a_parameter_has_no_values_between_steps():
    def rank():
        torch.set_num_threads(1)
        comm = hdp.init()
        model = Llama(CONFIG)
        planner = Planner(None, ClusterSpec(comm.size, 64), cost_model=COST)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm, zero=3)
        kept = sum(p.untyped_storage().nbytes() for p in model.parameters())
        trainer.step((5, 9), lambda i: torch.arange((5, 9)[i]))
        assert all(p.isnan().all() for p in model.parameters())
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == kept
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            model.norm.weight.mul_(2)
        for part in (model, model.norm):
            with pytest.raises(InvalidUsage, match=r"norm\.weight|weight has no values between steps, since zero=3"):
                part.state_dict()
        assert model.state_dict(keep_vars=True)["norm.weight"] is model.norm.weight
        assert trainer.state_dict()["model"]
        own = sum(each.values.numel() for each in trainer.runner.masters.parts())
        return kept, own, sum(p.numel() for p in model.parameters())

    results = run_threads(rank, 3, timeout=60.0 * PATIENCE)
    assert sum(own for _, own, _ in results) == results[0][2]
    assert all(kept <= 4 * 40 for kept, _, _ in results)


@pytest.mark.parametrize(
    ("zero", "queue", "told"), [(2, True, "queue=True"), (3, True, "queue=True"), (4, False, "4"), (3, False, "Muon")]
)
def test_refusals(zero, queue, told):
    with hdp.init() as comm:
        model = Llama(CONFIG)
        planner = Planner(None, ClusterSpec(1, 64), cost_model=COST, queue=queue)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if told == "Muon":
            optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
        with pytest.raises(InvalidUsage, match=told):
            Trainer(model, optimizer, planner, comm, zero=zero)


def steps_on(ranks, zero, dtype, state=None, count=2, parts=False):
    """By rank: (losses, norms, state of the whole model, elements that the rank updates) after some steps.

    ``parts``: the model is made in parts.
    """

    def rank():
        torch.set_num_threads(1)
        comm = hdp.init()
        torch.manual_seed(3)
        config = replace(CONFIG, tied_embeddings=False)
        model = Llama(config, device="meta" if parts else "cpu", dtype=torch.float32)
        if parts:
            materialize(model, hdp.Mesh(comm), NewWeights(model, 3), zero=zero)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        planner = Planner(None, ClusterSpec(comm.size, 64), cost_model=COST)
        trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=0.1, zero=zero, dtype=dtype)
        if state is not None:
            trainer.load_state_dict(state)
        lengths = [40, 9, 23, 5, 31, 2]
        metrics = [trainer.step(lengths, tokens_of(lengths, CONFIG).__getitem__) for _ in range(count)]
        trainer.check_replicas()
        masters = trainer.runner.masters
        updated = 0 if masters is None else sum(piece.master.numel() for piece in masters.pieces)
        return [m.loss for m in metrics], [m.grad_norm for m in metrics], trainer.state_dict(), updated

    return run_threads(rank, ranks, timeout=60.0 * PATIENCE)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("zero", "ranks", "on_host"), [(2, 4, 2), (3, 4, 2), (3, 6, 2), (3, 6, 3)])
def test_hosts_share_the_optimizers_state(zero, ranks, on_host, dtype, monkeypatch):
    (losses, norms, wanted, _), *_ = steps_on(1, 0, dtype)
    again = steps_on(1, 0, dtype, state=wanted)[0]
    monkeypatch.setattr(buckets, "nodes_of", lambda comm: [rank // on_host for rank in range(comm.size)])
    found = steps_on(ranks, zero, dtype)
    limit = 1e-5 if dtype is None else 2e-2
    total = sum(p.numel() for p in Llama(replace(CONFIG, tied_embeddings=False)).parameters())
    assert sum(updated for *_, updated in found) == total
    assert max(updated for *_, updated in found) < 1.3 * total / ranks
    for its_losses, its_norms, state, _ in found:
        assert its_losses == pytest.approx(losses, rel=limit)
        assert its_norms == pytest.approx(norms, rel=limit)
        for name, value in wanted["model"].items():
            torch.testing.assert_close(state["model"][name], value, rtol=0, atol=limit, msg=name)
    for its_losses, *_ in steps_on(ranks, zero, dtype, state=wanted):
        assert its_losses == pytest.approx(again[0], rel=limit)
    assert steps_on(1, 0, dtype, state=found[0][2])[0][0] == pytest.approx(again[0], rel=limit)
    if zero == 3:
        alone = steps_on(1, 0, dtype, parts=True)[0][0]
        assert steps_on(ranks, zero, dtype, parts=True)[0][0] == pytest.approx(alone, rel=limit)
