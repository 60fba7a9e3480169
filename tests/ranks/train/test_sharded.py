"""ZeRO and master weights: the loss curves of the whole optimizer, and what each rank keeps."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer, summed_loss
from hdpcomm.train.state.layout import layout_of
from hdpcomm.train.zero.masters import Masters
from tests.harness.noted import NotedComm
from tests.harness.small_buckets import make_trainer

CONFIG = LlamaConfig(vocabulary=31, layers=3, hidden=16, heads=2, kv_heads=1, ffn=24)
COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4)
LENGTHS = (30, 4, 9, 1, 12, 3)
STEPS = 16


def fetch(step, i):
    return (torch.arange(LENGTHS[i]) * (i + 3 + step % 5)) % 31


def optimizer_of(model, lr):
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def losses_of(trainer, steps, lr):
    """Losses of all steps, under a schedule that changes the groups' learning rate."""
    losses = []
    for step in range(steps):
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps / 2)
        losses.append(trainer.step(LENGTHS, functools.partial(fetch, step)).loss)
    return losses


def curve(
    ranks, *, steps=STEPS, policy="balanced", recompute="none", offload=False, whole_logits=False,
    lr=1e-2, start=torch.float32, scale=1.0, **options,
):  # fmt: skip
    """Losses of all steps on rank 0, after which all ranks hold the same parameters."""

    def main():
        torch.set_num_threads(1)
        comm = hdp.init()
        model = adapt(Llama(CONFIG, seed=comm.rank, dtype=start), recompute=recompute)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= scale if parameter.dim() > 1 else 1.0
        planner = Planner(None, ClusterSpec(comm.size, 64 // comm.size), policy, COST)
        pool = PinnedPool(1 << 20, device="cpu")
        trainer = make_trainer(
            model, optimizer_of(model, lr), planner, comm, loss=summed_loss if whole_logits else None,
            offload=ActivationOffload(pool, model, ratio=1.0, min_bytes=1) if offload else None, **options,
        )  # fmt: skip
        return losses_of(trainer, steps, lr), torch.cat([t.flatten() for _, t in trainer.whole_tensors()])

    results = run_threads(main, ranks, timeout=100.0)
    for losses, weights in results:
        assert losses == results[0][0]
        assert torch.equal(weights, results[0][1])
    return results[0][0]


@functools.cache
def wanted(dtype):
    return curve(1, start=dtype)


VARIANTS = [
    (2, {"zero": 1}),
    (3, {"zero": 1, "policy": "naive"}),
    (4, {"zero": 1, "policy": "static"}),
    (1, {"zero": 1}),
    (2, {"zero": 0, "dtype": torch.float32}),
    (3, {"zero": 0, "policy": "naive"}),
    (4, {"zero": 0, "whole_logits": True}),
    (2, {"zero": 1, "recompute": "full"}),
    (2, {"zero": 2}),
    (3, {"zero": 2, "policy": "naive", "recompute": "full"}),
    (4, {"zero": 2, "policy": "static"}),
    (2, {"zero": 3}),
    (3, {"zero": 3, "policy": "naive"}),
    (4, {"zero": 3, "policy": "static", "recompute": "full"}),
    (1, {"zero": 3}),
    (2, {"zero": 3, "recompute": 1, "offload": True, "whole_logits": True}),
    (2, {"zero": 1, "recompute": 1, "offload": True, "whole_logits": True}),
]


@pytest.mark.parametrize(("ranks", "options"), VARIANTS)
def test_curves_are_those_of_one_process(ranks, options):
    losses = curve(ranks, **options)
    assert losses[-1] < losses[0]
    assert losses[-1] == pytest.approx(wanted(torch.float32)[-1], rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_curves_in_double_precision(ranks):
    losses = curve(ranks, start=torch.float64, zero=ranks)
    assert losses == pytest.approx(wanted(torch.float64), rel=1e-9)


def test_bf16_with_master_weights_follows_fp32_where_bf16_alone_does_not():
    """Weights of a usual size do not change in bf16 by steps this small."""
    run = {"steps": 50, "lr": 3e-4, "scale": 16.0}
    full = curve(1, **run)[-1]
    masters = curve(2, zero=1, dtype=torch.bfloat16, **run)[-1]
    alone = curve(1, start=torch.bfloat16, **run)[-1]
    assert masters == pytest.approx(full, rel=0.02)
    assert abs(alone - full) > 0.05 * full


def trainer_of(comm, *, lr=1e-2, capacity=64, policy="balanced", model=None, optimizer=None, **options):
    torch.set_num_threads(1)
    model = model or Llama(CONFIG)
    planner = Planner(None, ClusterSpec(comm.size, capacity // comm.size), policy, COST)
    return make_trainer(model, optimizer or optimizer_of(model, lr), planner, comm, **options)


@pytest.mark.parametrize(("dtype", "zero", "ranks"), [(None, 1, 3), (torch.bfloat16, 1, 3), (torch.bfloat16, 0, 2)])
def test_what_a_rank_keeps(dtype, zero, ranks):
    def main():
        trainer = trainer_of(hdp.init(), zero=zero, dtype=dtype)
        trainer.step(LENGTHS, functools.partial(fetch, 0))
        state = sum(x.numel() * x.element_size() for entry in trainer.optimizer.state.values() for x in entry.values())
        memories = [] if trainer.runner.masters is None else trainer.runner.masters._memories
        masters = sum(wide.nbytes for memory, wide in memories if memory.dtype != wide.dtype)
        return trainer.model.num_parameters(), state, trainer.runner.gradients, masters

    results = run_threads(main, ranks, timeout=60.0)
    for parameters, state, gradients, masters in results:
        share = 1 / ranks if zero else 1
        padding = 16 * ranks * len(gradients.buckets)
        assert gradients.sums.flat.dtype == torch.float32
        assert parameters <= gradients.sums.flat.numel() <= parameters + padding
        assert abs(state - 8 * parameters * share) <= 8 * padding
        wide = 0 if dtype is None else 4 * parameters * share
        assert wide <= masters <= wide + 4 * padding
        assert all(p.dtype == (dtype or torch.float32) for p in gradients.parameters)
    states = sum(state for _, state, _, _ in results)
    once = 8 * parameters * (1 if zero else ranks)
    assert once < states <= once + 4 * ranks * len(gradients.parameters)  # and the counts of steps


def noted_events(trainer):
    """When reductions start, among what the backward pass computes."""
    events = []
    for place, bucket in enumerate(trainer.runner.gradients.buckets):
        comm = NotedComm(bucket.holders.replicas, events, started=f"bucket {place}")
        bucket.sharding = replace(bucket.sharding, owners=comm)
    trainer.model.embedding.weight.register_hook(lambda _: events.append("embedding"))
    return events


def test_reductions_start_while_the_last_backward_runs():
    """The embedding's gradient comes last; the buckets of the layers above left before, also beside a ring."""

    def main(lengths, capacity):
        trainer = trainer_of(hdp.init(), zero=1, capacity=capacity, policy="naive", bucket_bytes=2000)
        trainer.step(lengths, lambda i: torch.arange(lengths[i]) % 31)  # counts how often a pass reaches a parameter
        events = noted_events(trainer)
        trainer.step(lengths, lambda i: torch.arange(lengths[i]) % 31)
        return events, len(trainer.runner.gradients.buckets)

    for lengths in ([9, 9], [19]):
        for events, buckets in run_threads(main, 2, lengths, 20, timeout=60.0):
            assert [e for e in events if e != "embedding"] == [f"bucket {i}" for i in range(buckets)]
            assert buckets > 3
            assert 0 < events.index("embedding") < len(events) - 1


def mixed_steps(zero, steps):
    """On processes: random batches, whose ranks end with micro-batches of their own, of some, or of all ranks."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        trainer = trainer_of(comm, zero=zero, capacity=48, policy="naive", bucket_bytes=6000)
        generator = torch.Generator().manual_seed(7)
        losses = []
        for _ in range(steps):
            longest = 48 if torch.rand((), generator=generator) < 0.5 else 16
            lengths = [longest, *torch.randint(1, 16, (8,), generator=generator).tolist()]
            losses.append(
                trainer.step(lengths, lambda i, lengths=lengths: torch.arange(lengths[i]) * (i + 3) % 31).loss
            )
        return losses


def test_any_mix_of_last_micro_batches_on_processes(ranks):
    sharded, whole = (ranks(3, mixed_steps, zero, 8) for zero in (1, 0))
    assert sharded == [sharded[0]] * 3
    assert sharded[0] == pytest.approx(whole[0], rel=1e-4)


class Twice(torch.nn.Module):
    """Uses a layer two times."""

    def __init__(self, *, reentrant=True):
        super().__init__()
        self.reentrant = reentrant
        self.embedding = torch.nn.Embedding(31, 8)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, tokens, **_):
        x = self.embedding(tokens)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x @ self.embedding.weight.T


def test_reductions_wait_for_all_gradients_of_a_shared_parameter():
    """A reentrant checkpoint ends its gradient more than once."""

    begun = Twice().state_dict()

    def main(bucket_bytes):
        model = Twice()
        model.load_state_dict(begun)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_of(hdp.init(), model=model, optimizer=optimizer, zero=1, bucket_bytes=bucket_bytes)
        return [trainer.step([9, 9], lambda i: torch.arange(9) + i).grad_norm for _ in range(3)]

    early, late = (run_threads(main, 2, size, timeout=60.0)[0] for size in (1, 1 << 20))
    assert early == pytest.approx(late, rel=1e-6)


def test_a_gradient_that_comes_after_its_reduction_is_an_error():
    """A checkpoint that is reentrant in some passes only ends a shared parameter's gradient more often than before."""

    with hdp.init() as comm:
        model = Twice(reentrant=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_of(comm, model=model, optimizer=optimizer, zero=1, bucket_bytes=1)
        trainer.step([9], lambda _: torch.arange(9))
        model.reentrant = True
        with pytest.raises(Error, match="need use_reentrant=False"):
            trainer.step([9], lambda _: torch.arange(9))


def test_a_step_that_failed_leaves_the_next_one_sound():
    def main():
        comm = hdp.init()
        trainer, other = (trainer_of(comm, zero=1, lr=0.0, max_grad_norm=None) for _ in range(2))
        weight = trainer.model.norm.weight
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(Error, match="the loss is nan"):
            trainer.step(LENGTHS, functools.partial(fetch, 0))
        with torch.no_grad():
            weight.fill_(1.0)
        return [t.step(LENGTHS, functools.partial(fetch, 0)).grad_norm for t in (trainer, other)]

    for after, fresh in run_threads(main, 2, timeout=60.0):
        assert after == fresh


def test_another_optimizer_for_master_weights_is_refused():
    with hdp.init() as comm:
        model = Llama(LlamaConfig(layers=1, hidden=16, ffn=32))
        planner = Planner(None, ClusterSpec(1, 64), cost_model=CostModel(1e-9, 1e-6))
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm, zero=1)
        other = torch.optim.AdamW(model.parameters())
        with pytest.raises(InvalidUsage, match=r"trainer.optimizer was set to AdamW .* new Trainer"):
            trainer.optimizer = other
        assert trainer.optimizer is not other


def test_a_later_trainer_takes_over_the_model():
    def main():
        comm = hdp.init()
        model = Llama(CONFIG)
        for _ in range(2):
            trainer = trainer_of(comm, model=model, zero=1, dtype=torch.bfloat16, lr=0.0, max_grad_norm=None)
            norm = trainer.step(LENGTHS, functools.partial(fetch, 0)).grad_norm
        fresh = trainer_of(comm, model=Llama(CONFIG), zero=1, dtype=torch.bfloat16, lr=0.0, max_grad_norm=None)
        return norm, fresh.step(LENGTHS, functools.partial(fetch, 0)).grad_norm

    for norm, fresh in run_threads(main, 2, timeout=60.0):
        assert norm == pytest.approx(fresh, rel=1e-3)


def test_clipping_is_by_the_norm_over_all_ranks():
    def main(zero):
        trainer = trainer_of(hdp.init(), zero=zero, max_grad_norm=1e-3, optimizer=None)
        return trainer.step(LENGTHS, functools.partial(fetch, 0)).grad_norm, trainer.model.norm.weight.detach().clone()

    (norm, weight), (whole, other) = (run_threads(main, 3, zero, timeout=60.0)[0] for zero in (1, 0))
    assert norm == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-7)


def saved_and_loaded(ranks, first, then):
    """Losses of four steps with options ``first``, and of the last two again, from a state taken after two, on
    ``ranks[1]`` ranks with options ``then``."""

    def begin():
        trainer = trainer_of(hdp.init(), optimizer=None, **first)
        trainer.step(LENGTHS, functools.partial(fetch, 0))
        trainer.step(LENGTHS, functools.partial(fetch, 1))
        state = copy.deepcopy(trainer.state_dict())
        return state, [trainer.step(LENGTHS, functools.partial(fetch, step)).loss for step in (2, 3)]

    def resume(state):
        trainer = trainer_of(hdp.init(), optimizer=None, lr=1.0, **then)  # the state's learning rate counts
        trainer.load_state_dict(copy.deepcopy(state))
        assert trainer.num_steps == 2
        return [trainer.step(LENGTHS, functools.partial(fetch, step)).loss for step in (2, 3)]

    (state, losses), *_ = run_threads(begin, ranks[0], timeout=60.0)
    return losses, run_threads(resume, ranks[1], state, timeout=60.0)[0]


BF16 = {"zero": 1, "dtype": torch.bfloat16}


@pytest.mark.parametrize("options", [{"zero": 1}, BF16, {"dtype": torch.bfloat16}])
def test_a_loaded_state_gives_the_bits_of_the_run_that_it_was_taken_of(options):
    losses, again = saved_and_loaded((2, 2), options, options)
    assert again == losses


@pytest.mark.parametrize(
    ("ranks", "first", "then"),
    [
        ((2, 3), {"zero": 1}, {"zero": 1}), ((3, 1), BF16, BF16), ((2, 2), {"zero": 1}, {}), ((2, 3), {}, {"zero": 1}),
        ((1, 1), {"zero": 3}, {"zero": 3}), ((1, 2), {"zero": 3}, {}), ((2, 1), {"zero": 3}, {"zero": 3}),
    ],
)  # fmt: skip
def test_a_state_fits_any_number_of_ranks_sharded_or_not(ranks, first, then):
    losses, again = saved_and_loaded(ranks, first, then)
    assert again == pytest.approx(losses, rel=2e-3 if first == BF16 else 1e-5)


@pytest.mark.parametrize("options", [{}, BF16])
def test_trainers_of_one_process_share_nothing_after_one_state(options):
    def main():
        comm = hdp.init()
        first, second, third = (trainer_of(comm, **options) for _ in range(3))
        first.step(LENGTHS, functools.partial(fetch, 0))
        state = first.state_dict()
        second.load_state_dict(state)
        third.load_state_dict(state)
        return [[each.step(LENGTHS, functools.partial(fetch, step)).loss for step in (1, 2, 3)] for each in
                (first, second, third)]  # fmt: skip

    losses = run_threads(main, 1, timeout=60.0)[0]
    assert losses[0] == losses[1] == losses[2]


def test_a_state_without_master_weights_is_refused():
    with pytest.raises(InvalidUsage, match=r"no master weights for head\.weight|no master weights for "):
        saved_and_loaded((1, 1), {"zero": 1}, BF16)


def with_state(model):
    """An optimizer that has made steps, of which one parameter has no state."""
    optimizer = optimizer_of(model, 1e-3)
    for number, parameter in enumerate(list(model.parameters())[1:]):
        places = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
        parameter.grad = (places % 7 - 3 + number) / 100
    optimizer.step()
    return optimizer


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


@pytest.mark.parametrize("make", [with_state, adagrad])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_that_an_optimizer_has_already_goes_on(make, zero):
    def main(zero):
        torch.set_num_threads(1)
        model = Llama(CONFIG, dtype=torch.float64)
        trainer = trainer_of(hdp.init(), model=model, optimizer=make(model), zero=zero)
        return [trainer.step(LENGTHS, functools.partial(fetch, step)).loss for step in range(3)]

    whole = run_threads(main, 1, 0, timeout=60.0)[0]
    assert run_threads(main, 2, zero, timeout=60.0)[0] == pytest.approx(whole, rel=1e-9)


class Counted(torch.optim.AdamW):
    """Counts the steps of the program."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


class Plain(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):  # noqa: ARG002
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)


def test_a_group_needs_no_learning_rate():
    model = Llama(CONFIG)
    with hdp.init() as comm:
        state = trainer_of(comm, model=model, optimizer=Plain(list(model.parameters()))).state_dict()
    assert len(state["optimizer"]["state"]) == len(list(model.parameters()))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_state_makes_no_steps_of_the_program(zero):
    def main():
        model = Llama(CONFIG)
        kind = torch.optim.AdamW if zero else Counted  # ranks cut what is known to update each element by itself
        optimizer = kind([{"params": list(model.parameters())}])
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        trainer = trainer_of(hdp.init(), model=model, optimizer=optimizer, zero=zero)
        hooked = []
        optimizer.register_step_pre_hook(lambda *_: hooked.append("before"))
        optimizer.register_step_post_hook(lambda *_: hooked.append("after"))
        before = [p.clone() for p in model.parameters()]
        state = trainer.state_dict()
        assert not hooked
        assert getattr(optimizer, "steps", 0) == 0
        assert not getattr(optimizer, "_opt_called", False)
        assert schedule.last_epoch == 0
        assert all(torch.equal(a, b) or zero == 3 for a, b in zip(before, model.parameters(), strict=True))
        return len(state["optimizer"]["state"]), len(before)

    (states, parameters), *_ = run_threads(main, 1, timeout=60.0)
    assert states == parameters


class Own(torch.optim.SGD):
    pass


REFUSED = [
    ({"zero": 4}, None, "zero is 4, expected a whole number from 0 to 3"),
    ({"dtype": torch.float16}, None, "dtype is torch.float16; give torch.bfloat16"),
    ({"zero": 1}, lambda model: Own(model.parameters(), lr=0.1), "Own may look at more than one element"),
    ({}, lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS computes the loss several times a step"),
    (
        {},
        lambda _: torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1),
        "2 parameters of the optimizer are none",
    ),
    ({"zero": 1}, lambda model: torch.optim.Adafactor(model.parameters()), "Adafactor may look at more than one"),
    ({"zero": 1}, lambda model: torch.optim.SGD([model.norm.weight], lr=0.1), "optimizer lacks 28 of the model's 29"),
]


def test_parameters_that_are_sharded_already_are_refused():
    class Sharded(torch.Tensor):
        pass

    parameter = torch.nn.Parameter(torch.zeros(4).as_subclass(Sharded))
    model = torch.nn.ParameterList([parameter])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with hdp.init() as comm:
        mesh = Mesh(comm)
        layout = layout_of(model, mesh)
        with pytest.raises(InvalidUsage, match="a parameter is a Sharded; zero= and dtype= are of plain tensors"):
            Masters([model], optimizer, layout, mesh, zero=1, dtype=None, bucket_bytes=100)


@pytest.mark.parametrize(("options", "make", "message"), REFUSED)
def test_what_is_refused(options, make, message):
    model = Llama(CONFIG)
    before = model.norm.weight
    with hdp.init() as comm, pytest.raises(InvalidUsage, match=message):
        trainer_of(comm, model=model, optimizer=None if make is None else make(model), **options)
    assert model.norm.weight is before
    assert model.norm.weight.dtype == torch.float32


def test_an_optimizer_over_frozen_parameters_is_told_why():
    with hdp.init() as comm:
        model = Llama(CONFIG)
        model.blocks[0].requires_grad_(False)
        frozen = sum(not p.requires_grad for p in model.parameters())
        with pytest.raises(InvalidUsage, match=rf"lacks 0 of .* and holds {frozen} others \(frozen"):
            trainer_of(comm, model=model, optimizer=torch.optim.AdamW(model.parameters()), zero=1)
