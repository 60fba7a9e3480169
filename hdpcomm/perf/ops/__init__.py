"""The operations that ``hdpcomm perf`` measures."""

from hdpcomm.errors import InvalidUsage
from hdpcomm.perf.operation import Operation
from hdpcomm.perf.ops import collectives as plain

__all__ = ["OPERATIONS", "operation"]

OPERATIONS: dict[str, Operation] = {
    kind.name: kind()
    for kind in (
        *(plain.AllGather, plain.AllReduce, plain.ReduceScatter, plain.Broadcast, plain.Reduce, plain.Gather),
        *(plain.Scatter, plain.AllToAll, plain.AllToAllV, plain.SendRecv, plain.Ring),
    )
}


def operation(name: str) -> Operation:
    """The operation called ``name``. Raises InvalidUsage for an unknown name."""
    found = OPERATIONS.get(name)
    if found is None:
        raise InvalidUsage(f"operation {name!r} is unknown; give one of: {', '.join(OPERATIONS)}")
    return found
