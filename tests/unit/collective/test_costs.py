"""The choice of an algorithm follows the measured costs, and a bad costs file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hdpcomm as hdp
from hdpcomm._core import collective, comm
from hdpcomm.comm.costs import costs_path, load_costs, save_costs
from hdpcomm.plan import DEVICES
from tests.harness.native import _testing

DEFAULTS = collective.DEFAULT_COSTS
#: On a network steps are expensive and messages are cheap, so few steps win while messages are small.
NETWORK = {"alpha_s": 20e-6, "message_s": 5e-6, "beta_s_per_byte": 4e-11, "gamma_s_per_byte": 1e-11}


def chosen(op: str, size: int, count: int, costs: dict[str, float]) -> str:
    return _testing.choose(comm.OPS[op], size, count, 1, **costs)


@pytest.mark.parametrize("op", [op for op in comm.OPS if op != "send/recv"])
@pytest.mark.parametrize("costs", [DEFAULTS, NETWORK])
def test_the_choice_is_the_cheapest(op: str, costs: dict[str, float]) -> None:
    for size in (2, 3, 4, 7, 8, 64):
        for count in (0, 8, 4096, 1 << 20, 1 << 28):
            seconds = {
                name: _testing.estimate_s(comm.OPS[op], comm.ALGORITHMS[name], size, count, 1, **costs)
                for name in comm.algorithms_of(comm.OPS[op])
            }
            assert all(value > 0 for value in seconds.values())
            assert seconds[chosen(op, size, count, costs)] == min(seconds.values())


def test_small_takes_few_steps_and_large_few_bytes() -> None:
    assert chosen("all_reduce", 8, 8, NETWORK) == "recursive"
    assert chosen("all_reduce", 8, 1 << 28, NETWORK) != "recursive"
    assert chosen("broadcast", 64, 8, NETWORK) == "binomial"
    assert chosen("broadcast", 64, 1 << 28, NETWORK) != "binomial"
    assert chosen("all_to_all", 64, 1, NETWORK) == "bruck"
    assert chosen("all_to_all", 64, 1 << 20, NETWORK) == "direct"


def test_costs_are_stored_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HDPCOMM_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_costs("shm") == DEFAULTS
    assert save_costs("shm", NETWORK) == costs_path() == tmp_path / "hdpcomm" / "costs.json"
    save_costs("another", {"alpha_s": 1.0})
    assert load_costs("shm") == NETWORK
    assert load_costs("another") == DEFAULTS | {"alpha_s": 1.0}
    with pytest.raises(hdp.InvalidUsage, match="known are: alpha_s"):
        save_costs("shm", {"delta": 1.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not hold costs"),
        ("[1]", "does not hold costs"),
        (json.dumps({"shm": {"alpha_s": "fast"}}), "does not hold costs"),
        (json.dumps({"shm": {"alpha_s": -1}}), "must be above 0"),
        (json.dumps({"shm": {"beta_s_per_byte": float("inf")}}), "must be above 0"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    monkeypatch.setenv("HDPCOMM_COSTS", str(path))
    with pytest.raises(hdp.InvalidUsage, match=message):
        load_costs("shm")
    monkeypatch.setenv("HDPCOMM_COSTS", str(tmp_path / "absent.json"))
    with pytest.raises(hdp.InvalidUsage, match="no such file"):
        load_costs("shm")


def test_nccl_costs_what_planner_and_simulator_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HDPCOMM_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = DEVICES["h100"]
    for name, latency, bandwidth in (
        ("nccl", device.intra_latency_s, device.intra_bandwidth),
        ("nccl between nodes", device.inter_latency_s, device.inter_bandwidth),
    ):
        costs = load_costs(name)
        assert (costs["alpha_s"], costs["beta_s_per_byte"]) == (latency, 1 / bandwidth)
        assert chosen("all_reduce", 8, 8, costs) in ("recursive", "direct")  # steps are expensive
    assert device.intra_latency_s == pytest.approx(11.8e-6)
    assert device.inter_latency_s == pytest.approx(22.4e-6)
