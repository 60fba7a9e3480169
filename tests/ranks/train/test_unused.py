"""Parameters that no micro-batch uses, and buffers that a forward pass changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.small_buckets import make_trainer

COST = CostModel(attention=1e-9, linear=1e-6, fixed=1e-6)


class Switched(nn.Module):
    """Tokens above 15 go through a layer that others do not reach; a third layer is never reached."""

    def __init__(self, buffer=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(31, 8)
        self.low, self.high, self.never = (nn.Linear(8, 31) for _ in range(3))
        if buffer is not None:
            self.register_buffer("seen", torch.zeros(1), persistent=buffer)

    def forward(self, tokens, **_):
        if hasattr(self, "seen"):
            self.seen += tokens.numel()
        x = self.embedding(tokens)
        return self.high(x) if tokens.numel() and int(tokens.max()) > 15 else self.low(x)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)


def trainer_of(comm, model, **options):
    planner = Planner(None, ClusterSpec(comm.size, 10), "naive", COST)
    return make_trainer(model, adamw(model), planner, comm, max_grad_norm=None, **options)


STEPS = [[torch.arange(9), torch.arange(9)], [torch.arange(9), torch.arange(9) + 16], [torch.arange(9) + 16] * 2]


@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"zero": 1, "bucket_bytes": 64}])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weight_decay_leaves_what_no_rank_has_used(ranks, options):
    plain, start = Switched(), Switched()
    optimizer = adamw(plain)
    for step in STEPS:
        optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(plain(s)[:-1], s[1:], reduction="sum") for s in step]
        (sum(losses) / 16).backward()
        optimizer.step()

    def rank():
        with hdp.init() as comm:
            model = copy.deepcopy(start)  # ranks are threads, whose random numbers are of one generator
            trainer = trainer_of(comm, model, **options)
            for step in STEPS:
                trainer.step([9, 9], lambda i, step=step: step[i])
            return {name: p.detach().clone() for name, p in model.named_parameters()}, copy.deepcopy(
                trainer.state_dict()
            )

    for found, _ in run_threads(rank, ranks, timeout=60.0):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(found["never.weight"], start.never.weight)


KINDS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_looked_at_before_the_first_step_changes_nothing(kind):
    options = {} if kind == "Rprop" else {"weight_decay": 0.3}
    options |= {"momentum": 0.9} if kind == "SGD" else {}

    def rank(look):
        with hdp.init() as comm:
            model = Switched()
            planner = Planner(None, ClusterSpec(1, 20), "naive", COST)
            trainer = Trainer(model, getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options), planner, comm)
            if look:
                trainer.state_dict()
            return [trainer.step([9, 9], lambda i: STEPS[0][i]).loss for _ in range(4)]

    looked, plain = run_threads(rank, 1, True)[0], run_threads(rank, 1, False)[0]
    assert looked == pytest.approx(plain, rel=1e-6)


def test_the_state_of_a_rank_that_holds_everything_is_local():
    """One rank may ask alone, as ``if comm.rank == 0: torch.save(trainer.state_dict())`` does."""

    def rank():
        with hdp.init(timeout=5.0) as comm:
            trainer = trainer_of(comm, Switched())
            trainer.step([9, 9], lambda i: STEPS[0][i])
            found = [trainer.state_dict(), dict(trainer.whole_tensors())] if comm.rank == 0 else []
            comm.barrier()
            return [each.keys() for each in found]

    assert run_threads(rank, 2, timeout=60.0)[0][1] == Switched().state_dict().keys()


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_passes_change_are_refused_on_all_ranks(persistent):
    def rank():
        with hdp.init() as comm:
            trainer = trainer_of(comm, Switched(persistent))
            before = trainer.model.low.weight.detach().clone()
            try:
                trainer.step([9], lambda _: torch.arange(9))
            except hdp.InvalidUsage as error:
                assert torch.equal(trainer.model.low.weight, before)
                return str(error)
            return ""

    told = run_threads(rank, 2, timeout=60.0)
    if persistent:
        assert all("have changed buffers of the model" in each for each in told)
        assert any("(seen)" in each for each in told)
    else:
        assert told == ["", ""]


class Rotated(nn.Module):
    """A table of complex numbers, as rotary embeddings have, that each rank draws for itself."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.register_buffer("table", torch.view_as_complex(torch.randn(9, 4, 2)).conj(), persistent=False)

    def forward(self, tokens, *, positions, **_):
        x = torch.view_as_complex(self.embedding(tokens).unflatten(-1, (4, 2))) * self.table[positions]
        return self.last(torch.view_as_real(x).flatten(-2))


def test_complex_buffers_are_those_of_rank_0_on_all_ranks():
    def rank():
        with hdp.init() as comm:
            trainer = trainer_of(comm, Rotated())
            trainer.step([9, 3], lambda i: torch.arange(9 if i == 0 else 3))
            return trainer.model.table.clone()

    first, second = run_threads(rank, 2, timeout=60.0)
    assert torch.equal(first, second)
