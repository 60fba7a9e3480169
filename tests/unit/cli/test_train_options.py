"""Options of ``hdpcomm train``: command line over file over default, and one line for what is wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from hdpcomm.cli.main import build_parser
from hdpcomm.cli.train import job_of, parameter_type
from hdpcomm.cli.train_options import TrainOptions, changed_options, check_effects, dump_options, resolve_options
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.plan import Calibration, ClusterSpec, CostModel, MemoryModel, Planner
from hdpcomm.run import Schedule
from tests.harness.tokenizers import save_tokenizer

NAMES = (
    *("data", "out", "model", "steps", "save_every", "keep", "resume", "export", "compare", "dtype", "zero", "ranks"),
    *("policy", "recompute", "json", "trace", "dry_run", "schedule", "warmup", "eval_every", "eval_data"),
)


def read_options(arguments: list[str]) -> TrainOptions:
    """As the command reads them."""
    parsed = build_parser().parse_args(["train", *arguments])
    return resolve_options(vars(parsed), parsed.config)


def test_the_names_that_scripts_rely_on() -> None:
    assert set(NAMES) <= {each.name for each in fields(TrainOptions)}


def test_nothing_given_is_the_default() -> None:
    assert read_options([]) == TrainOptions()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("steps: 7\ncontext: 8k\ndata: [a, b]\nrecompute: 1\noffload: 64M\nlr: 3e-4\n")
    found = read_options(["--config", str(path), "--steps", "9", "--out", "run"])
    assert (found.steps, found.context, found.data, found.recompute) == (9, 8192, ("a", "b"), 1)
    assert (found.offload, found.lr, found.out) == (64 << 20, 3e-4, Path("run"))
    assert read_options(["--config", str(path), "--data", "c"]).data == ("c",)


@pytest.mark.parametrize(
    ("gpu", "arguments", "expected"),
    [
        (False, [], "fp32"),
        (True, [], "bf16"),
        (True, ["--transport", "shm"], "fp32"),
        (False, ["--transport", "cuda+nccl"], "bf16"),
        (True, ["--dtype", "fp32"], "fp32"),
        (False, ["--dtype", "bf16"], "bf16"),
        (True, ["--compare", "static", "ddp"], "fp32"),
        (True, ["--optimizer", "Muon"], "fp32"),
        (True, ["--optimizer", "SGD", "--zero", "3"], "bf16"),
    ],
)
def test_the_type_follows_the_devices(
    gpu: bool, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    options = read_options(arguments)
    assert parameter_type(options) == expected
    assert job_of(options, 8).config.dtype == expected


def test_the_environments_transport_says_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("HDPCOMM_TRANSPORT", "tcp")
    assert parameter_type(TrainOptions()) == "fp32"


def test_what_is_saved_gives_the_same_options_again(tmp_path: Path) -> None:
    arguments = [
        "--data",
        "ü",
        "model: ",
        "m",
        "--eval-fraction",
        "0.1",
        "--recompute",
        "full",
        "--seed",
        "5",
        "--warmup",
        "0",
    ]
    options = read_options([*arguments, "--out", "run", "--resume", "auto", "--dry-run"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_options(options))
    assert read_options(["--config", str(path)]) == read_options(arguments)


BAD = {
    "--stpes 3": "unrecognized arguments: --stpes 3; did you mean --steps?",
    "--steps x": "argument --steps: 'x' is not a whole number (like 8192 or 8k)",
    "--steps 1e400": "is not a whole number",
    "--steps 99999999999999999999": "is above 2^53",
    "--seed -1": "seed is -1; it must be from 0 to 2^63 - 1",
    "--lr nan": "nan is not a finite number above 0",
    "--lr 0": "0 is not a finite number above 0",
    "--min-lr 2": "2 is not a number from 0 to 1",
    "--policy fast": "invalid choice: 'fast' (choose from",
    "--recompute half": "'half' is neither none, full, auto nor a number of layers",
    "--offload 1Q": "argument --offload",
}

BAD_FILES = {
    "stpes: 3": "Option 'stpes' is not accepted; did you mean steps?",
    "steps: many": "steps: 'many' is not a whole number",
    "steps: [1]": "steps: ",
    "policy: fast": "policy: 'fast' not among choices",
    "model: {layers: 2}": "model: ",
    "- a\n- b": "this file holds no options",
    "": "this file holds no options",
    "steps: 3\n  x: 5": "--config",
    "[" * 5000: "--config",
    "data: !!python/object:os.system []": "--config",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_options(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_options(given.split())
    assert caught.value.code == 6
    assert BAD[given] in capsys.readouterr().err


@pytest.mark.parametrize("content", BAD_FILES, ids=lambda text: text[:20])
def test_bad_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(InvalidUsage) as caught:
        read_options(["--config", str(path)])
    assert BAD_FILES[content] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_no_file(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "a folder, pipe, socket or device")):
        with pytest.raises(InvalidUsage, match=f"--config {path}: {told}"):
            read_options(["--config", str(path)])


def test_steps_hold_the_longest_sequence_by_default() -> None:
    assert read_options(["--context", "128K"]).tokens_per_step == 128 << 10
    assert read_options(["--context", "8K"]).tokens_per_step == TrainOptions().tokens_per_step
    assert read_options(["--context", "128K", "--tokens-per-step", "1K"]).tokens_per_step == 1024


def test_options_without_effect_are_not_saved() -> None:
    saved = dump_options(TrainOptions(model=Path("tiny"), schedule="cosine"))
    assert "model: tiny" in saved
    for name in ("layers", "hidden", "top_k", "decay", "prefetch"):
        assert f"\n{name}:" not in saved


def test_what_is_told_of_a_run() -> None:
    assert changed_options(TrainOptions(steps=3, data=("a b",), ranks=2)) == "{data: [a b], ranks: 2, steps: 3}"


def test_one_path_needs_no_list(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: some/path\neval_data: [b]\ncompare: static\n")
    found = read_options(["--config", str(path)])
    assert (found.data, found.eval_data, found.compare) == (("some/path",), ("b",), ("static",))


HF_MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
}
HF_MODEL |= {"num_attention_heads": 2, "architectures": ["LlamaForCausalLM"]}

CHANGED = TrainOptions(
    data=("DOCS=1",), mixture_at=("3=2",), text_field="body", messages_field="chat", tokenizer="bytes",
    data_cache=Path("cache"), context=2048, tokens_per_step=4096, ramp="3000:5", seed=1, ranks=2, transport="shm",
    capacity=8192, pipeline=2, chunks=2, layers_per_stage="1,2,3,2",
    split_backward=True, tensor=2, expert=2, expert_replicas=1, policy="naive", compare=("static",),
    learn_costs=True, slices=4, queue=True, calibration=Path("COSTS"), offload=1 << 20,
    model=Path("MODEL"),
    layers=8, hidden=64, heads=4, kv_heads=2, ffn=64, experts=4, top_k=1, router_aux_loss=0.5, router_z_loss=0.5,
    optimizer="Adam", optimizer_options=("betas=0.8,0.9",), init_from=Path("earlier"), keep_optimizer=True,
    lora="r=2,alpha=4,targets=q_proj+v_proj",
    steps=7, lr=1e-3, schedule="wsd", warmup=3, decay=0.5, min_lr=0.5, weight_decay=0.5, dtype="bf16", zero=1,
    optimizer_offload=True, recompute="full", compile=True, fp8="rowwise", fp8_exclude=("out",),
    router_bias_rate=0.001, mtp_weight=0.3, memory=1 << 30,
    max_grad_norm=2.0, check_replicas=7, note_spikes=True, ema=0.99,
    skip_bad_steps=2, eval_every=2, eval_data=("DOCS",),
    eval_fraction=0.5, out=Path("run"), save_every=2, keep=5, keep_every=4, keep_best=True,
    time_limit="2h", resume="auto", elastic=True,
    export=Path("exported"),
    trace=Path("t.json"), trackers="tensorboard", json=Path("j.json"), metrics_port="9400", dry_run=True,
)  # fmt: skip
"""A value of each option that is not its default; capitals are files that the test makes."""
OTHERS: dict[str, tuple[object, ...]] = {
    "tokenizer": ("TOKENIZER",), "save_every": ("30min",),
    "policy": ("static",), "compare": (("ddp",), ("naive", "static")),
    "schedule": ("constant", "linear"), "min_lr": (0.0,), "decay": (1.0,), "recompute": (1, "auto"),
    "transport": ("tcp",), "trackers": ("wandb",), "resume": ("run/checkpoints/step-1",), "experts": (2,),
    "eval_fraction": (0.0,), "eval_every": (1,), "check_replicas": (0,), "weight_decay": (0.0,),
}  # fmt: skip
"""More values, where an option has several that differ in what they go together with."""


@lru_cache
def plans(policy: str, offload: bool, slow_rank: bool) -> list[object]:
    """Who runs what in a few steps of a policy."""
    speeds = (1.0,) * 20 + (0.4 if slow_rank else 1.0,) * 4
    cluster = ClusterSpec(ranks=24, capacity=100, ranks_per_node=4, offload=offload, speeds=speeds)
    memory = MemoryModel(100, offloadable=0.9, copy_s=1e-6, host_tokens=1000) if offload else None
    costs = CostModel(1e-9, 1e-6, 1e-4, piece=1e-7, ring_step=1e-5, kv_intra=1e-6, kv_inter=8e-6, latency_inter=1e-5)
    planner = Planner(None, cluster, policy, costs, context=700, memory=memory)
    draws = np.random.default_rng(1)
    steps = [draws.integers(1, longest + 1, 60).tolist() for longest in (150, 700, 700)]
    try:
        return [[(m.ranks, m.sequences, m.offload_ratio) for m in planner.plan(step).micro_batches] for step in steps]
    except InvalidUsage as error:
        return [str(error)]


def effects(options: TrainOptions) -> list[object]:
    """What a run does by these options, as far as its configuration tells: equal lists are equal runs."""
    check_effects(options)
    job = job_of(options, ranks=4)
    config, steps = job.config, range(job.config.steps)
    rates = [config.schedule.factor(step, config.steps) for step in steps]
    model = config.model
    if isinstance(model, LlamaConfig) and not model.experts:
        model = replace(model, top_k=1, router_aux_loss=0.0, router_z_loss=0.0)
    held_out = job.held_out or options.eval_fraction
    policies = [policy for policy in config.policies if policy != "ddp"]
    planned, learned = (
        [plans(policy, config.offload > 0, slow) for policy in policies] for slow in (False, config.learn_costs)
    )
    done: list[object] = [
        replace(config, model=model, schedule=Schedule(), learn_costs=False, offload=0, eval_every=0),
        planned,
        learned,
        rates,
        config.eval_every if held_out else None,
    ]
    for data in (job.data, job.held_out):
        if data is not None and not data.paths:
            data = replace(data, text_field="", messages_field="", cache=data.cache if data.tokenizer else None)
        done.append(data)
    if options.out is not None:
        done.append((options.save_every, options.keep, options.resume, options.trackers, job.shrinks))
        done.append((options.keep_every, options.keep_best, options.time_limit))
    if not options.dry_run:
        done.append((options.json, options.trace, options.export, options.metrics_port))
    return [*done, options.out, options.transport, options.ranks, options.eval_fraction, options.dry_run]


def test_every_pair_of_options_has_an_effect_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all pairs: what is accepted differs from what either option does alone."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("DOCS").mkdir()
    Path("DOCS/a.txt").write_text("a text\n" * 100)
    Path("MODEL").mkdir()
    Path("MODEL/config.json").write_text(json.dumps(HF_MODEL))
    save_tokenizer(Path("TOKENIZER"))
    cluster, memory = ClusterSpec(ranks=4, capacity=4096), MemoryModel(4096)
    Calibration(CostModel(1e-12, 1e-9, 1e-6), cluster, memory).save(Path("COSTS"))
    values = {each.name: (getattr(CHANGED, each.name), *OTHERS.get(each.name, ())) for each in fields(TrainOptions)}
    values["tokenizer"] = OTHERS["tokenizer"]  # "bytes" is what these runs take anyway
    for name, changed in values.items():
        assert getattr(TrainOptions(), name) not in changed, f"give another value of {name}"

    def found(given: tuple[tuple[str, object], ...]) -> list[object] | None:
        with contextlib.suppress(InvalidUsage):
            return effects(replace(TrainOptions(), **dict(given)))
        return None

    every = [(name, value) for name, changed in values.items() for value in changed]
    nothing, accepted, silent = found(()), 0, []
    alone = {each: found((each,)) for each in every}
    silent += [each for each, does in alone.items() if does == nothing]
    for first, second in itertools.combinations(every, 2):
        both = None if first[0] == second[0] else found((first, second))
        accepted += both is not None
        if both is not None and any(both == (alone[each] or nothing) for each in (first, second)):
            silent.append((first, second))
    assert not silent
    assert accepted > 1000
