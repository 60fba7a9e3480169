# ruff: noqa: RUF009  (every default is a field)
"""The options of ``hdpcomm train``: one dataclass gives the command line, the YAML file and the saved configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hdpcomm.cli.output import TRANSPORTS, BadOption, count, num_bytes, positive, seed, share
from hdpcomm.errors import InvalidUsage

__all__ = ["DESCRIPTION", "TrainOptions", "add_options", "changed_options", "check_effects", "dump_options"]

DESCRIPTION = """Trains a model with Hybrid Data Parallelism: every step plans how many ranks each sequence takes, from
its length. Starts the ranks on this machine; under torchrun, srun or mpirun it joins the given world instead. With
--out it saves as it goes, also on Ctrl-C and SIGTERM, and --resume goes on from there. --config takes a YAML file with
any of these options (as RUN/config.yaml); what stands on the command line wins."""


def recompute(text: str) -> str | int:
    """argparse type: ``none``, ``full``, ``auto`` or a number of layers."""
    if str(text) in ("none", "full", "auto"):
        return str(text)
    if not str(text).isdecimal():
        raise BadOption(f"{text!r} is neither none, full, auto nor a number of layers")
    return int(text)


def whole(text: str) -> int:
    """argparse type: a whole number of at least 0."""
    return 0 if str(text) == "0" else count(text)


def _option(group: str, default: Any, help: str, type: Callable[[str], Any] | None = None, **more: Any) -> Any:
    about = {"group": group, "help": help, **more}
    return field(default=default, metadata=about if type is None else about | {"type": type})


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Everything that ``hdpcomm train`` can be told."""

    data: tuple[str, ...] = _option(
        "data", (), "text, JSONL, Parquet, folders of these, Hugging Face datasets, folders of hdpcomm data build; "
        "without it, Python's standard library", str, nargs="+", metavar="PATH",
    )  # fmt: skip
    text_field: str = _option("data", "text", "field or column that holds the text", str, metavar="NAME")
    messages_field: str = _option(
        "data", "messages", "field or column with the messages of a chat; only the assistant's tokens are trained", str,
        metavar="NAME",
    )  # fmt: skip
    tokenizer: str | None = _option(
        "data", None, "folder of the tokenizer, or 'bytes' (that of --model, if it has one, else bytes)", str,
        metavar="FOLDER",
    )  # fmt: skip
    data_cache: Path | None = _option(
        "data", None, "folder for tokens that are made once (hdpcomm/data in the user's cache)", Path, metavar="FOLDER"
    )
    loader: str = _option(
        "data", "index", "index: all tokens are made before the first step, once, and kept in the cache; threads, ray: "
        "they are made while the run trains, by threads of the ranks or by Ray actors", str,
        choices=("index", "threads", "ray"),
    )  # fmt: skip
    loaders: int | None = _option(
        "data", None, "threads of each rank (1), or Ray actors (one a node), that make tokens", count, metavar="N"
    )
    prefetch: int = _option(
        "data", 2, "steps that the loader makes ready ahead, with --loader threads or ray", count, metavar="STEPS"
    )
    context: int = _option(
        "data", 4096, "longest sequence; longer documents are cut into pieces", count, metavar="TOKENS"
    )
    tokens_per_step: int = _option("data", 65536, "most tokens of a step over all ranks", count, metavar="TOKENS")
    seed: int = _option("data", 0, "seed of the shuffle and of the weights", seed)
    ranks: int | None = _option(
        "ranks", None, "ranks to start here (one a core, 2 to 8; under torchrun: its world)", count, metavar="N"
    )  # fmt: skip
    transport: str = _option(
        "ranks", "auto", "how the ranks exchange tensors; see hdpcomm.init", str, choices=TRANSPORTS
    )
    capacity: int | None = _option(
        "ranks", None, "tokens that a rank holds at once (so many that the longest sequences need all "
        "ranks)", count, metavar="TOKENS",
    )  # fmt: skip
    pipeline: int = _option(
        "ranks", 1, "stages of a pipeline: so many ranks hold the layers of the model together, and work as one; "
        "divides --ranks and --layers", count, metavar="N",
    )  # fmt: skip
    chunks: int = _option(
        "ranks", 1, "stages on each device of a pipeline (interleaved); --pipeline x --chunks divides --layers", count,
        metavar="N",
    )  # fmt: skip
    split_backward: bool = _option(
        "ranks", False, "stages of a pipeline compute the gradients of weights where they would wait for other stages "
        "(zero-bubble)", action="store_true",
    )  # fmt: skip
    tensor: int = _option(
        "ranks", 1, "ranks that share each layer and work on the same tokens; divides --ranks, --heads, --ffn and the "
        "vocabulary", count, metavar="N",
    )  # fmt: skip
    expert: int = _option(
        "ranks", 1, "neighbouring ranks that share the experts of each layer; divides --experts, and --ranks / "
        "pipeline / tensor", count, metavar="N",
    )  # fmt: skip
    policy: str = _option(
        "ranks", "balanced", "how ranks get their sequences", str, choices=("balanced", "naive", "static")
    )
    compare: tuple[str, ...] = _option(
        "ranks", (), "train more models on the same batches, by these policies or by torch's DDP over gloo with packs "
        "of whole sequences, and show them side by side", str, nargs="+",
        choices=("static", "naive", "balanced", "ddp"),
    )  # fmt: skip
    ring_peers: int | None = _option(
        "ranks", None, "most ranks that a rank exchanges ring messages with in a step, 2 or more", count, metavar="N",
    )  # fmt: skip
    learn_costs: bool = _option(
        "ranks", False, "plans follow what the steps before took, and slow ranks get less; no two runs then have the "
        "same bits", action="store_true",
    )  # fmt: skip
    queue: bool = _option(
        "ranks", False, "short sequences wait in a queue, from which ranks take when they are free: slow or unlucky "
        "ones do less; no two runs then have the same bits", action="store_true",
    )  # fmt: skip
    calibration: Path | None = _option(
        "ranks", None, "what hdpcomm calibrate measured of this model on such ranks, in place of a short profile at "
        "the start", Path, metavar="FILE",
    )  # fmt: skip
    offload: int = _option(
        "ranks", 0, "pinned host memory of each rank for activations of long sequences, like 512M or 64G; 0: none",
        num_bytes, metavar="SIZE",
    )  # fmt: skip
    model: Path | None = _option(
        "model", None, "Hugging Face folder: its weights, or new ones if it has only a config.json; without it, a "
        "small Llama of the sizes below", Path, metavar="FOLDER",
    )  # fmt: skip
    layers: int = _option("model", 4, "transformer blocks", count)
    hidden: int = _option("model", 32, "width of the residual stream", count)
    heads: int = _option("model", 2, "query heads", count)
    kv_heads: int = _option("model", 1, "key and value heads", count)
    ffn: int = _option("model", 96, "width of the feed-forward block, or of each expert", count)
    experts: int = _option("model", 0, "experts of each block; 0: one feed-forward block for all tokens", whole)
    top_k: int = _option("model", 2, "with --experts: experts that a token goes through", count)
    router_aux_loss: float = _option(
        "model", 0.01, "with --experts: factor of the loss that tells routers to use all experts alike", share
    )
    router_z_loss: float = _option("model", 0.0, "with --experts: factor of the loss on large router logits", share)
    steps: int = _option("training", 10, "optimizer steps", count)
    lr: float = _option("training", 1e-2, "highest learning rate", positive)
    schedule: str = _option(
        "training", "cosine", "of the learning rate after its rise", str,
        choices=("constant", "cosine", "linear", "wsd"),
    )  # fmt: skip
    warmup: int | None = _option("training", None, "steps over which the rate rises (a tenth)", whole, metavar="STEPS")
    decay: float = _option("training", 0.2, "wsd: the last share of the steps, in which the rate falls", share)
    min_lr: float = _option("training", 0.1, "share of the highest rate at the end", share)
    weight_decay: float = _option("training", 0.1, "of matrices, by AdamW", share)
    dtype: str = _option(
        "training", "fp32", "of the parameters; bf16 keeps fp32 master weights", str, choices=("fp32", "bf16")
    )
    zero: int = _option("training", 0, "1: each rank keeps a part of the optimizer's state", int, choices=(0, 1))
    recompute: str | int = _option(
        "training", "none", "layers that are computed again in the backward pass instead of kept; auto: as few as "
        "--memory allows", recompute,
        metavar="none|full|auto|N",
    )  # fmt: skip
    memory: int = _option(
        "training", 0, "memory that a rank's step may take, weights and optimizer included, like 4G; with --recompute "
        "auto", num_bytes, metavar="SIZE",
    )  # fmt: skip
    max_grad_norm: float = _option("training", 1.0, "gradients are clipped to this global norm", positive)
    check_replicas: int = _option(
        "training", 100, "steps between two comparisons of all ranks' weights and optimizer settings; 0: never", whole,
        metavar="STEPS",
    )  # fmt: skip
    eval_every: int | None = _option(
        "evaluation", None, "steps between two evaluations (only at the end)", count, metavar="N"
    )
    eval_data: tuple[str, ...] = _option("evaluation", (), "held-out text, as --data", str, nargs="+", metavar="PATH")
    eval_fraction: float | None = _option(
        "evaluation", None, "share of the documents of --data that is held out instead", share, metavar="SHARE"
    )
    out: Path | None = _option(
        "saving", None, "folder of the run: checkpoints/step-N, metrics.jsonl, config.yaml; made if need be", Path,
        metavar="RUN",
    )  # fmt: skip
    save_every: int | None = _option("saving", None, "steps between checkpoints (only at the end)", count, metavar="N")
    keep: int = _option("saving", 3, "checkpoints that stay, the newest", count, metavar="N")
    resume: str | None = _option(
        "saving", None, "go on from the newest checkpoint of --out, if there is any, or from the one at PATH", str,
        metavar="auto|PATH",
    )  # fmt: skip
    elastic: bool = _option(
        "saving", False, "when a rank dies, the others go on from the last checkpoint; under torchrun --max-restarts, "
        "the ranks that it starts anew do", action="store_true",
    )  # fmt: skip
    export: Path | None = _option(
        "saving", None, "write the model for transformers' from_pretrained at the end", Path, metavar="FOLDER"
    )
    trace: Path | None = _option(
        "output", None, "write a trace of the steps of this call for Perfetto: ranks as processes, arrows from send to "
        "receive", Path, metavar="FILE",
    )  # fmt: skip
    trackers: str = _option(
        "output", "auto", "with --out: auto writes TensorBoard and W&B (offline) files if these are installed", str,
        choices=("auto", "none", "tensorboard", "wandb"),
    )  # fmt: skip
    json: Path | None = _option("output", None, "write the results as JSON", Path, metavar="FILE")
    log: Path | None = _option("output", None, "write a JSON line after each step", Path, metavar="FILE")
    dry_run: bool = _option(
        "output",
        False,
        "plan and simulate a few steps of the run that the other options describe, print the memory of each rank, and "
        "train nothing",
        action="store_true",
    )


_NEEDS: tuple[tuple[str, Callable[[TrainOptions], Any], str], ...] = (
    ("text_field messages_field", lambda o: o.data or o.eval_data, "without --data; name the files, or leave it out"),
    ("data_cache", lambda o: o.data or o.eval_data or o.tokenizer, "without --data; name the files, or leave it out"),
    ("loaders prefetch", lambda o: o.loader != "index", "without a loader; give --loader threads or ray, too"),
    (
        "layers hidden heads kv_heads ffn experts top_k router_aux_loss router_z_loss",
        lambda o: o.model is None,
        "with --model, whose config.json says what the model is; leave out either",
    ),
    ("top_k router_aux_loss router_z_loss", lambda o: o.experts, "without experts; give --experts, or leave it out"),
    ("decay", lambda o: o.schedule == "wsd", "without --schedule wsd, which alone has it; give that, or leave it out"),
    ("min_lr", lambda o: o.schedule != "constant", "with --schedule constant, which does not fall; leave out either"),
    (
        "eval_every",
        lambda o: o.eval_data or o.eval_fraction is not None,
        "without held-out text; give --eval-data or --eval-fraction",
    ),
    ("save_every resume elastic keep", lambda o: o.out, "without --out; name the folder of the run"),
    ("trackers", lambda o: o.out or o.trackers == "none", "without --out; name the folder of the run"),
    ("json log trace export", lambda o: not o.dry_run, "with --dry-run, which writes no files; leave out either"),
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


_ONE_CALL = ("out", "resume", "export", "json", "log", "trace", "dry_run")
"""Options of one call, which RUN/config.yaml leaves out."""


def add_options(parser: Any) -> None:
    """Adds every option to a parser of argparse or jsonargparse. Those that are not given stay out of the namespace."""
    groups: dict[str, Any] = {}
    for each in fields(TrainOptions):
        about = dict(each.metadata)
        group = about.pop("group")
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        if each.default not in (None, (), False):
            about["help"] = f"{about['help']} (default: {each.default})"
        groups[group].add_argument("--" + each.name.replace("_", "-"), default=argparse.SUPPRESS, **about)


def dump_options(options: TrainOptions) -> str:
    """YAML that ``--config`` takes: every option of the run as resolved."""
    import yaml

    content = {
        name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
        if name not in _ONE_CALL and value not in (None, ())
    }
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def changed_options(options: TrainOptions) -> str:
    """One line with the options that are not as they are by default."""
    import yaml

    plain = yaml.safe_load(dump_options(options))
    defaults = yaml.safe_load(dump_options(TrainOptions()))
    changed = {name: value for name, value in plain.items() if defaults.get(name) != value}
    return str(
        yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    ).strip()
