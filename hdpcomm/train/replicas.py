"""Do all ranks hold the same weights, and update them alike? Compared by hashes of a few bytes."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hdpcomm.errors import Mismatch
from hdpcomm.train.dtensor import is_dtensor

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["check_replicas", "raise_unlike", "settings_of"]

_ROUNDING = 1e-6
"""Ranks with other processors or numbers of threads round differently; weights that differ by less are no error."""
_DIGEST = 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    *,
    settings: object = None,
    without: Collection[str] = (),
) -> None:
    """Compares parameters, buffers and the optimizer's settings of all ranks. Collective over ``comm``; 48 bytes each.

    A pass over the weights: the bits of each tensor are added up as integers. If the hashes differ, sums and norms of
    each tensor tell which rank has other values. Tensors that are sharded (DTensor) are left out.

    Args:
        settings: what else must be the same, by its ``repr``.
        without: names of parameters that are not the same on these ranks.

    Raises:
        Mismatch: on every rank, naming the ranks that are not like most, and the tensor or the setting.
    """
    if comm.size == 1:
        return
    tensors = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    tensors = {name: t for name, t in tensors.items() if name not in without and not is_dtensor(t)}
    told = settings_of(optimizer, settings)
    bits = [_bits(tensor) for tensor in tensors.values()]
    sums = torch.stack(bits).tolist() if bits else []
    names = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    own = torch.frombuffer(bytearray(_digest(told) + _digest(names) + _digest(sums)), dtype=torch.uint8)
    everyone = torch.empty(comm.size, own.numel(), dtype=torch.uint8)
    comm.all_gather(everyone, own)
    updates, kinds, weights = (
        [bytes(row.tolist()) for row in everyone[:, place : place + _DIGEST]]
        for place in range(0, own.numel(), _DIGEST)
    )
    if len(set(updates)) > 1:
        raise_unlike(comm, updates, "the optimizer's settings", f"here {told}")
    if len(set(kinds)) > 1:
        raise_unlike(comm, kinds, "names, types and shapes of the tensors", f"here {len(names)} tensors")
    if len(set(weights)) > 1:
        _compare_values(tensors, comm, weights)


def _compare_values(tensors: dict[str, Tensor], comm: Communicator, hashes: Sequence[bytes]) -> None:
    """Raises if the weights differ by more than rounding. Collective; 16 bytes a rank and tensor."""
    own = torch.zeros(len(tensors), 2, dtype=torch.float64)
    for place, tensor in enumerate(tensors.values()):
        values = tensor.to(torch.float64).flatten()
        own[place] = torch.stack((values.sum(), torch.linalg.vector_norm(values))).cpu()
    everyone = torch.empty(comm.size, *own.shape, dtype=torch.float64)
    comm.all_gather(everyone, own)
    usual = everyone[hashes.index(Counter(hashes).most_common(1)[0][0])]
    apart = (everyone - usual).abs().amax(2) / usual[:, 1].clamp(min=1e-300)
    apart = apart.nan_to_num(nan=float("inf"), posinf=float("inf"))
    worst = float(apart.max())
    if worst > _ROUNDING:
        rank, place = divmod(int(apart.argmax()), len(tensors))
        odd = [b"odd" if float(row.max()) > _ROUNDING else b"" for row in apart]
        raise_unlike(
            comm, odd, "the weights", f"{list(tensors)[place]} of rank {comm.ranks[rank]} is {worst:.1e} apart"
        )
    if comm.rank == 0:
        warnings.warn(
            f"the weights of the ranks differ by rounding ({worst:.1e}): their processors or numbers of threads differ",
            RuntimeWarning,
            stacklevel=3,
        )


def raise_unlike(
    comm: Communicator, found: Sequence[bytes], what: str, more: str, places: Sequence[int] | None = None
) -> NoReturn:
    """Raises Mismatch, which names the ranks that are not like most. Local.

    Args:
        found: of each place.
        places: positions in ``comm``; ``None``: all.
    """
    usual = Counter(found).most_common(1)[0][0]
    ranks = [comm.ranks[place] for place in (range(comm.size) if places is None else places)]
    odd = [rank for rank, each in zip(ranks, found, strict=True) if each != usual]
    rest = [rank for rank, each in zip(ranks, found, strict=True) if each == usual]
    raise Mismatch(
        f"{what} of ranks {odd} are not those of ranks {rest} ({more}); replicas must be alike: go on from a "
        "checkpoint, and look for what a single rank does (another learning rate, a changed weight, broken memory)",
        rank=comm.global_rank,
        op="check_replicas",
        ranks=comm.ranks,
    )


def settings_of(optimizer: torch.optim.Optimizer, more: object = None) -> str:
    """What an optimizer does to its parameters, as text: its class, and the options of each group. Local."""
    groups: list[dict[str, Any]] = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}" + ("" if more is None else f" {more!r}")


def _bits(tensor: Tensor) -> Tensor:
    """The bits of all elements, added up as integers: another one of them is another sum."""
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = whole.contiguous()
    if whole.dtype == torch.bool:
        return whole.sum(dtype=torch.int64)
    return whole.view(_BITS[whole.element_size()]).sum(dtype=torch.int64)


def _digest(facts: object) -> bytes:
    return hashlib.sha256(repr(facts).encode()).digest()[:_DIGEST]
