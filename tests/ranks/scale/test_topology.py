"""The topology of ranks of one host and of two that share a machine."""

from __future__ import annotations

from typing import Any

import pytest

import hdpcomm as hdp
from hdpcomm.comm.topology import by_host, node_block
from hdpcomm.measure.topology import Topology, measure_topology


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
    assert topology.hosts == ((0, 1), (2,))
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
