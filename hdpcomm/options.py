# ruff: noqa: RUF009  (every default is a field)
"""Options of commands as fields of dataclasses: each is declared once, with its default, its help and its check."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdpcomm.arguments import MOST_TOKENS, parse_size
from hdpcomm.errors import InvalidUsage

__all__ = [
    "BadOption",
    "LoraOptions",
    "TrainingOptions",
    "count",
    "duration",
    "layer_counts",
    "num_bytes",
    "option",
    "parse_ramp",
    "positive",
    "recompute",
    "zero_stage",
    "seconds_of",
    "seed",
    "share",
    "slices",
    "steps_or_time",
    "whole",
]


class BadOption(argparse.ArgumentTypeError, ValueError):
    """A wrong value of an option: argparse shows the text of the one base, jsonargparse expects the other in files."""


def count(text: str) -> int:
    """argparse type: a whole number of at least 1, such as ``8192``, ``8,192``, ``1e3``, ``8k`` (of 1024) or ``2M``."""
    units = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
    digits = str(text).replace(",", "").strip().lower()[:400]
    if scientific := re.fullmatch(r"(\d+)e(\d{1,2})", digits):
        digits = scientific[1] + "0" * int(scientific[2])
    unit = units.get(digits[-1:], 1)
    try:
        value = int(digits[:-1] if unit > 1 else digits) * unit
    except ValueError:
        raise BadOption(f"{text!r} is not a whole number (like 8192 or 8k)") from None
    if value < 1:
        raise BadOption(f"{text} is below 1; at least 1 was expected")
    if value > MOST_TOKENS:
        raise BadOption(f"{text} is above 2^53, the most that was expected")
    return value


def layer_counts(text: str) -> str:
    """argparse type: layers of each stage of a pipeline, such as ``4,5,5,4``."""
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", str(text)):
        raise BadOption(f"{text!r} is no list of layers of each stage, like 4,5,5,4")
    return str(text)


def slices(text: str) -> int:
    """argparse type: the most slices of a sequence, as a number, ``off`` (1) or ``auto`` (16)."""
    most = {"off": 1, "auto": 16}.get(str(text).strip().lower())
    return count(text) if most is None else most


def positive(text: str) -> float:
    """argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise BadOption(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise BadOption(f"{text} is not a finite number above 0")
    return value


def share(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        raise BadOption(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise BadOption(f"{text} is not a number from 0 to 1")
    return value


def seed(text: str) -> int:
    """argparse type: a whole number from 0 to 2^63 - 1."""
    try:
        value = int(str(text)[:40])
    except ValueError:
        raise BadOption(f"{text!r} is not a whole number") from None
    if not 0 <= value < 1 << 63:
        raise BadOption(f"seed is {text}; it must be from 0 to 2^63 - 1")
    return value


def num_bytes(text: str) -> int:
    """argparse type: bytes, such as ``512M``; see :func:`hdpcomm.arguments.parse_size`."""
    try:
        return parse_size(str(text))
    except InvalidUsage as error:
        raise BadOption(str(error)) from None


def recompute(text: str) -> str | int:
    """argparse type: ``none``, ``full``, ``auto`` or a number of layers."""
    if str(text) in ("none", "full", "auto"):
        return str(text)
    if not str(text).isdecimal():
        raise BadOption(f"{text!r} is neither none, full, auto nor a number of layers")
    return int(text)


def zero_stage(text: str) -> str | int:
    """argparse type: a stage of ZeRO, 0 to 3, or ``auto``."""
    if str(text) == "auto":
        return "auto"
    if str(text) not in ("0", "1", "2", "3"):
        raise BadOption(f"{text!r} is neither auto nor one of 0, 1, 2 and 3")
    return int(text)


_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def duration(text: str) -> str:
    """argparse type: a time such as ``90s``, ``30min``, ``23.5h`` or ``2d``, for :func:`seconds_of`."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?(s|min|h|d)", str(text)) or not seconds_of(str(text)):
        raise BadOption(f"{text!r} is no time above 0, like 90s, 30min, 23.5h or 2d")
    return str(text)


def seconds_of(text: str) -> float:
    """Seconds of a :func:`duration`."""
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * _SECONDS[unit]


def steps_or_time(text: str) -> int | str:
    """argparse type: a number of steps, or a :func:`duration`."""
    return duration(text) if str(text).endswith(tuple(_SECONDS)) else count(text)


def whole(text: str) -> int:
    """argparse type: a whole number of at least 0."""
    return 0 if str(text) == "0" else count(text)


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Options of LoRA, as ``--lora`` has them: ``r=16,alpha=32,targets=q_proj+v_proj``.

    Attributes:
        rank: columns of the small matrices.
        alpha: their product counts alpha / rank times.
        targets: names of the layers that get them, or ``all-linear``.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> LoraOptions:
        """Raises BadOption for another text."""
        given = dict(part.partition("=")[::2] for part in text.split(","))
        numbers = [given.get(name, "") for name in ("r", "alpha")]
        targets = tuple(given.get("targets", "").split("+"))
        if set(given) != {"r", "alpha", "targets"} or not all(targets) or not all(map(str.isdecimal, numbers)):
            raise BadOption(f"{text!r} is not of the form r=16,alpha=32,targets=q_proj+v_proj")
        if min(map(int, numbers)) < 1:
            raise BadOption(f"{text!r} has r {numbers[0]} and alpha {numbers[1]}; give at least 1 for both")
        return cls(int(numbers[0]), int(numbers[1]), targets)

    def __str__(self) -> str:
        return f"r={self.rank},alpha={self.alpha},targets={'+'.join(self.targets)}"


def lora(text: str) -> str:
    """argparse type: as :class:`LoraOptions` is written."""
    return str(LoraOptions.parse(str(text)))


def parse_ramp(text: str) -> tuple[int, int]:
    """(tokens, steps) of ``64k:1000``. Raises BadOption for another text."""
    tokens, colon, steps = str(text).partition(":")
    if not colon:
        raise BadOption(f"{text!r} is not of the form TOKENS:STEPS, like 64k:1000")
    return count(tokens), count(steps)


def ramp(text: str) -> str:
    """argparse type: as :func:`parse_ramp` takes it."""
    parse_ramp(text)
    return str(text)


def option(group: str, default: Any, help: str, type: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """A field that a command has as an option.

    Args:
        group: of the command's help.
        type, more: as argparse takes them.
    """
    about = {"group": group, "help": help, **more}
    return field(default=default, metadata=about if type is None else about | {"type": type})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of a training run, of a program (:class:`hdpcomm.run.RunConfig`) and on the command line of
    ``hdpcomm train`` alike; the helps of the fields say what they are. In a program ``recompute`` may also be a number
    of layers for each stage of a pipeline."""

    tokens_per_step: int = option(
        "data", 65536, "most tokens of a step over all ranks; by default --context, if that is more", count,
        metavar="TOKENS",
    )  # fmt: skip
    ramp: str | None = option(
        "data", None, "begin with steps of so many tokens, and rise to --tokens-per-step over so many steps, as "
        "64k:1000", ramp, metavar="TOKENS:STEPS",
    )  # fmt: skip
    seed: int = option("data", 0, "seed of the shuffle and of the weights", seed)
    pipeline: int = option(
        "ranks", 1, "stages of a pipeline: so many ranks hold the layers of the model together, and work as one; "
        "divides --ranks", count, metavar="N",
    )  # fmt: skip
    chunks: int = option("ranks", 1, "stages on each device of a pipeline (interleaved)", count, metavar="N")
    layers_per_stage: str | None = option(
        "ranks", None, "layers of each stage of a pipeline, as 4,5,5,4; by default as many as make stages of about "
        "equal work, head included", layer_counts, metavar="N,N,...",
    )  # fmt: skip
    split_backward: bool = option(
        "ranks", False, "stages of a pipeline compute the gradients of weights where they would wait for other stages "
        "(zero-bubble)", action="store_true",
    )  # fmt: skip
    tensor: int = option(
        "ranks", 1, "ranks that share each layer and work on the same tokens; divides --ranks, --heads, --ffn and the "
        "vocabulary", count, metavar="N",
    )  # fmt: skip
    expert: int = option(
        "ranks", 1, "neighbouring ranks that share the experts of each layer; divides --experts, and --ranks / "
        "pipeline / tensor", count, metavar="N",
    )  # fmt: skip
    expert_replicas: int = option(
        "ranks", 0, "with --expert: the most copies of busy experts of others on each rank and layer, chosen by the "
        "steps before", whole, metavar="N",
    )  # fmt: skip
    learn_costs: bool = option(
        "ranks", False, "plans follow what the steps before took, and slow ranks get less; no two runs then have the "
        "same bits", action="store_true",
    )  # fmt: skip
    slices: int = option(
        "ranks", 1, "most slices of tokens that a long sequence may run in, one after the other, where its pipeline "
        "then ends earlier, or the ranks hold it no other way (auto: 16)", slices, metavar="auto|off|N",
    )  # fmt: skip
    queue: bool = option(
        "ranks", False, "short sequences wait in a queue, from which ranks take when they are free: slow or unlucky "
        "ones do less; no two runs then have the same bits", action="store_true",
    )  # fmt: skip
    offload: int = option(
        "ranks", 0, "pinned host memory of each rank for activations of long sequences, like 512M or 64G; 0: none",
        num_bytes, metavar="SIZE",
    )  # fmt: skip
    steps: int = option("training", 10, "optimizer steps", count)
    lr: float | None = option(
        "training", None, "highest learning rate; by default 2e-4 with --lora, 2e-5 for other weights of --model, and "
        "from nothing 0.01 up to a width of 128, falling with the width", positive,
    )  # fmt: skip
    weight_decay: float = option("training", 0.1, "of matrices, where the optimizer has one", share)
    optimizer: str = option("training", "AdamW", "by its name in torch.optim, or module:Class", str, metavar="NAME")
    optimizer_options: tuple[str, ...] = option(
        "training", (), "of the optimizer's class, like momentum=0.9 or betas=0.9,0.99", str, nargs="+",
        metavar="NAME=VALUE",
    )  # fmt: skip
    ema: float | None = option(
        "training", None, "average the weights over the steps with this decay, like 0.999: held-out losses and "
        "--export are of the averages", share, metavar="DECAY",
    )  # fmt: skip
    init_from: Path | None = option(
        "training", None, "begin with the weights of another run (its newest checkpoint, or a path to one) or of a "
        "model's folder; data, context, mesh and schedule are those of this run", Path, metavar="RUN|FOLDER",
    )  # fmt: skip
    keep_optimizer: bool = option(
        "training", False, "with --init-from RUN: go on with that run's moments, too", action="store_true"
    )
    lora: str | None = option(
        "training", None, "train small matrices beside those of a --model only, by peft, as r=16,alpha=32,targets="
        "q_proj+v_proj; --export then writes these adapters", lora, metavar="r=R,alpha=A,targets=NAME+NAME",
    )  # fmt: skip
    dtype: str = option(
        "training", "fp32", "of the parameters; bf16 keeps fp32 master weights", str, choices=("fp32", "bf16")
    )
    zero: int | str = option(
        "training", 0, "what is cut among the HDP ranks: 1 the optimizer's state, 2 gradients, too, 3 weights, too (2 "
        "and 3: among those of a host); auto: as little as --memory allows", zero_stage,
        metavar="0|1|2|3|auto",
    )  # fmt: skip
    optimizer_offload: bool = option(
        "training", False, "master weights and the optimizer's state in pinned host memory; the CPU takes the "
        "optimizer's step", action="store_true",
    )  # fmt: skip
    recompute: str | int | tuple[int, ...] = option(
        "training", "none", "layers that are computed again in the backward pass instead of kept; auto: as few as "
        "--memory allows", recompute,
        metavar="none|full|auto|N",
    )  # fmt: skip
    router_bias_rate: float = option(
        "training", 0.0, "by how much a step moves the biases by which routers of a --model choose, against the "
        "loads of their experts (DeepSeek-V3: 0.001)", share, metavar="RATE",
    )  # fmt: skip
    mtp_weight: float = option(
        "training", 0.0, "weight of the loss of multi-token prediction, by the layers for it of a --model, or new ones "
        "(DeepSeek-V3: 0.3)", share, metavar="WEIGHT",
    )  # fmt: skip
    fp8: str = option(
        "training", "none", "linear layers multiply in FP8, by torchao: with a scale for each token and row, or for "
        "each tensor", str, choices=("none", "rowwise", "tensorwise"),
    )  # fmt: skip
    fp8_exclude: tuple[str, ...] = option(
        "training", (), "parts of names of linear layers that stay as they are; embedding, head and routers do anyway",
        str, nargs="+", metavar="NAME",
    )  # fmt: skip
    compile: bool = option(
        "training", False, "layers go through torch.compile, once for all lengths; needs a C++ compiler or, on GPUs, "
        "Triton", action="store_true",
    )  # fmt: skip
    memory: int = option(
        "training", 0, "memory that a rank's step may take, weights and optimizer included, like 4G; with --recompute "
        "auto or --zero auto", num_bytes, metavar="SIZE",
    )  # fmt: skip
    max_grad_norm: float = option("training", 1.0, "gradients are clipped to this global norm", positive)
    check_replicas: int = option(
        "training", 100, "steps between two comparisons of all ranks' weights and optimizer settings; 0: never", whole,
        metavar="STEPS",
    )  # fmt: skip
    note_spikes: bool = option(
        "training", False, "where a step's loss jumps, name its sequences with the largest loss, by one more forward "
        "pass over them", action="store_true",
    )  # fmt: skip
    skip_bad_steps: int = option(
        "training", 0, "steps of the run that may be left out as their loss or gradient is no finite number; one more "
        "ends it, saved", whole, metavar="N",
    )  # fmt: skip
    eval_every: int = option(
        "evaluation", 0, "steps between two evaluations on held-out text; 0: only at the end", whole, metavar="N"
    )
