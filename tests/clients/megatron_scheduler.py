"""Megatron-Core: its dynamic context parallel groups on the backend, and hdpcomm's scheduler in the place of its own.

Micro-batches in which every rank has samples, packed. A version of Megatron-Core whose class has moved is an error that
says so, and examples/megatron_packing.py has to follow.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common import Figures, join, leave, main

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

RANKS, LIMIT, STEPS = 4, 1000, 5


def samples_of(step: int) -> list[tuple[int, int]]:
    draw = random.Random(step)
    return [(i, max(1, int((RANKS * LIMIT) ** draw.random()))) for i in range(30)]


@contextmanager
def on_cpus(device: Any) -> Iterator[None]:
    """What Megatron-Core calls of torch.cuda goes to CPUs. device: what torch.cuda.current_device() gives."""
    import torch

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=device),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    ):
        yield


def work(backend: str) -> Figures:
    """Megatron-Core's whole way of a step's samples to packed micro-batches, with hdpcomm's micro-batches in it."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.datasets import data_schedule
    from megatron_packing import megatron_packing_scheduler

    rank, size = join(backend)
    everyone, group_of = make_groups(size)
    own = data_schedule.scheduler_map["default_dynamic_cp"]
    config = SimpleNamespace(
        max_seqlen_per_dp_cp_rank=LIMIT,
        microbatch_group_size_per_vp_stage=1,
        virtual_pipeline_model_parallel_size=None,
        sequence_packing_scheduler="default_dynamic_cp",
        min_dynamic_context_parallel_size=1,
        pipeline_model_parallel_layout=None,
        mtp_num_layers=None,
    )
    found: Figures = {"packed": [], "work of theirs less ours": []}
    for step in range(STEPS):
        samples = samples_of(step)
        works = []
        for scheduler in (megatron_packing_scheduler(), own):
            data_schedule.scheduler_map["default_dynamic_cp"] = scheduler
            # Every second sample on each of the two data parallel ranks; its tokens say which it is.
            mine = [sample for sample in samples if sample[0] % 2 == parallel_state.get_data_parallel_rank()]
            with on_cpus(torch.device("cpu")):
                micro_batches, count, tokens, _ = data_schedule.wrap_data_iterator(
                    iter([[tensors_of(*sample)] for sample in mine]), config, len(mine)
                )
            assert tokens == sum(length for _, length in samples)
            sums = torch.zeros(len(samples), dtype=torch.float64)
            loads = torch.zeros(count, dtype=torch.float64)
            for place in range(count):
                packed = next(micro_batches)
                wide = int(packed["local_cp_size"])
                lengths = packed["cu_seqlens"].diff()
                assert int(lengths.sum()) <= LIMIT * wide
                loads[place] = float(lengths.double().square().sum()) / wide
                part = torch.bincount(packed["tokens"], minlength=len(samples)).double() * (1 + rank)
                dist.all_reduce(part, group=group_of(wide))
                sums += part / wide
            dist.all_reduce(sums, group=everyone)
            dist.all_reduce(loads, op=dist.ReduceOp.MAX, group=everyone)
            works.append(float(loads.sum()))
            if scheduler is not own:
                found["packed"] += sums.tolist()
        data_schedule.scheduler_map["default_dynamic_cp"] = own
        found["work of theirs less ours"].append(works[1] - works[0])
    assert sum(found["work of theirs less ours"]) >= 0, "Megatron's own scheduler balanced better"
    parallel_state.destroy_model_parallel()
    leave(backend)
    return found


def make_groups(size: int) -> tuple[Any, Any]:
    """The group of all ranks, and a function that gives this rank's group of some size."""
    from megatron.core import parallel_state

    with on_cpus(0):
        parallel_state.initialize_model_parallel(
            context_parallel_size=size // 2, create_gloo_process_groups=False, dynamic_context_parallel=True
        )
    found = parallel_state.get_dynamic_data_context_parallel_groups
    return parallel_state.get_data_parallel_group(with_context_parallel=True), lambda wide: found(group_size=wide)


def tensors_of(sample: int, length: int) -> dict[str, Any]:
    import torch

    return {
        "tokens": torch.full((length,), sample),
        "labels": torch.full((length,), sample),
        "loss_mask": torch.ones(length),
        "position_ids": torch.arange(length),
        "original_seq_len": torch.tensor([length]),
        "padded_seq_len": torch.tensor([length]),
    }


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch", "megatron-core"], ranks=RANKS)
