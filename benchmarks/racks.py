"""Plans that know the racks against plans that do not: one rank on each of four hosts in two racks.

    sudo python benchmarks/racks.py --within 2000 --between 200 --steps 7 --json FILE

The hosts are network namespaces of this machine with shaped links (tc), those of a rack on one switch, and a slower
link from each switch to that of all; one thread a rank. Two cases: ranks numbered rack by rack, and dealt out in turns
(as by a scheduler that knows nothing of racks). ``aware`` knows the racks (``HDPCOMM_DOMAIN``), puts hosts of a rack
side by side, and plans with costs that tell links inside a rack from those between racks. ``blind`` takes the hosts as
numbered, and plans by the same kind of measurements as if all links between hosts were alike. ``static`` is a DP x CP
mesh of the smallest groups that hold the longest sequence, hosts ordered as for ``aware``. All train the same model on
the same batches in turns; a step takes as long as its slowest rank, and the gradients' reduction crosses the racks in
all of them. Needs root, ip and tc.
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
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.two_hosts import MODEL, batch, fork_ranks  # noqa: E402

CASES = {"rack by rack": (0, 0, 1, 1), "in turns": (0, 1, 0, 1)}  # by host


def on_rank(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Trains with each policy in turn; rank 0 returns the times, losses and plans."""
    import torch

    import hdpcomm as hdp
    from hdpcomm.comm.topology import by_host, domain_block, node_block
    from hdpcomm.measure.costs import profile_samples
    from hdpcomm.measure.topology import measure_topology
    from hdpcomm.models import Llama, LlamaConfig
    from hdpcomm.plan import ClusterSpec, CostModel, Planner, StepPlan
    from hdpcomm.train import Trainer

    torch.set_num_threads(1)
    os.environ["HDPCOMM_DOMAIN"] = str(list(CASES.values())[arguments["case"]][int(os.environ["RANK"])])
    capacity, longest = arguments["capacity"], arguments["longest"]
    with hdp.init(timeout=120) as world:
        topology = measure_topology(world)
        domains = topology.domain_of_rank
        assert domains is not None
        assert topology.domain is not None
        assert topology.inter is not None
        comm = by_host(world, domains)
        near = [domains[rank] for rank in comm.ranks]

        def new_model() -> Llama:
            torch.manual_seed(0)
            return Llama(LlamaConfig(**MODEL))

        aware = CostModel.fit(profile_samples(new_model(), comm, longest=capacity, domains=near))
        blind = CostModel.fit(profile_samples(new_model(), world, longest=capacity))
        here = ClusterSpec(
            ranks=comm.size,
            capacity=capacity,
            ranks_per_node=node_block(comm),
            ranks_per_domain=domain_block(comm, near),
        )
        alike = ClusterSpec(ranks=comm.size, capacity=capacity, ranks_per_node=node_block(world))
        planners = {
            "aware": (Planner(None, here, "balanced", aware, context=longest), comm),
            "blind": (Planner(None, alike, "balanced", blind, context=longest), world),
            "static": (Planner(None, here, "static", aware, context=longest), comm),
        }
        trainers = {}
        for name, (planner, ranks) in planners.items():
            model = new_model()
            trainers[name] = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), planner, ranks)

        def crossing_tokens(plan: StepPlan, ranks: tuple[int, ...]) -> int:
            """Tokens whose KV rings pass on between racks, in a layer's forward pass."""
            found = 0
            for each in plan.micro_batches:
                racks = [domains[ranks[rank]] for rank in each.ranks]
                crossings = sum(a != b for a, b in zip(racks, racks[1:] + racks[:1], strict=True))
                found += crossings * (len(racks) - 1) * each.tokens // len(racks)
            return found

        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        losses: dict[str, list[float]] = {name: [] for name in trainers}
        crossed: dict[str, list[int]] = {name: [] for name in trainers}
        for step in range(arguments["steps"] + 1):  # the first one warms up
            lengths = batch(step, tokens=arguments["tokens"], longest=longest)
            draw = torch.Generator().manual_seed(step)
            sequences = [torch.randint(0, 256, (length,), generator=draw) for length in lengths]
            for name, trainer in trainers.items():
                planner, ranks = planners[name]
                comm.barrier()
                start = time.perf_counter()
                metrics = trainer.step(lengths, sequences.__getitem__)
                took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                comm.all_reduce(took, "max")
                if step:
                    seconds[name].append(took.item())
                    losses[name].append(metrics.loss)
                    crossed[name].append(crossing_tokens(planner.plan(lengths), tuple(ranks.ranks)))
        if world.rank:
            return None
        return {
            "domain_of_rank": topology.domain_of_rank,
            "bytes_per_s": {"within": topology.domain.bandwidth, "between": topology.inter.bandwidth},
            "costs": {"aware": json.loads(aware.to_json()), "blind": json.loads(blind.to_json())},
            "seconds": seconds,
            "losses": losses,
            "tokens_between_racks": crossed,
        }


def run_case(racks: tuple[int, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """Starts the ranks; host h in rack ``racks[h]``."""
    from tests.harness.hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(len(racks), racks) as hosts:
        hosts.limit(arguments["within"])
        hosts.limit_racks(arguments["between"])
        file = Path(folder) / "result.json"
        options = (f"--{name}={value}" for name, value in arguments.items())
        hosts.ranks(["benchmarks.racks", f"--on-rank={file}", *options], range(len(racks)))
        hosts.finish(240 + 30 * arguments["steps"])
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--within", type=int, default=2000, help="Mbit/s of each host's link (default %(default)s)")
    parser.add_argument("--between", type=int, default=200, help="Mbit/s of each rack's link (default %(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="steps that are timed (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=12288, help="tokens of a step (default %(default)s)")
    parser.add_argument("--longest", type=int, default=2048, help="longest sequence (default %(default)s)")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens that a rank holds (default %(default)s)")
    parser.add_argument("--case", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--on-rank", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = ("within", "between", "steps", "tokens", "longest", "capacity")
    arguments = {name: getattr(options, name) for name in names}
    if options.on_rank:
        return fork_ranks(on_rank, options.on_rank, arguments | {"case": options.case})
    from tests.harness.hosts import why_not

    if reason := why_not():
        sys.exit(f"this machine cannot make hosts: {reason}")
    cases = {}
    print(
        f"links of {options.within} Mbit/s, of racks {options.between}; {options.tokens:,} tokens a step, the longest"
    )
    print(f"{options.longest:,}, at most {options.capacity:,} on a rank; medians of {options.steps} steps\n")
    print("| ranks | plan | s a step | of aware | tokens between racks a step | loss of the last step |")
    print("|---|---|---|---|---|---|")
    for number, (case, racks) in enumerate(CASES.items()):
        cases[case] = found = run_case(racks, arguments | {"case": number})
        for name, times in found["seconds"].items():
            crossed = statistics.median(found["tokens_between_racks"][name])
            ratio = statistics.median(t / a for t, a in zip(times, found["seconds"]["aware"], strict=True))
            middle, loss = statistics.median(times), found["losses"][name][-1]
            print(f"| {case} | {name} | {middle:.3f} | {ratio:.2f}x | {crossed:,.0f} | {loss:.6f} |", flush=True)
    if options.json:
        about = {"date": date.today().isoformat(), "machine": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps(about | arguments | {"model": MODEL, "cases": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
