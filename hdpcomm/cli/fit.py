"""``hdpcomm fit``: which settings bring a model's training step within the memory of some devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.arguments import size_text
from hdpcomm.cli.output import check_writable, new_table, stdout_console, write_json
from hdpcomm.cli.train_options import TrainOptions, add_options, resolve_options
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.options import count, num_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hdpcomm.run import RunConfig
    from hdpcomm.run.fit import Setting

__all__ = ["add_parser"]

_OPTIONS = (
    "model", "layers", "hidden", "heads", "kv_heads", "ffn", "experts", "top_k", "ranks", "capacity", "context",
    "tokens_per_step", "seed", "pipeline", "chunks", "layers_per_stage", "expert", "expert_replicas", "slices",
    "offload", "lora", "dtype", "optimizer", "optimizer_options", "optimizer_offload",
)  # fmt: skip
_ROOM = 0.9
"""Share of a device's memory for a step; the rest is for fragments and for what else lives there."""
_PARTS = {
    "weights": "weights", "gradients": "grads", "optimizer": "optim.", "activations": "activ.", "together": "total"
}  # fmt: skip
"""Names in the JSON, and on the table."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "fit",
        help="tell which settings fit a model into the memory of some devices, and how fast each is",
        description="Predicts memory and time of a training step for each stage of ZeRO and number of tensor ranks, "
        "with as few layers recomputed as fit, and names the setting to take. Nothing is allocated, so the devices "
        "need not be here, and a config.json is enough of a model.",
    )
    add_options(parser, only=_OPTIONS)
    where = parser.add_argument_group("devices and lengths")
    where.add_argument("--device", default="h100", metavar="KIND", help="a100, h100 or h200 (default: %(default)s)")
    where.add_argument(
        "--memory", type=num_bytes, metavar="SIZE",
        help="of a device that the step may take, like 70G (default: nine tenths of it)",
    )  # fmt: skip
    where.add_argument("--zero", type=int, choices=range(4), help="only this stage (default: all of them)")
    where.add_argument("--tensor", type=count, metavar="N", help="only so many tensor ranks (default: 1, 2, 4, 8)")
    where.add_argument(
        "--distribution", default="byted",
        help="lengths are drawn from: byted, github, lognormal[:MU:SIGMA] or file:PATH (default: %(default)s)",
    )  # fmt: skip
    where.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.set_defaults(func=_fit)


def _fit(options: argparse.Namespace) -> int:
    from hdpcomm.run.fit import best_setting, fit_settings

    check_writable(options.json)
    config = _config(options)
    lengths = _lengths(options, config)
    LOG.info("predicting the memory of a step, some seconds for each number of tensor ranks ...")
    settings = list(
        fit_settings(
            config, lengths, options.ranks, options.device,
            tensor=[options.tensor] if options.tensor else _tensor_ranks(options.ranks, config),
            zero=[options.zero] if options.zero is not None else range(4),
        )
    )  # fmt: skip
    best = best_setting(settings)
    _print(settings, best, config, lengths, options)
    if options.json is not None:
        rows = [_row(each, sum(lengths)) | {"take": each is best} for each in settings]
        write_json(options.json, {"ranks": options.ranks, "device": options.device, "settings": rows})
    if best is None:
        raise InvalidUsage(
            f"nothing of this fits into {size_text(settings[0].limit)} of {options.device}: give more --ranks, a lower "
            "--context or --capacity, --offload, --pipeline or --lora"
        )
    return 0


def _config(options: argparse.Namespace) -> RunConfig:
    """The run's configuration without what the table tries; ``memory`` is the limit."""
    from hdpcomm.cli.train import job_of
    from hdpcomm.plan import DEVICES
    from hdpcomm.run import model_path

    if options.device not in DEVICES:
        raise InvalidUsage(f"--device is {options.device!r}; choose from {', '.join(DEVICES)}")
    known = {each.name for each in fields(TrainOptions)} & {*_OPTIONS}
    given: dict[str, Any] = {"dtype": "bf16"} | {n: v for n, v in vars(options).items() if n in known}
    if given["dtype"] == "auto":
        given["dtype"] = "bf16"
    if "ranks" not in given:
        raise InvalidUsage("--ranks was not given; say how many devices there are, as --ranks 8")
    options.ranks = given["ranks"]
    resolved = resolve_options(given)
    if resolved.model is not None:
        resolved = replace(resolved, model=model_path(resolved.model))
    options.context = resolved.context
    config = job_of(resolved, options.ranks).config
    limit = options.memory or int(_ROOM * DEVICES[options.device].memory_bytes)
    return replace(config, recompute="auto", memory=limit)


def _tensor_ranks(ranks: int, config: RunConfig) -> list[int]:
    """Powers of two that a node has room for."""
    devices = config.pipeline * config.expert
    return [each for each in (1, 2, 4, 8) if ranks % (each * devices) == 0]


def _lengths(options: argparse.Namespace, config: RunConfig) -> list[int]:
    from hdpcomm.plan.distributions import sample_lengths

    lengths = sample_lengths(
        options.distribution, tokens=config.tokens_per_step, context=options.context, seed=config.seed
    )
    lengths[lengths.index(max(lengths))] = options.context  # a step that has one of the longest
    return lengths


def _row(setting: Setting, tokens: int) -> dict[str, Any]:
    device, config = setting.device, setting.config
    return {
        "tensor": config.tensor,
        "zero": config.zero,
        "recomputed": setting.recomputed,
        "weights": device.weights,
        "gradients": device.gradients,
        "optimizer": device.states - device.weights - device.gradients,
        "activations": setting.activations,
        "together": setting.taken,
        "fits": setting.fits,
        "step_s": setting.step_s,
        "tokens_per_s": tokens / setting.step_s if setting.step_s else None,
    }


def _print(
    settings: Sequence[Setting],
    best: Setting | None,
    config: RunConfig,
    lengths: Sequence[int],
    options: argparse.Namespace,
) -> None:
    from hdpcomm.cli.train_report import model_text

    console = stdout_console()
    console.print(
        f"{model_text(config)} in {config.dtype} on {options.ranks} {options.device}s, {size_text(config.memory)} of "
        f"each for a step of {sum(lengths):,} tokens with sequences of up to {max(lengths):,}"
    )
    unit, size = ("GB", 1e9) if config.memory >= 1e9 else ("MB", 1e6)
    title = f"{unit} on the fullest device (predicted), and the step (simulated)"
    table = new_table(title, "tensor", "zero", "recomp.", *_PARTS.values(), "s/step", "tokens/s", "")
    for each in settings:
        row = _row(each, sum(lengths))
        sizes = [f"{row[name] / size:,.1f}" for name in _PARTS]
        times = [f"{each.step_s:.4g}", f"{row['tokens_per_s']:,.0f}"] if each.step_s else ["", ""]
        verdict = "take" if each is best else "fits" if each.fits else "no"
        recomputed = f"{each.recomputed} of {each.device.layers}"
        table.add_row(str(row["tensor"]), str(row["zero"]), recomputed, *sizes, *times, verdict)
    console.print(table)
    if best is not None:
        console.print(_advice(best), soft_wrap=True)  # to be copied


def _advice(best: Setting) -> str:
    """The options of the command and of transformers' Trainer that say the same."""
    config = best.config
    sizes = {name: getattr(config, name) for name in ("pipeline", "chunks", "tensor", "expert")}
    cut = {name: size for name, size in sizes.items() if size > 1}
    if config.expert_replicas:
        cut["expert_replicas"] = config.expert_replicas
    options = "".join(f" --{name.replace('_', '-')} {size}" for name, size in cut.items())
    if config.layers_per_stage is not None:
        options += f" --layers-per-stage {config.layers_per_stage}"
    if isinstance(config.recompute, tuple):
        options += f" --recompute auto --memory {int(best.limit)}"
    elif best.recomputed:
        options += f" --recompute {config.recompute}"
    command = f"take hdpcomm train --dtype {config.dtype} --zero {config.zero}{options} --capacity {config.capacity}"
    if config.optimizer_offload:
        command += " --optimizer-offload"
    if config.pipeline > 1:
        return command
    mesh = f", mesh={json.dumps(cut)}" if cut else ""
    dtype = ", dtype=torch.bfloat16" if config.dtype == "bf16" else ""
    host = ", optimizer_offload=True" if config.optimizer_offload else ""
    checkpointing = " and gradient_checkpointing=True" if best.recomputed else ""
    return (
        f"{command}; in transformers' Trainer HybridDataParallel(zero={config.zero}{dtype}{mesh}{host}, "
        f"capacity={config.capacity}){checkpointing}"
    )
