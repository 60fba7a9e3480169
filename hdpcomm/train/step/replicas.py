"""Do all ranks hold the same weights, and update them alike? Compared by hashes of a few bytes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.comm.tensors import plain_tensors
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.log import LOG
from hdpcomm.plan import StepPlan

__all__ = ["ChangedBuffers", "check_replicas", "check_same_plan", "raise_unlike", "settings_of"]

_FEW = 8
"""Other bits in no more than one of so many tensors are no rounding."""
_ROUNDING = 1e-6
"""Ranks with other processors or numbers of threads round differently; weights that differ by less are no error."""
_DIGEST = 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(
    tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, comm: Communicator, *, settings: object = None
) -> None:
    """Compares tensors and the optimizer's settings of all ranks. Collective over ``comm``; 48 bytes each.

    A pass over the tensors: the bits of each are added up as integers. If the hashes differ, sums and norms of each
    tensor tell which rank has other values.

    Args:
        tensors: parameters and buffers by name.
        settings: what else must be the same, by its ``repr``.

    Raises:
        Mismatch: on every rank, naming the ranks that are not like most, and the tensor or the setting.
    """
    if comm.size == 1:
        return
    tensors = {
        f"{name} ({number})" if number else name: plain.detach()
        for name, tensor in tensors.items()
        for number, plain in enumerate(plain_tensors(tensor))
    }
    told = settings_of(optimizer, settings)
    bits = [_bits(tensor) for tensor in tensors.values()]
    sums = torch.stack(bits).tolist() if bits else []
    names = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    updates, kinds, weights = _gathered(comm, [_digest(repr(each).encode()) for each in (told, names, sums)])
    if len(set(updates)) > 1:
        raise_unlike(comm, updates, "the optimizer's settings", f"here {told}")
    if len(set(kinds)) > 1:
        raise_unlike(comm, kinds, "names, types and shapes of the tensors", f"here {len(names)} tensors")
    if len(set(weights)) > 1:
        _compare_values(tensors, sums, comm, weights)


def _compare_values(
    tensors: dict[str, Tensor], sums: Sequence[int], comm: Communicator, hashes: Sequence[bytes]
) -> None:
    """Raises if the weights differ by more than rounding, which is in most tensors if in any: other bits in a few are
    none, however little they change. Collective; 24 bytes a rank and tensor."""
    own = torch.zeros(len(tensors), 2, dtype=torch.float64)
    for place, tensor in enumerate(tensors.values()):
        values = tensor.to(torch.float64).flatten()
        own[place] = torch.stack((values.sum(), torch.linalg.vector_norm(values))).cpu()
    everyone, bits = own.new_empty(comm.size, *own.shape), torch.empty(comm.size, len(tensors), dtype=torch.int64)
    comm.all_gather(everyone, own)
    comm.all_gather(bits, torch.tensor(sums, dtype=torch.int64))
    place = hashes.index(Counter(hashes).most_common(1)[0][0])
    usual, other = everyone[place], bits != bits[place]
    apart = (everyone - usual).abs().amax(2) / usual[:, 1].clamp(min=1e-300)
    apart = apart.nan_to_num(nan=float("inf"), posinf=float("inf"))
    few = _FEW * other.sum(1) <= len(tensors)
    apart[other & few[:, None]] += float("inf")
    worst = float(apart.max())
    if worst > _ROUNDING:
        rank, place = divmod(int(apart.argmax()), len(tensors))
        odd = [b"odd" if float(row.max()) > _ROUNDING else b"" for row in apart]
        name = list(tensors)[place]
        told = "has other bits" if bool(few[rank]) and math.isinf(worst) else f"is {worst:.1e} apart"
        raise_unlike(comm, odd, "the weights", f"{name} of rank {comm.ranks[rank]} {told}")
    if comm.rank == 0:
        LOG.warning(
            f"the weights of the ranks differ by rounding ({worst:.1e}): their processors or numbers of threads differ"
        )


class ChangedBuffers:
    """Which of a model's buffers its forward passes change: ranks run other passes and would drift apart. Buffers that
    are no part of its state (``persistent=False``), as tables of angles, do not count.

    Args:
        model: whose buffers are looked at, those that it has now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name, f"{prefix}.{name}" if prefix else name)
            for prefix, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._before: list[tuple[Tensor | None, int]] = []

    def begin(self) -> None:
        """A step begins. Local."""
        self._before = self._now()

    def changed(self) -> list[str]:
        """Names of the buffers that have other values, or another tensor in their place, than at the beginning."""
        pairs = zip(self._places, self._before, self._now(), strict=True)
        return [name for (*_, name), old, now in pairs if old[0] is not now[0] or old[1] != now[1]]

    def refuse(self, comm: Communicator) -> NoReturn:
        """Raises InvalidUsage that names the ranks. Collective over ``comm``, where any rank has changed buffers."""
        own = self.changed()
        counts = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather(counts, torch.tensor([len(own)], dtype=torch.int64))
        ranks = [comm.ranks[place] for place in counts.nonzero().flatten().tolist()]
        raise InvalidUsage(
            f"forward passes of ranks {ranks} have changed buffers of the model ({', '.join(own[:3]) or 'none here'}): "
            "each rank runs passes of its own, so ranks would go on with other values (no parameter was updated); "
            "update them between steps from numbers that all ranks have alike, after comm.all_reduce() say, or "
            "register them with persistent=False if they are a cache"
        )

    def _now(self) -> list[tuple[Tensor | None, int]]:
        buffers = (module._buffers.get(name) for module, name, _ in self._places)
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]


def raise_unlike(
    comm: Communicator, found: Sequence[bytes], what: str, more: str, places: Sequence[int] | None = None
) -> NoReturn:
    """Raises Mismatch, which names the ranks that are not like most. Local.

    Args:
        found: of each place.
        places: positions in ``comm``; ``None``: all.
    """
    (usual, count), *others = Counter(found).most_common()
    ranks = [comm.ranks[place] for place in (range(comm.size) if places is None else places)]
    odd = [rank for rank, each in zip(ranks, found, strict=True) if each != usual]
    rest = [rank for rank, each in zip(ranks, found, strict=True) if each == usual]
    error = Mismatch(
        f"{what} of ranks {odd} are not those of ranks {rest} ({more}); replicas must be alike: go on from a "
        "checkpoint, and look for what a single rank does (another learning rate, a changed weight, broken memory)",
        rank=comm.global_rank,
        op="check_replicas",
        ranks=comm.ranks,
    )
    if count > max((each for _, each in others), default=0):
        error.unlike = tuple(odd)
    raise error


def settings_of(optimizer: torch.optim.Optimizer, more: object = None) -> str:
    """Settings of an optimizer, as text: its class, and the options of each group. Local."""
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


def _digest(facts: bytes) -> bytes:
    return hashlib.sha256(facts).digest()[:_DIGEST]


def _gathered(comm: Communicator, digests: Sequence[bytes]) -> list[list[bytes]]:
    """Each of these digests, of all ranks. Collective over ``comm``."""
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    everyone = torch.empty(comm.size, len(digests), _DIGEST, dtype=torch.uint8)
    comm.all_gather(everyone, own)
    return [[bytes(each.tolist()) for each in column] for column in everyone.unbind(1)]


def check_same_plan(
    plan: StepPlan,
    comm: Communicator,
    *,
    more: bytes = b"",
    settings: str = "",
    alike: Sequence[Sequence[int]] | None = None,
    order: bytes = b"",
) -> bool:
    """Compares hashes of the plan and of the optimizer's settings of all ranks. Collective over ``comm``; 48 bytes a
    rank in one message. Returns whether ``order`` is the same on all ranks of each stage, too.

    Args:
        more: what else the step follows, as the order of a pipeline's passes; it must be equal, too.
        settings: of the optimizer (:func:`hdpcomm.train.step.replicas.settings_of`).
        alike: positions in ``comm`` whose settings must be the same, by stage; ``None``: all.
        order: in which gradients come (:meth:`hdpcomm.train.zero.gradients.WholeSums.order`).

    Raises:
        Mismatch: on every rank, naming which ranks hold which plan, or those whose settings are not like most.
    """
    if comm.size == 1:
        return True
    own = bytes.fromhex(plan.hash)[:_DIGEST] if not more else _digest(bytes.fromhex(plan.hash) + more)
    plans, updates, orders = _gathered(comm, [own, _digest(settings.encode()), _digest(order)])
    groups: dict[str, list[int]] = {}
    for rank, each in zip(comm.ranks, plans, strict=True):
        groups.setdefault(each.hex(), []).append(rank)
    if len(groups) > 1:
        told = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {key[:12]}"
            for key, ranks in groups.items()
        )
        raise Mismatch(
            f"ranks made different plans for this step ({told}); all ranks must pass the same lengths and use the "
            "same planner and cost model",
            rank=comm.global_rank,
            op="plan",
            ranks=comm.ranks,
        )
    stages = alike or [range(comm.size)]
    for places in stages:
        if len({updates[place] for place in places}) > 1:
            raise_unlike(comm, [updates[p] for p in places], "the optimizer's settings", f"here {settings}", places)
    return all(len({orders[place] for place in places}) == 1 for places in stages)
