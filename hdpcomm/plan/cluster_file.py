"""Clusters as files: the measurements of ``hdpcomm doctor --topology``, for the planner and the simulator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text, write_whole
from hdpcomm.plan.cluster import ClusterSpec
from hdpcomm.plan.specs import DeviceSpec

__all__ = ["cluster_from_dict", "cluster_to_dict", "load_cluster", "save_cluster"]


def cluster_to_dict(cluster: ClusterSpec) -> dict[str, Any]:
    """A cluster and the figures of its device, as plain Python objects."""
    return dataclasses.asdict(cluster) | {"device": dataclasses.asdict(cluster.hardware)}


def cluster_from_dict(content: dict[str, Any]) -> ClusterSpec:
    """Reads :func:`cluster_to_dict` back. Raises: TypeError, KeyError, ValueError, InvalidUsage for anything else."""
    values = dict(content)
    device = DeviceSpec(**values.pop("device"))
    speeds = values.pop("speeds", None)
    return ClusterSpec(**values, device=device, speeds=None if speeds is None else tuple(map(float, speeds)))


def save_cluster(cluster: ClusterSpec, path: Path) -> None:
    """Writes a cluster and the figures of its device as JSON."""
    write_whole(path, (json.dumps(cluster_to_dict(cluster), indent=1) + "\n").encode())


def load_cluster(path: Path) -> ClusterSpec:
    """Reads what :func:`save_cluster` wrote.

    Raises: InvalidUsage for a file that cannot be read or holds no cluster.
    """
    try:
        return cluster_from_dict(json.loads(read_text(path)))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidUsage(
            f"{path} holds no cluster ({type(error).__name__}: {error}); write one with hdpcomm doctor --topology "
            "--cluster FILE"
        ) from error
