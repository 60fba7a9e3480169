"""Joining a world, communicators over any ordered set of its ranks, and the operations between them."""

from hdpcomm.comm.bootstrap import init
from hdpcomm.comm.communicator import Communicator, SharedCounter, Work
from hdpcomm.comm.mesh import Mesh

__all__ = ["Communicator", "Mesh", "SharedCounter", "Work", "init"]
