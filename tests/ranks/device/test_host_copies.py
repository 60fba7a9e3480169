"""Weights and the optimizer's state in host memory between steps: their memory is given back, no bit changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.testing import run_threads, spawn
from hdpcomm.train import Trainer
from hdpcomm.train.step import runner as host_copies
from tests.ranks.train.test_trainer import LENGTHS, fetch, trainer_of

VARIANTS: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"zero": 1, "dtype": torch.bfloat16},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "dtype": torch.bfloat16},
]
NAMES = ["plain", "zero 1", "zero 1, bf16", "zero 2", "zero 3", "zero 3, bf16"]
KINDS = ({"optimizer": False}, {"model": False}, {})


def tensors_of(trainer: Trainer) -> Iterator[torch.Tensor]:
    runner = trainer.runner
    yield from runner.model.parameters()
    yield from runner.model.buffers()
    assert runner.optimizer is not None
    for values in runner.optimizer.state.values():
        yield from (each for each in values.values() if isinstance(each, torch.Tensor) and each.dim())
    for group in runner.optimizer.param_groups:
        yield from group["params"]
    if runner.masters is not None:
        yield from runner.masters.tensors()
    if hasattr(trainer.runner.gradients.sums, "flat"):
        yield trainer.runner.gradients.sums.flat


def kept_bytes(trainer: Trainer) -> int:
    """Bytes of the storages that the tensors have; windows' memory belongs to none of torch's."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors_of(trainer)}
    return sum(each.nbytes() for each in storages.values() if each.resizable())


def training(stores: bool, options: dict[str, Any]) -> tuple[list[float], torch.Tensor, list[int]]:
    """(losses, weights, bytes that are kept before, while and after everything is stored, the last time)"""
    host_copies._SMALLEST = 1
    with hdp.init() as comm:
        trainer = trainer_of(comm, **options)
        losses, kept = [], [0]
        for kind in KINDS:
            losses.append(trainer.step(LENGTHS, fetch).loss)
            if stores:
                kept = [kept_bytes(trainer)]
                trainer.runner.store(**kind)
                trainer.runner.store(**kind)  # nothing is there to be stored
                kept.append(kept_bytes(trainer))
                trainer.runner.bring_back(**kind)
                trainer.runner.bring_back()
                kept.append(kept_bytes(trainer))
        losses.append(trainer.step(LENGTHS, fetch).loss)
        return losses, torch.cat([tensor.cpu().flatten() for _, tensor in trainer.whole_tensors()]), kept


def check_stays(stored: list[Any], usual: list[Any], *, rtol: float = 0.0) -> None:
    for (losses, weights, kept), (want_losses, want_weights, _) in zip(stored, usual, strict=True):
        assert losses == pytest.approx(want_losses, rel=rtol, abs=0.0)
        torch.testing.assert_close(weights, want_weights, rtol=rtol, atol=rtol)
        before, meanwhile, after = kept
        assert before == after > 1000
        assert meanwhile == 0


@pytest.mark.parametrize("options", VARIANTS, ids=NAMES)
def test_no_bit_changes(options: dict[str, Any]) -> None:
    check_stays(*(run_threads(training, 2, stores, options, transport="sim") for stores in (True, False)))


def test_no_bit_changes_in_processes() -> None:
    options = {"zero": 3, "dtype": torch.bfloat16}
    check_stays(*(spawn(training, 2, stores, options, transport="sim") for stores in (True, False)))


def test_what_ranks_share_on_the_host_stays() -> None:
    losses, weights, kept = run_threads(training, 2, True, {"zero": 3})[0]
    want_losses, want_weights, _ = run_threads(training, 2, False, {"zero": 3})[0]
    assert losses == want_losses
    assert torch.equal(weights, want_weights)
    assert kept[0] > kept[1] == 0  # the optimizer's state


def reach(memory: tuple[Any, bytes, int]) -> str:
    """The error of mapping device memory by its handle; empty if it is there."""
    try:
        _core.device.Memory.mapped(*memory)
    except InvalidUsage as error:
        return str(error)
    return ""


def windows_while_away(options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Errors of mapping the memory of this rank's windows before and after it is stored."""
    with hdp.init() as comm:
        device = comm.streams.device  # type: ignore[attr-defined]
        trainer = trainer_of(comm, **options)
        trainer.step(LENGTHS, fetch)
        assert trainer.runner.masters is not None
        windows = trainer.runner.masters.windows.windows
        owned = [(device, each._memories[comm.rank].handle, each.nbytes) for each in windows]
        before = [reach(memory) for memory in owned]
        trainer.runner.store()
        comm.barrier()
        meanwhile = [reach(memory) for memory in owned]
        comm.barrier()
        trainer.runner.bring_back()
        trainer.step(LENGTHS, fetch)
        return before, meanwhile


@pytest.mark.parametrize("zero", [2, 3])
def test_windows_are_freed(zero: int) -> None:
    for before, meanwhile in run_threads(windows_while_away, 2, {"zero": zero}, transport="sim"):
        assert before == [""] * len(before) != []
        assert all("freed" in error for error in meanwhile), meanwhile


def used_while_away(kind: dict[str, bool]) -> list[str]:
    with hdp.init() as comm:
        trainer = trainer_of(comm, zero=3)
        trainer.step(LENGTHS, fetch)
        trainer.runner.store(**kind)
        told = []
        for use in (
            lambda: trainer.step(LENGTHS, fetch),
            lambda: trainer.evaluate(LENGTHS, fetch),
            lambda: next(trainer.whole_tensors()),
            trainer.state_dict,
            trainer.runner.update,
        ):
            try:
                use()
                told.append("")
            except InvalidUsage as error:
                told.append(str(error))
        return told


def test_use_while_away() -> None:
    sentence = "are in host memory, so that others have the device's; bring them back to cpu first"
    for told in run_threads(used_while_away, 2, {"optimizer": False}, transport="sim"):
        assert told == [f"weights {sentence}"] * 5
    for step, evaluation, *rest in run_threads(used_while_away, 2, {"model": False}, transport="sim"):
        assert step == rest[-1] == f"the optimizer's state {sentence}"
        assert evaluation == ""


def brought_back_later(failing: set[int]) -> tuple[str, float]:
    """(the error of the first try, the loss of the step after the second)"""
    with hdp.init() as comm:
        trainer = trainer_of(comm, zero=3)
        trainer.step(LENGTHS, fetch)
        trainer.runner.store()
        if comm.rank == 1:
            failing.add(threading.get_ident())
        told = "nothing"
        try:
            trainer.runner.bring_back()
        except Error as error:
            told = str(error)
        assert trainer.runner.stored == (True, True)
        trainer.runner.bring_back()
        return told, trainer.step(LENGTHS, fetch).loss


def test_memory_that_others_have_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failing: set[int] = set()
    memory = _core.device.Memory

    class Scarce:
        mapped = memory.mapped

        def __new__(cls, device: Any, nbytes: int) -> Any:
            if threading.get_ident() in failing:
                failing.clear()
                raise Error("no such memory is free", rank=1, op="window")
            return memory(device, nbytes)

    monkeypatch.setattr(_core.device, "Memory", Scarce)
    (first, loss), (second, _) = run_threads(brought_back_later, 2, failing, transport="sim")
    assert "another rank of this host could not map the memory" in first
    assert "no such memory is free" in second
    assert loss == run_threads(training, 2, False, {"zero": 3}, transport="sim")[0][0][1]
