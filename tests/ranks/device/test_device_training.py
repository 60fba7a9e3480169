"""Attention and training over streams give the same bits as over the shm transport."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import testing
from hdpcomm._core import collective
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.testing import run_threads, spawn
from tests.harness import pipelines
from tests.harness.attention_oracle import GRADS, Case, on_rank
from tests.harness.fakes import FakeMachine
from tests.harness.native import _testing
from tests.harness.worlds import small_slots
from tests.ranks.train.test_trainer import LENGTHS, fetch, trainer_of


def attention(case: Case) -> tuple[dict[str, torch.Tensor], int]:
    with hdp.init() as comm:
        return on_rank(case, comm), comm.stats()["messages_sent"]


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "sliding": {"window": 20},  # blocks that do not go straight to the next rank
    "longer keys": {"keys": [300, 20, 5, 61]},
}


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_forward_and_backward(variant: str, mask: str) -> None:
    options = {"variant": variant}
    case = Case(4, [150, 7, 1, 61], heads=4, kv_heads=4, dtype=torch.float32, **MASKS[mask], options=options)
    with small_slots():
        streams = run_threads(attention, 4, case, transport="sim")
    for (got, messages), (want, _) in zip(streams, run_threads(attention, 4, case), strict=True):
        assert messages > 0
        for name in GRADS:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("landing_bytes", [0, 4096, 1 << 20])
def test_zones_of_any_size(landing_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not fit into the landing zone go through slots."""
    case = Case(3, [150, 7, 61], heads=2, kv_heads=2, dtype=torch.float32, options={"variant": "ring"})
    monkeypatch.setenv("HDPCOMM_DEVICE_LANDING_BYTES", str(landing_bytes))
    for (got, _), (want, _) in zip(
        run_threads(attention, 3, case, transport="sim"), run_threads(attention, 3, case), strict=True
    ):
        for name in GRADS:
            assert torch.equal(got[name], want[name]), name


def test_processes() -> None:
    case = Case(2, [100, 3], heads=4, kv_heads=2, dtype=torch.float32, options={"variant": "ring"})
    for (got, _), (want, _) in zip(
        spawn(attention, 2, case, transport="sim"), run_threads(attention, 2, case), strict=True
    ):
        for name in GRADS:
            assert torch.equal(got[name], want[name]), name


def training() -> tuple[list[float], torch.Tensor]:
    with hdp.init() as comm:
        trainer = trainer_of(comm)
        losses = [trainer.step(LENGTHS, fetch).loss for _ in range(4)]
        return losses, torch.cat([p.detach().cpu().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("world_size", [2, 3])
def test_trainer(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training gives the bits of shared memory with its costs, which make the order of sums equal: no peer reads."""
    want = run_threads(training, world_size, transport="shm")
    for losses, weights in run_threads(training, world_size, transport="sim"):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want[0][0]), rtol=1e-5, atol=0)
        torch.testing.assert_close(weights, want[0][1], rtol=1e-4, atol=1e-4)
    monkeypatch.setenv("HDPCOMM_COSTS", str(tmp_path / "costs.json"))
    (tmp_path / "costs.json").write_text(json.dumps({"sim": collective.DEFAULT_COSTS | {"round_s": 1.0}}))
    for (losses, weights), (want_losses, want_weights) in zip(
        run_threads(training, world_size, transport="sim"), want, strict=True
    ):
        assert losses == want_losses
        assert torch.equal(weights, want_weights)


def zero_training(zero: int, dtype: torch.dtype | None) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """(losses of steps and evaluations, weights, bytes that parameters have between steps)"""
    with hdp.init() as comm:
        trainer = trainer_of(comm, zero=zero, dtype=dtype)
        losses = []
        for _ in range(3):
            losses.append(trainer.step(LENGTHS, fetch).loss)
            total = trainer.evaluate(LENGTHS[:3], fetch)
            comm.all_reduce(total)
            losses.append(float(total[0] / total[1]))
        kept = sum({id(s): s.nbytes() for s in (p.untyped_storage() for p in trainer.model.parameters())}.values())
        return losses, {key: tensor.cpu().clone() for key, tensor in trainer.whole_tensors()}, kept


ZERO = [(2, None), (3, None), (3, torch.bfloat16)]


def check_zero(found: list[Any], zero: int, dtype: torch.dtype | None) -> None:
    """Stages 2 and 3 over devices train as stage 1 over shared memory."""
    losses, weights, whole = run_threads(zero_training, 2, 1, dtype)[0]
    exact = dtype is None
    for own_losses, own, kept in found:
        assert own_losses == pytest.approx(losses, rel=1e-5 if exact else 2e-2)
        for key, tensor in weights.items():
            torch.testing.assert_close(own[key], tensor, rtol=1e-4, atol=1e-4 if exact else 2e-2)
        assert (kept < 0.1 * whole) == (zero == 3)


@pytest.mark.parametrize(("zero", "dtype"), ZERO)
def test_parts_that_processes_import(zero: int, dtype: torch.dtype | None) -> None:
    check_zero(spawn(zero_training, 2, zero, dtype, transport="sim"), zero, dtype)


def environment() -> tuple[str, str]:
    with hdp.init() as comm:
        comm.barrier()
        return comm.transport, os.environ["HDPCOMM_TRANSPORT"]


def test_the_transport_of_spawn() -> None:
    assert spawn(environment, 2, transport="sim") == [("sim", "sim")] * 2


ALLOCATE = ("allocate", "allocatePinned", "registerPinned", "importMemory", "createStream")


def calls_of_steps(options: dict[str, Any]) -> dict[str, int]:
    """What four steps give the device, after three."""
    with hdp.init() as comm:
        device = comm.streams.device  # type: ignore[attr-defined]
        if options.get("pipeline"):
            plan = [((0,), (1, 2)), ((0,), (0,)), ((0,), (3, 4, 5))]
            planner = pipelines.FixedPlanner(1, 2, plan, ratio=1.0)
            trainer = pipelines.trainer_of(comm, planner, pipelines.CONFIG, torch.float32)
            trainer.offload = ActivationOffload(
                PinnedPool(8 << 20, device=device), trainer.model.blocks, min_bytes=1, resident_layers=0
            )
            lengths = [40, 20, 13, 9, 5, 2]
            steps = [lambda: trainer.step(lengths, lambda i: torch.arange(lengths[i]))]
        else:
            trainer = trainer_of(comm, **options)
            steps = [lambda: trainer.step(LENGTHS, fetch)]
        for number in range(7):
            if number == 3:
                device.count_calls()
            steps[0]()
        found: dict[str, int] = device.counted_calls()
        assert not options.get("pipeline") or trainer.offload.stats().stored_bytes > 0
        return found


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"pipeline": True}],
    ids=["plain", "bf16", "zero 1", "zero 2", "zero 3", "pipeline, offload"],
)
def test_a_step_allocates_nothing(options: dict[str, Any]) -> None:
    """Neither the engine nor offload; torch has an allocator of its own. Until a stream has eight marks by which the
    host knows how far ahead it is (pacer.hpp), it makes an event for each."""
    machine = FakeMachine(2, opens=_testing.TestDevice)
    for found in testing.run_threads(machine.ranks(calls_of_steps), 2, options, transport="sim"):
        assert found["copy"] > 0
        assert not set(ALLOCATE) & set(found), found
