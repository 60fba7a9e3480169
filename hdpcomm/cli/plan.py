"""``hdpcomm plan``: plans one step and shows which ranks run which sequences."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.cli.output import check_drawing, check_writable, write_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.options import count, layer_counts, positive, seed, slices

if TYPE_CHECKING:
    from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, ModelSpec, Planner, StepPlan

__all__ = [
    "add_parser",
    "add_step_options",
    "draw_lengths",
    "make_planners",
    "ranks_per_node",
    "refuse_given",
]


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that define the step and the cluster."""
    batch = parser.add_argument_group("the step")
    batch.add_argument(
        "--distribution",
        default="byted",
        help="lengths are drawn from: byted, github, lognormal[:MU:SIGMA] or file:PATH (default %(default)s)",
    )
    batch.add_argument("--lengths", metavar="FILE", help="use exactly the lengths in this text file")
    batch.add_argument("--tokens", type=count, default="32M", help="tokens of a step (default %(default)s)")
    batch.add_argument(
        "--context",
        type=count,
        help="longest sequence; longer ones are cut (default 2M, or what the ranks hold if that is less)",
    )
    batch.add_argument("--seed", type=seed, default=0, help="seed of the random lengths (default %(default)s)")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--ranks", type=count, help="number of HDP ranks (default 1024, or those of --calibration)")
    cluster.add_argument("--capacity", type=count, help="tokens that a rank can hold (default: from its memory)")
    cluster.add_argument(
        "--model",
        default="llama-7b",
        help="preset: llama-7b, -13b, -30b, -70b, mistral-8x7b, -8x22b; or a config.json of Hugging Face, or a folder "
        "with one (default %(default)s)",
    )
    cluster.add_argument(
        "--cluster",
        default="h100",
        help="kind of device: a100, h100 or h200 (default %(default)s)",
    )
    cluster.add_argument(
        "--ranks-per-node", type=count, help="ranks that share the fast link (default: nodes of 8 devices)"
    )
    cluster.add_argument(
        "--ranks-per-domain",
        type=count,
        help="ranks of a rack or NVLink domain: whole nodes with faster links between them than to others",
    )
    cluster.add_argument(
        "--domain-bandwidth",
        type=positive,
        metavar="GB/S",
        help="between nodes of a domain, one way a rank",
    )
    cluster.add_argument(
        "--nics",
        type=count,
        help="network interfaces that the ranks of a node share (default: each has its own)",
    )
    cluster.add_argument("--tensor", type=count, default="1", help="devices of a rank, tensor parallel (default 1)")
    cluster.add_argument("--pipeline", type=count, default="1", help="devices of a rank's pipeline (default 1)")
    cluster.add_argument(
        "--chunks", type=count, default="1", help="stages on each of these, interleaved 1F1B (default 1)"
    )
    cluster.add_argument(
        "--layers-per-stage",
        type=layer_counts,
        metavar="N,N,...",
        help="layers of each stage of a pipeline, as 4,5,5,4 (default: as many as make stages of about equal work)",
    )
    cluster.add_argument(
        "--split-backward",
        action="store_true",
        help="pipelines compute the gradients of weights where a device would wait (zero-bubble)",
    )
    cluster.add_argument(
        "--expert", type=count, default="1", help="ranks that share the experts of each layer (default 1)"
    )
    cluster.add_argument("--offload", action="store_true", help="activations may go to host memory")
    cluster.add_argument(
        "--slow-ranks",
        metavar="RANK:SPEED,...",
        help="speeds of ranks that are slower than the others, 0.001 to 1 (3:0.5,9:0.8)",
    )
    cluster.add_argument(
        "--slices",
        type=slices,
        default="off",
        metavar="auto|off|N",
        help="most slices of tokens that plans of balanced run a long sequence in, one after the other, where a "
        "pipeline then ends earlier, or the ranks hold it no other way (auto: 16; default: off)",
    )
    cluster.add_argument(
        "--queue",
        action="store_true",
        help="plans of balanced let sequences that fit one rank wait in a queue, from which ranks take when they are "
        "free",
    )
    cluster.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="model, costs and cluster as hdpcomm calibrate measured them; --ranks, --ranks-per-node, "
        "--ranks-per-domain and --capacity may differ",
    )


_RANKS = 1024
_KNOWN_BY_CALIBRATION = (
    *("model", "cluster", "tensor", "pipeline", "chunks", "layers_per_stage", "split_backward", "expert", "nics"),
    "domain_bandwidth",
)
_KNOWN_BY_LENGTHS = ("distribution", "tokens", "context", "seed")
_CONTEXT = 2 << 20


def ranks_per_node(tensor: int, pipeline: int) -> int:
    """How many ranks of tensor x pipeline devices are on a node of eight; warns where they are cut by its border."""
    from hdpcomm.plan.specs import NODE_DEVICES

    devices = tensor * pipeline
    if NODE_DEVICES % devices and devices % NODE_DEVICES:
        LOG.warning(
            f"ranks of {tensor} x {pipeline} devices do not fill nodes of {NODE_DEVICES}, so some "
            "lie on two; give --ranks-per-node"
        )
    return max(1, NODE_DEVICES // devices)


def _speeds(text: str | None, ranks: int) -> tuple[float, ...] | None:
    """The speeds of all ranks, from RANK:SPEED pairs."""
    if not text:
        return None
    speeds = [1.0] * ranks
    for pair in text.split(","):
        found = re.fullmatch(r"(\d{1,9}):(\d*\.?\d+)", pair.strip())
        if found is None or int(found[1]) >= ranks:
            raise InvalidUsage(f"--slow-ranks has {pair!r}, expected RANK:SPEED with a rank below {ranks}, as in 3:0.5")
        speeds[int(found[1])] = float(found[2])
    return tuple(speeds)


def _default_context(planner: Planner) -> int:
    if planner.cluster.offload:  # how much more it holds depends on the lengths
        return _CONTEXT
    held = planner.memory.capacity << int(math.log2(planner.cluster.ranks))  # groups of some policies are powers of two
    if held >= _CONTEXT:
        return _CONTEXT
    LOG.info(f"sequences are cut to the {held:,} tokens that the ranks hold; see --context")
    return held


def _model(name: str) -> ModelSpec:
    """A preset, or the shape that a file or folder of Hugging Face gives."""
    from hdpcomm.plan import MODELS, load_model

    if name in MODELS:
        return MODELS[name]
    if not name.endswith(".json") and not Path(name).is_dir():
        raise InvalidUsage(
            f"unknown model {name!r}, expected one of {', '.join(MODELS)}, a config.json, or a folder with one"
        )
    return load_model(name)


def make_planners(options: argparse.Namespace, policies: Sequence[str]) -> list[Planner]:
    """A planner for each policy, from the options of :func:`add_step_options`; chooses ``context`` where it is open."""
    from hdpcomm.plan import Planner

    if options.lengths:
        refuse_given(options, _KNOWN_BY_LENGTHS, "--lengths, whose file")
    if options.ranks_per_node and options.ranks and options.ranks % min(options.ranks, options.ranks_per_node):
        raise InvalidUsage(
            f"--ranks-per-node {options.ranks_per_node} was given with --ranks {options.ranks}, which do not fill such "
            "nodes: give a number of ranks that divides the others"
        )
    model, cluster, cost, memory = _described(options) if options.calibration is None else _calibrated(options)
    balanced = [policy for policy in policies if policy in ("balanced", "pipeline")]
    for option, asked in (("slices", options.slices > 1), ("queue", options.queue)):
        if asked and not balanced:
            raise InvalidUsage(
                f"--{option} was given with the policies {', '.join(policies)}, and only plans of balanced have "
                f"{'them' if option == 'slices' else 'one'}: give balanced, too, or leave it out"
            )

    def planner(policy: str, context: int) -> Planner:
        return Planner(
            model,
            cluster,
            policy,
            cost,
            context=context,
            memory=memory,
            queue=options.queue and policy in balanced,
            slices=options.slices if policy in balanced else 1,
        )

    if options.context is None and not options.lengths:
        options.context = _default_context(planner("balanced", 0))
    return [planner(policy, 0 if options.lengths else options.context) for policy in policies]


_Described = tuple["ModelSpec | None", "ClusterSpec", "CostModel | None", "MemoryModel | None"]


def _described(options: argparse.Namespace) -> _Described:
    """Model, ranks, costs and memory as the options say."""
    from hdpcomm.plan import ClusterSpec

    options.ranks = options.ranks or _RANKS
    model = _model(options.model)
    cluster = ClusterSpec(
        ranks=options.ranks,
        capacity=options.capacity,
        ranks_per_node=options.ranks_per_node or ranks_per_node(options.tensor, options.pipeline),
        tensor=options.tensor,
        pipeline=options.pipeline,
        chunks=options.chunks,
        split_backward=options.split_backward,
        expert=options.expert,
        nics=options.nics,
        offload=options.offload,
        speeds=_speeds(options.slow_ranks, options.ranks),
        device=options.cluster,
        stage_work=_stage_work(options, model),
    )
    cluster = _with_domains(options, cluster)
    _check_size(options, model, cluster)
    return model, cluster, None, None


def _stage_work(options: argparse.Namespace, model: ModelSpec) -> tuple[tuple[float, float, float], ...] | None:
    """Work of each stage of the model."""
    from hdpcomm.plan import stage_layers, stage_work
    from hdpcomm.plan.stage_cut import parse_cut

    if options.pipeline == 1:
        if options.layers_per_stage:
            raise InvalidUsage("--layers-per-stage was given without --pipeline; give both, or leave it out")
        return None
    if not options.layers_per_stage:
        return stage_work(model, stage_layers(model, options.pipeline, options.chunks))
    return stage_work(model, parse_cut(options.layers_per_stage, model.layers, options.pipeline * options.chunks))


def _check_size(options: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> None:
    """Raises InvalidUsage for what the model or the device has not."""
    from hdpcomm.plan.memory import StepMemory

    if options.expert > 1 and model.experts == 1:
        raise InvalidUsage(f"--expert {options.expert} was given and {model.name} has no experts; leave it out")
    layers = cluster.most_layers(model.layers)
    memory = StepMemory.of(model, states=0.0, layers=layers, tensor=cluster.tensor)
    most = memory.capacity(cluster.hardware.memory_bytes, layers, 1.0 if cluster.offload else 0.0)
    if options.capacity and options.capacity > most:
        raise InvalidUsage(
            f"--capacity {options.capacity} is more than the {most:,} tokens of {model.name} that a rank of "
            f"{cluster.hardware.name} can hold, even with all layers recomputed and nothing else in its memory; give "
            "less"
        )


def _with_domains(options: argparse.Namespace, cluster: ClusterSpec) -> ClusterSpec:
    """The domains that the options say."""
    near = options.ranks_per_domain
    device = cluster.hardware
    if options.domain_bandwidth is not None:
        if near is None:
            raise InvalidUsage("--domain-bandwidth was given without domains: give --ranks-per-domain, too")
        device = replace(device, domain_bandwidth=options.domain_bandwidth * 1e9)
        cluster = replace(cluster, device=device)
    if near is not None and device.domain_bandwidth is None:
        raise InvalidUsage(
            f"--ranks-per-domain {near} was given, and how fast the links of a domain are is not known: give "
            "--domain-bandwidth, too"
        )
    return replace(cluster, ranks_per_domain=near)


def refuse_given(options: argparse.Namespace, names: Sequence[str], told: str) -> None:
    """Raises InvalidUsage for an option of these that is not at its default though something else says what it is.

    told: ``--lengths, whose file``, say.
    """
    defaults = options.parser.parse_args([])
    for name in names:
        if getattr(options, name) != getattr(defaults, name):
            option = name.replace("_", "-")
            raise InvalidUsage(
                f"--{option} {getattr(options, name)} was given with {told} says what it is; leave out one of them"
            )


def _calibrated(options: argparse.Namespace) -> _Described:
    """As :func:`_described`, by the file of ``--calibration``."""
    from hdpcomm.plan import Calibration

    refuse_given(options, _KNOWN_BY_CALIBRATION, "--calibration, whose file")
    found = Calibration.load(options.calibration)
    if options.ranks or options.ranks_per_node or options.ranks_per_domain:
        ranks = options.ranks or found.cluster.ranks
        found = found.with_ranks(ranks, options.ranks_per_node, options.ranks_per_domain)
    if options.capacity:
        found = found.with_capacity(options.capacity)
    if options.offload and not found.memory.offloadable:
        raise InvalidUsage(f"{options.calibration} was made without offload: calibrate with --offload SIZE")
    memory = found.memory if options.offload else replace(found.memory, offloadable=0.0, copy_s=0.0, host_tokens=0.0)
    speeds = _speeds(options.slow_ranks, found.cluster.ranks)
    cluster = replace(found.cluster, offload=options.offload, speeds=speeds)
    return found.model, cluster, found.cost_model, memory


def draw_lengths(options: argparse.Namespace, *, step: int = 0) -> list[int]:
    """The lengths of a step, from the options of :func:`add_step_options` after :func:`make_planners`."""
    from hdpcomm.plan.distributions import read_lengths, sample_lengths

    if options.lengths:
        return read_lengths(options.lengths)
    return sample_lengths(
        options.distribution, tokens=options.tokens, context=options.context, seed=options.seed + step
    )


def _compare(plans: Sequence[StepPlan]) -> str:
    lines = [
        f"{'policy':<10} {'seconds':>10} {'idle':>7} {'gap':>8} {'micro-batches':>14} {'peers':>6} {'planned in':>11}"
    ]
    for plan in plans:
        lines.append(
            f"{plan.policy:<10} {plan.makespan_s:>10.4g} {100 * plan.idle_share:>6.1f}% {100 * plan.gap:>7.2f}% "
            f"{len(plan.table):>14} {plan.table.most_peers():>6} {1e3 * plan.planning_s:>8.1f} ms"
        )
    return "\n".join(lines)


def _plan(options: argparse.Namespace) -> int:
    for path in (options.plot, options.trace, options.json, options.out):
        check_writable(path)
    if options.plot:
        check_drawing("--plot")
    others = [policy for policy in (options.compare or "").split(",") if policy and policy != options.policy]
    planners = make_planners(options, [options.policy, *others])
    lengths = draw_lengths(options)
    plans = [planner.plan(lengths) for planner in planners]
    for planner, plan in zip(planners, plans, strict=True):
        planner.validate(plan, lengths)
    print(plans[0].explain(max_rows=options.rows))
    if len(plans) > 1:
        print(_compare(plans))
    if options.plot:
        from hdpcomm.trace import plot_plans

        plot_plans(plans, options.plot, planners)
    if options.trace:
        from hdpcomm.trace import write_plan_trace

        write_plan_trace(options.trace, plans[0], planners[0].cluster)
    if options.out:
        plans[0].save(options.out)
    if options.json:
        compared = [
            {
                "policy": p.policy,
                "makespan_s": p.makespan_s,
                "idle_share": p.idle_share,
                "ring_peers": p.table.most_peers(),
            }
            for p in plans[1:]
        ]
        found = plans[0].to_dict() | {"ring_peers": plans[0].table.most_peers(), "compared": compared}
        write_json(options.json, found)
    return 0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "plan",
        help="plan one step and show which ranks run which sequences",
        description="Plans one training step: how many ranks each sequence takes, which ones, and in which order.",
    )
    add_step_options(parser)
    parser.add_argument(
        "--policy", default="balanced", help="balanced (alias: pipeline), naive, pow2 or static (default %(default)s)"
    )
    parser.add_argument("--compare", metavar="POLICIES", help="policies to compare with, separated by commas")
    parser.add_argument("--rows", type=count, default="12", help="micro-batches to print (default %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the plans")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write a trace for Perfetto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan and --compare's figures as JSON")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the plan for simulate --plan and StepPlan.load()",
    )
    parser.set_defaults(func=_plan, parser=parser)
