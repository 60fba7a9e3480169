"""The process group that torch gets: collectives and messages, and what else torch asks of a group."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.work import BackendWork, Engine, Operation, seconds_of

__all__ = ["HdpProcessGroup"]


# By the number of the RedOpType, which is found faster than the object.
_CORE: dict[int, str] = {
    kind.value: name
    for kind, name in (
        (ReduceOp.SUM, "sum"),
        (ReduceOp.AVG, "avg"),
        (ReduceOp.PRODUCT, "prod"),
        (ReduceOp.MIN, "min"),
        (ReduceOp.MAX, "max"),
    )
}
Tensors = torch.Tensor | Sequence[torch.Tensor]
Lists = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


def op_of(options: Any) -> Any:
    """The reduce operation in torch's options, or what stands in their place."""
    return ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """The root in torch's options, or what stands in their place."""
    return options if isinstance(options, int) else int(getattr(options, "rootRank", 0))


def one(tensors: Any, call: str, what: str) -> Any:
    """The only element of the lists that torch's calls take (they were made for several devices a process)."""
    if type(tensors) is list and len(tensors) == 1:
        return tensors[0]
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidUsage(f"{call}() got {len(tensors)} {what}; give a list of one")
    return tensors[0]


def tensor_of_each_rank(operation: Operation, lists: Any, what: str) -> Sequence[torch.Tensor]:
    """The list of one tensor a rank, from the lists of lists that torch's calls take."""
    tensors = lists
    if len(lists) == 0 or not isinstance(lists[0], torch.Tensor):
        tensors = one(lists, operation.call, f"{what} lists")
    check_count(operation, tensors, what)
    return list(tensors)


def check_count(operation: Operation, tensors: Sequence[torch.Tensor], what: str) -> None:
    """There must be one tensor for each rank."""
    size = operation.comm.size
    if len(tensors) != size:
        raise InvalidUsage(f"{operation.call}() got {len(tensors)} {what}s; give one for each of the {size} ranks")


def check_types(operation: Operation, tensors: Sequence[torch.Tensor]) -> None:
    """All tensors must have one type."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) != 1:
        names = ", ".join(sorted(map(str, types)))
        raise InvalidUsage(f"{operation.call}() got tensors of {names}; give all one type")


def check_equal(operation: Operation, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """The parts must have the type and the size of the tensor."""
    check_types(operation, [*parts, tensor])
    sizes = {part.numel() for part in parts}
    if sizes != {tensor.numel()}:
        raise InvalidUsage(
            f"{operation.call}() got a list of {sorted(sizes)} elements a rank and a tensor of {tensor.numel()}; "
            "give equal sizes"
        )


def check_pairs(operation: Operation, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor]) -> None:
    """Each tensor of the first list must be one of the second list for each rank."""
    if len(large) != len(small):
        raise InvalidUsage(f"{operation.call}() got {len(large)} and {len(small)} tensors; give pairs")
    size = operation.comm.size
    for many, few in zip(large, small, strict=True):
        check_types(operation, [many, few])
        if many.numel() != few.numel() * size:
            raise InvalidUsage(
                f"{operation.call}() got tensors of {many.numel()} and {few.numel()} elements; on {size} ranks one has "
                f"{size} times the elements of the other"
            )


def elements_of(operation: Operation, tensor: torch.Tensor, rows: Sequence[int] | None, what: str) -> list[int]:
    """The elements for each rank, from rows of dimension 0."""
    size = operation.comm.size
    num_rows = tensor.shape[0] if tensor.dim() > 0 else 1
    row = math.prod(tensor.shape[1:])
    if rows is None or len(rows) == 0:
        if num_rows % size:
            raise InvalidUsage(
                f"{operation.call}() got an {what} of {num_rows} rows without splits; they must be divisible by the "
                f"{size} ranks"
            )
        return [num_rows // size * row] * size
    if len(rows) != size or min(rows) < 0 or sum(rows) != num_rows:
        raise InvalidUsage(
            f"{operation.call}() got {what} splits {list(rows)}; give {size} counts, none below 0, that sum up to the "
            f"tensor's {num_rows} rows"
        )
    return [count * row for count in rows]


def reduction(op: Any, dtype: torch.dtype, call: str) -> str:
    """The core's name of a reduce operation.

    Raises: NotImplementedError naming an operation that it has not; InvalidUsage for a type that it does not take.
    """
    kind = getattr(op, "op", op)  # ReduceOp or RedOpType
    in_core = _CORE.get(kind.value)
    if in_core is None:
        raise NotImplementedError(f"hdpcomm backend: {call} with ReduceOp.{getattr(kind, 'name', str(kind))}")
    if dtype.is_complex and in_core not in ("sum", "avg"):
        raise InvalidUsage(f"{call}() got op={in_core} for {dtype}; complex tensors can be added and averaged")
    return in_core


class Collectives:
    """The operations of a group, by the names of torch's C++ groups; ``opts``: torch's options, or a plain value.

    Ranks in arguments are positions in the group.
    """

    engine: Engine
    communicator: Communicator
    _seconds: float  # that an operation may take
    _world_seconds: float  # that one of the world may

    # Where torch has several signatures, `options` is its options object or, in those without one, what stands there.
    def _begin(self, call: str, options: Any, timeout: datetime.timedelta | None = None) -> Operation:
        """An operation whose parts can be started."""
        given = options if isinstance(options, datetime.timedelta) else getattr(options, "timeout", None)
        seconds = seconds_of(given if timeout is None else timeout, self._seconds)
        # A deadline of its own can be given to wait() only.
        background = getattr(options, "asyncOp", True) or seconds != self._world_seconds
        return Operation(call, self.communicator, timeout=seconds, background=background)

    def _end(self, operation: Operation, outputs: Sequence[torch.Tensor], *, in_order: bool = True) -> BackendWork:
        """The work of an operation whose parts have all been started. ``in_order``: it ends after those that were
        started before it."""
        if operation.over:
            return BackendWork.ended(outputs)
        engine = self.engine
        work = operation.work(outputs, engine.complete_in_order if in_order else engine.complete_alone)
        if in_order and operation.parts and operation.copies:
            engine.hold(work, operation.parts)
        return work

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
        tensor = one(tensors, "send", "tensors")
        comm, peer = self._way("send", tensor, dst, tag)
        operation = self._begin("send", None)
        operation.start(comm.send, operation.source(tensor), peer)
        return self._end(operation, [], in_order=False)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
        tensor = one(tensors, "recv", "tensors")
        comm, peer = self._way("recv", tensor, src, tag)
        operation = self._begin("recv", None)
        operation.source_rank = src
        operation.start(comm.recv, operation.target(tensor), peer)
        return self._end(operation, [tensor], in_order=False)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> BackendWork:
        raise NotImplementedError(
            "hdpcomm backend: recv() from any source; messages of a pair of ranks are matched in the order of the "
            "calls: name the source"
        )

    def _way(self, call: str, tensor: torch.Tensor, rank: int, tag: int) -> tuple[Communicator, int]:
        """The communicator that moves the message, and the peer's rank there."""
        comm = self.communicator
        if not 0 <= rank < comm.size:
            raise InvalidUsage(f"{call}() got rank {rank}; this group has ranks 0..{comm.size - 1}")
        if tag:
            raise NotImplementedError(
                f"hdpcomm backend: {call}() with tag {tag}; messages of a pair of ranks are matched in the order of "
                "the calls: leave the tag out"
            )
        return (comm, rank) if comm._by_streams(tensor) else (self.engine.messages, comm.ranks[rank])

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> BackendWork:
        operation = self._begin("barrier", opts, timeout)
        operation.start(self.communicator.barrier)
        return self._end(operation, [])

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: datetime.timedelta | None = None) -> BackendWork:
        operation = self._begin("broadcast", opts, timeout)
        tensor = one(tensors, "broadcast", "tensors")
        root = root_of(opts)
        x = operation.source(tensor) if root == self.communicator.rank else operation.target(tensor)
        operation.start(self.communicator.broadcast, x, root)
        return self._end(operation, [tensor])

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: datetime.timedelta | None = None) -> BackendWork:
        operation = self._begin("all_reduce", opts, timeout)
        tensor = one(tensors, "all_reduce", "tensors")
        self._all_reduce(operation, tensor, op_of(opts))
        return self._end(operation, [tensor])

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> BackendWork:
        operation = self._begin("all_reduce_coalesced", opts)
        for tensor in tensors:
            self._all_reduce(operation, tensor, op_of(opts))
        return self._end(operation, tensors)

    def _all_reduce(self, operation: Operation, tensor: torch.Tensor, op: Any) -> None:
        kind = reduction(op, operation.reduced(tensor).dtype, operation.call)
        operation.start(self.communicator.all_reduce, operation.target(tensor, read=True), kind)

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: datetime.timedelta | None = None
    ) -> BackendWork:
        operation = self._begin("reduce", opts, timeout)
        tensor = one(tensors, "reduce", "tensors")
        root = root_of(opts)
        given = op_of(None if isinstance(opts, int) else opts) if op is None else op
        kind = reduction(given, operation.reduced(tensor).dtype, "reduce")
        receives = root == self.communicator.rank
        x = operation.target(tensor, read=True) if receives else operation.source(tensor)
        operation.start(self.communicator.reduce, x, root, kind)
        return self._end(operation, [tensor])

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> BackendWork:
        operation = self._begin("all_gather", opts)
        outs = tensor_of_each_rank(operation, outputs, "output")
        tensor = one(inputs, "all_gather", "inputs")
        self._all_gather(operation, outs, tensor)
        return self._end(operation, outs)

    def _all_gather(self, operation: Operation, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        check_types(operation, [*outs, tensor])
        if outs[self.communicator.rank].numel() != tensor.numel():
            raise InvalidUsage(
                f"{operation.call}() got an input of {tensor.numel()} elements, but this rank's output has "
                f"{outs[self.communicator.rank].numel()}; give equal sizes"
            )
        x = operation.source(tensor)
        if len({out.numel() for out in outs}) == 1:
            flat = tensor.new_empty(len(outs) * tensor.numel())
            operation.start(self.communicator.all_gather, operation.target(flat), x)
            operation.copy_parts(outs, flat)
        else:
            targets = [operation.target(out) for out in outs]
            operation.start(
                self.communicator.exchange,
                [(x, peer) for peer in range(len(outs))],
                [(target, peer) for peer, target in enumerate(targets)],
            )

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> BackendWork:
        operation = self._begin("all_gather_into_tensor", opts)
        check_pairs(operation, outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            operation.start(self.communicator.all_gather, operation.target(output), operation.source(tensor))
        return self._end(operation, outputs)

    def gather(
        self, outputs: Lists, inputs: Tensors, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> BackendWork:
        operation = self._begin("gather", opts, timeout)
        root = root_of(opts)
        tensor = one(inputs, "gather", "inputs")
        x = operation.source(tensor)
        if root != self.communicator.rank:
            operation.start(self.communicator.gather, None, x, root)
            return self._end(operation, [])
        outs = tensor_of_each_rank(operation, outputs, "output")
        check_equal(operation, outs, tensor)
        flat = tensor.new_empty(len(outs) * tensor.numel())
        operation.start(self.communicator.gather, operation.target(flat), x, root)
        operation.copy_parts(outs, flat)
        return self._end(operation, outs)

    def scatter(
        self, outputs: Tensors, inputs: Lists, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> BackendWork:
        operation = self._begin("scatter", opts, timeout)
        root = root_of(opts)
        tensor = one(outputs, "scatter", "outputs")
        flat = None
        if root == self.communicator.rank:
            parts = tensor_of_each_rank(operation, inputs, "input")
            check_equal(operation, parts, tensor)
            flat = operation.source(_flatten(parts))
        operation.start(self.communicator.scatter, operation.target(tensor), flat, root)
        return self._end(operation, [tensor])

    def reduce_scatter(
        self, outputs: Tensors, inputs: Lists, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> BackendWork:
        operation = self._begin("reduce_scatter", opts, timeout)
        tensor = one(outputs, "reduce_scatter", "outputs")
        parts = tensor_of_each_rank(operation, inputs, "input")
        check_types(operation, [*parts, tensor])
        if len({part.numel() for part in parts}) == 1:
            self._reduce_scatter(operation, tensor, _flatten(parts), op_of(opts))
            return self._end(operation, [tensor])
        kind = reduction(op_of(opts), operation.reduced(tensor).dtype, operation.call)
        rank = self.communicator.rank
        for root, part in enumerate(parts):
            out = operation.target(tensor) if root == rank else None
            operation.start(partial(self.communicator.reduce, out=out), operation.source(part), root, kind)
        return self._end(operation, [tensor])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> BackendWork:
        operation = self._begin("reduce_scatter_tensor", opts)
        check_pairs(operation, inputs, outputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter(operation, output, tensor, op_of(opts))
        return self._end(operation, outputs)

    def _reduce_scatter(self, operation: Operation, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> None:
        kind = reduction(op, operation.reduced(tensor).dtype, operation.call)
        x, out = operation.source(tensor), operation.target(output)
        operation.start(self.communicator.reduce_scatter, out, x, kind)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> BackendWork:
        operation = self._begin("all_to_all_single", opts)
        check_types(operation, [output, input])
        # Splits are rows of dimension 0. Always passed on, since some ranks may leave equal ones out and others not.
        splits = [
            elements_of(operation, tensor, rows, name)
            for tensor, rows, name in ((output, output_split_sizes, "output"), (input, input_split_sizes, "input"))
        ]
        x, out = operation.source(input), operation.target(output)
        widths = [_width(out, output), _width(x, input)]
        out_splits, in_splits = ([n * width for n in each] for each, width in zip(splits, widths, strict=True))
        operation.start(self.communicator.all_to_all, out, x, out_splits, in_splits)
        return self._end(operation, [output])

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> BackendWork:
        operation = self._begin("all_to_all", opts)
        for name, tensors in (("output", outputs), ("input", inputs)):
            check_count(operation, tensors, name)
        check_types(operation, [*outputs, *inputs])
        sends = [(operation.source(tensor), peer) for peer, tensor in enumerate(inputs)]
        recvs = [(operation.target(tensor), peer) for peer, tensor in enumerate(outputs)]
        operation.start(self.communicator.exchange, sends, recvs)
        return self._end(operation, outputs)


def _flatten(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _width(carrier: torch.Tensor, tensor: torch.Tensor) -> int:
    """Elements that the core carries for each element of the tensor."""
    return carrier.numel() // tensor.numel() if tensor.numel() > 0 else 1


class HdpProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """A group of torch ranks: a subset of the world of its :class:`Engine`. Made by torch, see ``init_process_group``.

    The collectives of overlapping groups must be called in one order on all ranks, whether waited for or not;
    point-to-point messages are free of that order. Methods take torch's options, as torch.distributed's functions pass
    them, or their plain values, as its C++ groups also do.

    Raises (all): InvalidUsage (ValueError) for bad arguments, before anything is sent; NotImplementedError naming what
    there is not; BackendTimeout, BackendLost, BackendMismatch, BackendAborted (``dist.DistBackendError``) from the call
    or the work's ``wait()``.
    """

    def __init__(
        self,
        engine: Engine,
        communicator: Communicator,
        store: Any,
        *,
        name: str,
        timeout: float,
        owner: bool = False,
    ) -> None:
        dist.ProcessGroup.__init__(self, communicator.rank, communicator.size)  # type: ignore[call-arg]
        self.engine = engine
        self.communicator = communicator
        self._seconds = timeout
        self._world_seconds = communicator.timeout
        self._name = name
        self._store = store
        self._owner = owner
        self._description = ""

    # --- what torch asks of a group ----------------------------------------------------------------------------------

    # pybind calls these by their C++ names.
    def getBackendName(self) -> str:
        return "hdpcomm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """The time that an operation may take from now on. Local."""
        seconds = timeout.total_seconds()
        if not seconds > 0:
            raise InvalidUsage(f"set_timeout() got {timeout}; give a time above 0")
        self._seconds = seconds

    @property
    def _device_types(self) -> list[torch.device]:
        device = getattr(self.communicator, "device", torch.device("cpu"))  # of a world with streams
        return [torch.device(kind) for kind in dict.fromkeys(("cpu", device.type))]

    def _get_backend(self, device: torch.device) -> HdpProcessGroup:  # type: ignore[override]
        if torch.device(torch.device(device).type) not in self._device_types:
            raise RuntimeError(
                f"No backend type associated with device type {device}: this group moves tensors on "
                f"{', '.join(each.type for each in self._device_types)}"
            )
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the core numbers the operations itself."""

    def abort(self) -> None:
        """Ends this rank's pending operations, of all groups of its world, and tells the ranks concerned. Local."""
        self.engine.abort("abort() of a process group")

    def shutdown(self) -> None:
        """Ends the group, for ``destroy_process_group``. The world ends with the group that began it. Local."""
        if self._owner:
            self.engine.close()

    # --- one tensor of the calls for several, and names of torch before 2.13 ----------------------------------------

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = Collectives.all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = Collectives.reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = Collectives.all_to_all_single  # type: ignore[assignment]

    # --- what there is not -------------------------------------------------------------------------------------------

    def _start_coalescing(self, _device: torch.device) -> None:
        raise NotImplementedError("hdpcomm backend: coalescing of a device's operations; leave the device out")

    def split_group(self, *_args: Any, **_options: Any) -> dist.ProcessGroup | None:
        raise NotImplementedError("hdpcomm backend: split_group; new_group() of any ranks is free here")

    def merge_remote_group(self, *_args: Any, **_options: Any) -> dist.ProcessGroup:
        raise NotImplementedError("hdpcomm backend: merge_remote_group")

    def monitored_barrier(self, *_args: Any, **_options: Any) -> None:
        raise NotImplementedError(
            "hdpcomm backend: monitored_barrier; barrier() names the absent ranks at its deadline"
        )

    def _register_on_completion_hook(self, _hook: Any) -> None:
        raise NotImplementedError("hdpcomm backend: _register_on_completion_hook")
