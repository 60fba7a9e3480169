"""Micro-batches for Megatron-Core's packing scheduler with dynamic context parallelism, ``default_dynamic_cp``: a file
to be put beside a training script (docs/how-to/other-trainers.md).

There a step is a table of micro-batches and ranks. In each micro-batch every rank has samples, packed into one, and the
ranks of a group have equal ones. Groups were made in advance: 2^k ranks on aligned places, or all. All ranks have as
many micro-batches, and pipelines and expert groups keep them in step: what counts is the sum of their longest ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import CostModel

__all__ = ["megatron_packing_scheduler", "pack_micro_batches"]

#: Megatron's own estimate: the square of the length, divided by the ranks.
SQUARES = CostModel(attention=1.0, linear=0.0)
# The longest sample of a micro-batch takes so many times the mean work, or more ranks; the best plan counts.
_TARGETS = (1.0, 1.5, 2.5)
# Plans are made for so many numbers of micro-batches, from the fewest that hold the samples.
_COUNTS = 2
# What is used of Megatron-Core's class, beside its constructor and run().
_ATTRIBUTES = ("max_seqlen_per_dp_cp_rank", "cp_size", "dp_size", "min_cp_size", "microbatch_group_size_per_vp_stage")
Groups = list[list[list[int]]]
Sample = tuple[int, int]  # id, tokens
Times = dict[int, dict[int, float]]  # seconds by tokens and size of the group, rising


def megatron_packing_scheduler(cost_model: CostModel = SQUARES) -> type[Any]:
    """Megatron-Core's ``DefaultDynamicCPScheduler`` with the micro-batches of :func:`pack_micro_batches`. Local.

    Fetching, rerouting and packing of samples stay Megatron's. In a training script, before the first step::

        from megatron.core.datasets import data_schedule
        from megatron_packing import megatron_packing_scheduler

        data_schedule.scheduler_map["default_dynamic_cp"] = megatron_packing_scheduler()

    and ``--dynamic-context-parallel`` as always.

    Args:
        cost_model: what a sample takes on some ranks; default: Megatron's own estimate, the length squared / ranks.

    Raises:
        InvalidUsage: no Megatron-Core, or one without that class (0.19 and older) or with another interface of it.
    """
    try:
        import megatron.core
        from megatron.core.datasets import data_schedule
    except ImportError as error:
        raise InvalidUsage(f"Megatron-Core cannot be imported ({error}); pip install megatron-core") from error
    told = f"megatron-core {megatron.core.__version__}: {data_schedule.__name__}"
    parent: Any = getattr(data_schedule, "DefaultDynamicCPScheduler", None)
    if parent is None:
        raise InvalidUsage(
            f"{told} has no DefaultDynamicCPScheduler, which came after 0.19: install Megatron-LM's branch dev, or a "
            "release with --dynamic-context-parallel"
        )
    _check_interface(parent, f"{told}.DefaultDynamicCPScheduler")
    schedulers = getattr(data_schedule, "scheduler_map", {})
    if "default_dynamic_cp" not in schedulers:
        raise InvalidUsage(
            f"{told}.scheduler_map has {list(schedulers)}, expected 'default_dynamic_cp' among them: another scheduler "
            "put there would not be asked. Use a release of hdpcomm that knows this version"
        )

    class PlannedDynamicCPScheduler(parent):  # type: ignore[misc] # mypy does not see Megatron-Core
        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[Sample]) -> Groups:
            most = getattr(self, "max_num_seqs", None)
            return pack_micro_batches(
                sample_id_seqlens,
                self.max_seqlen_per_dp_cp_rank,
                self.dp_size * self.cp_size,
                min_ranks=self.min_cp_size,
                divisible_by=self.microbatch_group_size_per_vp_stage or 1,
                # Megatron-Core may append a sequence of padding, which the configured number counts, too.
                max_samples=None if most is None else max(1, most - 1),
                cost_model=cost_model,
            )

    return PlannedDynamicCPScheduler


def _check_interface(parent: Any, name: str) -> None:
    """Raises InvalidUsage if Megatron-Core's class is no longer the one that this module knows."""
    try:
        one = parent(8, 2, 1, None, min_cp_size=1)
        missing = [each for each in _ATTRIBUTES if not hasattr(one, each)]
        given = list(inspect.signature(parent.get_groups_and_subsamples).parameters)
        found = one.get_groups_and_subsamples([(0, 16)])
    except Exception as error:
        raise InvalidUsage(f"{name} has another interface than Megatron-LM's pull request 2000: {error!r}") from error
    if missing or given != ["self", "sample_id_seqlens"] or found != [[[0], [0]]] or not hasattr(parent, "run"):
        raise InvalidUsage(
            f"{name} has another interface than Megatron-LM's pull request 2000: attributes missing: {missing}; "
            f"get_groups_and_subsamples takes {given}, expected ['self', 'sample_id_seqlens'], and gives {found} for a "
            "sample on two ranks, expected [[[0], [0]]]. Use a release of hdpcomm that knows it"
        )


def pack_micro_batches(
    samples: Sequence[Sample],
    max_tokens: int,
    ranks: int,
    *,
    min_ranks: int = 1,
    divisible_by: int = 1,
    max_samples: int | None = None,
    cost_model: CostModel = SQUARES,
) -> Groups:
    """Packs the samples of a step. Equal on all ranks that see equal samples. Local.

    Args:
        samples: (id, tokens) of each sample.
        max_tokens: tokens that a rank holds in a micro-batch.
        ranks: ranks of the data and context parallel group.
        min_ranks: the fewest ranks of a sample, unless that is all of them.
        divisible_by: the number of micro-batches is a multiple of it, for interleaved pipelines.
        max_samples: the most samples of a rank in a micro-batch.
        cost_model: what a sample takes on some ranks.

    Returns:
        For each micro-batch and each rank, the ids of its samples; nobody has none. No samples: an empty list.

    Raises:
        InvalidUsage: a sample that is empty or that all ranks cannot hold, or fewer samples than micro-batches.

    Example:
        >>> pack_micro_batches([(7, 2000), (8, 900), (9, 800)], 1000, 4)
        [[[7], [7], [8], [9]]]
    """
    if (
        max_tokens < 1
        or not 1 <= min_ranks <= ranks
        or divisible_by < 1
        or (max_samples is not None and max_samples < 1)
    ):
        raise InvalidUsage(
            f"max_tokens {max_tokens}, min_ranks {min_ranks} of {ranks}, divisible_by {divisible_by} and max_samples "
            f"{max_samples}: expected at least 1 of each"
        )
    if not samples:
        return []
    ordered = _longest_first(samples, ranks, max_tokens)
    # The groups that Megatron-Core makes: create_dynamic_dp_cp_groups(), and that of all ranks.
    sizes = [2**k for k in range(ranks.bit_length() - 1) if 2**k >= min_ranks]
    sizes = [size for size in sizes if size < ranks] + [ranks]
    times: Times = {}
    for _, length in ordered:
        if length not in times:
            times[length] = {
                size: cost_model.seconds([length], size) - cost_model.fixed
                for size in sizes
                if length <= size * max_tokens
            }
    work = sum(min(size * time for size, time in times[length].items()) for _, length in ordered) / ranks
    least = -(-sum(length for _, length in ordered) // (max_tokens * ranks))
    if max_samples is not None:
        least = max(least, -(-len(ordered) // (max_samples * ranks)))
    count = -(-least // divisible_by) * divisible_by
    plans: list[tuple[float, int, Groups]] = []
    most = len(ordered) // divisible_by * divisible_by
    found = 0
    while found < _COUNTS and count <= most:
        before = len(plans)
        for target in _TARGETS:
            table = _Table(count, ranks, sizes, max_tokens, max_samples)
            if table.place_all(ordered, times, work / count * target) and table.fill(times):
                plans.append((table.longest(times) + count * cost_model.fixed, len(plans), table.groups()))
        found += len(plans) > before
        after = count + max(1, 0 if found else count // (8 * divisible_by)) * divisible_by
        count = after if count == most else min(after, most)
    if not plans:
        raise InvalidUsage(
            f"{len(ordered)} samples make no micro-batches of at most {max_tokens} tokens and {max_samples} samples a "
            f"rank, none idle, whose number is a multiple of {divisible_by}: take more samples a step"
        )
    return min(plans)[2]


def _longest_first(samples: Sequence[Sample], ranks: int, max_tokens: int) -> list[Sample]:
    ordered = sorted(samples, key=lambda sample: (-sample[1], sample[0]))
    for sample, length in (ordered[0], ordered[-1]):
        if not 1 <= length <= ranks * max_tokens:
            raise InvalidUsage(
                f"sample {sample} has {length} tokens, expected 1 to {ranks} ranks x {max_tokens} tokens: cut it, or "
                "raise max_seqlen_per_dp_cp_rank"
            )
    return ordered


class _Table:
    """Micro-batches x ranks. A block is some aligned ranks of a micro-batch, and their samples, packed."""

    def __init__(self, count: int, ranks: int, sizes: list[int], max_tokens: int, max_samples: int | None) -> None:
        self.ranks, self.sizes, self.max_tokens = ranks, sizes, max_tokens
        self.max_samples = max_samples or math.inf
        self.size = np.zeros((count, ranks), dtype=np.int64)  # of the block that holds a rank; 0: idle
        self.blocks: dict[tuple[int, int], list[Sample]] = {}  # by micro-batch and first rank

    def place_all(self, samples: list[Sample], times: Times, target: float) -> bool:
        """Gives each sample the fewest ranks on which it ends within the target, else more, else fewer.

        Among their places, that which makes its micro-batch last least longer, then that of the least load. False: the
        micro-batches are too few.
        """
        tokens, load = np.zeros(self.size.shape), np.zeros(self.size.shape)
        held, longest = np.zeros(self.size.shape, dtype=np.int64), np.zeros((len(self.size), 1))
        for sample in samples:
            time = times[sample[1]]
            wanted = next((size for size in time if time[size] <= target), min(time, key=lambda s: (time[s], s)))
            sizes = sorted(time, key=lambda size: (size < wanted, abs(size - wanted)))
            for size in sizes:
                firsts = slice(0, self.ranks // size * size, size)
                inside = self.size[:, : firsts.stop].reshape(len(self.size), -1, size)
                free = ((inside == size) | (inside == 0)).all(axis=2) & (inside == inside[:, :, :1]).all(axis=2)
                free &= tokens[:, firsts] * size + sample[1] <= self.max_tokens * size
                free &= held[:, firsts] < self.max_samples
                if free.any():
                    break
            else:
                return False
            ends = load[:, firsts] + time[size]
            rise = np.where(free, np.maximum(ends, longest) - longest, np.inf)
            micro_batch, place = divmod(int(np.where(rise <= rise.min(), ends, np.inf).argmin()), ends.shape[1])
            own = (micro_batch, slice(place * size, (place + 1) * size))
            self.size[own] = size
            tokens[own] += sample[1] / size
            held[own] += 1
            load[own] += time[size]
            longest[micro_batch] = max(longest[micro_batch, 0], ends[micro_batch, place])
            self.blocks.setdefault((micro_batch, place * size), []).append(sample)
        return True

    def fill(self, times: Times) -> bool:
        """Leaves no rank idle: samples move from loaded blocks, or blocks take more ranks. False: it cannot be."""
        for micro_batch in map(int, np.flatnonzero(~self.size.any(axis=1))):
            samples_of = [0] * len(self.size)
            for at, samples in self.blocks.items():
                samples_of[at[0]] += len(samples)
            if not self._move(micro_batch, 0, [at for at in self.blocks if samples_of[at[0]] > 1], times):
                return False
        for micro_batch in range(len(self.size)):
            while (idle := np.flatnonzero(self.size[micro_batch] == 0)).size:
                givers = [at for at, samples in self.blocks.items() if len(samples) > 1]
                near = [at for at in givers if at[0] == micro_batch]
                if not (
                    self._move(micro_batch, int(idle[0]), near, times)
                    or self._widen(micro_batch, int(idle[0]))
                    or self._move(micro_batch, int(idle[0]), givers, times)
                ):
                    return False
        return True

    def _move(self, micro_batch: int, idle: int, blocks: list[tuple[int, int]], times: Times) -> bool:
        """Moves a sample of about half a block's load to the idle place; the block: the most loaded that has one."""
        givers = [(self._load(at, times), at) for at in blocks]
        for load, giver in sorted(givers, reverse=True):
            least = {sample: min(times[sample[1]]) for sample in self.blocks[giver]}  # ranks
            fitting = [sample for sample, size in least.items() if self._is_idle(micro_batch, idle, size)]
            if fitting:
                moved = min(fitting, key=lambda sample: abs(times[sample[1]][least[sample]] - load / 2))
                self.blocks[giver].remove(moved)
                if not self.blocks[giver]:
                    del self.blocks[giver]
                    self.size[giver[0], giver[1] : giver[1] + self.size[giver]] = 0
                first = idle // least[moved] * least[moved]
                self.blocks[micro_batch, first] = [moved]
                self.size[micro_batch, first : first + least[moved]] = least[moved]
                return True
        return False

    def _is_idle(self, micro_batch: int, rank: int, size: int) -> bool:
        first = rank // size * size
        return first + size <= self.ranks and not self.size[micro_batch, first : first + size].any()

    def _widen(self, micro_batch: int, idle: int) -> bool:
        """Makes one block of the smallest aligned place that has the idle rank and any block."""
        for size in self.sizes:
            first = idle // size * size
            inside = [at for at in range(first, first + size) if (micro_batch, at) in self.blocks]
            if inside and first + size <= self.ranks:
                merged = [sample for at in inside for sample in self.blocks[micro_batch, at]]
                if len(merged) > self.max_samples:
                    return False
                for at in inside:
                    del self.blocks[micro_batch, at]
                self.blocks[micro_batch, first] = merged
                self.size[micro_batch, first : first + size] = size
                return True
        return False

    def _load(self, at: tuple[int, int], times: Times) -> float:
        return sum(times[length][int(self.size[at])] for _, length in self.blocks[at])

    def longest(self, times: Times) -> float:
        """The sum over the micro-batches of their longest load, seconds."""
        most = [0.0] * len(self.size)
        for at in self.blocks:
            most[at[0]] = max(most[at[0]], self._load(at, times))
        return sum(most)

    def groups(self) -> Groups:
        found: Groups = [[[] for _ in range(self.ranks)] for _ in range(len(self.size))]
        for (micro_batch, first), samples in self.blocks.items():
            for rank in range(first, first + int(self.size[micro_batch, first])):
                found[micro_batch][rank] = [sample for sample, _ in samples]
        return found
