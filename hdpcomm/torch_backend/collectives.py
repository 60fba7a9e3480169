"""torch.distributed's collectives and messages in terms of communicators."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.checks import (
    Lists,
    Tensors,
    check_count,
    check_equal,
    check_pairs,
    check_types,
    elements_of,
    one,
    op_of,
    reduction,
    root_of,
    tensor_of_each_rank,
)
from hdpcomm.torch_backend.engine import Engine
from hdpcomm.torch_backend.staging import Operation
from hdpcomm.torch_backend.work import BackendWork, seconds_of

__all__ = ["Collectives"]


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
            x = operation.source(part)
            operation.start(_reduce_into, self.communicator, x, root, kind, out)
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


def _reduce_into(
    comm: Communicator, x: torch.Tensor, root: int, op: str, out: torch.Tensor | None, *, async_op: bool
) -> Any:
    return comm.reduce(x, root, op, out=out, async_op=async_op)
