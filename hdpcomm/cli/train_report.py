"""The output of ``hdpcomm train``: the progress bar, the tables at the end, and the JSON."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hdpcomm.arguments import ranks_text, size_text
from hdpcomm.cli.output import new_bar, new_table, stdout_console
from hdpcomm.data import CorpusSummary
from hdpcomm.log import LOG
from hdpcomm.run import DryRun, Evaluation, FolderModel, RunConfig, RunResult
from hdpcomm.run.model import model_facts
from hdpcomm.run.pipelines import recompute_by_device
from hdpcomm.train import StepMetrics, totals

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hdpcomm.sim import StepReport

__all__ = [
    "Progress",
    "model_text",
    "print_dry_run",
    "print_report",
    "to_json",
]


class Progress:
    """Shows progress on stderr: a bar on a terminal, and else a message a step, as it is done."""

    def __init__(self, config: RunConfig) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = new_bar(
            "{task.description:<9}",
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            "{task.fields[latest]}",
            TimeElapsedColumn(),
            "ETA",
            TimeRemainingColumn(),
        )
        self._step_level = logging.INFO if self._bar.disable else logging.DEBUG
        self._task = self._bar.add_task("measuring", total=config.steps * len(config.policies), latest="")
        self._steps = config.steps

    def __enter__(self) -> Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._bar.__exit__(*failure)

    def step(self, policy: str, metrics: StepMetrics, costs: Mapping[str, float]) -> None:
        """Shows a finished step."""
        del costs
        latest = f"loss {metrics.loss:.3f}  {metrics.tokens / metrics.seconds:,.0f} tokens/s"
        self._bar.update(self._task, advance=1, description=policy, latest=latest)
        LOG.log(self._step_level, f"step {metrics.step + 1}/{self._steps}  {policy}  {latest}")

    def evaluation(self, policy: str, found: Evaluation) -> None:
        """Shows the loss on held-out text, also above the bar of a terminal."""
        text = f"loss {found.loss:.3f}, perplexity {found.perplexity:,.1f}, {found.tokens:,} tokens"
        LOG.info(f"after step {found.step}  {policy}  held-out {text}")


_MOST_ROWS = 20  # of the table of steps; metrics.jsonl has all


def print_report(corpus: CorpusSummary, config: RunConfig, result: RunResult) -> None:
    """Prints on stdout what was trained, each step of the first policy, and a comparison of all policies."""
    console = stdout_console()
    policy = config.policies[0]
    console.print(corpus.text)
    console.print(
        f"{model_text(config)} of {result.parameters:,} parameters on {_ranks_text(result.ranks)} "
        f"({result.transport}), capacity {config.capacity:,} tokens a rank"
    )
    if result.step_memory:
        console.print(_memory_text(config, result))
    console.print(_steps_table(policy, result.steps[policy]))
    console.print(_policies_table(result))
    for evaluated, found in result.evaluations.items():
        if found:
            losses = f"{found[0].loss:.3f} after step {found[0].step}"
            losses += f", {found[-1].loss:.3f} after step {found[-1].step}" if len(found) > 1 else ""
            console.print(f"held-out loss ({evaluated}): {losses}")
    for given, steps in result.left_out.items():
        if steps:
            numbers = ", ".join(str(step + 1) for step in steps)
            console.print(f"left out ({given}), as loss or gradient were no finite numbers: step {numbers}")
    total = totals(result.steps[policy])
    console.print(
        f"each step was planned while the one before ran: {1e3 * total.planning_s / total.steps:.2f} ms on average, of "
        f"which the step waited {1e3 * total.plan_wait_s / total.steps:.2f} ms"
    )
    if config.queue:
        console.print(_queue_text(result.steps["balanced"]))
    for rival in config.policies[1:]:
        console.print(_verdict(policy, rival, result))


def _queue_text(steps: list[StepMetrics]) -> str:
    """Gain from the queue of the balanced plans."""
    queued, moved = sum(step.queued for step in steps), sum(step.moved for step in steps)
    if not queued:
        return (
            "no step had a queue: its plans were not longer without one (ranks that share processors, few short "
            "sequences)"
        )
    return (
        f"{queued:,} of {sum(step.micro_batches for step in steps):,} micro-batches waited in a queue; "
        f"{moved / queued:.0%} of them were taken by another rank than predicted"
    )


def model_text(config: RunConfig) -> str:
    return config.model.architecture if isinstance(config.model, FolderModel) else "Llama"


def print_dry_run(corpus: CorpusSummary, config: RunConfig, found: DryRun) -> None:
    """Prints on stdout what the first steps would take, and the memory of a full device."""
    console = stdout_console()
    console.print(corpus.text)
    console.print(
        f"{model_text(config)} of {found.parameters:,} parameters on {_ranks_text(found.ranks)}; nothing was trained"
    )
    _print_devices(console, config, found)
    if corpus.images:
        console.print("beside it, activations of the encoder, if it is trained and not recomputed (--recompute full)")
    count = len(found.reports[config.policies[0]])
    title = f"the first {count} steps, simulated with the costs measured here"
    names = ("policy", "seconds/step", "tokens/s", "micro-batches", "longest on", "idle", "exposed")
    steps = new_table(title, *names, left=("policy",))
    for policy, reports in found.reports.items():
        seconds = sum(report.step_s for report in reports)
        groups = [len(batch.ranks) for report in reports for batch in report.plan.micro_batches]
        steps.add_row(
            policy,
            f"{seconds / count:.4g}",
            f"{_tokens_per_s(reports):,.0f}",
            f"{len(groups) / count:.1f}",
            _ranks_text(max(groups)),
            f"{sum(report.idle_share for report in reports) / count:.0%}",
            f"{sum(report.exposed_share for report in reports) / count:.0%}",
        )
    console.print(steps)
    total = config.steps * config.tokens_per_step
    rates = {policy: _tokens_per_s(reports) for policy, reports in found.reports.items()}
    hours = ", ".join(f"{total / rate / 3600:,.3g} hours under {policy}" for policy, rate in rates.items())
    console.print(f"{total:,} tokens, in {config.steps:,} steps, take {hours}")


def _tokens_per_s(reports: Sequence[StepReport]) -> float:
    return sum(report.plan.tokens for report in reports) / sum(report.step_s for report in reports)


def _print_devices(console: Console, config: RunConfig, found: DryRun) -> None:
    """The memory of a full device by its parts."""
    devices = "device" if len(found.devices) == 1 else "device of each pipeline stage"
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "together")
    title = f"memory of a {devices} with {config.capacity:,} tokens at once"
    table = new_table(title, "stage", "recomputed", *parts)
    for stage, (memory, recompute) in enumerate(zip(found.devices, found.recompute, strict=True)):
        optimizer = memory.states - memory.weights - memory.gradients
        logits = min(memory.chunk, config.capacity) * memory.logits
        ratio = config.offload_ratio
        together = memory.peak_bytes(config.capacity, recompute, ratio)
        activations = memory.activation_bytes(config.capacity, recompute, ratio)
        sizes = (memory.weights, memory.gradients, optimizer, activations, logits, together)
        table.add_row(str(stage), str(recompute), *map(size_text, sizes))
    console.print(table)
    beside = found.beside
    columns = {
        "offload pool (pinned)": beside.pool,
        "messages (shared by the host)": beside.shared,
        "messages (device)": beside.device,
    }
    if host := max(memory.host for memory in found.devices):
        columns["optimizer (pinned)"] = host
    if beside.copies:
        columns["copies (--elastic)"] = beside.copies
    table = new_table("beside it, of each rank", *columns)
    table.add_row(*map(size_text, columns.values()))
    console.print(table)


def _memory_text(config: RunConfig, result: RunResult) -> str:
    """The choice of the memory model; of a pipeline, on the device that is fullest."""
    ratio = config.offload_ratio
    by_device = recompute_by_device(replace(config, recompute=result.recompute, memory=0))
    taken, states = max(
        (memory.peak_bytes(config.capacity, recompute, ratio), memory.states)
        for memory, recompute in zip(result.step_memory, by_device, strict=True)
    )
    where = f" ({', '.join(map(str, by_device))} on the devices of a pipeline)" if len(by_device) > 1 else ""
    return (
        f"{sum(by_device)} of {config.model.layers} layers are recomputed{where}: {config.capacity:,} tokens then take "
        f"{size_text(taken)} of {size_text(config.memory)}, {size_text(states)} of it states"
    )


def _steps_table(policy: str, steps: list[StepMetrics]) -> Table:
    names = ("step", "loss", "tokens", "tokens/s", "longest", "on ranks", "micro-batches", "sent", "idle")
    table = new_table(f"policy {policy}", *names)
    shown = steps if len(steps) <= _MOST_ROWS else [*steps[: _MOST_ROWS // 2], None, *steps[-_MOST_ROWS // 2 :]]
    for step in shown:
        if step is None:
            table.add_row(*("..." for _ in names))
            continue
        table.add_row(
            str(step.step + 1),
            f"{step.loss:.3f}",
            f"{step.tokens:,}",
            f"{step.tokens / step.seconds:,.0f}",
            f"{step.longest:,}",
            str(step.longest_ranks),
            str(step.micro_batches),
            size_text(step.bytes_sent),
            f"{step.idle_share:.0%}",
        )
    return table


def _policies_table(result: RunResult) -> Table:
    names = ("", "loss first", "last", "tokens/s", "s/step", "sequences on ranks", "sent/step", "idle")
    title = "the same batches" if len(result.steps) > 1 else "the whole run"
    table = new_table(title, *names, left=("", "sequences on ranks"))
    for policy, steps in result.steps.items():
        total = totals(steps)
        table.add_row(
            _name(policy, max(s.longest_ranks for s in steps), result.ranks),
            f"{total.first_loss:.3f}",
            f"{total.last_loss:.3f}",
            f"{total.tokens_per_s:,.0f}",
            f"{total.seconds / total.steps:.2f}",
            ", ".join(f"{count:,} on {ranks}" for ranks, count in total.sequences_on_ranks.items()),
            size_text(total.bytes_sent / total.steps),
            f"{total.idle_share:.0%}",
        )
    return table


def _name(policy: str, widest: int, ranks: int) -> str:
    return {"static": f"static DP{ranks // widest} x CP{widest}", "ddp": "torch DDP, gloo"}.get(policy, policy)


def _ranks_text(fewest: int, most: int = 0) -> str:
    most = max(fewest, most)
    return f"{fewest}-{most} ranks" if fewest < most else ranks_text(most)


def _verdict(policy: str, rival: str, result: RunResult) -> str:
    own, other = totals(result.steps[policy]), totals(result.steps[rival])
    name = {"static": "the static mesh", "ddp": "torch's DDP"}.get(rival, rival)
    parts = [
        f"{policy} against {name}: {own.tokens_per_s / other.tokens_per_s:.2f}x the tokens/s",
        f"idle {own.idle_share:.0%} instead of {other.idle_share:.0%}",
        f"{size_text(own.bytes_sent / own.steps)} sent a step instead of {size_text(other.bytes_sent / other.steps)}",
    ]
    theirs = {step.step: step.loss for step in result.steps[rival]}  # either may have left out some
    gaps = [abs(step.loss - theirs[step.step]) for step in result.steps[policy] if step.step in theirs]
    parts += [f"losses equal within {max(gaps):.1g}"] if gaps else []
    text = ", ".join(parts) + "."
    cores = len(os.sched_getaffinity(0))
    if cores < result.ranks:
        text += (
            f"\n{ranks_text(result.ranks)} share {cores} cores here: a rank that waits leaves its core to another, "
            "so idle time costs less than with a device for each. The busiest rank of a step took "
            f"{own.processor_s / own.steps:.2f} s of processor time, {other.processor_s / other.steps:.2f} s with "
            f"{name}: with one core for each rank and no cost of messages, that is "
            f"{other.processor_s / own.processor_s:.2f}x the tokens/s."
        )
    return text


def to_json(corpus: CorpusSummary, config: RunConfig, result: RunResult) -> dict[str, object]:
    """The content of ``--json``: the first policy at the top level, the others under ``comparison``."""
    first, *others = (
        {
            "policy": policy,
            "steps": [asdict(step) for step in result.steps[policy]],
            "totals": totals(result.steps[policy]).to_dict(),
        }
        for policy in config.policies
    )
    return {
        **first,
        "ranks": result.ranks,
        "transport": result.transport,
        "comparison": others,
        "model": {**model_facts(config.model), "parameters": result.parameters},
        "evaluations": {policy: [asdict(each) for each in found] for policy, found in result.evaluations.items()},
        "config": {
            "steps": config.steps,
            "context": corpus.context,
            "capacity": config.capacity,
            "tokens_per_step": config.tokens_per_step,
            "seed": config.seed,
            "learning_rate": config.highest_lr,
            "max_grad_norm": config.max_grad_norm,
            "offload_bytes": config.offload,
        },
        "data": {name: value for name, value in asdict(corpus).items() if name not in ("context", "text")},
    }
