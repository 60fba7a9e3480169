"""``hdpcomm simulate``: runs planned steps on a simulated cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.cli.output import check_drawing, check_writable, write_json
from hdpcomm.cli.plan import add_step_options, draw_lengths, make_planners, refuse_given
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.options import count

if TYPE_CHECKING:
    from hdpcomm.plan import Planner
    from hdpcomm.sim import StreamReport

__all__ = ["add_parser"]

_POLICIES = "balanced,naive,static"


def _row(policy: str, report: StreamReport, base: StreamReport) -> str:
    steps = report.steps
    number = len(steps)

    def mean(name: str) -> float:
        return float(sum(getattr(step, name) for step in steps)) / number

    mfu = 100 * sum(step.mfu or 0.0 for step in steps) / number
    peak = max(step.peak_bytes or 0.0 for step in steps) / 1e9
    return (
        f"{policy:<10} {mean('step_s'):>9.4g} {base.total_s / report.total_s:>8.2f}x {report.tokens_per_s:>12,.0f} "
        f"{mfu:>6.1f}% {100 * mean('idle_share'):>6.1f}% {100 * mean('exposed_share'):>8.1f}% "
        f"{100 * mean('stalled_share'):>8.1f}% {peak:>8.1f} {1e3 * sum(report.waits_s[1:]):>9.1f}"
    )


_KNOWN_BY_PLAN = ("policy", "distribution", "lengths", "tokens", "context", "seed", "steps")


def _simulate_plan(options: argparse.Namespace) -> int:
    """Runs the plan in a file in place of ones that are made here."""
    from hdpcomm.plan import StepPlan
    from hdpcomm.sim import StreamReport, simulate_step

    refuse_given(options, _KNOWN_BY_PLAN, "--plan, whose file")
    plan = StepPlan.load(options.plan)
    options.ranks = options.ranks or plan.num_ranks
    options.context = 0  # no lengths are drawn
    (planner,) = make_planners(options, ["balanced"])
    step = simulate_step(planner, plan)
    report = StreamReport(steps=(step,), waits_s=(0.0,), total_s=step.step_s)
    _show(options, [planner], [plan.policy], [report])
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from hdpcomm.plan import POLICIES
    from hdpcomm.sim import simulate_stream

    for path in (options.plot, options.trace, options.json):
        check_writable(path)
    if options.plot:
        check_drawing("--plot")
    if options.plan is not None:
        return _simulate_plan(options)
    policies = list(POLICIES) if options.policy == "all" else options.policy.split(",")
    planners = make_planners(options, policies)
    batches = [draw_lengths(options, step=step) for step in range(options.steps)]
    reports, able = [], []
    for planner in planners:
        LOG.info(f"simulating {planner.policy} ...")
        try:
            reports.append(simulate_stream(planner, batches))
            able.append(planner)
        except InvalidUsage as error:
            if planner.policy == "balanced" or options.policy not in (_POLICIES, "all"):
                raise
            LOG.warning(f"{planner.policy} is left out: {error}")  # nobody named it
    planners = able
    _show(options, planners, [planner.policy for planner in planners], reports)
    return 0


def _show(
    options: argparse.Namespace,
    planners: Sequence[Planner],
    policies: Sequence[str],
    reports: Sequence[StreamReport],
) -> None:
    print(
        f"{'policy':<10} {'step (s)':>9} {'speed-up':>9} {'tokens/s':>12} {'MFU':>7} {'idle':>7} {'exposed':>9} "
        f"{'stalled':>9} {'peak GB':>8} {'waits ms':>9}"
    )
    for policy, report in zip(policies, reports, strict=True):
        print(_row(policy, report, reports[-1]))
    for policy, report in zip(policies, reports, strict=True):
        if queued := sum(step.plan.queued for step in report.steps):
            count = sum(len(step.plan.table) for step in report.steps)
            print(f"{policy}: {queued:,} of {count:,} micro-batches wait in a queue, and run here where predicted")
    if options.plot:
        from hdpcomm.trace import plot_plans

        plot_plans([report.steps[0].plan for report in reports], options.plot, planners)
    if options.trace:
        from hdpcomm.trace import write_stream_trace

        write_stream_trace(options.trace, reports[0].steps, reports[0].waits_s, planners[0].cluster)
    if options.json:
        write_json(options.json, {policy: report.to_dict() for policy, report in zip(policies, reports, strict=True)})


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="run planned steps on a simulated cluster",
        description="Simulates training steps under one or several policies; the speed-up is over the last one. "
        "'waits' is the time that steps after the first wait for their plan.",
    )
    add_step_options(parser)
    parser.add_argument(
        "--policy",
        default=_POLICIES,
        help="policies, separated by commas: balanced, pipeline, naive, pow2, static; or all (default %(default)s)",
    )
    parser.add_argument("--steps", type=count, default=1, help="steps to run (default %(default)s)")
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="run the plan that hdpcomm plan --out wrote, and make none"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the first step under each policy")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write the first policy's steps for Perfetto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.set_defaults(func=_simulate, parser=parser)
