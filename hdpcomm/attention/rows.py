"""Rows of a pack, one for each token: the C++/CUDA kernels that copy, add and merge them on torch tensors, exchanges of
them between ranks, and what a row of keys and values holds: K and V themselves, or the latent of MLA, which each rank
expands.

All functions but those of :class:`RowExchange` are local. On CUDA tensors they enqueue on the current stream; on CPU
tensors they are done on return.

A row travels as one vector, so the rings and gathers that move it need not know what it holds. In backward the
gradients of the rows travel in the same form. Source of the latent: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
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
from hdpcomm.comm.tensors import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import autocast_type, dtype_code, launch, to_device, without_second_derivative

__all__ = ["Latent", "Payload", "RowExchange", "Rows", "add_rows", "copy_rows", "merge", "take_rows"]

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


_Pair = tuple[Tensor, Tensor]


class Payload:
    """The rows of one rank: K [rows, kv_heads, k_dim] and V [rows, kv_heads, v_dim]; :class:`Latent` travels in another
    form. All methods are local; ``buffer`` is [rows, width], and None means this rank's own rows.

    Attributes:
        width: values of a row.
        like: a tensor of the type and device of the rows.
    """

    shared = False
    """Whether a row serves all heads, so that a choice of heads travels as the whole."""
    like: Tensor

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._k_shape, self._v_shape = tuple(k.shape[1:]), tuple(v.shape[1:])
        self._k_width = k.shape[1] * k.shape[2]
        self.rows, self.kv_heads, self.v_dim, self.like = k.shape[0], k.shape[1], v.shape[2], k
        self.width = self._k_width + v.shape[1] * v.shape[2]

    def pack(self, out: Tensor | None = None) -> Tensor:
        """This rank's own rows, [rows, width], as they travel."""
        return torch.cat((self._k.flatten(1), self._v.flatten(1)), dim=1, out=out)

    def _views(self, rows: Tensor) -> _Pair:
        return (
            rows[:, : self._k_width].view(rows.shape[0], *self._k_shape),
            rows[:, self._k_width :].view(rows.shape[0], *self._v_shape),
        )

    def expand(self, buffer: Tensor | None, dtype: torch.dtype) -> _Pair:
        """K [rows, kv_heads, k_dim] and V [rows, kv_heads, v_dim] in ``dtype``."""
        k, v = (self._k, self._v) if buffer is None else self._views(buffer)
        return k.to(dtype), v.to(dtype)

    def new_grads(self, grads: Tensor) -> _Pair:
        """Where the gradients of K and V are added, for rows whose gradients are ``grads`` [rows, width]."""
        return self._views(grads)

    def fold(self, buffer: Tensor | None, pair: _Pair, grads: Tensor, dtype: torch.dtype) -> None:
        """Adds what was put into ``pair`` (of :meth:`new_grads`) to ``grads``, unless it is a view of them; products
        are computed in ``dtype``."""

    def split(self, grads: Tensor) -> _Pair:
        """The gradients of the two tensors that the payload was made of, from those of this rank's own rows."""
        return self._views(grads)

    def heads(self, chosen: slice) -> Payload:
        """These rows with some of the kv heads only."""
        return Payload(self._k[:, chosen], self._v[:, chosen])

    def join(self, parts: Sequence[_Pair]) -> _Pair:
        """The gradients of :meth:`split` from those of choices of heads that follow each other."""
        dk, dv = zip(*parts, strict=True)
        return (dk[0], dv[0]) if len(parts) == 1 else (torch.cat(dk, dim=1), torch.cat(dv, dim=1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own type, also where autocast would choose another."""
    with torch.autocast(autocast_type(a), enabled=False):
        return a @ b


class Latent(Payload):
    """The compressed kv and the shared rope key of MLA, and the weight that expands them.

    ``latent``: [rows, 1, rank + rope_dim], ``weight``: [heads, nope_dim + v_dim, rank]. K of a head is its first
    ``nope_dim`` products followed by the rope key, V the other products. The gradient of the weight is this rank's
    share: the sum over the ranks is the gradient.
    """

    shared = True

    def __init__(self, latent: Tensor, weight: Tensor, *, rope_dim: int, v_dim: int) -> None:
        self._latent, self._weight = latent, weight
        self._rank, self._rope = weight.shape[2], rope_dim
        self._nope = weight.shape[1] - v_dim
        self.rows, self.width, self.like = latent.shape[0], latent.shape[2], latent
        self.kv_heads, self.v_dim = weight.shape[0], v_dim
        self._weight_grad: Tensor | None = None

    def pack(self, out: Tensor | None = None) -> Tensor:
        own = self._latent.flatten(1)
        return own if out is None else out.copy_(own)

    def _parts(self, buffer: Tensor | None, dtype: torch.dtype) -> _Pair:
        """Compressed kv [rows, rank] and rope key [rows, rope_dim]."""
        rows = (self._latent.flatten(1) if buffer is None else buffer).to(dtype)
        return rows[:, : self._rank], rows[:, self._rank :]

    def expand(self, buffer: Tensor | None, dtype: torch.dtype) -> _Pair:
        compressed, rope = self._parts(buffer, dtype)
        heads, dims, _ = self._weight.shape
        both = _product(compressed, self._weight.to(dtype).flatten(0, 1).T).view(compressed.shape[0], heads, dims)
        k = both.new_empty((both.shape[0], heads, self._nope + self._rope))
        k[..., : self._nope] = both[..., : self._nope]
        k[..., self._nope :] = rope[:, None]
        return k, both[..., self._nope :].contiguous()

    def new_grads(self, grads: Tensor) -> _Pair:
        shape = (grads.shape[0], self._weight.shape[0])
        return grads.new_zeros((*shape, self._nope + self._rope)), grads.new_zeros((*shape, self.v_dim))

    def fold(self, buffer: Tensor | None, pair: _Pair, grads: Tensor, dtype: torch.dtype) -> None:
        compressed, _ = self._parts(buffer, dtype)
        dk, dv = pair
        both = torch.cat((dk[..., : self._nope], dv), dim=-1).flatten(1).to(dtype)
        weight = self._weight.to(dtype).flatten(0, 1)
        grads[:, : self._rank] += _product(both, weight)
        grads[:, self._rank :] += dk[..., self._nope :].sum(1)
        share = _product(both.T, compressed).to(grads.dtype).view_as(self._weight)
        self._weight_grad = share if self._weight_grad is None else self._weight_grad.add_(share)

    def split(self, grads: Tensor) -> _Pair:
        share = self._weight_grad
        if share is None:
            share = torch.zeros(self._weight.shape, dtype=grads.dtype, device=grads.device)
        return grads.unsqueeze(1), share

    def heads(self, chosen: slice) -> Latent:
        return Latent(self._latent, self._weight[chosen], rope_dim=self._rope, v_dim=self.v_dim)

    def join(self, parts: Sequence[_Pair]) -> _Pair:
        return parts[0][0], torch.cat([share for _, share in parts])
