"""Steps whose loss or gradient is no finite number: not taken, on all ranks, and as if never asked for."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch.nn import functional

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.errors import NotFinite
from hdpcomm.run import read_lines
from hdpcomm.testing import run_threads
from tests.harness.mesh_shapes import SHAPES, Shape, trainer_of

LENGTHS = (50, 3, 17, 30)
POISON = 63
"""As a label it makes the loss, or only the gradient, no number."""
CASES = [("hdp 3", Shape(3), zero) for zero in range(4)] + [
    (name, SHAPES[name], zero)
    for name in ("hdp 2 pp 2", "hdp 2 tp 2", "pp 2 x 2 stages", "hdp 2 pp 2, split backward", "hdp 4 ep 2")
    for zero in (0, 1, 3)
    if zero < 2 or "split" not in name
]


class OnlyItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * math.nan


def summed(logits, labels, what):
    bad = bool((labels == POISON).any())
    if bad and what == "gradient norm":
        logits = OnlyItsGradient.apply(logits)
    loss = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return loss * math.inf if bad and what == "loss" else loss


def fetch(step, poisoned=None):
    def tokens(i):
        draw = torch.Generator().manual_seed(10 * step + i)
        found = torch.randint(POISON, (LENGTHS[i],), generator=draw)
        if i == poisoned:
            found[-1] = POISON
        return found

    return tokens


@pytest.mark.parametrize(("name", "shape", "zero"), CASES)
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_step_that_is_not_taken_leaves_nothing(name, shape, zero, what):
    del name

    def body():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            states = []
            for poisoned in (None, 2):
                trainer = trainer_of(comm, shape, zero=zero, loss=lambda x, y: summed(x, y, what))
                trainer.step(LENGTHS, fetch(0))
                if poisoned is not None:
                    with pytest.raises(NotFinite, match=f"step 1: the {what} is ") as caught:
                        trainer.step(LENGTHS, fetch(1, poisoned))
                    found = caught.value.sequences
                    assert (poisoned in found) if what == "loss" else found == ()
                    assert 0 not in found  # it runs with no other one
                    with pytest.raises(NotFinite):  # and once more
                        trainer.step(LENGTHS, fetch(1, poisoned))
                metrics = trainer.step(LENGTHS, fetch(2))
                assert (metrics.step, trainer.num_steps) == (1, 2)
                states.append(copy.deepcopy(trainer.state_dict()))
            return states

    for never, left_out in run_threads(body, shape.ranks):
        assert all(torch.equal(never["model"][name], left_out["model"][name]) for name in never["model"])
        for name, own in never["optimizer"]["state"].items():
            assert all(torch.equal(own[key], left_out["optimizer"]["state"][name][key]) for key in own)


def test_an_evaluation_may_be_no_number():
    with hdp.init() as comm:
        trainer = trainer_of(comm, Shape(1), loss=lambda x, y: summed(x, y, "loss"))
        assert not math.isfinite(trainer.evaluate(LENGTHS, fetch(1, 2))[0])
        trainer.step(LENGTHS, fetch(0))


# --- runs


COMMAND = ["train", "--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "16"]
BATCHES = ["--context", "200", "--tokens-per-step", "300", "--trackers", "none", "--ranks", "2"]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i + 1))
    return str(folder)


def test_a_run_ends_saved_and_names_the_batch(data, tmp_path, capfd):
    """A learning rate that makes all weights no numbers with the first update."""
    out = tmp_path / "run"
    options = ["--data", data, "--out", str(out), "--lr", "1e30", "--warmup", "0", "--steps", "9"]
    assert main([*COMMAND, *BATCHES, *options]) == 1
    told = capfd.readouterr().err
    assert re.search(rf"step \d: the (loss|gradient norm) is nan.*; of {data}/\d.txt, tokens 0 to ", told)
    assert "--skip-bad-steps N leaves out N such steps; saved: " in told
    taken = len(read_lines(out / "metrics.jsonl"))
    assert (out / "checkpoints" / f"step-{taken}").is_dir()


def test_policies_are_compared_in_steps_that_both_took(data, capfd):
    """DDP's first update makes all of its weights no numbers, too."""
    options = ["--data", data, "--lr", "1e30", "--warmup", "0", "--steps", "4", "--skip-bad-steps", "4"]
    assert main([*COMMAND, *BATCHES, *options, "--compare", "static", "ddp"]) == 0
    told = capfd.readouterr().out
    for policy in ("balanced", "static", "ddp"):
        assert f"left out ({policy}), as loss or gradient were no finite numbers: step " in told


def test_a_run_leaves_out_so_many_steps(data, tmp_path, capfd):
    out = tmp_path / "run"
    options = ["--data", data, "--out", str(out), "--lr", "1e30", "--warmup", "0", "--steps", "4"]
    assert main([*COMMAND, *BATCHES, *options, "--skip-bad-steps", "3"]) == 0
    told = capfd.readouterr().out
    left_out = set(range(4)) - {row["step"] for row in read_lines(out / "metrics.jsonl")}
    numbers = ", ".join(str(step + 1) for step in sorted(left_out))
    assert left_out
    assert f"left out (balanced), as loss or gradient were no finite numbers: step {numbers}" in told
