"""Calibration: every cost is measured, for each kind of link, and saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import hdpcomm as hdp
from hdpcomm.comm import Communicator
from hdpcomm.comm.costs import load_costs, save_costs
from hdpcomm.measure import timing as links
from tests.harness.fakes import run_threads


def measure_costs(transport: str) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_ROUNDS", 1)  # of seconds each
        with hdp.init(transport=transport) as comm:
            return links.measure(comm)


@pytest.mark.parametrize(("transport", "num_ranks"), [("shm", 2), ("sim", 2), ("sim", 3)])
def test_calibration(ranks: Any, transport: str, num_ranks: int, tmp_path: Path) -> None:
    everyone = ranks(num_ranks, measure_costs, transport)
    assert all(costs == everyone[0] for costs in everyone)
    assert min(everyone[0].values()) > 0
    save_costs(transport, everyone[0], tmp_path / "costs.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HDPCOMM_COSTS", str(tmp_path / "costs.json"))
        assert load_costs(transport) == everyone[0]  # no cost is missing
    with pytest.raises(hdp.InvalidUsage, match="--ranks 2"):
        ranks(1, measure_costs, transport)


def measure_on_hosts(names: list[str]) -> dict[str, dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HDPCOMM_HOSTID", names[int(os.environ["RANK"])])
        patch.setattr(links, "_ROUNDS", 1)  # of seconds each
        with hdp.init() as world:
            return links.measure_world(world)


@pytest.mark.parametrize(
    ("hosts", "names"),
    [("aa", ["shm"]), ("ab", ["tcp"]), ("abb", ["shm", "tcp"])],  # rank 0 has no pair on its host
)
def test_calibration_on_hosts(ranks: Any, hosts: str, names: list[str], tmp_path: Path) -> None:
    everyone = ranks(len(hosts), measure_on_hosts, list(hosts))
    assert all(found == everyone[0] for found in everyone)
    assert sorted(everyone[0]) == names
    for name, costs in everyone[0].items():
        assert min(costs.values()) > 0
        save_costs(name, costs, tmp_path / "costs.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HDPCOMM_COSTS", str(tmp_path / "costs.json"))
        assert {name: load_costs(name) for name in names} == everyone[0]


def calibrate_nccl() -> dict[str, dict[str, float]]:
    with hdp.init() as world:
        return links.measure_world(world)


def test_calibration_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake NCCL: under which names costs are saved, and which pairs of ranks are measured."""
    pairs: list[tuple[int, int]] = []

    def measured(_comm: Communicator, members: tuple[int, int]) -> dict[str, float]:
        pairs.append(members)
        return {"alpha_s": 1.0 + members[1]}

    monkeypatch.setattr(links, "measure", measured)
    found = run_threads(calibrate_nccl, 3, transport="nccl", hosts=(0, 1, 1))
    assert found == [{"nccl between nodes": {"alpha_s": 2.0}, "nccl": {"alpha_s": 3.0}}] * 3
    assert sorted(pairs) == [(0, 1)] * 3 + [(1, 2)] * 3
    assert run_threads(calibrate_nccl, 2, transport="nccl") == [{"nccl": {"alpha_s": 2.0}}] * 2
    monkeypatch.undo()
    with pytest.raises(hdp.InvalidUsage, match="--ranks 2 or more"):
        run_threads(calibrate_nccl, 1, transport="nccl")


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_costs_of_peer_reads_are_found(num_ranks: int) -> None:
    want = {"round_s": 5e-6, "signal_s": 2e-6, "read_s_per_byte": 3e-12}
    of_two, of_all = (5e-6 + 2 * (n - 1) * 2e-6 for n in (2, num_ranks))
    found = links.fit_reads(of_two, of_all, num_ranks, of_two + (4 << 20) * (3e-12 + 1e-12), 1e-12)
    assert found == pytest.approx(want)
    alone = links.fit_reads(of_two, of_two, 2, of_two, 1e-12)
    assert alone["round_s"] + 2 * alone["signal_s"] == pytest.approx(of_two)
    assert min(alone.values()) > 0
