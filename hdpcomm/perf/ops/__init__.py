"""The operations that ``hdpcomm perf`` measures, one module each."""

from hdpcomm.errors import InvalidUsage
from hdpcomm.perf.operation import Operation
from hdpcomm.perf.ops.all_gather import AllGather
from hdpcomm.perf.ops.all_reduce import AllReduce
from hdpcomm.perf.ops.alltoall import AllToAll
from hdpcomm.perf.ops.alltoallv import AllToAllV
from hdpcomm.perf.ops.broadcast import Broadcast
from hdpcomm.perf.ops.gather import Gather
from hdpcomm.perf.ops.hypercube import Hypercube
from hdpcomm.perf.ops.mixed import Mixed
from hdpcomm.perf.ops.reduce import Reduce
from hdpcomm.perf.ops.reduce_scatter import ReduceScatter
from hdpcomm.perf.ops.ring import Ring
from hdpcomm.perf.ops.scatter import Scatter
from hdpcomm.perf.ops.sendrecv import SendRecv
from hdpcomm.perf.ops.subset import Subset

__all__ = ["OPERATIONS", "operation"]

OPERATIONS: dict[str, Operation] = {
    kind.name: kind()
    for kind in (
        AllGather,
        AllReduce,
        ReduceScatter,
        Broadcast,
        Reduce,
        Gather,
        Scatter,
        AllToAll,
        AllToAllV,
        SendRecv,
        Hypercube,
        Ring,
        Subset,
        Mixed,
    )
}


def operation(name: str) -> Operation:
    """The operation called ``name``. Raises InvalidUsage for an unknown name."""
    found = OPERATIONS.get(name)
    if found is None:
        raise InvalidUsage(f"operation {name!r} is unknown; give one of: {', '.join(OPERATIONS)}")
    return found
