"""``hdpcomm replay``: a step of a run again, from the checkpoint before it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.cli.output import TRANSPORTS, new_table, stdout_console
from hdpcomm.cli.train import job_of, ranks_of_job, run_rank
from hdpcomm.cli.train_options import TrainOptions, resolve_options
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.options import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hdpcomm.run import RunResult

__all__ = ["add_parser"]

_ROUNDING = 1e-4  # of a loss, where sums have another order


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "replay",
        help="run a step of a training run again, to look into it",
        description="Goes on from the newest checkpoint before a step of a run to the end of that step, with the same "
        "weights, batches and options, and compares loss and gradient with what the run has noted. On as many ranks as "
        "then the plan is the same, too, and so are the bits; on one rank it all runs in this process (python -m pdb "
        "-m hdpcomm replay ...). Writes nothing. Exit code 1 where the figures differ by more than rounding.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of hdpcomm train --out")
    parser.add_argument("--step", type=count, required=True, metavar="N", help="as the terminal counts them, from 1")
    parser.add_argument("--ranks", type=count, metavar="N", help="ranks to start (as many as ran the step)")
    parser.add_argument("--transport", choices=TRANSPORTS, help="see hdpcomm.init (that of the run)")
    parser.set_defaults(func=_replay)


def _replay(parsed: argparse.Namespace) -> int:
    from hdpcomm.run import RunResult, read_metrics
    from hdpcomm.run.checkpoints import newest_checkpoint

    run, step = parsed.run, parsed.step
    if not (run / "config.yaml").is_file():
        raise InvalidUsage(f"{run}: no run there (no config.yaml); give the folder of hdpcomm train --out")
    options = resolve_options({"out": run}, run / "config.yaml")
    if step > options.steps:
        raise InvalidUsage(f"--step {step} was given, and the run has {options.steps} steps")
    log = run / "metrics.jsonl"
    rows = {int(r["step"]): r for r in read_metrics(log) if r["policy"] == options.policy} if log.is_file() else {}
    found = newest_checkpoint(run / "checkpoints", before=step)[0]
    if found is None and step > 1:
        LOG.info(f"no checkpoint of before step {step} is left, so the run begins anew; --keep-every keeps more")
    then = int(rows.get(step - 1, {}).get("ranks", options.ranks or 1))
    options, ranks = _for_replay(options, parsed.transport, parsed.ranks or then, then, run, new=found is None)
    job = replace(job_of(options, ranks), begins=None if found is None else found.path, stop_after=step)
    outcome = run_rank(job) if ranks == 1 else ranks_of_job(job, ranks)  # one rank: in this process
    assert outcome is not None
    assert isinstance(outcome[0], RunResult)
    return _compare(outcome[0], rows, options, same=ranks == then)


def _for_replay(
    options: TrainOptions, transport: str | None, ranks: int, then: int, run: Path, *, new: bool
) -> tuple[TrainOptions, int]:
    """The options of the run, but nothing that it writes, for another number of ranks."""
    plain = TrainOptions()
    idle = ("out", "save_every", "keep", "keep_every", "keep_best", "time_limit", "elastic", "trackers", "eval_every")
    changes: dict[str, Any] = {name: getattr(plain, name) for name in idle}
    if ranks != then:
        changes["capacity"] = None
    if ranks == 1:
        alone = ("pipeline", "chunks", "layers_per_stage", "split_backward", "tensor", "expert", "expert_replicas")
        changes |= {name: getattr(plain, name) for name in alone}
    elif new and ranks == then and options.pipeline * options.tensor == 1 and options.calibration is None:
        changes["calibration"] = run / "calibration.json"  # what the run's own plans were made from
    if transport is not None:
        changes["transport"] = transport
    return replace(options, ranks=ranks, **changes), ranks


def _compare(result: RunResult, rows: Mapping[int, Mapping[str, Any]], options: TrainOptions, *, same: bool) -> int:
    """Prints the steps beside what the run has noted; the exit code."""
    table = new_table("", "step", "tokens", "loss", "then", "gradient norm", "then", "", left=("",))
    code = 0
    for metrics in result.steps[options.policy]:
        then = rows.get(metrics.step)
        row = [str(metrics.step + 1), f"{metrics.tokens:,}", f"{metrics.loss:.12g}"]
        if then is None:
            table.add_row(*row, "-", f"{metrics.grad_norm:.12g}", "-", "not noted")
            continue
        pairs = [(metrics.loss, float(then["loss"])), (metrics.grad_norm, float(then["grad_norm"]))]
        gap = max(abs(now - before) / max(abs(before), 1e-30) for now, before in pairs)
        code = max(code, int(gap > _ROUNDING))
        verdict = "the same bits" if gap == 0 else f"within {gap:.1g}"
        table.add_row(*row, f"{pairs[0][1]:.12g}", f"{pairs[1][0]:.12g}", f"{pairs[1][1]:.12g}", verdict)
    console = stdout_console()
    console.print(table)
    why = [name for name in ("queue", "learn_costs") if getattr(options, name)]
    if why:
        console.print(f"the run had --{why[0].replace('_', '-')}, whose plans follow the clock: bits are not to be had")
    elif not same:
        console.print("on other ranks than then, so sums have another order")
    return code
