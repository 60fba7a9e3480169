"""A scheduler for Megatron-Core's hybrid context parallelism, in the place of its ``BalancedCPScheduler``.

Megatron's process groups are made in advance: 2^k ranks on aligned places. Every sample runs by itself on one of them,
each rank runs its samples in the order of its list, and no rank may be without a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import CostModel

__all__ = ["MegatronScheduler", "longest_first"]

#: Megatron's own estimate: the square of the length, divided by the ranks.
SQUARES = CostModel(attention=1.0, linear=0.0)
# Targets between the mean load and twice of it; the best plan counts.
_TARGETS = tuple(1 + step / 12 for step in range(13))


def longest_first(samples: Sequence[tuple[int, int]], ranks: int, max_tokens: int) -> list[tuple[int, int]]:
    """(id, tokens) of samples by falling length. Raises: InvalidUsage: all ranks cannot hold one, or it is empty."""
    ordered = sorted(samples, key=lambda sample: (-sample[1], sample[0]))
    for sample, length in (*ordered[:1], *ordered[-1:]):
        if not 1 <= length <= ranks * max_tokens:
            raise InvalidUsage(
                f"sample {sample} has {length} tokens, expected 1 to {ranks} ranks x {max_tokens} tokens: cut it, or "
                "raise max_seqlen_per_dp_cp_rank"
            )
    return ordered


class _Group(Protocol):
    def size(self) -> int:
        """Number of ranks."""


class MegatronScheduler:
    """Gives ``sample_id_groups`` to Megatron-Core; equal on all ranks that see equal lengths. Local.

    All samples of a step are one group, without barriers between them: every rank's list follows one global order, so
    ranks whose partners change cannot wait for each other in a circle.

    Args:
        max_seq_len_per_rank: tokens that a rank holds.
        dp_cp_group: the data and context parallel process group, or anything with ``size()``.
        cost_model: what a sample takes on some ranks; default: Megatron's own estimate, the length squared / ranks.

    Raises:
        InvalidUsage: the group is no power of two, as Megatron requires.

    Example:
        >>> class Group:
        ...     def size(self):
        ...         return 4
        >>> scheduler = MegatronScheduler(1000, Group())
        >>> _, [ids_by_rank] = scheduler.get_groups_and_subsamples([(7, 2000), (8, 900), (9, 800)])
        >>> ids_by_rank
        [[7], [7], [8], [9]]

    In a training script::

        wrapper = HybridCPDataLoaderWrapper(iterator, config)
        wrapper.cp_balancing_scheduler = MegatronScheduler(config.max_seqlen_per_dp_cp_rank, wrapper.dp_cp_group)
    """

    def __init__(self, max_seq_len_per_rank: int, dp_cp_group: _Group, *, cost_model: CostModel = SQUARES) -> None:
        ranks = dp_cp_group.size()
        if max_seq_len_per_rank < 1:
            raise InvalidUsage(f"max_seq_len_per_rank is {max_seq_len_per_rank}, expected at least 1 token")
        if ranks & (ranks - 1):
            raise InvalidUsage(f"the group has {ranks} ranks, and Megatron-Core makes groups for powers of two only")
        self.max_seq_len_per_rank = max_seq_len_per_rank
        self.total_hdp_gpus = ranks
        self.cost_model = cost_model

    def gpus_needed(self, seq_len: int) -> int:
        """The fewest ranks, a power of two, that hold a sample."""
        return 1 << max(0, (-(-seq_len // self.max_seq_len_per_rank) - 1).bit_length())

    def get_groups_and_subsamples(
        self,
        sample_id_seqlens: Sequence[tuple[int, int]],
        config: Any = None,  # noqa: ARG002 (Megatron-Core gives it)
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Assigns the samples of a step.

        Args:
            sample_id_seqlens: (sample id, tokens) of each sample.
            config: Megatron's, not used.

        Returns:
            ``(groups, sample_id_groups)``: for the step's one group and each rank, the lengths and the ids of its
            samples, in the order in which it runs them. No samples: two empty lists.

        Raises:
            InvalidUsage: a sample that is empty, or that all ranks together cannot hold.
        """
        samples = longest_first(sample_id_seqlens, self.total_hdp_gpus, self.max_seq_len_per_rank)
        if not samples:
            return [], []
        lengths = [length for _, length in samples]
        times = [self._times(length) for length in lengths]
        least = sum(min(time * 2**k for k, time in found.items()) for found in times) / self.total_hdp_gpus
        plans = [self._place(times, least * target) for target in _TARGETS]
        _, places = min(plans, key=lambda plan: plan[0])
        ids: list[list[int]] = [[] for _ in range(self.total_hdp_gpus)]
        tokens: list[list[int]] = [[] for _ in range(self.total_hdp_gpus)]
        for (sample, length), (first, size) in zip(samples, places, strict=True):
            for rank in range(first, first + size):
                ids[rank].append(sample)
                tokens[rank].append(length)
        return [tokens], [ids]

    def _times(self, length: int) -> dict[int, float]:
        """Seconds by the logarithm of the ranks, for all sizes that hold the sample."""
        least, most = self.gpus_needed(length).bit_length() - 1, self.total_hdp_gpus.bit_length()
        return {k: self.cost_model.seconds([length], 2**k) for k in range(least, most)}

    def _place(self, times: list[dict[int, float]], target: float) -> tuple[float, list[tuple[int, int]]]:
        """The longest load of a rank and each sample's (first rank, ranks), for samples by falling length.

        Each sample takes the fewest ranks on which it ends within the target, on the place that is free first.
        """
        ready = np.zeros(self.total_hdp_gpus)
        places = []
        for found in times:
            k = next((k for k, time in found.items() if time <= target), min(found, key=lambda k: (found[k], k)))
            free = ready.reshape(-1, 2**k).max(axis=1)
            place = int(free.argmin())
            ready[place << k : (place + 1) << k] = free[place] + found[k]
            places.append((place << k, 2**k))
        places = self._spread(places)
        return self._longest(times, places), places

    def _longest(self, times: list[dict[int, float]], places: list[tuple[int, int]]) -> float:
        ready = np.zeros(self.total_hdp_gpus)
        for found, (first, size) in zip(times, places, strict=True):
            own = ready[first : first + size]
            own[:] = own.max() + found[size.bit_length() - 1]
        return float(ready.max())

    def _spread(self, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Widens samples until every rank has one: the shortest that is beside ranks without any."""
        places = list(places)
        while True:
            busy = np.zeros(self.total_hdp_gpus, dtype=bool)
            for first, size in places:
                busy[first : first + size] = True
            if busy.all():
                return places
            idle, width = int(busy.argmin()), 1
            while True:  # the smallest aligned place with the idle rank and a sample
                width *= 2
                start = idle // width * width
                inside = [
                    i for i, (first, size) in enumerate(places) if start <= first and first + size <= start + width
                ]
                if inside:
                    places[inside[-1]] = (start, width)
                    break
