"""A plan in words, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdpcomm.plan.step import MicroBatch, StepPlan

__all__ = ["explain", "format_ranks"]


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as ranges: ``0-3,7``."""
    parts: list[str] = []
    ordered = sorted(ranks)
    start = previous = ordered[0]
    for rank in [*ordered[1:], -2]:
        if rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ",".join(parts)


def _format_sequences(batch: MicroBatch) -> str:
    if len(batch.sequences) == 1:
        return f"sequence {batch.sequences[0].id}"
    return f"{len(batch.sequences)} sequences"


def explain(plan: StepPlan, *, max_rows: int) -> str:
    """The text of :meth:`StepPlan.explain`."""
    counts = [len(plan.for_rank(rank)) for rank in range(plan.num_ranks)]
    peers = max((len(plan.peers(rank)) for rank in range(plan.num_ranks)), default=0)
    widest = max((len(batch.ranks) for batch in plan.micro_batches), default=0)
    ring_tokens = sum((len(batch.ranks) - 1) * batch.tokens for batch in plan.micro_batches)
    lines = [
        f"policy {plan.policy} on {plan.num_ranks} ranks: {plan.tokens:,} tokens in {len(plan.micro_batches)} "
        f"micro-batches, {min(counts)} to {max(counts)} a rank",
        f"predicted {plan.makespan_s:.6g} s, lower bound {plan.lower_bound_s:.6g} s (gap {100 * plan.gap:.2f}%), "
        f"idle {100 * plan.idle_share:.2f}%, planned in {1e3 * plan.planning_s:.1f} ms",
        f"widest group {widest} ranks, at most {peers} ring peers a rank, KV of {ring_tokens:,} tokens passed on per "
        "layer and pass",
    ]
    rows = list(zip(plan.micro_batches, plan.timeline(), strict=True))
    if len(rows) > max_rows:
        rows = sorted(rows, key=lambda row: -row[0].tokens)[:max_rows]
        lines.append(f"the {max_rows} largest micro-batches:")
    for batch, start in rows:
        offload = f", offload {batch.offload_ratio:.2f}" if batch.offload_ratio else ""
        lines.append(
            f"  #{batch.index}: {_format_sequences(batch)}, {batch.tokens:,} tokens on {len(batch.ranks)} ranks "
            f"({format_ranks(batch.ranks)}), {start:.6g} to {start + batch.seconds:.6g} s{offload}"
        )
    return "\n".join(lines)
