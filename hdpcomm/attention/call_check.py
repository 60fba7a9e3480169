"""Checks of arguments, which all ranks compare before data is exchanged: bad input is an error on every rank, never a
hang."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import Kept, Pack
from hdpcomm.attention.tree_layout import TokenLayout
from hdpcomm.comm import Communicator
from hdpcomm.errors import Error, InvalidUsage, Mismatch

__all__ = [
    "agree", "agree_on_call", "agree_on_result", "check_alike", "check_all_finite", "check_finite", "check_linear",
    "check_states", "keep_rows", "summary_of", "token_layouts",
]  # fmt: skip

_T = TypeVar("_T")

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DIGEST = 32
_TEXT = 512
_RECORD = 1 + _DIGEST + 2 + _TEXT


def agree(comm: Communicator, op: str, *, error: Error | None, facts: str, summary: str, device: torch.device) -> None:
    """Returns if no rank failed and ``facts`` are the same text on all ranks. Collective over ``comm`` (one
    all-gather).

    ``error``: the error that this rank found; it raises it, and all others raise an InvalidUsage that quotes it.
    ``summary``: readable facts, quoted when they differ. Raises: ``error``, InvalidUsage, Mismatch.
    """
    if device.type == "meta":  # has no bytes to compare
        if error is not None:
            raise error
        return
    note = (summary if error is None else str(error)).encode()[:_TEXT]
    record = bytearray([error is not None]) + hashlib.sha256(facts.encode()).digest() + len(note).to_bytes(2, "little")
    mine = torch.frombuffer(record + note.ljust(_TEXT, b"\0"), dtype=torch.uint8).to(device)
    everyone = torch.empty(comm.size * _RECORD, dtype=torch.uint8, device=device)
    comm.all_gather(everyone, mine)
    if error is not None:
        raise error
    if bool((everyone.view(comm.size, _RECORD)[:, : 1 + _DIGEST] == mine[: 1 + _DIGEST]).all()):
        return
    records = [bytes(row) for row in everyone.view(comm.size, _RECORD).cpu().numpy()]
    texts = [row[3 + _DIGEST :][: int.from_bytes(row[1 + _DIGEST : 3 + _DIGEST], "little")] for row in records]
    notes = [text.decode(errors="replace") for text in texts]
    failed = [rank for rank, row in enumerate(records) if row[0]]
    where: dict[str, Any] = {"rank": comm.global_rank, "op": op, "ranks": comm.ranks}
    if failed:
        raise InvalidUsage(
            f"{op}: rank {failed[0]} of the communicator refused its arguments, so no rank began: {notes[failed[0]]}",
            peer=comm.ranks[failed[0]],
            **where,
        )
    digests = [row[1 : 1 + _DIGEST] for row in records]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[comm.rank])
    raise Mismatch(
        f"{op}: the ranks of the communicator were called with different arguments, so no rank began; rank "
        f"{comm.rank}: {notes[comm.rank]}; rank {other}: {notes[other]}",
        peer=comm.ranks[other],
        **where,
    )


def _several(comm: Communicator | None) -> Communicator | None:
    return comm if comm is not None and comm.size > 1 else None


def agree_on_call(
    comm: Communicator | None,
    op: str,
    *,
    careful: bool,
    device: torch.device,
    prepare: Callable[[], tuple[_T, str, str]],
) -> _T:
    """Returns ``prepare``'s first result; its other results are facts and a summary for :func:`agree`.

    An InvalidUsage of ``prepare`` is one on all ranks if they are ``careful``, else on this one. Collective over
    ``comm`` if ``careful``.
    """
    several, error, result, facts, summary = _several(comm), None, None, "", ""
    try:
        result, facts, summary = prepare()
    except InvalidUsage as problem:
        if several is None or not careful:
            raise
        error = problem
    if careful and several is not None:
        agree(several, op, error=error, facts=facts, summary=summary, device=device)
    assert result is not None
    return result


def keep_rows(pack: Pack, comm: Communicator | None, *new: Tensor) -> tuple[tuple[Tensor, ...], Kept | None]:
    """:meth:`Pack.keep` on this rank of ``comm``."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    return pack.keep(*new, rank=rank, size=size)


def agree_on_result(comm: Communicator | None, op: str, *, device: torch.device, error: InvalidUsage | None) -> None:
    """Raises where a rank found its result wrong (``error``); on all ranks. Collective over ``comm``."""
    several = _several(comm)
    if several is not None:
        agree(several, op, error=error, facts="", summary="", device=device)
    elif error is not None:
        raise error


def check_finite(name: str, x: Tensor) -> None:
    """Raises InvalidUsage for NaN or infinity. A kernel may hide them: torch's CPU operator treats a row of NaN as one
    without keys."""
    if x.is_meta:
        return
    total = x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    if bool(torch.isfinite(total)) or bool(torch.isfinite(x).all()):
        return
    place = (~torch.isfinite(x)).nonzero()[0].tolist()
    raise InvalidUsage(
        f"{name} holds NaN or infinity (first at local token {place[-3]}, head {place[-2]}); check what computes it, "
        "or pass options=AttentionOptions(check=False) to allow it"
    )


def token_layouts(pack: Pack, comm: Communicator | None) -> tuple[TokenLayout, TokenLayout]:
    """The layouts of a call's tokens, and of these and the tokens of earlier slices that they see. Raises InvalidUsage,
    also for a mask."""
    layouts = pack.token_layouts(1 if comm is None else comm.size)
    layouts[0].check_attended()
    return layouts


def check_alike(tensors: dict[str, Tensor]) -> None:
    """Raises InvalidUsage unless all tensors have one type, which attention takes, and are on one device."""
    types = [x.dtype for x in tensors.values()]
    if len(set(types)) > 1 or types[0] not in _TYPES:
        raise InvalidUsage(
            f"{_listed(tensors)} must have one type, float64, float32, bfloat16 or float16; got "
            f"{', '.join(map(str, types))}"
        )
    _check_device(tensors)


def _check_device(tensors: dict[str, Tensor]) -> None:
    devices = [x.device for x in tensors.values()]
    if len(set(devices)) > 1 or devices[0].type not in ("cpu", "cuda", "meta"):
        raise InvalidUsage(f"{_listed(tensors)} must be on one device, cpu or cuda; got {', '.join(map(str, devices))}")


def _listed(tensors: dict[str, Tensor]) -> str:
    *names, last = tensors
    return f"{', '.join(names)} and {last}" if names else last


def check_linear(tensors: dict[str, Tensor], layout: Layout, comm: Communicator | None) -> None:
    """Checks the types, devices and tokens of a call's tensors, [T_local, ...] each. Raises InvalidUsage."""
    for name, x in tensors.items():
        if x.dtype not in _TYPES:
            raise InvalidUsage(f"{name} has type {x.dtype}; expected float64, float32, bfloat16 or float16")
    _check_device(tensors)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    for name, x in tensors.items():
        if x.shape[0] != layout.rows(rank):
            raise InvalidUsage(
                f"{name} has {x.shape[0]} tokens; under cu_seqlens, rank {rank} of {size} holds {layout.rows(rank)} "
                "(see shard())"
            )


def check_states(out: Tensor) -> InvalidUsage | None:
    """The error for an output that is not a number."""
    if bool(torch.isfinite(out.detach().sum(dtype=torch.float64))):
        return None
    bad = ~torch.isfinite(out.detach()).flatten(1).all(1)
    if not bool(bad.any()):
        return None
    return InvalidUsage(
        f"the output of {int(bad.sum())} of {len(bad)} local tokens is not a number (first: local token "
        f"{int(bad.nonzero()[0])}): the state overflows; check that g is not above 0, that keys are normalised and "
        "that beta is at most 2 / |k|^2"
    )


def check_all_finite(tensors: dict[str, Tensor]) -> None:
    """Raises InvalidUsage for NaN or infinity in a tensor [tokens, heads(, dim)]."""
    for name, x in tensors.items():
        check_finite(name, x[..., None] if x.ndim == 2 else x)


def summary_of(layout: Layout, settings: str) -> tuple[str, str]:
    """(all that must be the same on all ranks, a summary of it for messages)."""
    pack = layout.facts
    return f"{pack[0]} {settings}", f"{pack[1]}, {settings}"
