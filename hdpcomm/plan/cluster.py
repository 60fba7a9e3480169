"""The ranks that train: :class:`ClusterSpec`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

from hdpcomm.arguments import check_number, check_type
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.specs import DEVICES, DeviceSpec, check_positive

__all__ = ["ClusterSpec", "cluster_from_dict", "cluster_to_dict"]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The ranks of hybrid data parallelism, and what each of them can hold.

    A rank is one device, or ``tensor * pipeline`` devices that work as one: ranks share the sequence dimension, while
    tensor and pipeline parallelism stay fixed.

    Attributes:
        ranks: number of HDP ranks.
        capacity: tokens that a rank holds without offload; ``None``: derived from its memory (needs a model).
        ranks_per_node: ranks that share the fast link; ``None``: all.
        ranks_per_domain: ranks of a domain: neighbouring nodes with faster links between them
            (``device.domain_bandwidth``) than to others, as those of a rack, or of an NVLink domain such as an NVL72. A
            multiple of ``ranks_per_node``; ``None``: links between nodes are all alike.
        tensor, pipeline: sizes of tensor and pipeline parallelism inside a rank.
        chunks: stages of the model on each device of a pipeline; more than 1 is interleaved 1F1B, which fills and
            drains the pipelines faster and keeps more activations.
        split_backward: backward passes of pipelines are split: the gradients of weights are computed where a device
            would wait for other stages (zero-bubble pipelines, arXiv 2401.10241). It needs a pipeline.
        offload: whether activations may go to host memory.
        expert: neighbouring ranks that share the experts of each layer; they run their micro-batches in waves
            (:mod:`hdpcomm.plan.waves`). It divides ``ranks``.
        expert_imbalance: rows that the busiest of these ranks gets from the routers, over the mean.
        cores: processors that the devices of all ranks share, if there are fewer of them than devices: a device that
            waits leaves its time to another. ``None``: each has its own.
        speeds: of each rank, relative to the fastest one, 0.001 to 1: a micro-batch takes 1 / speed times as long on a
            group whose slowest rank has it, whatever it waits for included. ``None``: all are alike.
            :class:`hdpcomm.plan.CostLearner` finds them in steps that were measured.
        nics: network interfaces of a node, each of ``device.inter_bandwidth``, that its ranks share in equal parts of
            neighbours. Where two messages of a ring would share one, the ring goes node after node and leaves each
            once, and ranks have more peers. ``None``: each rank has its own.
        stage_work: of each stage of the model, in that of the mean stage: its linear work, its attention work with
            messages, and what is paid once a layer (:func:`hdpcomm.plan.stage_work`). ``None``: all are alike.
        device: the name of a preset (``hdpcomm.plan.DEVICES``) or a :class:`DeviceSpec`.
    """

    ranks: int
    capacity: int | None = None
    ranks_per_node: int | None = None
    tensor: int = 1
    pipeline: int = 1
    offload: bool = False
    device: str | DeviceSpec = "h100"
    cores: int | None = None
    chunks: int = 1
    speeds: tuple[float, ...] | None = None
    expert: int = 1
    expert_imbalance: float = 1.0
    nics: int | None = None
    split_backward: bool = False
    ranks_per_domain: int | None = None
    stage_work: tuple[tuple[float, float, float], ...] | None = None

    def __post_init__(self) -> None:
        given = {
            name: getattr(self, name)
            for name in ("ranks_per_node", "ranks_per_domain", "cores", "nics")
            if getattr(self, name) is not None
        }
        counts = {"ranks": self.ranks, "tensor": self.tensor, "pipeline": self.pipeline, "chunks": self.chunks}
        counts["expert"] = self.expert
        check_positive("ClusterSpec", most=(1 << 31) - 1, **counts, **given)
        if self.ranks_per_domain is not None and self.ranks_per_domain % (self.ranks_per_node or self.ranks):
            raise InvalidUsage(
                f"ranks_per_domain is {self.ranks_per_domain} and nodes have {self.ranks_per_node or self.ranks} "
                "ranks: give a number of ranks that is a multiple of ranks_per_node"
            )
        if self.capacity is not None:
            check_positive("ClusterSpec", capacity=self.capacity)
        if self.chunks > 1 and self.pipeline == 1:
            raise InvalidUsage(
                f"chunks is {self.chunks} and pipeline 1: give a pipeline of 2 devices or more, or 1 chunk"
            )
        check_type("ClusterSpec", "split_backward", self.split_backward, bool)
        if self.split_backward and self.pipeline == 1:
            raise InvalidUsage(
                "split_backward was given and pipeline is 1, where no stage waits for another: give a pipeline of 2 "
                "devices or more, or whole backward passes"
            )
        if self.ranks % self.expert:
            raise InvalidUsage(
                f"expert is {self.expert} and ranks {self.ranks}: give a number of expert ranks that divides the ranks"
            )
        check_number("ClusterSpec", "expert_imbalance", self.expert_imbalance, least=1, most=self.expert)
        if self.speeds is not None:
            self._check_speeds(self.speeds)
        if self.stage_work is not None:
            self._check_stage_work(self.stage_work)

    def _check_speeds(self, speeds: tuple[float, ...]) -> None:
        check_type("ClusterSpec", "speeds", speeds, (tuple, list))
        if len(speeds) != self.ranks:
            raise InvalidUsage(f"ClusterSpec: {len(speeds)} speeds for {self.ranks} ranks, expected one for each")
        for rank, speed in enumerate(speeds):
            check_number("ClusterSpec", f"the speed of rank {rank}, 1 for the fastest,", speed, least=1e-3, most=1)
        if self.cores is not None and min(speeds) < 1:
            raise InvalidUsage(
                "ClusterSpec: ranks that share processors (cores) take time from each other and have no speeds of "
                "their own: give cores or speeds"
            )

    def _check_stage_work(self, works: tuple[tuple[float, float, float], ...]) -> None:
        check_type("ClusterSpec", "stage_work", works, (tuple, list))
        stages = self.pipeline * self.chunks
        if len(works) != stages or any(len(each) != 3 for each in works):
            raise InvalidUsage(
                f"ClusterSpec: stage_work is {works} for {stages} stages, expected (linear, attention, fixed) of each"
            )
        for shares in zip(*works, strict=True):
            for share in shares:
                check_number("ClusterSpec", "a share of a stage's work", share, least=0, most=stages)
            if abs(sum(shares) / stages - 1) > 1e-6:
                raise InvalidUsage(
                    f"ClusterSpec: stage_work has {shares} of one kind of work, expected shares of the mean stage's, "
                    "whose mean is 1"
                )

    @property
    def largest_share(self) -> float:
        """Layers of the device of a pipeline that has most, over the mean."""
        if self.stage_work is None:
            return 1.0
        shares = (self.stage_work[device :: self.pipeline] for device in range(self.pipeline))
        return max(sum(fixed for *_, fixed in each) for each in shares) / self.chunks

    def most_layers(self, layers: int) -> int:
        """Layers on the device of a pipeline that has most, where the model has so many."""
        return math.ceil(layers / self.pipeline * self.largest_share - 1e-6)

    def with_speeds(self, speeds: tuple[float, ...] | None) -> ClusterSpec:
        """This cluster with these speeds of its ranks."""
        return replace(self, speeds=speeds)

    @property
    def node_ranks(self) -> int:
        """Ranks that share a node."""
        return self.ranks if self.ranks_per_node is None else min(self.ranks, self.ranks_per_node)

    @property
    def domain_ranks(self) -> int:
        """Ranks that share a domain, or a node where there are no domains."""
        return max(self.node_ranks, min(self.ranks, self.ranks_per_domain or 0))

    @property
    def hardware(self) -> DeviceSpec:
        """The device; a name is looked up in the presets."""
        if isinstance(self.device, DeviceSpec):
            return self.device
        if not isinstance(self.device, str) or self.device not in DEVICES:
            raise InvalidUsage(f"unknown device {self.device!r}, expected one of {', '.join(DEVICES)} or a DeviceSpec")
        return DEVICES[self.device]


def cluster_to_dict(cluster: ClusterSpec) -> dict[str, Any]:
    """A cluster and the figures of its device, as plain Python objects."""
    return dataclasses.asdict(cluster) | {"device": dataclasses.asdict(cluster.hardware)}


def cluster_from_dict(content: dict[str, Any]) -> ClusterSpec:
    """Reads :func:`cluster_to_dict` back. Raises: TypeError, KeyError, ValueError, InvalidUsage for anything else."""
    values = dict(content)
    device = DeviceSpec(**values.pop("device"))
    speeds, work = values.pop("speeds", None), values.pop("stage_work", None)
    return ClusterSpec(
        **values,
        device=device,
        speeds=None if speeds is None else tuple(map(float, speeds)),
        stage_work=None if work is None else tuple((float(a), float(b), float(c)) for a, b, c in work),
    )
