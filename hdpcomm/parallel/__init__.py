"""HDP beside other kinds of parallelism: the mesh of ranks."""

from __future__ import annotations

from hdpcomm.parallel.mesh import Mesh

__all__ = ["Mesh"]
