"""Attention inside a model that does not know about packs: ``with packing(comm, cu_seqlens):`` around the forward sets
the pack, and ``packed_attention(q, k, v)`` or ``scaled_dot_product_attention(...)`` inside use it.

The block sets the pack of its thread. An activation checkpoint runs the forward again in the backward pass, after the
block and perhaps on another thread: there the pack has to come with the call (``pack=``) or with the checkpoint
(``context_fn=carry_pack``).

Under torch.compile the call is one opaque operator (``hdpcomm::packed_attention``) with a fake implementation and a
backward, so the rest of the model compiles without a graph break; the pack is looked up when the operator runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hdpcomm import _core
from hdpcomm.attention.api import Arguments, attend, plan_call, positive_scale
from hdpcomm.attention.engine import AttentionOptions, backward, careful_of, options_of, retrace
from hdpcomm.attention.packs import CuSeqlens, Pack, as_pack
from hdpcomm.attention.slices import Recomputation
from hdpcomm.attention.tiles import window_pair
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import refuse_second_derivative

__all__ = [
    "PackContext", "carry_pack", "current_pack", "current_routes", "packed_attention", "packing", "routing",
    "scaled_dot_product_attention",
]  # fmt: skip

_MAX_SAVED = 1024
"""Most packs of compiled forwards that are saved for their backward."""


@dataclass(frozen=True, slots=True, eq=False)
class PackContext:
    """Which ranks share which pack, and how its attention is computed."""

    comm: Communicator | None
    cu_seqlens: Pack
    backend: str
    options: AttentionOptions
    """Its ``variant``, ``costs`` and ``check`` are those of all calls; a layer adds its own softcap, sinks and
    chunk."""
    ticket: int
    """Number by which a compiled backward finds the pack of its forward."""
    padded: bool = False
    """This rank holds no token and runs the model on one that counts for nothing, as many layers take no empty input;
    attention leaves it out."""
    token_rows: int | None = None
    """The first rows of the layers' input on this rank, which stand for tokens; ``None``: all do."""

    @property
    def tokens(self) -> int:
        """Rows of hidden states on this rank."""
        rank, size = (0, 1) if self.comm is None else (self.comm.rank, self.comm.size)
        return 1 if self.padded else self.cu_seqlens.layout(size).rows(rank)


class _Current(threading.local):
    """The pack of this thread, since ranks may be threads of one process."""

    pack: PackContext | None = None
    routes: Any = None
    """Answers routers that ask for the experts of tokens; see :mod:`hdpcomm.models.routes`."""


_current = _Current()
_tickets = count(1)
_lock = threading.Lock()
_saved: OrderedDict[int, tuple[PackContext, _core.comm.World | None]] = OrderedDict()


@contextmanager
def packing(
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    *,
    backend: str = "auto",
    options: AttentionOptions | None = None,
    padded: bool = False,
    token_rows: int | None = None,
) -> Iterator[PackContext]:
    """Attention calls of this thread inside the block use this pack; arguments as in
    :func:`hdpcomm.attention.ring_attention`.

    ``options``: the ``variant``, ``costs`` and ``check`` of all layers. Raises InvalidUsage for its other fields.

    ``padded``: this rank's shard is empty and it passes one token that counts for nothing in its place.

    ``token_rows``: where the last rows between layers stand for no token, as of a tensor rank's block, the others.

    Local. May be nested; the innermost applies. Backward may run after the block. An activation checkpoint inside it
    needs ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=carry_pack)``.
    """
    known = options_of("packing", options, "variant", "costs", "check")
    pack = PackContext(comm, as_pack(cu_seqlens), backend, known, next(_tickets), padded, token_rows)
    _drop_packs_of_ended_worlds()
    with CurrentPack(pack):
        yield pack


class CurrentPack:
    """The pack of the thread that enters it, for the length of the block; may be entered again and again."""

    def __init__(self, pack: PackContext | None, recomputation: Recomputation | None = None) -> None:
        """``recomputation``: of the forward pass that is computed again inside."""
        self._pack, self._recomputation, self._routes = pack, recomputation, _current.routes
        self._before: list[tuple[PackContext | None, Any]] = []

    def __enter__(self) -> None:
        self._before.append((_current.pack, _current.routes))
        _current.pack, _current.routes = self._pack, self._routes
        if self._recomputation is not None:
            self._recomputation.again.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._recomputation is not None:
            self._recomputation.again.__exit__()
        _current.pack, _current.routes = self._before.pop()


def carry_pack() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint.checkpoint``: recomputation runs with the pack of its forward pass and
    its routing of each layer of experts, after the block and on any thread. Local.
    """
    recomputation = Recomputation()
    return recomputation, CurrentPack(_current.pack, recomputation)


def current_pack() -> PackContext:
    """The pack of this thread. Raises InvalidUsage outside ``with packing(...)``."""
    if _current.pack is None:
        raise InvalidUsage(
            "attention was called outside a pack; call the model's forward inside `with "
            "hdpcomm.attention.packing(comm, cu_seqlens):`, and give activation checkpoints "
            "context_fn=hdpcomm.attention.carry_pack, as they call it again in the backward pass; to generate with an "
            "adapted model of transformers, do it `with adapted.attention.original():`"
        )
    return _current.pack


@contextmanager
def routing(routes: Any) -> Iterator[None]:
    """Routers of this thread inside the block ask ``routes``, also where layers run again in the backward pass."""
    before, _current.routes = _current.routes, routes
    try:
        yield
    finally:
        _current.routes = before


def current_routes() -> Any:
    """The object that :func:`routing` was given, or None."""
    return _current.routes


def find_pack() -> PackContext | None:
    """The pack of this thread, or None outside of ``with packing(...)``."""
    return _current.pack


def on_local_tokens(pack: PackContext, call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    """``call(*tensors)`` [tokens, ...] on this rank's tokens: without the one that stands for none in a padded pack,
    whose result is zeros."""
    if not pack.padded:
        return call(*tensors)
    out = call(*(x[:0] for x in tensors))
    # in the graph, so that this rank takes part in the backward of its group
    return torch.cat((out, out.new_zeros((tensors[0].shape[0], *out.shape[1:]))))


def _save(pack: PackContext) -> int:
    """Saves the pack for its backward and returns its ticket, with which :func:`_saved_pack` finds it."""
    world = None if pack.comm is None else pack.comm._core.world
    with _lock:
        _saved[pack.ticket] = pack, world
        while len(_saved) > _MAX_SAVED:
            _saved.popitem(last=False)
    return pack.ticket


def _drop_packs_of_ended_worlds() -> None:
    """Drops the packs whose world was closed or aborted, since no backward can run in it."""
    if not _saved:  # always, unless the model is compiled
        return
    with _lock:
        for ticket in [ticket for ticket, (_, world) in _saved.items() if world is not None and world.over]:
            del _saved[ticket]


def _apart(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies results that share memory: an operator's may share none with what it got (dv of a sequence of one token is
    dout), nor among itself."""
    seen = {x.untyped_storage().data_ptr() for x in inputs}
    results = []
    for x in outputs:
        results.append(x.clone() if x.untyped_storage().data_ptr() in seen and x.numel() else x)
        seen.add(results[-1].untyped_storage().data_ptr())
    return results


def _saved_pack(ticket: int) -> PackContext:
    saved = _saved.get(ticket)
    if saved is None:
        raise InvalidUsage(
            "the pack of this backward was dropped: its world was closed or aborted, or more than "
            f"{_MAX_SAVED} packs were used since its forward; run backward before that"
        )
    return saved[0]


_Settings = Sequence[float]
"""Causal, how many keys to the left and to the right a query sees, scale, softcap and chunk: numbers, as an operator
takes them."""


def _arguments(pack: PackContext, sinks: Tensor | None, settings: _Settings) -> Arguments:
    causal, left, right, scale, softcap, chunk = settings
    options = replace(pack.options, softcap=softcap, sinks=sinks, chunk=int(chunk))
    return Arguments(bool(causal), (int(left), int(right)), scale, pack.backend, options)


@torch.library.custom_op("hdpcomm::packed_attention", mutates_args=())
def _packed_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, ticket of the pack)."""
    pack = current_pack()
    if pack.cu_seqlens.keeps:
        raise InvalidUsage(
            "a compiled model was given a slice of a sequence, whose keys outlast the call: run it eagerly"
        )
    with torch.no_grad():
        out, lse = _attend(q, k, v, sinks, settings, pack)
    out, lse = _apart((out, lse), (q, k, v))
    return out, lse, torch.tensor(_save(pack))


@_packed_op.register_fake
def _(q: Tensor, _: Tensor, v: Tensor, *__: object) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    return out, q.new_empty(q.shape[:2], dtype=dtype), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("hdpcomm::packed_attention_backward", mutates_args=())
def _packed_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ticket: Tensor,
    sinks: Tensor | None,
    settings: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); dsinks is empty where there are no sinks."""
    pack = _saved_pack(int(ticket))
    call = plan_call(q, k, v, pack.comm, pack.cu_seqlens, _arguments(pack, sinks, settings))
    saved = retrace(q, (k, v), out, lse, call)
    dq, dk, dv, dsinks = backward(dout, saved, sinks, call, (q.shape[1], k.shape[1]))
    none = q.new_empty(0) if dsinks is None or sinks is None else dsinks.to(sinks.dtype)
    grads = dq.to(q.dtype), dk.to(q.dtype).contiguous(), dv.to(q.dtype).contiguous(), none
    return tuple(_apart(grads, (dout, q, k, v, out, lse)))  # type: ignore[return-value]


@_packed_backward_op.register_fake
def _packed_backward_fake(_: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, _, _, _, sinks, _ = given
    none = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), none


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, ctx.settings = inputs
    out, lse, ticket = output
    ctx.save_for_backward(q, k, v, out, lse, ticket, sinks)
    ctx.mark_non_differentiable(lse, ticket)


def _backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    *saved, sinks = ctx.saved_tensors
    dq, dk, dv, dsinks = _packed_backward_op(dout.contiguous(), *saved, sinks, ctx.settings)
    return dq, dk, dv, None if sinks is None else dsinks, None


_packed_op.register_autograd(_backward, setup_context=_setup)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunk: int = 0,
    pack: PackContext | None = None,
) -> Tensor:
    """:func:`hdpcomm.attention.ring_attention` on the pack of the enclosing ``with packing(...)``; torch.compile keeps
    it as one operator.

    ``q``: [T_local, heads, head_dim] or [batch, T_local, heads, head_dim], ``k``, ``v`` alike (the head_dim of v may be
    another); any strides. ``pack``: what ``packing`` gave, for calls outside its block or thread; compiled code takes
    that of the block. Collective.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    q, scale = positive_scale(q, q.shape[-1] ** -0.5 if scale is None else scale)
    assert scale is not None
    left, right = window_pair(window)
    if not torch.compiler.is_compiling():
        pack = current_pack() if pack is None else pack
        return _eager(q, k, v, sinks, (causal, left, right, scale, softcap, chunk), pack)
    settings = [float(x) for x in (causal, left, right, scale, softcap, chunk)]
    if q.ndim == 3:
        out: Tensor = _packed_op(q, k, v, sinks, settings)[0]
        return out
    batch = q.shape[0]
    q, k, v = (x.transpose(0, 1).flatten(1, 2).contiguous() for x in (q, k, v))
    per_head = None if sinks is None else sinks.repeat(batch)
    flat: Tensor = _packed_op(q, k, v, per_head, settings)[0]
    return flat.view(flat.shape[0], batch, q.shape[1] // batch, flat.shape[2]).transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: _Settings, pack: PackContext
) -> tuple[Tensor, Tensor]:
    return attend(
        q, k, v, comm=pack.comm, cu_seqlens=pack.cu_seqlens, arguments=lambda: _arguments(pack, sinks, settings),
        careful=careful_of(q, pack.options),
    )  # fmt: skip


def _eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: _Settings, pack: PackContext) -> Tensor:
    shape = (*q.shape[:-1], v.shape[-1])
    if pack.padded:
        q, k, v = (x.narrow(-3, 0, 0).contiguous() for x in (q, k, v))
    out, _ = _attend(q, k, v, sinks, settings, pack)
    if pack.padded:  # in the graph, so that this rank takes part in the backward of its group
        out = torch.cat((out, out.new_zeros(shape)), dim=-3)
    return out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for ``torch.nn.functional.scaled_dot_product_attention``, on the pack of ``with packing(...)``.

    ``query``: [batch, heads, T_local, head_dim]; every row of the batch is a pack of the same lengths. Refuses
    ``attn_mask`` (the pack defines which tokens belong together) and dropout. Collective. Raises InvalidUsage.
    """
    if attn_mask is not None:
        raise InvalidUsage(
            "attn_mask was given, but the pack's cu_seqlens, is_causal and windows define what is masked: pass None"
        )
    if dropout_p:
        raise InvalidUsage(f"dropout_p={dropout_p}: attention dropout is not supported; set it to 0")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InvalidUsage(
            f"{query.shape[1]} heads with {key.shape[1]} kv_heads were given; pass enable_gqa=True if meant"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return packed_attention(q, k, v, causal=is_causal, scale=scale).transpose(1, 2)
