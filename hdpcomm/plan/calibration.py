"""Measured costs of a model on a cluster, in one file: :class:`Calibration`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text, write_whole
from hdpcomm.plan.cost import CostModel, CostSample
from hdpcomm.plan.memory import MemoryModel
from hdpcomm.plan.specs import ClusterSpec, ModelSpec, cluster_from_dict, cluster_to_dict
from hdpcomm.plan.token_mixing import TokenMixing

__all__ = ["Calibration"]

_SCHEMA = "hdpcomm-calibration-1"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model on a cluster, measured by ``hdpcomm calibrate``; ``plan``, ``simulate`` and ``train`` take its file.

    Attributes:
        cost_model: of a micro-batch, fitted to ``samples``.
        cluster: the ranks as they were, and a device whose rates are those measured. Links and memory bandwidth are
            what makes the reduction of the gradients and the optimizer take as long as they did.
        memory: what a rank holds; its capacity is that of the cluster.
        model: ``None`` for one that is no plain decoder.
        facts: what was measured: ``model`` (its sizes), ``parameters``, ``dtype``, ``recompute``, ``longest`` (tokens
            of a rank), ``transport``, ``hosts``, ``date``, versions. A run with another model is refused.
        reduction_s, optimizer_s: seconds of a step's reduction of gradients, and of the optimizer.
        samples: micro-batches as measured, means over the ranks.
    """

    cost_model: CostModel
    cluster: ClusterSpec
    memory: MemoryModel
    model: ModelSpec | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    reduction_s: float = 0.0
    optimizer_s: float = 0.0
    samples: tuple[CostSample, ...] = ()

    def errors(self) -> list[float]:
        """Relative error of the cost model's prediction for each sample."""
        return [
            self.cost_model.seconds(
                sample.lengths, sample.ranks, one_node=sample.one_node, one_domain=sample.one_domain
            )
            / sample.seconds
            - 1
            for sample in self.samples
        ]

    def with_capacity(self, capacity: int) -> Calibration:
        """This calibration for ranks that hold ``capacity`` tokens without offload."""
        return replace(
            self,
            cluster=replace(self.cluster, capacity=capacity),
            memory=replace(self.memory, capacity=capacity),
        )

    def with_ranks(
        self, ranks: int, ranks_per_node: int | None = None, ranks_per_domain: int | None = None
    ) -> Calibration:
        """This calibration for another number of ranks of this kind, on hosts and in domains of as many ranks as before
        unless these are given; without domains where hosts do not fill them.

        Ranks that shared processors do so in the same proportion. Raises: InvalidUsage for more than one host where
        the links between hosts were not measured.
        """
        cluster = self.cluster
        cores = None if cluster.cores is None else max(1, round(cluster.cores * ranks / cluster.ranks))
        local = ranks_per_node or cluster.node_ranks
        if local < ranks and not (self.cost_model.kv_inter or self.cost_model.latency_inter):
            raise InvalidUsage(
                f"{ranks} ranks on hosts of {local} send between hosts, and the calibration was made on "
                f"{cluster.ranks} ranks of one host: give ranks_per_node={ranks} (--ranks-per-node), or calibrate on "
                "two hosts"
            )
        cores = None if cores is not None and cores >= ranks else cores
        near = ranks_per_domain
        if near is None and cluster.ranks_per_domain is not None and cluster.ranks_per_domain % local == 0:
            near = cluster.ranks_per_domain
        cluster = replace(cluster, ranks=ranks, ranks_per_node=local, ranks_per_domain=near, cores=cores, speeds=None)
        return replace(self, cluster=cluster)

    def save(self, path: Path) -> None:
        """Writes :meth:`to_json`. Raises: OSError."""
        write_whole(path, self.to_json().encode())

    def to_json(self) -> str:
        """One JSON object, in lines."""
        content = {
            "schema": _SCHEMA,
            "facts": self.facts,
            "cost_model": asdict(self.cost_model),
            "cluster": cluster_to_dict(self.cluster),
            "memory": asdict(self.memory),
            "model": None if self.model is None else asdict(self.model),
            "reduction_s": self.reduction_s,
            "optimizer_s": self.optimizer_s,
            "samples": [asdict(sample) for sample in self.samples],
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Reads what :meth:`save` wrote. Raises: InvalidUsage for a file that cannot be read or is none."""
        try:
            content = json.loads(read_text(path))
            if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
                raise ValueError(f"its schema is not {_SCHEMA!r}")
            model = content["model"]
            return cls(
                cost_model=CostModel.from_json(json.dumps(content["cost_model"])),
                cluster=cluster_from_dict(content["cluster"]),
                memory=_memory(content["memory"]),
                model=None if model is None else _model(model),
                facts=dict(content["facts"]),
                reduction_s=float(content["reduction_s"]),
                optimizer_s=float(content["optimizer_s"]),
                samples=tuple(CostSample(**each | {"lengths": tuple(each["lengths"])}) for each in content["samples"]),
            )
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise InvalidUsage(
                f"{path} holds no calibration ({type(error).__name__}: {error}); write one with hdpcomm calibrate "
                "--out FILE"
            ) from error


def _model(values: dict[str, Any]) -> ModelSpec:
    mixing = tuple(TokenMixing(**each) for each in values.get("mixing", ()))
    return ModelSpec(**values | {"mixing": mixing})


def _memory(values: dict[str, Any]) -> MemoryModel:
    memory = MemoryModel(**values)
    for name, value in values.items():
        if value is not None and not 0 <= float(value) < float("inf"):
            raise ValueError(f"memory.{name} is {value}")
    return memory
