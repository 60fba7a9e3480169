"""Megatron-Core: its hybrid context parallel groups on the backend, and hdpcomm's scheduler in the place of its own."""

from __future__ import annotations

import random

from common import Figures, join, leave, main

RANKS, LIMIT, STEPS = 4, 1000, 5


def samples_of(step: int) -> list[tuple[int, int]]:
    draw = random.Random(step)
    return [(i, max(1, int((RANKS * LIMIT) ** draw.random()))) for i in range(30)]


def work(backend: str) -> Figures:
    """The sum of a number of each sample over the ranks that run it, in the scheduler's order; and each rank's load."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    from hdpcomm.integrations import MegatronScheduler

    rank, size = join(backend)
    parallel_state.initialize_model_parallel(
        context_parallel_size=size, hybrid_context_parallel=True, create_gloo_process_groups=False
    )
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found: Figures = {"sums": [], "load of theirs less ours": []}
    for step in range(STEPS):
        samples = samples_of(step)
        loads = []
        for scheduler in (MegatronScheduler(LIMIT, everyone), BalancedCPScheduler(LIMIT, everyone)):
            ids = [[] for _ in range(size)]  # a rank's samples in order, of all groups of the step
            for group in scheduler.get_groups_and_subsamples(samples, None)[1]:
                for own, more in zip(ids, group, strict=True):
                    own += more
            wide = {sample: sum(sample in own for own in ids) for sample, _ in samples}
            loads.append(max(sum(dict(samples)[i] ** 2 / wide[i] for i in own) for own in ids))
            if not isinstance(scheduler, MegatronScheduler):
                continue
            sums = torch.zeros(len(samples), dtype=torch.float64)
            for sample in ids[rank]:
                part = torch.full((), 1.0 + rank + sample, dtype=torch.float64)
                if wide[sample] > 1:
                    group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=wide[sample])
                    dist.all_reduce(part, group=group)
                sums[sample] = part / wide[sample]
            dist.all_reduce(sums, group=everyone)
            found["sums"] += sums.tolist()
        found["load of theirs less ours"].append(loads[1] - loads[0])
    assert sum(found["load of theirs less ours"]) >= 0, "Megatron's own scheduler balanced better"
    leave(backend)
    return found


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch", "megatron-core"], ranks=RANKS)
