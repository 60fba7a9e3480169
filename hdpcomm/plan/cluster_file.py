"""Clusters as files: the measurements of ``hdpcomm doctor --topology``, for the planner and the simulator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.cluster import ClusterSpec
from hdpcomm.plan.specs import DeviceSpec

__all__ = ["load_cluster", "save_cluster"]


def save_cluster(cluster: ClusterSpec, path: Path) -> None:
    """Writes a cluster and the figures of its device as JSON."""
    content = dataclasses.asdict(cluster) | {"device": dataclasses.asdict(cluster.hardware)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load_cluster(path: Path) -> ClusterSpec:
    """Reads what :func:`save_cluster` wrote.

    Raises: InvalidUsage for a file that cannot be read or holds no cluster.
    """
    try:
        content = json.loads(path.read_text())
        device = DeviceSpec(**content.pop("device"))
        speeds = content.pop("speeds", None)
        return ClusterSpec(**content, device=device, speeds=None if speeds is None else tuple(map(float, speeds)))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidUsage(
            f"{path} holds no cluster ({type(error).__name__}: {error}); write one with hdpcomm doctor --topology "
            "--cluster FILE"
        ) from error
