"""ZeRO and mixed precision on meshes: the training of one process, and what each rank keeps."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.models import Llama
from hdpcomm.testing import run_threads
from tests.harness.mesh_shapes import DENSE, SHAPES, SPARSE, Shape, trainer_of
from tests.harness.noted import NotedComm

BATCHES = ((50, 3, 17, 30), (8, 2, 33, 12, 5), (60,), (9, 9, 9, 9, 9, 9))
ONE = {DENSE: Shape(1), SPARSE: Shape(1, config=SPARSE)}


def fetch(step, config):
    def tokens(i):
        return torch.randint(
            config.vocabulary, (BATCHES[step][i],), generator=torch.Generator().manual_seed(10 * step + i)
        )

    return tokens


def steps_of(trainer, config, steps):
    """(loss, norm) of each."""
    done = [trainer.step(BATCHES[step], fetch(step, config)) for step in steps]
    return [(each.loss, each.grad_norm) for each in done]


def run(shape, steps=range(4), state=None, **options):
    """On each rank: (losses and norms, the state afterwards, elements of its optimizer's first moment)."""

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, shape, **options)
            if state is not None:
                trainer.load_state_dict(copy.deepcopy(state))
            found = steps_of(trainer, shape.config, steps)
            trainer.check_replicas()
            kept = sum(each["exp_avg"].numel() for each in trainer.optimizer.state.values())
            return found, copy.deepcopy(trainer.state_dict()), kept

    return run_threads(rank, shape.ranks)


@functools.cache
def one_process(config):
    return run(ONE[config])[0]


def check_state(found, wanted, limit):
    assert found["num_steps"] == wanted["num_steps"]
    assert found["model"].keys() == wanted["model"].keys()
    assert found["optimizer"]["state"].keys() == wanted["optimizer"]["state"].keys()
    pairs = [(name, tensor, wanted["model"][name]) for name, tensor in found["model"].items()]
    for name, own in found["optimizer"]["state"].items():
        pairs += [
            (f"{key} of {name}", own[key], wanted["optimizer"]["state"][name][key]) for key in ("exp_avg", "step")
        ]
    for name, tensor, want in pairs:
        assert tensor.shape == want.shape, name
        assert (tensor - want).norm() <= limit * (want.norm() + 1e-6), name
    for group, other in zip(found["optimizer"]["param_groups"], wanted["optimizer"]["param_groups"], strict=True):
        assert sorted(group["params"]) == sorted(other["params"])
        assert group["weight_decay"] == other["weight_decay"]


CASES = [(name, zero) for name, shape in SHAPES.items() for zero in (1, 2, 3) if zero == 1 or not shape.split]


@pytest.mark.parametrize(("name", "zero"), CASES)
def test_training_is_that_of_one_process(name, zero):
    """Clipped in each step; small buckets, so that there are many."""
    shape = SHAPES[name]
    results = run(shape, zero=zero, bucket_bytes=2000)
    wanted, state, _ = one_process(shape.config)
    assert all(norm > 0.5 for _, norm in wanted)
    for found, own, _ in results:
        assert found == results[0][0]
        for pair, want in zip(found, wanted, strict=True):
            assert pair == pytest.approx(want, rel=1e-9)
        check_state(own, state, 1e-7)
    other = run(shape)
    assert sum(kept for _, _, kept in other) > sum(kept for _, _, kept in results) or shape.hdp == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hdp 2 pp 2, split backward", {}),
        ("pp 2 x 2 stages", {"zero": 1}),
        ("hdp 2 pp 2 tp 2 ep 2", {"zero": 1, "dtype": torch.float32}),
        ("hdp 2 pp 2 tp 2", {"zero": 3}),
    ],
)
def test_optimizers_on_the_host_make_the_same_bits(name, options):
    """Also where weights are tied at both ends of a pipeline."""
    device, host = (run(SHAPES[name], optimizer_offload=on_host, **options) for on_host in (False, True))
    for (losses, state, kept), (own_losses, own_state, own_kept) in zip(device, host, strict=True):
        assert own_losses == losses
        assert own_kept == kept
        check_state(own_state, state, 0.0)


def test_a_rank_keeps_its_part_of_what_others_hold_too():
    """A rank keeps state for a quarter of the dense parameters, and for half of its experts, which two of the four
    ranks hold alike. Padding is 16 a part."""
    shape = SHAPES["hdp 4 ep 2"]
    experts = 2 * 3 * 4 * 16 * 12
    whole = sum(p.numel() for p in Llama(SPARSE).parameters())
    least = (whole - experts) / 4 + experts / 2 / 2
    found = [kept for _, _, kept in run(shape, steps=(0,), zero=1)]
    assert all(least - 16 * 6 <= kept <= least + 16 * 6 for kept in found)  # padding has no state
    assert sum(found) == 4 * least


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("tp 4, two ranks a KV head", 1),
        ("pp 2 x 2 stages", 1),
        ("hdp 2 ep 2", 0),
        ("hdp 2 pp 2 tp 2 ep 2", 1),
        ("hdp 2 pp 2", 2),
        ("hdp 4 ep 2", 3),
        ("hdp 2 pp 2 tp 2 ep 2", 3),
    ],
)
def test_bf16_with_master_weights(name, zero):
    """Near the training in double precision; the same state on all ranks, whose masters the parameters are, rounded."""
    shape = SHAPES[name]
    results = run(shape, wide=torch.float32, dtype=torch.bfloat16, zero=zero)
    wanted = one_process(shape.config)[0]
    state = results[0][1]
    for found, own, _ in results:
        assert found == results[0][0]
        for (loss, norm), (want, want_norm) in zip(found, wanted, strict=True):
            assert loss == pytest.approx(want, rel=2e-2)
            assert norm == pytest.approx(want_norm, rel=0.1)
        for name, master in own["masters"].items():
            assert torch.equal(master, state["masters"][name]), name
            assert torch.equal(master.to(torch.bfloat16), own["model"][name]), name
    assert state["masters"].keys() == state["optimizer"]["state"].keys()


@pytest.mark.parametrize("narrow", [False, True], ids=["fp64", "bf16"])
@pytest.mark.parametrize(
    ("first", "then", "zeros"),
    [
        ("hdp 2 pp 2 tp 2", "hdp 2 tp 2", (1, 1)),
        ("hdp 2 pp 2 tp 2 ep 2", "hdp 4 ep 2", (1, 3)),
        ("hdp 4 ep 2", "one process", (3, 1)),
        ("hdp 4 ep 2", "hdp 2 ep 2", (2, 3)),
        ("one process", "hdp 2 pp 2 tp 2", (1, 1)),
    ],
)
def test_any_mesh_goes_on_from_the_state_of_any_other(first, then, zeros, narrow):
    config = (SHAPES.get(first) or SHAPES[then]).config
    before, after = SHAPES.get(first, ONE[config]), SHAPES.get(then, ONE[config])
    options = {"wide": torch.float32, "dtype": torch.bfloat16} if narrow else {}
    zero, then_zero = zeros
    state = run(before, steps=(0, 1), zero=zero, **options)[0][1]
    wanted = run(before, zero=zero, **options)[0][0][2:]
    then_zero = 0 if narrow and then_zero == 1 else then_zero
    for found, _, _ in run(after, steps=(2, 3), state=state, zero=then_zero, **options):
        for pair, want in zip(found, wanted, strict=True):
            assert pair == pytest.approx(want, rel=5e-2 if narrow else 1e-8)


def test_a_state_without_a_parameter_is_refused():
    shape = SHAPES["hdp 2 pp 2"]
    state = run(shape, steps=(), zero=0)[0][1]
    del state["optimizer"]["state"]["norm.weight"]

    def rank():
        with hdp.init() as comm:
            trainer = trainer_of(comm, shape)
            try:
                trainer.load_state_dict(state)
            except hdp.InvalidUsage as error:
                return str(error)
            return ""

    told = run_threads(rank, shape.ranks)
    assert any("no optimizer state for norm.weight; give that of a trainer of the same model" in each for each in told)


def test_sums_of_tensor_ranks_start_while_later_buckets_are_reduced():
    """Norms of tensor ranks are in buckets of their own: each sum starts before the next bucket is waited for."""
    of_ranks = {}

    def rank():
        with hdp.init() as comm:
            trainer = trainer_of(comm, SHAPES["hdp 2 tp 2"], zero=1, bucket_bytes=64)
            gradients = trainer.runner.gradients
            events = of_ranks.setdefault(comm.rank, [])

            for place, bucket in enumerate(gradients.buckets):
                held = bucket.holders
                alike = None if held.alike is None else NotedComm(held.alike, events, started="sum")
                bucket.holders = replace(held, alike=alike)
                bucket.sharding = replace(bucket.sharding, owners=NotedComm(held.replicas, events, awaited=place))
            trainer.step(BATCHES[0], fetch(0, DENSE))
            return len(gradients.buckets), [1 if bucket.holders.alike else 2 for bucket in gradients.buckets]

    for place, (count, parts) in enumerate(run_threads(rank, 4)):
        wanted = []
        for bucket in range(count):
            wanted += [bucket] if parts[bucket] == 2 else [bucket, "sum"]
        assert 1 in parts[:-1]
        assert of_ranks[place][: len(wanted)] == wanted
