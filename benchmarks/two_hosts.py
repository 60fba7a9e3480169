"""Plans that know the hosts against plans that do not: ranks on two hosts whose link is slow.

    sudo python benchmarks/two_hosts.py --mbit 1000 --steps 9 --json FILE

The hosts are network namespaces of this machine with a shaped link (tc), one thread a rank. Two cases: three ranks on
each host, numbered host by host, and two ranks on each, dealt out in turns (as with Slurm's cyclic distribution).
``aware`` is what ``hdpcomm train`` does: ranks of a host side by side, plans that know how many these are, costs that
tell links inside a host from those between hosts. ``blind`` plans by such measurements as if all ranks were alike, and
``static`` is a DP x CP mesh of the smallest groups that hold the longest sequence, with the ranks ordered as for
``aware``. All train the same model on the same batches in turns; a step takes as long as its slowest rank. The
gradients' reduction crosses the link in all of them. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384}


def batch(step: int, *, tokens: int, longest: int) -> list[int]:
    """Lengths of a step: many that a rank holds, and some that need two."""
    import numpy as np

    draw = np.random.default_rng(step)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 16:
        lengths.append(int(min(left, longest, max(16, draw.lognormal(6.5, 0.8)))))
    return lengths


def on_rank(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Trains with each policy in turn; rank 0 returns the times, losses and plans."""
    import torch

    import hdpcomm as hdp
    from hdpcomm.comm.topology import by_host, node_block
    from hdpcomm.measure.costs import profile_samples
    from hdpcomm.measure.topology import measure_topology
    from hdpcomm.models import Llama, LlamaConfig
    from hdpcomm.plan import ClusterSpec, CostModel, Planner
    from hdpcomm.train import Trainer

    torch.set_num_threads(1)
    capacity, longest = arguments["capacity"], arguments["longest"]
    with hdp.init(timeout=120) as world:
        topology = measure_topology(world)
        comm = by_host(world)

        def new_model() -> Llama:
            torch.manual_seed(0)
            return Llama(LlamaConfig(**MODEL))

        aware = CostModel.fit(profile_samples(new_model(), comm, longest=capacity))
        seen = profile_samples(new_model(), world, longest=capacity)
        blind = CostModel.fit([replace(sample, one_node=True) for sample in seen])
        here = ClusterSpec(ranks=comm.size, capacity=capacity, ranks_per_node=node_block(comm))
        planners = {
            "aware": Planner(None, here, "balanced", aware, context=longest),
            "blind": Planner(None, replace(here, ranks_per_node=None), "balanced", blind, context=longest),
            "static": Planner(None, here, "static", aware, context=longest),
        }
        trainers = {}
        for name, planner in planners.items():
            model = new_model()
            trainers[name] = Trainer(
                model, torch.optim.AdamW(model.parameters(), lr=1e-3), planner, world if name == "blind" else comm
            )
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        losses: dict[str, list[float]] = {name: [] for name in trainers}
        crossings: dict[str, list[int]] = {name: [] for name in trainers}
        for step in range(arguments["steps"] + 1):  # the first one warms up
            lengths = batch(step, tokens=arguments["tokens"], longest=longest)
            draw = torch.Generator().manual_seed(step)
            sequences = [torch.randint(0, 256, (length,), generator=draw) for length in lengths]
            for name, trainer in trainers.items():
                before = comm.stats()["remote_bytes_sent"]
                comm.barrier()
                start = time.perf_counter()
                metrics = trainer.step(lengths, sequences.__getitem__)
                took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                comm.all_reduce(took, "max")
                sent = torch.tensor([comm.stats()["remote_bytes_sent"] - before])
                comm.all_reduce(sent)
                if step:
                    seconds[name].append(took.item())
                    losses[name].append(metrics.loss)
                    crossings[name].append(int(sent.item()))
        if comm.rank:
            return None
        return {
            "hosts": [list(ranks) for ranks in topology.hosts],
            "link_bytes_per_s": topology.inter.bandwidth if topology.inter else None,
            "costs": {"aware": json.loads(aware.to_json()), "blind": json.loads(blind.to_json())},
            "seconds": seconds,
            "losses": losses,
            "bytes_between_hosts": crossings,
        }


CASES = {"three ranks a host": (0, 0, 0, 1, 1, 1), "two ranks a host, in turns": (0, 1, 0, 1)}


def run_case(world: tuple[int, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """Starts the ranks; rank r on host ``world[r]``."""
    from tests.harness.hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        hosts.limit(arguments["mbit"])
        file = Path(folder) / "result.json"
        hosts.ranks(["benchmarks.two_hosts", f"--on-rank={file}", *(f"--{n}={v}" for n, v in arguments.items())], world)
        hosts.finish(120 + 30 * arguments["steps"])
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def fork_ranks(
    on_rank: Callable[[dict[str, Any]], dict[str, Any] | None], file: Path, arguments: dict[str, Any]
) -> int:
    """One host: a process for each of its ranks, which imported torch before; rank 0 writes what it returns."""
    import hdpcomm.train  # noqa: F401

    def one(rank: str, local: int) -> None:
        os.environ |= {"RANK": rank, "LOCAL_RANK": str(local)}
        if (result := on_rank(arguments)) is not None:
            file.write_text(json.dumps(result))

    fork = multiprocessing.get_context("fork")
    ranks = os.environ.pop("HOST_RANKS").split()
    children = [fork.Process(target=one, args=(rank, local)) for local, rank in enumerate(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return max(abs(child.exitcode or 0) for child in children)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000, help="of each host's link, both ways (default %(default)s)")
    parser.add_argument("--steps", type=int, default=9, help="steps that are timed (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=12288, help="tokens of a step (default %(default)s)")
    parser.add_argument("--longest", type=int, default=2048, help="longest sequence (default %(default)s)")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens that a rank holds (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--on-rank", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    arguments = {name: getattr(options, name) for name in ("mbit", "steps", "tokens", "longest", "capacity")}
    if options.on_rank:
        return fork_ranks(on_rank, options.on_rank, arguments)
    from tests.harness.hosts import why_not

    if reason := why_not():
        sys.exit(f"this machine cannot make hosts: {reason}")
    cases = {}
    print(f"link {options.mbit} Mbit/s, {options.tokens:,} tokens a step, the longest {options.longest:,}, at most")
    print(f"{options.capacity:,} on a rank; medians of {options.steps} steps\n")
    print("| ranks | plan | s a step | of aware | MB between hosts a step | loss of the last step |")
    print("|---|---|---|---|---|---|")
    for case, world in CASES.items():
        cases[case] = found = run_case(world, arguments)
        for name, times in found["seconds"].items():
            crossed = statistics.median(found["bytes_between_hosts"][name]) / 1e6
            ratio = statistics.median(t / a for t, a in zip(times, found["seconds"]["aware"], strict=True))
            middle, loss = statistics.median(times), found["losses"][name][-1]
            print(f"| {case} | {name} | {middle:.3f} | {ratio:.2f}x | {crossed:.1f} | {loss:.6f} |", flush=True)
    if options.json:
        about = {"date": date.today().isoformat(), "machine": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps(about | arguments | {"model": MODEL, "cases": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
