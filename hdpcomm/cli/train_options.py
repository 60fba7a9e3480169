# ruff: noqa: RUF009  (every default is a field)
"""The options of ``hdpcomm train``: one dataclass gives the command line, the YAML file and the saved configuration."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hdpcomm.cli.output import TRANSPORTS
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text
from hdpcomm.options import TrainingOptions, count, duration, option, share, steps_or_time, whole

__all__ = [
    "DESCRIPTION", "TrainOptions", "add_options", "changed_options", "check_effects", "dump_options", "read_config",
    "resolve_options",
]  # fmt: skip

DESCRIPTION = """Trains a model with Hybrid Data Parallelism: every step plans how many ranks each sequence takes, from
its length. Starts the ranks on this machine; under torchrun, srun or mpirun it joins the given world instead. With
--out it saves as it goes, also on Ctrl-C and SIGTERM, and --resume goes on from there. --config takes a YAML file with
any of these options (as RUN/config.yaml); what stands on the command line wins."""


@dataclass(frozen=True, slots=True)
class TrainOptions(TrainingOptions):
    """Everything that ``hdpcomm train`` can be told."""

    data: tuple[str, ...] = option(
        "data", (), "text, JSONL, Parquet, folders and URLs of these, datasets of Hugging Face and Megatron-Core, "
        "folders of hdpcomm data build; PATH=0.7: its share of the tokens, in a mixture; without it, Python's standard "
        "library", str, nargs="+", metavar="PATH",
    )  # fmt: skip
    mixture_at: tuple[str, ...] = option(
        "data", (), "weights of the mixture's PATHs after a step, as 1000=0.5,0.5; 0 leaves one out", str, nargs="+",
        metavar="STEP=WEIGHTS",
    )  # fmt: skip
    text_field: str = option("data", "text", "field or column that holds the text", str, metavar="NAME")
    messages_field: str = option(
        "data", "messages", "field or column with the messages of a chat; only the assistant's tokens are trained", str,
        metavar="NAME",
    )  # fmt: skip
    tokenizer: str | None = option(
        "data", None, "folder of the tokenizer, or 'bytes' (that of --model, if it has one, else bytes)", str,
        metavar="FOLDER",
    )  # fmt: skip
    data_cache: Path | None = option(
        "data", None, "folder for tokens that are made once (hdpcomm/data in the user's cache)", Path, metavar="FOLDER"
    )
    context: int = option(
        "data", 4096, "longest sequence; longer documents are cut into pieces", count, metavar="TOKENS"
    )
    ranks: int | None = option(
        "ranks", None, "ranks to start here (one a core, 2 to 8; under torchrun: its world)", count, metavar="N"
    )  # fmt: skip
    transport: str = option(
        "ranks", "auto", "how the ranks exchange tensors; see hdpcomm.init", str, choices=TRANSPORTS
    )
    capacity: int | None = option(
        "ranks", None, "tokens that a rank holds at once (so many that the longest sequences need all "
        "ranks)", count, metavar="TOKENS",
    )  # fmt: skip
    policy: str = option(
        "ranks", "balanced", "how ranks get their sequences", str, choices=("balanced", "naive", "static")
    )
    compare: tuple[str, ...] = option(
        "ranks", (), "train more models on the same batches, by these policies or by torch's DDP over gloo with packs "
        "of whole sequences, and show them side by side", str, nargs="+",
        choices=("static", "naive", "balanced", "ddp"),
    )  # fmt: skip
    dtype: str = option(
        "training", "auto", "of the parameters; bf16 keeps fp32 master weights; auto: bf16 on GPUs, fp32 elsewhere and "
        "with DDP and Muon", str, choices=("auto", "fp32", "bf16"),
    )  # fmt: skip
    calibration: Path | None = option(
        "ranks", None, "what hdpcomm calibrate measured of this model on such ranks, in place of a short profile at "
        "the start", Path, metavar="FILE",
    )  # fmt: skip
    model: Path | None = option(
        "model", None, "Hugging Face folder or name on the hub: its weights, or new ones if it has only a config.json; "
        "without it, a small Llama of the sizes below", Path, metavar="FOLDER",
    )  # fmt: skip
    layers: int = option("model", 4, "transformer blocks", count)
    hidden: int = option("model", 32, "width of the residual stream", count)
    heads: int = option("model", 2, "query heads", count)
    kv_heads: int = option("model", 1, "key and value heads", count)
    ffn: int = option("model", 96, "width of the feed-forward block, or of each expert", count)
    experts: int = option("model", 0, "experts of each block; 0: one feed-forward block for all tokens", whole)
    top_k: int = option("model", 2, "with --experts: experts that a token goes through", count)
    router_aux_loss: float | None = option(
        "model", None, "factor of the loss that tells routers to use all experts alike (--experts: 0.01, --model: as "
        "its configuration says)", share, metavar="FACTOR",
    )  # fmt: skip
    router_z_loss: float = option(
        "model", 0.0, "factor of the loss on large router logits; --model: in place of its configuration's loss", share
    )
    schedule: str = option(
        "schedule", "cosine", "of the learning rate after its rise", str,
        choices=("constant", "cosine", "linear", "wsd"),
    )  # fmt: skip
    warmup: int | None = option("schedule", None, "steps over which the rate rises (a tenth)", whole, metavar="STEPS")
    decay: float = option("schedule", 0.2, "wsd: the last share of the steps, in which the rate falls", share)
    min_lr: float = option("schedule", 0.1, "share of the highest rate at the end", share)
    eval_data: tuple[str, ...] = option("evaluation", (), "held-out text, as --data", str, nargs="+", metavar="PATH")
    eval_fraction: float | None = option(
        "evaluation", None, "share of the documents of --data that is held out instead", share, metavar="SHARE"
    )
    out: Path | None = option(
        "saving", None, "folder of the run: checkpoints/step-N, metrics.jsonl, config.yaml; made if need be", Path,
        metavar="RUN",
    )  # fmt: skip
    save_every: int | str | None = option(
        "saving", None, "steps between checkpoints, or a time, like 30min or 2h (only at the end)", steps_or_time,
        metavar="N|TIME",
    )  # fmt: skip
    keep: int = option("saving", 3, "checkpoints that stay, the newest", count, metavar="N")
    keep_every: int | None = option("saving", None, "those after a multiple of N steps stay, too", count, metavar="N")
    keep_best: bool = option(
        "saving", False, "the one with the least held-out loss stays, too: checkpoints/best", action="store_true"
    )
    time_limit: str | None = option(
        "saving", None, "end the run, saved, before so much time has passed since the start of the command, like "
        "23.5h; exit code 142", duration, metavar="TIME",
    )  # fmt: skip
    resume: str | None = option(
        "saving", None, "go on from the newest checkpoint of --out, if there is any, or from the one at PATH", str,
        metavar="auto|PATH",
    )  # fmt: skip
    elastic: bool = option(
        "saving", False, "when a rank dies, the others go on from what they keep in memory; under torchrun "
        "--max-restarts, the ranks that it starts anew go on from the last checkpoint", action="store_true",
    )  # fmt: skip
    export: Path | None = option(
        "saving", None, "write the model for transformers' from_pretrained at the end", Path, metavar="FOLDER"
    )
    trace: Path | None = option(
        "output", None, "write a trace of the steps of this call for Perfetto: ranks as processes, the plan above what "
        "each did", Path, metavar="FILE",
    )  # fmt: skip
    trackers: str = option(
        "output", "auto", "with --out: auto writes TensorBoard and W&B (offline) files if these are installed, and "
        "sends spans to OTEL_EXPORTER_OTLP_ENDPOINT, if set", str,
        choices=("auto", "none", "tensorboard", "wandb", "opentelemetry"),
    )  # fmt: skip
    metrics_port: str | None = option(
        "output", None, "serve the newest figures to Prometheus, on a port of the loopback interface (0: a free one) "
        "or to other hosts by the token of HDPCOMM_METRICS_TOKEN", str, metavar="[IP:]PORT",
    )  # fmt: skip
    json: Path | None = option("output", None, "write the results as JSON", Path, metavar="FILE")
    dry_run: bool = option(
        "output",
        False,
        "plan and simulate a few steps of the run that the other options describe, print the memory of a device, and "
        "train nothing",
        action="store_true",
    )


def _policies(options: TrainOptions) -> set[str]:
    return {options.policy, *options.compare}


_NEEDS: tuple[tuple[str, Callable[[TrainOptions], Any], str], ...] = (
    ("text_field messages_field", lambda o: o.data or o.eval_data, "without --data; name the files, or leave it out"),
    ("mixture_at", lambda o: o.data, "without --data; name its files with a weight for each, or leave it out"),
    ("data_cache", lambda o: o.data or o.eval_data or o.tokenizer, "without --data; name the files, or leave it out"),
    (
        "layers hidden heads kv_heads ffn experts top_k",
        lambda o: o.model is None,
        "with --model, whose config.json says what the model is; leave out either",
    ),
    (
        "learn_costs",
        lambda o: "balanced" in _policies(o) or ("naive" in _policies(o) and o.offload),
        "without the policy balanced, and other plans do not follow costs; leave it out",
    ),
    (
        "offload",
        lambda o: not o.offload or {"balanced", "naive"} & _policies(o),
        "with the policy static, which offloads nothing; give --policy balanced or naive, or leave it out",
    ),
    (
        "slices",
        lambda o: o.slices == 1 or "balanced" in _policies(o),
        "without the policy balanced, whose plans alone have them; leave it out",
    ),
    ("eval_fraction", lambda o: o.eval_fraction, "as 0, which holds nothing out; give more, or leave it out"),
    ("top_k", lambda o: o.experts, "without experts; give --experts, or leave it out"),
    ("router_aux_loss router_z_loss", lambda o: o.experts or o.model, "without --experts and --model; give one"),
    ("decay", lambda o: o.schedule == "wsd", "without --schedule wsd, which alone has it; give that, or leave it out"),
    ("min_lr", lambda o: o.schedule != "constant", "with --schedule constant, which does not fall; leave out either"),
    (
        "eval_every",
        lambda o: o.eval_data or o.eval_fraction,
        "without held-out text; give --eval-data or --eval-fraction",
    ),
    ("fp8_exclude", lambda o: o.fp8 != "none", "without --fp8, which it is for; give both"),
    ("keep_optimizer", lambda o: o.init_from, "without --init-from; name the run whose optimizer it is"),
    ("keep_best", lambda o: o.eval_data or o.eval_fraction, "without held-out text; give --eval-data"),
    (
        "save_every resume elastic keep keep_every keep_best time_limit",
        lambda o: o.out,
        "without --out; name the folder of the run",
    ),
    ("trackers", lambda o: o.out or o.trackers == "none", "without --out; name the folder of the run"),
    ("json trace export metrics_port", lambda o: not o.dry_run, "with --dry-run, which runs no step; leave out either"),
)
"""Names of options, when they have an effect, and what is wrong otherwise."""


def check_effects(options: TrainOptions, given: Iterable[str] = ()) -> None:
    """Refuses options that would change nothing beside the others.

    Args:
        given: names of those that stand on the command line, which are checked with their default values, too.

    Raises: InvalidUsage, which names the option and the reason.
    """
    defaults, spelled = TrainOptions(), frozenset(given)
    for names, has_effect, reason in _NEEDS:
        for name in names.split():
            if (name in spelled or getattr(options, name) != getattr(defaults, name)) and not has_effect(options):
                raise InvalidUsage(f"--{name.replace('_', '-')} was given {reason}")


_GROUPS = ("data", "ranks", "model", "training", "schedule", "evaluation", "saving", "output")
_ONE_CALL = ("out", "resume", "export", "json", "trace", "metrics_port", "dry_run")
"""Options of one call, which RUN/config.yaml leaves out."""


def add_options(parser: Any, only: Collection[str] = ()) -> None:
    """Adds every option, or some, to a parser of argparse or jsonargparse. Those that are not given stay out of the
    namespace."""
    groups: dict[str, Any] = {}
    for each in _ordered():
        if only and each.name not in only:
            continue
        about = dict(each.metadata)
        group = about.pop("group")
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        if each.default not in (None, (), False):
            about["help"] = f"{about['help']} (default: {each.default})"
        groups[group].add_argument("--" + each.name.replace("_", "-"), default=argparse.SUPPRESS, **about)


def _ordered() -> list[Field[Any]]:
    """The options group by group, those that only the command has first."""
    shared = {each.name for each in fields(TrainingOptions)}
    return sorted(fields(TrainOptions), key=lambda each: (_GROUPS.index(each.metadata["group"]), each.name in shared))


def dump_options(options: TrainOptions) -> str:
    """YAML that ``--config`` takes: every option of the run as resolved, but for those that the others leave without
    effect."""
    import yaml

    idle = {name for names, has_effect, _ in _NEEDS if not has_effect(options) for name in names.split()}
    content = {name: value for name, value in _plain(options).items() if name not in idle}
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _plain(options: TrainOptions) -> dict[str, Any]:
    """Values of the options that a file may give, in types of YAML."""
    return {
        name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for name, value in ((each.name, getattr(options, each.name)) for each in _ordered())
        if name not in _ONE_CALL and value not in (None, ())
    }


def changed_options(options: TrainOptions) -> str:
    """One line with the options that are not as they are by default."""
    import yaml

    defaults = _plain(TrainOptions())
    changed = {name: value for name, value in _plain(options).items() if defaults.get(name) != value}
    return str(
        yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    ).strip()


_LONGEST = 600  # characters of a message


def resolve_options(given: Mapping[str, Any], config: Path | str | None = None) -> TrainOptions:
    """Options of the command line, over those of ``config``, a file or its text, over the defaults.

    Raises: InvalidUsage, in one line, if the file cannot be read, has an unknown name or a wrong value, or if an option
        would change nothing beside the others.
    """
    found = {} if config is None else read_config(config)
    names = {each.name for each in fields(TrainOptions)}
    spelled = {name: value for name, value in given.items() if name in names}
    found |= spelled
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in found.items()}
    options = replace(TrainOptions(), **values)
    if "tokens_per_step" not in values:
        options = replace(options, tokens_per_step=max(options.tokens_per_step, options.context))
    check_effects(options, spelled)
    return options


def read_config(config: Path | str) -> dict[str, Any]:
    """The options that a file gives, or its text, checked as on the command line. Raises: InvalidUsage, in one line."""
    import yaml
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="hdpcomm train", exit_on_error=False)
    add_options(parser)
    where = f"--config {config}" if isinstance(config, Path) else "the options of the run"
    try:
        content = yaml.safe_load(read_text(config) if isinstance(config, Path) else config)
        if not isinstance(content, dict):
            raise TypeError("this file holds no options; give a line 'name: value' for each")
        several = {each.name for each in fields(TrainOptions) if isinstance(each.default, tuple)}
        given = {str(n): [v] if n in several and isinstance(v, str) else v for n, v in content.items()}
        found: dict[str, Any] = vars(parser.parse_object(given))
    except RecursionError:
        raise InvalidUsage(f"{where}: this YAML is nested too deeply; give one option a line") from None
    except OSError as error:
        raise InvalidUsage(f"{where}: {error.strerror}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise InvalidUsage(f"{where}: no YAML ({_one_line(error)[:_LONGEST]})") from None
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise InvalidUsage(f"{where}: {_plain_message(_one_line(error), parser)}") from None
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _plain_message(message: str, parser: Any) -> str:
    message = re.sub(r'Parser key "([^"]+)":?', r"\1:", message)
    if wrong := re.search(r"Option '([^']+)' is not accepted", message):
        near = difflib.get_close_matches(wrong[1], [action.dest for action in parser._actions], n=1)
        message += f"; did you mean {near[0]}?" if near else "; hdpcomm train --help lists what there is"
    return message.strip()[:_LONGEST]
