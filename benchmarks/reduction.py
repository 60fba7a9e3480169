"""How much of the gradients' reduction no compute hides: started after the last backward pass, or beside it.

    python benchmarks/reduction.py                                       two ranks on this machine
    sudo python benchmarks/reduction.py --hosts --json FILE              and one rank on each of two hosts

Each rank has one sequence, all of one length, so they end their backward passes together. ``after`` starts all buckets
at the end of the pass, ``beside`` each bucket when its gradients are there, as the trainer does. Exposed is the time
from the end of the pass until the reduced gradients are there, median over steps and the most over ranks. Both take
turns within one run. The hosts are network namespaces of this machine with a shaped link (tc). They need root, ip and
tc.

On one machine the reduction is processor time, of which the pass leaves none over where every core has a rank. A link
between hosts needs no processor while it sends, so there the time can be hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hdpcomm as hdp
from hdpcomm.measure import profile_cost_model
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.parallel.program import StepProgram
from hdpcomm.plan import ClusterSpec, Planner, StepPlan
from hdpcomm.train import Trainer
from hdpcomm.train.step.passes import Passes, StepInputs
from hdpcomm.train.step.runner import Runner, StepSettings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MODEL: dict[str, Any] = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1536}
BUCKET_BYTES = 4 << 20


class NotingPasses(Passes):
    """Notes when the passes of a step end.

    Args:
        times: of these ends, and of those of reductions.
        early: reductions begin beside the last backward pass.
    """

    def __init__(self, model: nn.Module, mesh: hdp.Mesh, times: list[float], early: bool) -> None:
        super().__init__([model], mesh)
        self.times, self.early = times, early

    def run(self, step: StepInputs) -> Tensor:
        total = super().run(step)
        self.times.append(time.perf_counter())
        return total

    def program(self, plan: StepPlan, *, training: bool) -> StepProgram:
        own = super().program(plan, training=training)
        return own if self.early else replace(own, alone=False, overlap=lambda: 0.0)


class NotingRunner(Runner):
    """Notes when the gradients of a step are there."""

    passes: NotingPasses

    def reduce(self, factor: float = 1.0) -> None:
        super().reduce(factor)
        self.passes.times.append(time.perf_counter())


class NotingTrainer(Trainer):
    """Steps whose passes and reductions are noted; see :class:`NotingPasses`."""

    bucket_bytes = BUCKET_BYTES

    def __init__(self, times: list[float], early: bool, *args: Any, **options: Any) -> None:
        self._noting = times, early
        super().__init__(*args, **options)

    def make_runner(self, optimizer: torch.optim.Optimizer, settings: StepSettings) -> Runner:
        return NotingRunner(NotingPasses(self.model, self.mesh, *self._noting), optimizer, settings)


def measure(tokens: int, steps: int) -> dict[str, Any]:
    """Runs on all ranks; the same on all."""
    torch.set_num_threads(1)
    with hdp.init(timeout=120) as comm:
        trainers: dict[str, Trainer] = {}
        times: dict[str, list[float]] = {"after": [], "beside": []}
        for name in times:
            torch.manual_seed(0)
            model = Llama(LlamaConfig(**MODEL))
            cost = profile_cost_model(model, comm, longest=64)
            planner = Planner(None, ClusterSpec(comm.size, capacity=tokens), "naive", cost)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            kind = partial(NotingTrainer, times[name], name == "beside")
            trainers[name] = kind(model, optimizer, planner, comm, zero=1)
        losses: dict[str, list[float]] = {name: [] for name in trainers}
        took: dict[str, list[float]] = {name: [] for name in trainers}
        for step in range(steps + 1):
            for name in list(trainers)[:: 1 if step % 2 else -1]:
                comm.barrier()
                start = time.perf_counter()
                losses[name].append(
                    trainers[name].step([tokens] * comm.size, lambda _: torch.arange(tokens) % 250).loss
                )
                took[name].append(time.perf_counter() - start)
        assert losses["after"] == losses["beside"], losses  # bit by bit: the same sums in the same order
        result: dict[str, Any] = {"gradient_bytes": 4 * sum(p.numel() for p in model.parameters())}
        for name, stamps in times.items():
            exposed = [end - start for start, end in zip(stamps[2::2], stamps[3::2], strict=True)]
            both = torch.tensor([statistics.median(exposed), statistics.median(took[name][1:])], dtype=torch.float64)
            comm.all_reduce(both, "max")
            result[name] = {"exposed_s": both[0].item(), "step_s": both[1].item()}
        return result


def on_hosts(mbit: int, tokens: int, steps: int) -> dict[str, Any]:
    """One rank on each of two hosts, whose link sends so many Mbit/s."""
    from tests.harness.hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        hosts.limit(mbit)
        file = Path(folder) / "result.json"
        program = ["benchmarks.reduction", f"--on-rank={file}", f"--tokens={tokens}", f"--steps={steps}"]
        for host in range(2):
            rank = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            where = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29400"}
            hosts.start(host, [sys.executable, "-m", *program], rank | where)
        hosts.finish(120 + 30 * steps)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank's sequence (default %(default)s)")
    parser.add_argument("--steps", type=int, default=9, help="steps that are timed (default %(default)s)")
    parser.add_argument("--hosts", action="store_true", help="measure two hosts, too")
    parser.add_argument("--mbit", type=int, default=1000, help="of each host's link, both ways (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--on-rank", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        result = measure(options.tokens, options.steps)
        if os.environ["RANK"] == "0":
            options.on_rank.write_text(json.dumps(result))
        return 0
    from hdpcomm.comm.launch import run_ranks

    cases = {"one host": run_ranks(measure, 2, options.tokens, options.steps, timeout=600)[0]}
    if options.hosts:
        from tests.harness.hosts import why_not

        if reason := why_not():
            sys.exit(f"this machine cannot make hosts: {reason}")
        cases[f"two hosts, {options.mbit} Mbit/s"] = on_hosts(options.mbit, options.tokens, options.steps)
    size = next(iter(cases.values()))["gradient_bytes"]
    print(
        f"2 ranks, {size / 1e6:.1f} MB of gradients, {options.tokens} tokens a rank, medians of {options.steps} steps\n"
    )
    print("| ranks on | exposed after the pass s | beside it s | step after s | step beside s |")
    print("|---|---|---|---|---|")
    for name, case in cases.items():
        after, beside = case["after"], case["beside"]
        print(
            f"| {name} | {after['exposed_s']:.4f} | {beside['exposed_s']:.4f} "
            f"| {after['step_s']:.3f} | {beside['step_s']:.3f} |"
        )
    if options.json:
        about: dict[str, Any] = {
            "date": date.today().isoformat(),
            "machine": platform.platform(),
            "cores": os.cpu_count(),
        }
        about |= {"tokens": options.tokens, "steps": options.steps, "mbit": options.mbit, "model": MODEL}
        options.json.write_text(json.dumps(about | {"bucket_bytes": BUCKET_BYTES, "cases": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
