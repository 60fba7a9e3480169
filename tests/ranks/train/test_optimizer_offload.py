"""Optimizers that compute on the host: the bits of those on the device, and the memory that they take."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure import profile_memory
from hdpcomm.models import Llama
from hdpcomm.testing import run_threads
from hdpcomm.train.step.runner import StepSettings
from tests.ranks.train.test_sharded import CONFIG, LENGTHS, fetch, trainer_of

OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "bf16": {"dtype": torch.bfloat16},
    "zero 1": {"zero": 1, "bucket_bytes": 2000},
    "zero 1, bf16": {"zero": 1, "dtype": torch.bfloat16},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "zero 3, bf16": {"zero": 3, "dtype": torch.bfloat16},
}


def steps_of(trainer: Any, first: int, count: int) -> list[float]:
    return [trainer.step(LENGTHS, functools.partial(fetch, step)).loss for step in range(first, first + count)]


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return [copied(each) for each in state] if isinstance(state, list) else state


def run_of(options: dict[str, Any], state: Any = None, *, first: int = 0) -> tuple[list[float], Any]:
    """Losses of three steps, and the state after them."""
    comm = hdp.init()
    trainer = trainer_of(comm, **options)
    if state is not None:
        trainer.load_state_dict(copied(state))
    losses = steps_of(trainer, first, 3)
    return losses, copied(trainer.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return bool(a == b)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", OPTIONS)
def test_steps_have_the_bits_of_those_on_the_device(kind: str, ranks: int) -> None:
    """Also of what was saved with the one and goes on with the other."""
    options = OPTIONS[kind]
    device, host = (
        run_threads(run_of, ranks, {**options, "optimizer_offload": on_host})[0] for on_host in (False, True)
    )
    assert device[0] == host[0]
    assert same(device[1], host[1])
    goes_on = [
        run_threads(
            lambda on_host=on_host: run_of({**options, "optimizer_offload": on_host}, device[1], first=3), ranks
        )
        for on_host in (False, True)
    ]
    assert goes_on[0][0][0] == goes_on[1][0][0]
    assert same(goes_on[0][0][1], goes_on[1][0][1])


@pytest.mark.parametrize("kind", ["whole", "zero 1", "zero 3, bf16"])
def test_masters_have_no_memory_of_the_models(kind: str) -> None:
    def main() -> None:
        trainer = trainer_of(hdp.init(), **OPTIONS[kind], optimizer_offload=True)
        steps_of(trainer, 0, 1)
        masters = trainer.runner.masters
        of_device = {each.untyped_storage().data_ptr() for each in masters.tensors()}
        of_device |= {each.untyped_storage().data_ptr() for each in trainer.model.parameters()}
        for group in trainer.optimizer.param_groups:
            for master in group["params"]:
                own = (master, master.grad, *trainer.optimizer.state[master].values())
                assert not of_device & {each.untyped_storage().data_ptr() for each in own}

    run_threads(main, 2)


def test_memory_is_that_of_the_prediction() -> None:
    """Within 5% of the bytes that a rank's masters, their gradients and the optimizer's state have."""

    def main(zero: int) -> tuple[float, float, float, float]:
        comm = hdp.init()
        trainer = trainer_of(comm, zero=zero, dtype=torch.bfloat16, optimizer_offload=True)
        steps_of(trainer, 0, 1)
        held = 0
        for group in trainer.optimizer.param_groups:
            for master in group["params"]:
                own = (master, master.grad, *trainer.optimizer.state[master].values())
                held += sum(each.nbytes for each in own if each.numel() > 1)
        model = Llama(CONFIG, dtype=torch.bfloat16)
        both = [StepSettings(zero, torch.bfloat16, optimizer_offload=on_host) for on_host in (False, True)]
        found = [profile_memory(model, comm, torch.optim.AdamW, tokens=64, settings=each) for each in both]
        return held, found[1].host, found[0].states - found[1].states, found[0].host

    for zero in (0, 1, 3):
        for held, host, saved, nothing in run_threads(main, 2, zero):
            assert held == pytest.approx(host, rel=0.05)
            assert saved == pytest.approx(host * 12 / 16)  # the gradients' sums stay on the device
            assert nothing == 0


def test_loaded_weights_reach_the_masters() -> None:
    def main() -> None:
        comm = hdp.init()
        trainer = trainer_of(comm, zero=1, optimizer_offload=True)
        named = Llama(CONFIG, seed=5).named_parameters(remove_duplicate=False)
        other = {name: tensor.detach() + 1 for name, tensor in named}
        trainer.runner.state.load_weights(Whole(other))
        for piece in trainer.runner.masters.pieces:
            values = piece.parameter.detach().flatten()[piece.start : piece.start + piece.master.numel()]
            assert torch.equal(piece.master.flatten(), values)

    run_threads(main, 2)


class Whole:
    """Weights of a whole model."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def whole(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def test_memory_given_to_others_leaves_the_host_alone() -> None:
    """:meth:`Runner.store` has nothing to move of masters that are on the host."""

    def main() -> None:
        trainer = trainer_of(hdp.init(), zero=1, dtype=torch.bfloat16, optimizer_offload=True)
        before = steps_of(trainer, 0, 1)
        masters = [piece.master for piece in trainer.runner.masters.pieces]
        trainer.runner.store()
        assert all(master.untyped_storage().nbytes() > 0 for master in masters)
        trainer.runner.bring_back()
        after = steps_of(trainer, 1, 2)
        other = trainer_of(trainer.comm, zero=1, dtype=torch.bfloat16)
        assert steps_of(other, 0, 3) == before + after

    run_threads(main, 2)


def test_what_is_refused() -> None:
    def main(value: Any) -> None:
        comm = hdp.init()
        with pytest.raises(InvalidUsage, match="optimizer_offload is"):
            trainer_of(comm, optimizer_offload=value)

    run_threads(main, 1, "cpu")
    assert StepSettings(optimizer_offload=True).masters
    assert not StepSettings().masters
