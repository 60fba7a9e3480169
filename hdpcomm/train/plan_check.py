"""All ranks must run the same plan and update alike: with different plans they would wait for each other for ever, with
different learning rates their weights would drift apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hdpcomm.errors import Mismatch
from hdpcomm.train.replicas import raise_unlike

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.plan import StepPlan

__all__ = ["check_same_plan"]


def check_same_plan(
    plan: StepPlan,
    comm: Communicator,
    *,
    more: bytes = b"",
    settings: str = "",
    alike: Sequence[Sequence[int]] | None = None,
) -> None:
    """Compares hashes of the plan and of the optimizer's settings of all ranks. Collective over ``comm``; 48 bytes a
    rank in one message.

    Args:
        more: what else the step follows, as the order of a pipeline's passes; it must be equal, too.
        settings: of the optimizer (:func:`hdpcomm.train.replicas.settings_of`).
        alike: positions in ``comm`` whose settings must be the same, by stage; ``None``: all.

    Raises:
        Mismatch: on every rank, naming which ranks hold which plan, or those whose settings are not like most.
    """
    if comm.size == 1:
        return
    digest = bytes.fromhex(plan.hash) if not more else hashlib.sha256(bytes.fromhex(plan.hash) + more).digest()
    digest += hashlib.sha256(settings.encode()).digest()[:16]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    hashes = torch.empty(comm.size, mine.numel(), dtype=torch.uint8)
    comm.all_gather(hashes, mine)
    rows = [bytes(row.tolist()) for row in hashes]
    groups: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        groups.setdefault(row[:32].hex(), []).append(comm.ranks[position])
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
    for places in alike or [range(comm.size)]:
        if len({rows[place][32:] for place in places}) > 1:
            raise_unlike(comm, [rows[p][32:] for p in places], "the optimizer's settings", f"here {settings}", places)
