"""The C++/CUDA kernels of distributed attention on torch tensors, the LSE merge and segmented row copies, and exchanges
of such rows.

All functions but those of :class:`RowExchange` are local. On CUDA tensors they enqueue on the current stream; on CPU
tensors they are done on return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm._core import kernels as _core
from hdpcomm.comm import Communicator
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative
from hdpcomm.kernels.transfers import dtype_code, launch, to_device

__all__ = ["RowExchange", "Rows", "add_rows", "copy_rows", "merge", "take_rows"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Rows:
    """The row segments of a copy; each moves ``rows`` consecutive rows from row ``src`` on to row ``dst`` on.

    Holds the table that the kernels read, and a copy of it on each CUDA device that needed one.
    """

    __slots__ = ("_on_device", "_table", "total")

    def __init__(
        self,
        segments: Sequence[tuple[int, int, int]] | npt.NDArray[np.int64],
        *,
        positions: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """``segments``: (dst, src, rows) triples; empty ones are dropped. ``positions``: the position of each segment's
        first row in its sequence, for :func:`copy_rows` with positions (default: 0)."""
        triples = np.asarray(segments, dtype=np.int64).reshape(-1, 3)
        starts = np.zeros(len(triples), dtype=np.int64) if positions is None else positions
        kept = triples[:, 2] > 0
        triples, starts = triples[kept], starts[kept]
        ends = np.cumsum(triples[:, 2])
        self._table = np.ascontiguousarray(np.column_stack((triples, ends - triples[:, 2], starts)))
        self._on_device: dict[torch.device, Tensor] = {}
        self.total = int(ends[-1]) if len(ends) else 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def triples(self) -> npt.NDArray[np.int64]:
        """[segments, 3]: dst, src, rows."""
        return self._table[:, :3]

    def inverse(self) -> Rows:
        """The copy in the other direction."""
        return Rows(self._table[:, [1, 0, 2]])

    def contiguous_source(self) -> tuple[int, int] | None:
        """(start, stop) of the source rows if they are one range that goes, in order, to rows 0, 1, ...; else None."""
        table = self._table
        if not len(table):
            return 0, 0
        offsets = table[:, 1] - table[0, 1]
        if (offsets == table[:, 3]).all() and (table[:, 0] == table[:, 3]).all():
            return int(table[0, 1]), int(table[0, 1]) + self.total
        return None

    def address(self, device: torch.device) -> int:
        """Address of the table where a kernel on ``device`` can read it; valid while this object lives."""
        if device.type == "cpu":
            return int(self._table.ctypes.data)
        if device not in self._on_device:
            self._on_device[device] = to_device(torch.from_numpy(self._table), device)
        return self._on_device[device].data_ptr()


def _row_layout(tensor: Tensor) -> tuple[int, int]:
    """(bytes of a row, stride between rows in bytes); the rows themselves must be contiguous."""
    row = tensor[0] if tensor.shape[0] else tensor.new_empty(tensor.shape[1:])
    if not row.is_contiguous():
        raise InvalidUsage(
            f"rows of a tensor with shape {tuple(tensor.shape)} and strides {tensor.stride()} are not contiguous; "
            "call .contiguous() first"
        )
    return row.numel() * tensor.element_size(), tensor.stride(0) * tensor.element_size()


def _move(kernel: Any, dst: Tensor, src: Tensor, rows: Rows, last: int) -> None:
    """Launches a kernel that takes rows of ``src`` to ``dst``; ``last``: its last argument."""
    if rows.total == 0:
        return
    (row_bytes, dst_stride), (_, src_stride) = _row_layout(dst), _row_layout(src)
    launch(
        kernel, dst, dst.data_ptr(), src.data_ptr(), dst_stride, src_stride, row_bytes, rows.address(dst.device),
        len(rows), rows.total, last,
    )  # fmt: skip


@untraced
def copy_rows(dst: Tensor, src: Tensor, rows: Rows, *, positions: Tensor | None = None) -> None:
    """``dst[d : d + n] = src[s : s + n]`` for every segment; rows contiguous, any stride between them.

    ``positions``: int64, contiguous, one for each row of ``dst``: receives the row's position in its sequence (for
    RoPE), in the same launch.
    """
    _move(_core.copy_rows, dst, src, rows, 0 if positions is None else positions.data_ptr())


@untraced
def add_rows(dst: Tensor, src: Tensor, rows: Rows) -> None:
    """``dst[d : d + n] += src[s : s + n]`` for every segment; float32 or float64, no row of ``dst`` twice."""
    _move(_core.add_rows, dst, src, rows, dtype_code(dst, _FLOATS))


class RowExchange:
    """Rows on their way to and from other ranks; it keeps all that is read or written alive until :meth:`finish`.

    ``rows``: copies from the rows of a buffer to rows 0, 1, ... of a message; ``place``: where it arrives in a landing
    zone.
    """

    def __init__(self) -> None:
        self._sends: list[tuple[Any, ...]] = []
        self._recvs: list[tuple[Any, ...]] = []
        self._puts: list[tuple[Any, Tensor, Tensor, Rows]] = []
        """Messages to copy or add into a buffer, as far as they do not arrive in it."""
        self._work: Any = None

    def send(self, buffer: Tensor, rows: Rows, peer: int, *place: int) -> None:
        """Adds a message of rows of a buffer."""
        if buffer.is_contiguous() and (whole := rows.contiguous_source()) is not None:
            message = buffer[whole[0] : whole[1]]
        else:
            message = buffer.new_empty((rows.total, *buffer.shape[1:]))
            copy_rows(message, buffer, rows)
        self._sends.append((message, peer, *place))

    def receive(self, buffer: Tensor, rows: Rows, peer: int, *place: int, add: bool = False) -> None:
        """Adds a message that becomes rows of a buffer, or is added to them."""
        if not add and (whole := rows.contiguous_source()) is not None:
            message = buffer[whole[0] : whole[1]]
        else:
            message = buffer.new_empty((rows.total, *buffer.shape[1:]))
            self._puts.append((add_rows if add else copy_rows, buffer, message, rows.inverse()))
        self._recvs.append((message, peer, *place))

    def post(self, comm: Communicator | None) -> None:
        """Starts the exchange of all these messages."""
        if self._sends or self._recvs:
            assert comm is not None
            self._work = comm.exchange(self._sends, self._recvs, async_op=True)

    def finish(self) -> None:
        """Waits until all rows are where they belong."""
        if self._work is not None:
            self._work.wait()
        for put, buffer, message, rows in self._puts:
            put(buffer, message, rows)


@untraced
def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, rows: Tensor | None = None) -> None:
    """Merges a block of keys into the running attention result, in place.

    ``out``: [tokens, heads, dim] and ``lse``: [tokens, heads], float32 or float64, contiguous. ``block_out``: [n,
    heads, dim] contiguous (also bfloat16 or float16); ``block_lse``: [n, heads], type of ``lse``, any strides; -inf
    where a row sees no key of the block. ``rows``: int64 [n], the row of ``out`` of each block row (default: row i to
    row i); no row twice.
    """
    tokens, heads, dim = block_out.shape
    if not (out.is_contiguous() and lse.is_contiguous() and block_out.is_contiguous()):
        raise InvalidUsage("out, lse and block_out of a merge must be contiguous; call .contiguous() first")
    if out.shape[1:] != block_out.shape[1:] or lse.shape != out.shape[:2] or block_lse.shape != (tokens, heads):
        raise InvalidUsage(
            f"shapes of a merge do not fit: out {tuple(out.shape)}, lse {tuple(lse.shape)}, block_out "
            f"{tuple(block_out.shape)}, block_lse {tuple(block_lse.shape)}"
        )
    if (rows is None and tokens != out.shape[0]) or (rows is not None and rows.shape != (tokens,)):
        raise InvalidUsage(f"a block of {tokens} rows does not fit a result of {out.shape[0]} rows; give `rows`")
    if lse.dtype != out.dtype or block_lse.dtype != out.dtype:
        raise InvalidUsage(f"lse must have the type of out, {out.dtype}; got {lse.dtype} and {block_lse.dtype}")
    launch(
        _core.merge, out, out.data_ptr(), lse.data_ptr(), block_out.data_ptr(), block_lse.data_ptr(),
        0 if rows is None else rows.data_ptr(), tokens, heads, dim, *block_lse.stride(),
        dtype_code(out, _FLOATS), dtype_code(block_out, _FLOATS), torch.get_num_threads(),
    )  # fmt: skip


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.shape = rows, x.shape  # type: ignore[attr-defined]
        out = x.new_empty((rows.total, *x.shape[1:]))
        copy_rows(out, x, rows)
        return out

    @staticmethod
    @without_second_derivative
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        out = grad.new_zeros(ctx.shape)  # type: ignore[attr-defined]
        copy_rows(out, grad, ctx.rows.inverse())  # type: ignore[attr-defined]
        return out, None


@untraced
def take_rows(x: Tensor, rows: Rows, *, dim: int = 0) -> Tensor:
    """A new tensor with the rows of ``x`` along ``dim`` that ``rows`` selects, no source row twice. Differentiable."""
    moved = x.movedim(dim, 0).contiguous()
    out: Tensor = _TakeRows.apply(moved, rows)  # type: ignore[no-untyped-call]
    return out.movedim(0, dim)
