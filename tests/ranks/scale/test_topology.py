"""``hdpcomm doctor --topology`` on ranks of one host and of two that share a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.comm.costs import load_costs
from hdpcomm.comm.topology import by_host, node_block
from hdpcomm.measure.topology import Topology, measure_topology


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    report = tmp_path / "report.json"
    assert main(["doctor", "--topology", "--ranks", "2", "--json", str(report)]) == 0
    told = capsys.readouterr().out
    assert "2 ranks on 1 host, transport shm" in told
    assert "between hosts  no such pair" in told
    found = json.loads(report.read_text())
    assert found["inter"] is None
    assert found["intra"]["bandwidth"] > 0


def test_costs_keep_those_of_other_transports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {"alpha_s": 1e-6, "message_s": 2e-7, "beta_s_per_byte": 1e-10, "gamma_s_per_byte": 3e-10}
    monkeypatch.setattr("hdpcomm.comm.launch.run_ranks", lambda *_: [(Topology("shm", (), None, None), {"shm": costs})])
    monkeypatch.delenv("HDPCOMM_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "hdpcomm" / "costs.json"
    path.parent.mkdir()
    path.write_text('{"tcp": {"alpha_s": 1}}')
    command = ["doctor", "--topology", "--costs"]
    assert main(command) == 0
    assert json.loads(path.read_text()) == {"tcp": {"alpha_s": 1}, "shm": costs}
    assert load_costs("shm") == costs
    assert "alpha 1.00 us, message 0.20 us, beta 0.1000 ns/byte, gamma 0.3000" in capsys.readouterr().out
    monkeypatch.setenv("HDPCOMM_COSTS", str(tmp_path / "new.json"))
    assert main(command) == 0
    assert json.loads((tmp_path / "new.json").read_text()) == {"shm": costs}
    for text in ("{", "[]"):
        path.write_text(text)
        assert main([*command, str(path)]) == 6
        assert "is no file of --costs" in capsys.readouterr().err


def test_the_command_measures_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "costs.json"
    assert main(["doctor", "--topology", "--ranks", "2", "--transport", "tcp", "--costs", str(path)]) == 0
    written = json.loads(path.read_text())
    assert list(written) == ["tcp"]
    assert min(written["tcp"].values()) > 0
    assert f"written to {path}" in capsys.readouterr().out


def on_two_hosts() -> Topology:
    import os

    os.environ["HDPCOMM_HOSTID"] = "b" if int(os.environ["RANK"]) > 1 else "a"
    try:
        comm = hdp.init()
    finally:
        del os.environ["HDPCOMM_HOSTID"]
    with pytest.raises(hdp.InvalidUsage, match="give what init"):
        measure_topology(comm.subset([comm.rank]))  # type: ignore[arg-type]
    return measure_topology(comm)


def test_two_hosts(ranks: Any) -> None:
    found = ranks(3, on_two_hosts)
    assert all(each == found[0] for each in found)
    topology = found[0]
    assert topology.transport == "shm+tcp"
    assert [host.ranks for host in topology.hosts] == [(0, 1), (2,)]
    assert topology.ranks == 3
    assert topology.intra.pairs == 1
    assert topology.inter.pairs == 2
    assert topology.intra.latency_s > 0
    assert topology.inter.bandwidth > 0


def dealt_out() -> tuple[tuple[int, ...], int, int, tuple[int, ...], list[tuple[int, bool]]]:
    import os

    from hdpcomm.measure.costs import profile_samples
    from hdpcomm.models import Llama, LlamaConfig

    os.environ["HDPCOMM_HOSTID"] = "ab"[int(os.environ["RANK"]) % 2]
    try:
        world = hdp.init()
    finally:
        del os.environ["HDPCOMM_HOSTID"]
    comm = by_host(world)
    assert (comm.rank == 0) == (world.rank == 0)
    part = comm.subset([0, 2])
    small = Llama(LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24))
    samples = profile_samples(small, comm, longest=64)
    return (
        comm.ranks,
        node_block(world),
        node_block(comm),
        () if part is None else (node_block(part), node_block(comm, [0, 1])),
        sorted({(sample.ranks, sample.one_node) for sample in samples}),
    )


def test_ranks_that_are_dealt_out_are_sorted_by_host(ranks: Any) -> None:
    for ranks_of, mixed, sorted_, part, samples in ranks(4, dealt_out):
        assert ranks_of == (0, 2, 1, 3)
        assert (mixed, sorted_) == (1, 2)
        assert part in ((), (1, 2))
        assert samples == [(1, True), (2, True), (4, False)]


def four_hosts_in_two_racks() -> tuple[Any, ...]:
    import os

    from hdpcomm.comm.topology import domain_block, domains_of
    from hdpcomm.measure.costs import profile_samples
    from hdpcomm.models import Llama, LlamaConfig

    os.environ["HDPCOMM_HOSTID"] = "abcd"[int(os.environ["RANK"])]
    try:
        world = hdp.init()
        unnamed = domains_of(world)
        os.environ["HDPCOMM_DOMAIN"] = ["one", "", "one", "two"][world.rank]
        partly = domains_of(world)
        os.environ["HDPCOMM_DOMAIN"] = ["one", "two"][world.rank % 2]
        topology = measure_topology(world)
        domains = domains_of(world)
    finally:
        for name in ("HDPCOMM_HOSTID", "HDPCOMM_DOMAIN"):
            os.environ.pop(name, None)
    comm = by_host(world, domains)
    assert domains is not None
    near = [domains[rank] for rank in comm.ranks]
    small = Llama(LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24))
    samples = profile_samples(small, comm, longest=64, domains=near)
    blocks = (domain_block(world, domains), domain_block(comm, near), domain_block(comm, near, [0, 2]))
    return (
        unnamed,
        partly,
        domains,
        comm.ranks,
        blocks,
        topology,
        sorted({(sample.ranks, sample.one_node, sample.one_domain) for sample in samples}),
    )


def test_hosts_of_a_domain_are_side_by_side(ranks: Any) -> None:
    found = ranks(4, four_hosts_in_two_racks)
    assert all(each == found[0] for each in found)
    unnamed, partly, domains, order, blocks, topology, samples = found[0]
    assert (unnamed, partly, domains) == (None, [0, 1, 0, 2], [0, 1, 0, 1])
    assert order == (0, 2, 1, 3)
    assert blocks == (None, 2, None)
    assert topology.domains == ((0, 2), (1, 3))
    assert (topology.domain.pairs, topology.inter.pairs, topology.domain_of_rank) == (2, 3, [0, 1, 0, 1])
    assert samples == [(1, True, False), (2, False, True), (4, False, False)]


def three_and_one() -> list[tuple[int, bool]]:
    import os

    from hdpcomm.measure.costs import profile_samples
    from hdpcomm.models import Llama, LlamaConfig

    os.environ["HDPCOMM_HOSTID"] = "aaab"[int(os.environ["RANK"])]
    try:
        comm = hdp.init()
    finally:
        del os.environ["HDPCOMM_HOSTID"]
    small = Llama(LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24))
    return [(sample.ranks, sample.one_node) for sample in profile_samples(small, comm, longest=64)]


def test_unequal_hosts(ranks: Any) -> None:
    for samples in ranks(4, three_and_one):
        assert sorted(set(samples)) == [(1, True), (2, True), (3, True), (4, False)]
