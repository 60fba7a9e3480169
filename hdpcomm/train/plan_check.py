"""All ranks must run the same plan: with different ones they would wait for each other for ever."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from hdpcomm.errors import Mismatch

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.plan import StepPlan

__all__ = ["check_same_plan"]


def check_same_plan(plan: StepPlan, comm: Communicator, *, more: bytes = b"") -> None:
    """Compares the plan's hash with that of all ranks. Collective over ``comm``; 32 bytes a rank.

    ``more``: what else the step follows, as the order of a pipeline's passes; it must be equal, too.

    Raises:
        Mismatch: on every rank, naming which ranks hold which plan.
    """
    if comm.size == 1:
        return
    digest = bytes.fromhex(plan.hash) if not more else hashlib.sha256(bytes.fromhex(plan.hash) + more).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    hashes = torch.empty(comm.size * mine.numel(), dtype=torch.uint8)
    comm.all_gather(hashes, mine)
    groups: dict[str, list[int]] = {}
    for position, row in enumerate(hashes.view(comm.size, -1)):
        groups.setdefault(bytes(row.tolist()).hex(), []).append(comm.ranks[position])
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
