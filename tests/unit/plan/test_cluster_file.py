"""Saving and loading clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.measure.topology import Host, LinkCost, Topology, host_facts
from hdpcomm.plan import DEVICES, ClusterSpec, StepPlan, load_cluster, save_cluster

TOPOLOGY = Topology(
    transport="shm+torch",
    hosts=(Host("a", (0, 1, 2), 8, (), (("eth0", 25.0),)), Host("b", (3, 4), 8, (), ())),
    intra=LinkCost(3, 1e-6, 5e9),
    inter=LinkCost(3, 2e-4, 1e9),
)


def test_a_cluster_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    shared = replace(TOPOLOGY, nics=1).to_cluster("a100")
    for cluster in (ClusterSpec(ranks=16, capacity=1000, ranks_per_node=8), shared):
        save_cluster(cluster, path)
        loaded = load_cluster(path)
        assert loaded.hardware == cluster.hardware
        assert (loaded.ranks, loaded.ranks_per_node, loaded.capacity, loaded.nics) == (
            cluster.ranks,
            cluster.ranks_per_node,
            cluster.capacity,
            cluster.nics,
        )


def test_measured_links_replace_those_of_the_preset() -> None:
    cluster = TOPOLOGY.to_cluster("a100")
    assert (cluster.ranks, cluster.ranks_per_node) == (5, 2)
    device = cluster.hardware
    assert (device.intra_bandwidth, device.inter_bandwidth, device.inter_latency_s) == (5e9, 1e9, 2e-4)
    assert device.peak_flops == DEVICES["a100"].peak_flops
    alone = Topology("shm", TOPOLOGY.hosts[:1], TOPOLOGY.intra, None).to_cluster("a100").hardware
    assert alone.inter_bandwidth == DEVICES["a100"].inter_bandwidth
    with pytest.raises(hdp.InvalidUsage, match="unknown device 'abacus'"):
        TOPOLOGY.to_cluster("abacus")


def test_the_planner_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = tmp_path / "cluster.json", tmp_path / "plan.json"
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("32000\n")  # takes all eight ranks
    rings = []
    for nics in (None, 1):
        save_cluster(replace(TOPOLOGY, nics=nics).to_cluster("h100"), path)
        command = ["plan", "--cluster", str(path), "--ranks", "8", "--ranks-per-node", "2", "--lengths", str(lengths)]
        assert main([*command, "--capacity", "4k", "--out", str(plan)]) == 0
        assert "policy balanced on 8 ranks" in capsys.readouterr().out
        rings.append(StepPlan.load(plan).micro_batches[0].ranks)
    # Where the two ranks of a node share one interface, the ring leaves each node once.
    assert rings == [(0, 2, 4, 6, 7, 5, 3, 1), (1, 0, 4, 5, 6, 7, 2, 3)]


@pytest.mark.parametrize("text", ["{", "[]", '{"ranks": 4}', '{"ranks": 4, "device": {"name": "x"}}'])
def test_bad_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(hdp.InvalidUsage, match="holds no cluster"):
        load_cluster(path)
    with pytest.raises(hdp.InvalidUsage, match="holds no cluster"):
        load_cluster(tmp_path / "absent.json")


def test_facts_of_this_host() -> None:
    facts = host_facts()
    assert facts["cores"]
    assert isinstance(facts["name"], str)
    assert isinstance(facts["links"], list)
