"""Micro-batches for verl's ``use_dynamic_bsz``: as few as fit, of equal time.

verl cuts a rank's samples into micro-batches by their estimated work and takes more of them until none has too many
tokens. Here the tokens are a limit from the start, so fewer are needed, and a cost model says what is equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import CostModel

__all__ = ["split_micro_batches"]

#: verl's own estimate for a 7B model: 24576 tokens + squares.
VERL_WORK = CostModel(attention=1.0, linear=24576.0)


def split_micro_batches(
    lengths: Sequence[int],
    max_token_len: int,
    *,
    min_count: int = 1,
    divisible_by: int = 1,
    group_size: int = 1,
    cost_model: CostModel = VERL_WORK,
) -> list[list[int]]:
    """Cuts samples into micro-batches of at most ``max_token_len`` tokens and of about equal time. Local.

    Args:
        lengths: tokens of each sample, as ``attention_mask.sum(dim=1)`` gives them.
        max_token_len: the most tokens of a micro-batch.
        min_count: the fewest micro-batches (what ``all_reduce(MAX)`` over the data parallel ranks gave).
        divisible_by: the number of micro-batches is a multiple of it, for interleaved pipelines.
        group_size: consecutive samples that stay together, as ``force_group_size`` of verl.
        cost_model: what a micro-batch takes.

    Returns:
        Positions of the samples by micro-batch, rising in each; none is empty.

    Raises:
        InvalidUsage: samples that do not fit into a micro-batch, or fewer samples than micro-batches.

    Example:
        >>> split_micro_batches([900, 100, 500, 500], 1000)
        [[0, 1], [2, 3]]
    """
    if max_token_len < 1 or min_count < 1 or divisible_by < 1 or group_size < 1 or len(lengths) % group_size:
        raise InvalidUsage(
            f"max_token_len {max_token_len}, min_count {min_count}, divisible_by {divisible_by} and group_size "
            f"{group_size} for {len(lengths)} samples: expected at least 1, and groups that divide the samples"
        )
    groups = [list(range(first, first + group_size)) for first in range(0, len(lengths), group_size)]
    tokens = [sum(lengths[i] for i in group) for group in groups]
    if any(length < 1 for length in lengths) or max(tokens, default=0) > max_token_len:
        raise InvalidUsage(
            f"samples of {min(lengths)} to {max(lengths)} tokens in groups of up to {max(tokens)}, expected 1 to "
            f"max_token_len, {max_token_len}"
        )
    times = [cost_model.seconds([lengths[i] for i in group]) - cost_model.fixed for group in groups]
    order = sorted(range(len(groups)), key=lambda g: (-times[g], g))
    count = max(min_count, -(-sum(tokens) // max_token_len)) if groups else 0
    count = -(-count // divisible_by) * divisible_by
    while count <= len(groups):
        bins = _deal(order, tokens, times, count, max_token_len)
        if bins is not None:
            return [sorted(i for group in bin for i in groups[group]) for bin in bins]
        count += divisible_by
    raise InvalidUsage(
        f"{len(groups)} groups of samples cannot make {count} micro-batches that are not empty: lower min_count or "
        "divisible_by, or raise max_token_len"
    )


def _deal(
    order: Sequence[int], tokens: Sequence[int], times: Sequence[float], count: int, limit: int
) -> list[list[int]] | None:
    """Longest first, each into the shortest micro-batch with room; else, best fit by tokens; None if neither works."""
    heap = [(0.0, bin) for bin in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for group in order:
        full = []
        while heap and held[heap[0][1]] + tokens[group] > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            return _best_fit(tokens, count, limit)
        time, bin = heap[0]
        heapq.heapreplace(heap, (time + times[group], bin))
        bins[bin].append(group)
        held[bin] += tokens[group]
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _best_fit(tokens: Sequence[int], count: int, limit: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for group in sorted(range(len(tokens)), key=lambda g: (-tokens[g], g)):
        fitting = [bin for bin in range(count) if held[bin] + tokens[group] <= limit]
        if not fitting:
            return None
        best = max(fitting, key=lambda bin: held[bin])
        bins[best].append(group)
        held[best] += tokens[group]
    return bins if all(bins) else None
