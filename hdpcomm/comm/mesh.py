"""Which rank does what when HDP runs beside pipeline, tensor and expert parallelism: :class:`Mesh`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from types import SimpleNamespace
from typing import Any, cast

import torch

from hdpcomm.arguments import check_has, check_whole
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.topology import domain_block, domains_of, host_order, node_block, nodes_of, shared_cores
from hdpcomm.comm.work import ENDED, Work
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec

__all__ = ["AbsentRanks", "Mesh"]


class Mesh:
    """The ranks of a communicator as pipeline stages x HDP ranks x tensor ranks.

    Every communicator of the mesh is a :meth:`Communicator.subset` of the one that is given: no message, no group, no
    memory. Expert parallelism lies inside HDP: ``expert`` neighbouring HDP ranks hold the experts of a layer together.

    By default the tensor ranks are neighbours on one host, HDP ranks follow, and the pipeline's stages are farthest
    apart, since they exchange least: rank = (stage * hdp + hdp_rank) * tensor + tensor_rank, counted host by host.
    Local: every rank of ``comm`` makes one with equal arguments.

    Args:
        comm: the ranks that train together.
        pipeline, tensor: sizes; their product divides the number of ranks, and the rest is HDP.
        expert: ranks that share the experts of a layer; divides the HDP ranks.
        expert_replicas: the most copies of others' busy experts on each of these ranks and layer, which steps choose.
        placement: the positions in ``comm`` in the order [stage, HDP rank, tensor rank], flat, in place of the default.

    Attributes:
        comm: as given.
        pipeline, hdp, tensor, expert, expert_replicas: sizes.
        stage, hdp_rank, tensor_rank, expert_rank: this rank's place.
        pipeline_comm: the stages of this rank's pipeline, in order.
        hdp_comm: the HDP ranks of this rank's stage; a plan's ranks are positions in it.
        tensor_comm: the ranks that share this rank's layers.
        expert_comm: the ranks that hold the experts of a layer together.
        expert_replica_comm: the ranks that hold the same experts as this one.

    Raises:
        InvalidUsage: sizes that do not divide, a placement that is no permutation, or a tensor group on two hosts.

    Source: ByteScale, arXiv 2502.21231, section 5.1 (d_hdp * d_tp * d_pp = N).

    Examples:
        >>> import hdpcomm as hdp
        >>> with hdp.init() as comm:
        ...     mesh = hdp.Mesh(comm)
        ...     mesh.hdp, mesh.pipeline, mesh.hdp_comm.size
        (1, 1, 1)
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        pipeline: int = 1,
        tensor: int = 1,
        expert: int = 1,
        expert_replicas: int = 0,
        placement: Sequence[int] | None = None,
    ) -> None:
        check_has("Mesh", "comm", comm, "subset", "the communicator of init()")
        for name, size in (("pipeline", pipeline), ("tensor", tensor), ("expert", expert)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidUsage(f"{name} is {size!r}; give a whole number of at least 1")
        if comm.size % (pipeline * tensor):
            raise InvalidUsage(
                f"{comm.size} ranks cannot be pipelines of {pipeline} stages with {tensor} tensor ranks each: the "
                f"number of ranks must be a multiple of {pipeline * tensor}"
            )
        hdp = comm.size // (pipeline * tensor)
        if hdp % expert:
            raise InvalidUsage(
                f"{hdp} HDP ranks ({comm.size} ranks / pipeline {pipeline} / tensor {tensor}) cannot be groups of "
                f"{expert} ranks that share experts: expert must divide {hdp}"
            )
        if check_whole("Mesh", "expert_replicas", expert_replicas, least=0) and expert == 1:
            raise InvalidUsage(f"expert_replicas is {expert_replicas} and expert 1: give ranks that share experts, too")
        self.comm, self.expert_replicas = comm, expert_replicas
        self.pipeline, self.hdp, self.tensor, self.expert = pipeline, hdp, tensor, expert
        self._hosts = nodes_of(comm)
        order = host_order(comm) if placement is None else self._given(placement)
        self._positions = torch.tensor(order, dtype=torch.int64).view(pipeline, hdp, tensor)
        if placement is None and tensor > 1:
            self._check_hosts()
        place = (self._positions == comm.rank).nonzero()[0].tolist()
        self.stage, self.hdp_rank, self.tensor_rank = place
        self.expert_rank = self.hdp_rank % expert
        first = self.hdp_rank - self.expert_rank
        along_hdp = self._positions[self.stage, :, self.tensor_rank]
        self.pipeline_comm = self._subset(self._positions[:, self.hdp_rank, self.tensor_rank])
        self.hdp_comm = self._subset(along_hdp)
        self.tensor_comm = self._subset(self._positions[self.stage, self.hdp_rank, :])
        self.expert_comm = self._subset(along_hdp[first : first + expert])
        self.expert_replica_comm = self._subset(along_hdp[self.expert_rank :: expert])

    @property
    def positions(self) -> torch.Tensor:
        """``[pipeline, hdp, tensor]`` int64: the position in ``comm`` of each place. A copy."""
        return self._positions.clone()

    def cluster(
        self,
        *,
        capacity: int | None = None,
        chunks: int = 1,
        split_backward: bool = False,
        offload: bool = False,
        nics: int | None = None,
    ) -> ClusterSpec:
        """The mesh as planners take it: its sizes, the hosts and domains that its HDP ranks lie on, and on CPUs the
        cores that they share. Collective over ``comm``.

        Args:
            capacity, chunks, split_backward, offload: of :class:`hdpcomm.plan.ClusterSpec`.
            nics: network interfaces of a host; ``None``: on CPUs one, else one for each rank.
        """
        groups = self._positions.transpose(1, 2).reshape(-1, self.hdp).tolist()  # the HDP ranks that work together
        domains = domains_of(self.comm)
        local = math.gcd(*(node_block(self.comm, group) for group in groups))
        near = math.gcd(*(domain_block(self.comm, domains, group) or 1 for group in groups))
        has_domains = near > local and near % local == 0
        on_cpu = self.comm.device.type == "cpu"
        # The simulated schedule of pipelines is that of devices that do not share cores, and tensor ranks work at once.
        cores = shared_cores(self.comm) if on_cpu and self.pipeline * self.tensor == 1 else None
        return ClusterSpec(
            ranks=self.hdp,
            capacity=capacity,
            ranks_per_node=local,
            ranks_per_domain=near if has_domains else None,
            tensor=self.tensor,
            pipeline=self.pipeline,
            expert=self.expert,
            nics=nics or (1 if on_cpu else None),
            cores=cores,
            chunks=chunks,
            split_backward=split_backward,
            offload=offload,
        )

    def _subset(self, positions: torch.Tensor) -> Communicator:
        return cast("Communicator", self.comm.subset(positions.tolist()))

    def _given(self, placement: Sequence[int]) -> list[int]:
        order = list(placement)
        if any(isinstance(p, bool) or not hasattr(p, "__index__") for p in order) or sorted(map(index, order)) != list(
            range(self.comm.size)
        ):
            raise InvalidUsage(
                f"placement is {order}; give each position from 0 to {self.comm.size - 1} once, in the order [stage, "
                "HDP rank, tensor rank]"
            )
        return [index(position) for position in order]

    def _check_hosts(self) -> None:
        for group in self._positions.view(-1, self.tensor).tolist():
            hosts = {self._hosts[self.comm.ranks[position]] for position in group}
            if len(hosts) > 1:
                raise InvalidUsage(
                    f"the tensor group of the ranks {[self.comm.ranks[position] for position in group]} would lie on "
                    f"{len(hosts)} hosts: tensor ({self.tensor}) must divide the ranks of each host, or placement= "
                    "must say where ranks go"
                )

    def __repr__(self) -> str:
        return (
            f"<Mesh pipeline {self.pipeline} x hdp {self.hdp} x tensor {self.tensor}, expert {self.expert}: stage "
            f"{self.stage}, HDP rank {self.hdp_rank}, tensor rank {self.tensor_rank}>"
        )


class AbsentRanks:
    """Stands for a :class:`hdpcomm.Communicator` where tensors are on torch's meta device, which have sizes and no
    bytes: each message has arrived when it is sent, and what has bytes is the same on all ranks.

    A mesh of it, and models cut for that mesh, are those of one rank of many; their passes allocate what that rank's
    would, so that its memory is known without any of them (:func:`hdpcomm.measure.memory.profile_memory`).

    Args:
        size: number of ranks.
        rank: the one whose place this process takes.
        ranks_per_host: for meshes, whose tensor ranks are to lie on one host.
    """

    device = torch.device("meta")

    def __init__(self, size: int, rank: int = 0, *, ranks_per_host: int | None = None) -> None:
        if not 0 <= rank < size:
            raise InvalidUsage(f"rank is {rank} of {size} ranks; give one from 0 to {size - 1}")
        self._ranks_per_host = ranks_per_host or size
        self.ranks: tuple[int, ...] = tuple(range(size))
        self.global_rank = rank
        self.rank = rank
        hosts = [each // self._ranks_per_host for each in range(size)]
        self._core = SimpleNamespace(world=SimpleNamespace(nodes=lambda: hosts))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subset(self, ranks: Sequence[int]) -> AbsentRanks | None:
        chosen = tuple(self.ranks[place] for place in ranks)
        if self.global_rank not in chosen:
            return None
        made = object.__new__(AbsentRanks)
        made.__dict__.update(self.__dict__)
        made.ranks, made.rank = chosen, chosen.index(self.global_rank)
        return made

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def _arrived(self, *_: Any, **__: Any) -> Work:
        return ENDED

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, **_: Any) -> Work:
        """Fills all parts with this rank's own."""
        if not out.is_meta:
            out.view(self.size, -1).copy_(x.reshape(1, -1).expand(self.size, -1))
        return ENDED

    def all_reduce(self, x: torch.Tensor, op: str = "sum", **_: Any) -> Work:
        if op == "sum" and not x.is_meta:
            x *= self.size
        return ENDED

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, _: Any = None, in_splits: Sequence[int] = (), **__: Any
    ) -> Work:
        """Fills all parts with what this rank has for itself."""
        if not out.is_meta:
            own = torch.split(x, list(in_splits) or x.numel() // self.size)[self.rank]
            out.view(self.size, -1).copy_(own.expand(self.size, -1))
        return ENDED

    send = recv = exchange = barrier = _arrived
    reduce_scatter = broadcast = reduce = gather = scatter = _arrived

    def landing_zone(self, x: Any) -> None:
        """``None``: buffers of rings are counted as tensors."""

    def lands(self, _: int) -> bool:
        return False
