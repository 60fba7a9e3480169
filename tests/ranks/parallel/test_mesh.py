"""The mesh: every rank has one place, groups of one kind are disjoint and cover all ranks, and errors are clear."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads

GROUPS = ("pipeline_comm", "hdp_comm", "tensor_comm", "expert_comm", "expert_replica_comm")


class FakeComm:
    """A communicator's places without a world; ``hosts``: by global rank."""

    def __init__(self, rank, ranks, hosts):
        self.rank, self.size, self.ranks = rank, len(ranks), tuple(ranks)
        self.global_rank = ranks[rank]
        self._core = SimpleNamespace(world=SimpleNamespace(nodes=lambda: list(hosts)))

    def subset(self, positions):
        return FakeComm(
            list(positions).index(self.rank) if self.rank in positions else 0,
            [self.ranks[position] for position in positions],
            self._core.world.nodes(),
        )


@st.composite
def shapes(draw):
    pipeline, expert, replicas, tensor = (draw(st.integers(1, 4)) for _ in range(4))
    ranks = draw(st.permutations(range(pipeline * expert * replicas * tensor)))
    # Hosts that hold whole tensor groups, of any sizes, in any order.
    hosts = [0] * len(ranks)
    for group in range(len(ranks) // tensor):
        host = draw(st.integers(0, 3))
        for each in ranks[group * tensor : (group + 1) * tensor]:
            hosts[each] = host
    return pipeline, tensor, expert, ranks, hosts


@settings(max_examples=60)
@given(shape=shapes())
def test_groups_of_each_kind_are_a_partition(shape):
    pipeline, tensor, expert, ranks, hosts = shape
    meshes = [
        Mesh(FakeComm(rank, ranks, hosts), pipeline=pipeline, tensor=tensor, expert=expert)
        for rank in range(len(ranks))
    ]
    hdp = len(ranks) // pipeline // tensor
    sizes = dict(zip(GROUPS, (pipeline, hdp, tensor, expert, hdp // expert), strict=True))
    for name, size in sizes.items():
        groups = {getattr(mesh, name).ranks for mesh in meshes}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(len(ranks)))
        assert all(mesh.comm.global_rank in getattr(mesh, name).ranks for mesh in meshes)
    places = {(m.stage, m.hdp_rank, m.tensor_rank): m for m in meshes}
    assert len(places) == len(meshes)
    for (stage, hdp_rank, tensor_rank), mesh in places.items():
        assert mesh.pipeline_comm.ranks[stage] == mesh.comm.global_rank
        assert mesh.hdp_comm.ranks[hdp_rank] == mesh.comm.global_rank
        assert mesh.tensor_comm.ranks[tensor_rank] == mesh.comm.global_rank
        assert mesh.expert_comm.ranks[mesh.expert_rank] == mesh.comm.global_rank
        assert set(mesh.expert_comm.ranks) & set(mesh.expert_replica_comm.ranks) == {mesh.comm.global_rank}
        assert len({hosts[rank] for rank in mesh.tensor_comm.ranks}) == 1
    # HDP ranks are counted host by host: no stage goes back to a host that it has left.
    order = [hosts[meshes[0].comm.ranks[at]] for at in meshes[0].positions.flatten().tolist()]
    assert sum(one != two for one, two in itertools.pairwise(order)) == len(set(hosts)) - 1


def test_placement_by_hosts_and_by_hand():
    # Ranks of two hosts in turns, as some launchers number them.
    mesh = Mesh(FakeComm(3, range(8), [0, 1] * 4), pipeline=2, tensor=2)
    assert mesh.positions.tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert (mesh.stage, mesh.hdp_rank, mesh.tensor_rank) == (1, 0, 1)
    mesh.positions.zero_()  # a copy
    assert mesh.positions.sum() == 28
    assert repr(mesh) == ("<Mesh pipeline 2 x hdp 2 x tensor 2, expert 1: stage 1, HDP rank 0, tensor rank 1>")
    by_hand = Mesh(FakeComm(3, range(8), [0, 1] * 4), pipeline=2, tensor=2, placement=[7, 6, 5, 4, 3, 2, 1, 0])
    assert by_hand.hdp_comm.ranks == (3, 1)
    assert by_hand.tensor_comm.ranks == (3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": 4}, "6 ranks cannot be pipelines of 4 stages with 1 tensor ranks each.*a multiple of 4"),
        ({"pipeline": 2, "tensor": 2}, "must be a multiple of 4"),
        ({"pipeline": 2, "expert": 2}, "3 HDP ranks .* expert must divide 3"),
        ({"tensor": 0}, "tensor is 0; give a whole number of at least 1"),
        ({"pipeline": True}, "pipeline is True"),
        ({"expert": 1.5}, "expert is 1.5"),
        ({"placement": [0, 1, 2]}, r"placement is \[0, 1, 2\]; give each position from 0 to 5 once"),
        ({"placement": [0, 1, 2, 3, 4, 4]}, "once"),
        ({"tensor": 2}, r"the tensor group of the ranks \[2, 3\] would lie on 2 hosts"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    with pytest.raises(InvalidUsage, match=message):
        Mesh(FakeComm(0, range(6), [0, 0, 0, 1, 1, 1]), **options)


def test_groups_are_subsets_that_work_side_by_side():
    def rank():
        with hdp.init() as comm:
            before = comm.stats()["messages_sent"]
            mesh = Mesh(comm, pipeline=2, expert=2)
            made = comm.stats()["messages_sent"] - before
            sums = []
            for name in GROUPS:
                x = torch.tensor([float(comm.rank)])
                getattr(mesh, name).all_reduce(x)
                sums.append(float(x))
            return made, sums

    for at, (made, sums) in enumerate(run_threads(rank, 4)):
        assert made == 0
        pair = sum((at // 2 * 2, at // 2 * 2 + 1))
        assert sums == [at % 2 * 2 + 2, pair, at, pair, at]


def device_mesh_rank(expert):
    from hdpcomm.torch_backend import device_mesh

    comm = hdp.init()
    mesh = Mesh(comm, pipeline=2, expert=expert)
    with pytest.raises(InvalidUsage, match=r"torch\.distributed does not run on hdpcomm"):
        device_mesh(mesh)
    dist.init_process_group("hdpcomm")
    try:
        with pytest.raises(InvalidUsage, match=r"this is rank .* of 4 in torch\.distributed, and rank .* of a mesh"):
            device_mesh(Mesh(comm.subset([comm.rank, (comm.rank + 1) % 4])))
        made = device_mesh(mesh)
        names = ("pp", "ep") if expert > 1 else ("pp", "hdp")
        found = []
        for name in names:
            x = torch.tensor([1.0 + comm.rank])
            dist.all_reduce(x, group=made[name].get_group())
            found.append(float(x))
        wanted = [sum(1.0 + r for r in group.ranks) for group in (mesh.pipeline_comm, mesh.hdp_comm)]
        return found == wanted, made.mesh.flatten().tolist()
    finally:
        dist.destroy_process_group()
        comm.close()


@pytest.mark.parametrize("expert", [1, 2])
def test_device_mesh_of_torch(ranks, expert):
    assert ranks(4, device_mesh_rank, expert) == [(True, [0, 1, 2, 3])] * 4
