"""Training on the same batches in turns: balanced, static, torch's DDP and torch's FSDP2 over gloo.

    python benchmarks/train.py --json benchmarks/results/train.json      two ranks on two cores, about 4 minutes
    python benchmarks/train.py --ranks 4 --steps 8 --contexts 8192

Batches are those of ``hdpcomm train`` without ``--data``: hundreds of short sequences of Python's standard library, and
a few that need all ranks. All train the same model from the same weights with the same kernels and AdamW, and their
losses are compared. DDP and FSDP2 take whole sequences in packs without padding, as many tokens on each rank; so a rank
holds the longest sequence, where "balanced" and "static" hold its share. "balanced, whole" may hold as much as DDP.
FSDP2 gathers parameters and scatters gradients in every pass, as it is meant. Torch's context parallelism is tried, and
its error shown: it has no strategy for the CPU, so the static mesh is this library's.

Whatever else the machine does is in all rows, which take turns in an order that changes with each step. So compare the
ratios, each the median over the steps of a step's time against that of DDP on the same batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdpcomm as hdp
from hdpcomm.comm.launch import run_ranks
from hdpcomm.comm.topology import shared_cores
from hdpcomm.data import BatchSampler, Corpus, standard_library
from hdpcomm.measure import profile_cost_model
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, PlanAhead, PlannedStep, Planner
from hdpcomm.train import StepMetrics, Trainer
from hdpcomm.train.losses.shards import Fetch, micro_batch_loss, no_tokens, pack_shard
from hdpcomm.train.step.data_parallel import DataParallelTrainer, WholeSequencePlanner, torch_group
from hdpcomm.train.step.metrics import PHASES, Timeline

MODEL = LlamaConfig(layers=4, hidden=32, heads=2, kv_heads=1, ffn=96)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train.

    Attributes:
        seconds: of each step.
        phases: seconds of a step by phase of ``hdpcomm.train.step.metrics.PHASES``, mean over steps and ranks.
        processor_s: processor time of a step on the busiest rank, mean over the steps.
        sent_bytes: of a step, all ranks; ``None`` where torch does not tell.
        losses: of each step.
    """

    name: str
    tokens_per_s: float
    against_ddp: float
    seconds: list[float]
    phases: dict[str, float]
    processor_s: float
    sent_bytes: float | None
    sequences_on_ranks: dict[int, int]
    losses: list[float]


class LockstepLoop:
    """FSDP2 as it is meant, in a plain loop: parameters gathered layer by layer in each pass, gradients scattered in
    the last one. All ranks run equally many passes; where a rank has no more sequences, it runs one over a token
    without a loss.

    Args:
        model: which ``fully_shard`` has sharded.
    """

    def __init__(
        self, model: Llama, optimizer: torch.optim.Optimizer, planner: Planner, comm: hdp.Communicator
    ) -> None:
        self.model, self.planner, self._comm, self._optimizer = model, planner, comm, optimizer
        self._device = next(model.parameters()).device
        self._alone = comm.subset([comm.rank])
        self._steps = 0
        self.timeline = Timeline(comm)

    def step(self, planned: PlannedStep, fetch: Fetch) -> StepMetrics:
        started, processor = time.perf_counter() - planned.waited_s, time.process_time()
        plan, comm = planned.plan, self._comm
        own = plan.for_rank(comm.rank)
        most = max(len(plan.for_rank(rank)) for rank in range(comm.size))
        self._optimizer.zero_grad()
        comm.barrier()
        self.timeline.begin()
        told = torch.zeros(2, dtype=torch.float64, device=self._device)
        for place in range(most):
            packed = no_tokens(self._device)
            if place < len(own):
                packed = pack_shard(own[place], fetch, comm=self._alone, device=self._device)
            self.model.set_requires_gradient_sync(place == most - 1)
            loss = micro_batch_loss(self.model, packed, self._alone)
            loss.backward()
            told += torch.stack((loss.detach().double(), packed.trained.double()))
            self.timeline.end("micro-batch", place)
        told = told.cpu()
        comm.all_reduce(told)
        self.timeline.end("wait for others")
        total, labels = told.tolist()
        for parameter in self.model.parameters():
            parameter.grad *= comm.size / labels  # FSDP2 takes the mean over the ranks
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor())
        self.timeline.end("gradients")
        self._optimizer.step()
        self.timeline.end("optimizer")
        ends = torch.tensor([time.perf_counter() - started, sum(span.idle_s for span in self.timeline.spans)])
        comm.all_reduce(ends)
        seconds, idle = (ends / comm.size).tolist()
        busiest = torch.tensor([time.process_time() - processor])
        comm.all_reduce(busiest, "max")
        longest, longest_ranks = plan.longest()
        self._steps += 1
        return StepMetrics(
            self._steps - 1, total / labels, plan.tokens, seconds, 0, idle / seconds, norm, longest, longest_ranks,
            len(plan.table), plan.makespan_s, plan.planning_s, planned.waited_s, processor_s=float(busiest),
            sequences_on_ranks=plan.sequences_on_ranks(),
        )  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def compared(corpus: Corpus, steps: int, tokens: int) -> list[Row]:
    """Every way to train, step by step in turns. Runs on all ranks."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        comm = stack.enter_context(hdp.init())
        stack.enter_context(torch_group(comm))
        cost = profile_cost_model(Llama(MODEL), comm, longest=2048)
        longest = int(corpus.lengths.max())
        cluster = ClusterSpec(ranks=comm.size, capacity=-(-longest // comm.size), cores=shared_cores(comm))
        whole = WholeSequencePlanner(cluster, cost)

        def hybrid(policy: str, capacity: int = cluster.capacity) -> Trainer:
            model = Llama(MODEL)
            planner = Planner(None, replace(cluster, capacity=capacity), policy, cost, context=longest)
            return Trainer(model, adamw(model), planner, comm)

        def fsdp2() -> LockstepLoop:
            model, mesh = Llama(MODEL), init_device_mesh("cpu", (comm.size,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return LockstepLoop(model, adamw(model), whole, comm)

        ddp = Llama(MODEL)
        trainers = {
            "balanced": hybrid("balanced"),
            "balanced, whole": hybrid("balanced", longest),
            "static": hybrid("static"),
            "torch DDP": DataParallelTrainer(ddp, adamw(ddp), whole, comm),
            "torch FSDP2": fsdp2(),
        }
        sampler = BatchSampler(corpus.lengths, tokens=tokens)
        batches = [sampler.batch(step) for step in range(steps + 1)]
        # As in a run: a step is planned while the one before is under way.
        plans = {
            name: stack.enter_context(PlanAhead(trainer.planner, [batch.lengths for batch in batches]))
            for name, trainer in trainers.items()
        }
        found: dict[str, list[StepMetrics]] = {name: [] for name in trainers}
        phases: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        names = list(trainers)
        for step, batch in enumerate(batches):
            for name in names[step % len(names) :] + names[: step % len(names)]:
                trainer = trainers[name]
                metrics = trainer.step(next(plans[name]), lambda place, ids=batch.ids: corpus.read(ids[place]))
                if step:  # the first one warms up
                    found[name].append(metrics)
                    phases[name].append(_phases(trainer, comm))
        return [_row(name, found[name], found["torch DDP"], phases[name]) for name in names]


def _phases(trainer: Trainer | LockstepLoop, comm: hdp.Communicator) -> dict[str, float]:
    """Seconds of the last step by phase, mean over the ranks; waiting inside of micro-batches counts as waiting."""
    own = dict.fromkeys(PHASES, 0.0)
    for span in trainer.timeline.spans:
        waited = span.wait_s if span.phase == "micro-batch" else 0.0
        own[span.phase] += span.end_s - span.start_s - waited
        own["wait for others"] += waited
    means = torch.tensor([own[phase] for phase in PHASES], dtype=torch.float64)
    comm.all_reduce(means)
    return dict(zip(PHASES, (means / comm.size).tolist(), strict=True))


def _row(name: str, steps: list[StepMetrics], ddp: list[StepMetrics], phases: list[dict[str, float]]) -> Row:
    on: dict[int, int] = {}
    for metrics in steps:
        for ranks, count in metrics.sequences_on_ranks.items():
            on[ranks] = on.get(ranks, 0) + count
    return Row(
        name,
        tokens_per_s=median(each.tokens / each.seconds for each in steps),
        against_ddp=median(theirs.seconds / ours.seconds for ours, theirs in zip(steps, ddp, strict=True)),
        seconds=[each.seconds for each in steps],
        phases={phase: mean(each[phase] for each in phases) for phase in PHASES},
        processor_s=mean(each.processor_s for each in steps),
        sent_bytes=None if name == "torch FSDP2" else mean(each.bytes_sent for each in steps),
        sequences_on_ranks=on,
        losses=[each.loss for each in steps],
    )


def torch_context_parallel() -> str:
    """What torch's own context parallelism says to a causal attention on the CPU; empty if it works. On all ranks."""
    from torch.distributed.tensor.experimental import context_parallel

    torch.set_num_threads(1)
    with hdp.init() as comm, torch_group(comm):
        mesh = init_device_mesh("cpu", (comm.size,))
        q, k, v = (torch.randn(1, 2, 64 * comm.size, 16, requires_grad=True) for _ in range(3))
        try:
            with context_parallel(mesh, buffers=[q.data, k.data, v.data], buffer_seq_dims=[2, 2, 2]):
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        except Exception as error:  # of several kinds, by version
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ""


def print_rows(rows: Sequence[Row]) -> None:
    print("| | tokens/s | against DDP | sent/step MB | largest difference of a loss | sequences on ranks |")
    print("|---|---|---|---|---|---|")
    first = rows[0].losses
    for row in rows:
        on = ", ".join(f"{count:,} on {ranks}" for ranks, count in row.sequences_on_ranks.items())
        error = max(abs(ours / theirs - 1) for ours, theirs in zip(row.losses, first, strict=True))
        sent = "" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.1f}"
        print(f"| {row.name} | {row.tokens_per_s:,.0f} | {row.against_ddp:.2f} | {sent} | {error:.0e} | {on} |")
    print("\nSeconds of a step, mean over steps and ranks\n\n| | " + " | ".join(PHASES) + " | processor |")
    print("|---|" + "---|" * (len(PHASES) + 1))
    for row in rows:
        own = " | ".join(f"{row.phases[phase]:.3f}" for phase in PHASES)
        print(f"| {row.name} | {own} | {row.processor_s:.3f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=min(8, max(2, len(os.sched_getaffinity(0)))))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384], help="a table each")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tables, error = [], 0.0
    for context in options.contexts:
        corpus = standard_library(context=context)
        rows = run_ranks(compared, options.ranks, corpus, options.steps, options.tokens, timeout=900)[0]
        print(f"{corpus.describe()}\n{options.steps} steps of {options.tokens:,} tokens on {options.ranks} ranks\n")
        print_rows(rows)
        print(flush=True)
        tables.append({"context": context, "rows": [asdict(row) for row in rows]})
        error = max(error, *(abs(row.losses[-1] / rows[0].losses[-1] - 1) for row in rows))
    refusal = run_ranks(torch_context_parallel, options.ranks, timeout=100)[0]
    print(f"torch's context parallelism on the CPU: {refusal or 'works, and belongs into the table'}")
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        record = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": machine}
        record |= {"ranks": options.ranks, "tokens": options.tokens, "tables": tables}
        record["torch_context_parallel"] = refusal
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if error > 1e-4 else 0


if __name__ == "__main__":
    raise SystemExit(main())
