"""Runs whose ranks are pipelines: the losses of a run without, checkpoints of the whole model, and refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.data import open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, RouterLosses
from hdpcomm.parallel import split_model
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.run import RunConfig, Saving, Watching, dry_run, train
from hdpcomm.run.model import folder_model
from hdpcomm.run.pipelines import device_recompute, recompute_by_device, stage_recompute
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import CONFIG, COST, SEED, tokens_of, trainer_of

MODEL = LlamaConfig(layers=4, hidden=16, heads=2, kv_heads=1, ffn=24)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return str(folder)


def run_rank(data, out=None, resume=None, held_out=False, watching=None, context=300, export=None, **changed):
    """One rank of a run of four steps."""
    torch.set_num_threads(1)
    config = RunConfig(**{"model": MODEL, "steps": 4, "capacity": 300, "tokens_per_step": 700} | changed)
    saving = None if out is None else Saving(Path(out), every=2, resume=resume)
    corpus = open_corpus([data], context=context)
    with hdp.init() as comm:
        told = Watching()
        if watching is not None and comm.rank == 0:
            told = Watching(on_step=lambda *row: watching.append(row))
        return train(
            comm, corpus, config, saving=saving, held_out=corpus if held_out else None, watching=told, export=export
        )


def run_of(data, ranks, **options):
    """On each rank, a thread: the result of a run."""
    return run_threads(lambda: run_rank(data, **options), ranks)


def losses(results):
    return [step.loss for step in results[0].steps["balanced"]]


def check_exports(folder, wanted):
    """The same weights under the same names."""
    found, others = (load_file(each / "model.safetensors") for each in (folder, wanted))
    assert found.keys() == others.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-2, atol=1e-3)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain") / "model"


@pytest.fixture(scope="module")
def plain(data, plain_folder):
    return run_of(data, 1, held_out=True, export=plain_folder)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"pipeline": 2}),
        (4, {"pipeline": 4, "recompute": 3}),
        (4, {"pipeline": 2, "split_backward": True, "recompute": 1}),
        (2, {"pipeline": 2, "recompute": "full"}),
        (2, {"pipeline": 2, "chunks": 2, "recompute": 3}),
        (4, {"pipeline": 2, "chunks": 2, "slices": 16}),
        (4, {"pipeline": 2, "tensor": 2}),
        (4, {"tensor": 2, "recompute": 1}),
    ],
)
def test_a_run_has_the_losses_of_one_process(data, plain, plain_folder, tmp_path, ranks, options):
    steps = []
    results = run_of(data, ranks, held_out=True, watching=steps, export=tmp_path / "model", **options)
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    assert results[0].evaluations["balanced"][0].loss == pytest.approx(
        plain[0].evaluations["balanced"][0].loss, rel=1e-4
    )
    assert {result.parameters for result in results} == {plain[0].parameters}
    check_exports(tmp_path / "model", plain_folder)
    for _, metrics, costs in steps:
        stages, element = options.get("pipeline", 1) * options.get("chunks", 1), 4
        # Each token's activations cross each border once, and their gradients once; with two tensor ranks each sends a
        # half, which may have a row that fills it up.
        rows = costs["stage_bytes"] / (2 * MODEL.hidden * element)
        filled = (stages - 1) * metrics.micro_batches * 4 if options.get("tensor", 1) > 1 else 0
        assert 0 <= rows - (stages - 1) * metrics.tokens <= filled
        assert 0 <= costs["ring_bytes"] <= metrics.bytes_sent


def test_offload_in_stages(data):
    """How much goes to host memory depends on the measured rates; the losses do not."""
    model = LlamaConfig(layers=6, hidden=16, heads=2, kv_heads=1, ffn=24)
    options = {"model": model, "steps": 2, "context": 400}
    plain = run_of(data, 1, **options | {"capacity": 400})
    offloaded = run_of(data, 4, **options | {"capacity": 250, "pipeline": 2, "offload": 16 << 20})
    assert losses(offloaded) == pytest.approx(losses(plain), rel=1e-4)
    assert all(step.memory_bytes > 0 for step in offloaded[0].steps["balanced"])


def test_a_run_goes_on_with_any_number_of_stages(ranks, data, plain, tmp_path):
    """Checkpoints hold the whole model: pipelines save one that a run without takes over, and the other way round.

    In processes: torch's reader of checkpoints has global state.
    """

    def resumed(out, path, pipeline, tensor=1, zero=0):
        options = {"out": str(tmp_path / out), "resume": path, "pipeline": pipeline, "tensor": tensor, "zero": zero}
        results = ranks(2, run_rank_with, data, options)
        assert results[0].first_step == 2
        assert losses(results) == pytest.approx(losses(plain)[2:], rel=1e-4)

    ranks(2, run_rank_with, data, {"out": str(tmp_path / "pipes"), "pipeline": 2, "steps": 2})
    resumed("same", str(tmp_path / "pipes/step-2"), 2)
    resumed("plain", str(tmp_path / "pipes/step-2"), 1)
    ranks(2, run_rank_with, data, {"out": str(tmp_path / "whole"), "steps": 2})
    resumed("back", str(tmp_path / "whole/step-2"), 2)
    resumed("cut", str(tmp_path / "pipes/step-2"), 1, 2, zero=1)
    ranks(2, run_rank_with, data, {"out": str(tmp_path / "parts"), "tensor": 2, "zero": 1, "steps": 2})
    resumed("joined", str(tmp_path / "parts/step-2"), 2, zero=1)


def run_rank_with(data, options):
    return run_rank(data, **options)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_state_of_a_trainer_goes_both_ways(chunks):
    """In fp64, with AdamW: what either has after two steps, the other goes on with."""
    lengths = (50, 3, 19, 8)
    sequences = tokens_of(lengths, CONFIG)

    def steps(trainer, count):
        return [trainer.step(lengths, lambda i: sequences[i]).loss for _ in range(count)]

    def whole(comm):
        model = Llama(CONFIG, seed=SEED, dtype=torch.float64)
        planner = Planner(None, ClusterSpec(comm.size, 100 // comm.size), cost_model=COST)
        return Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), planner, comm)

    def pipelined(comm, seed=SEED):
        planner = Planner(None, ClusterSpec(comm.size // 2, 100, pipeline=2, chunks=chunks), cost_model=COST)
        trainer = trainer_of(comm, planner, CONFIG, torch.float64)
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
        if seed != SEED:
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.fill_(0.5)
        return trainer

    def rank():
        with hdp.init() as comm:
            first, second = whole(comm), pipelined(comm)
            found = [steps(first, 2), steps(second, 2)]
            states = copy.deepcopy([first.state_dict(), second.state_dict()])
            assert states[0]["model"].keys() == states[1]["model"].keys()
            assert states[0]["optimizer"]["state"].keys() == states[1]["optimizer"]["state"].keys()
            for name, tensor in states[0]["model"].items():
                torch.testing.assert_close(tensor, states[1]["model"][name], rtol=1e-7, atol=1e-9)
            to_pipeline, to_whole = pipelined(comm, seed=1), whole(comm)
            to_pipeline.load_state_dict(states[0])
            to_whole.load_state_dict(states[1])
            assert (to_pipeline.num_steps, to_whole.num_steps) == (2, 2)
            return [*found, steps(first, 2), steps(to_pipeline, 2), steps(to_whole, 2)]

    for before, also_before, wanted, there, back in run_threads(rank, 4):
        assert also_before == pytest.approx(before, rel=1e-9)
        assert there == pytest.approx(wanted, rel=1e-9)
        assert back == pytest.approx(wanted, rel=1e-9)


def test_recomputed_layers_are_those_of_the_model():
    for recompute, wanted in (("full", ["full"] * 2), ("none", ["none"] * 2), (3, [2, 1]), (0, [0, 0]), (4, [2, 2])):
        assert stage_recompute(RunConfig(model=MODEL, pipeline=2, recompute=recompute)) == wanted


def test_a_dry_run_plans_pipelines(data):
    def rank():
        with hdp.init() as comm:
            config = RunConfig(model=MODEL, capacity=300, pipeline=2, tensor=2)
            return dry_run(comm, open_corpus([data], context=300), config)

    for found in run_threads(rank, 4):
        first, last = found.devices
        assert (first.in_flight, last.in_flight) == (2, 1)  # micro-batches
        assert min(memory.states for memory in found.devices) > 0
        report = found.reports["balanced"][0]
        assert set(report.spans[:, 1].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "1"], "1 layers cannot be cut into 2 stages, of which each has one at least"),
        (["--layers-per-stage", "2,3"], "layers of the stages are [2, 3] for 2 stages of a model with 4 layers"),
        (["--layers-per-stage", "2,2", "--pipeline", "1"], "layers_per_stage was given and pipeline is 1"),
        (["--ranks", "3"], "3 ranks cannot be pipelines of 2 stages"),
        (["--recompute", "auto", "--memory", "1K"], "with all 2 layers recomputed, and 1.0 kB is the limit"),
        (["--compare", "ddp"], "with ddp yet"),
        (["--split-backward", "--recompute", "full"], "all layers are recomputed, whose gradients of weights cannot"),
        (["--offload", "64M"], "no device has more than 2 layers, of which the last two.*give at least 6 layers"),
        (["--chunks", "2", "--layers", "3"], "3 layers cannot be cut into 4 stages, of which each has one at least"),
        (["--tensor", "2"], "2 ranks cannot be pipelines of 2 stages with 2 tensor ranks each"),
        (["--context", "5000", "--capacity", "1000"], "1 rank with a capacity of 1,000 .*or --ranks to 2"),
    ],
)
def test_the_command_refuses_by_name(data, capfd, monkeypatch, options, message):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    common = ["--data", data, "--hidden", "16", "--ffn", "24", "--steps", "1", "--ranks", "2", "--pipeline", "2"]
    assert main(["train", *common, *options]) != 0
    assert message.split(".*")[0] in " ".join(capfd.readouterr().err.split())


UNEVEN = LlamaConfig(layers=5, hidden=16, heads=2, kv_heads=1, ffn=24)


def test_stages_of_different_numbers_of_layers(data, tmp_path):
    """The losses and the weights of one process, and a checkpoint goes on on another cut, and on another number of
    stages."""
    plain = run_of(data, 1, model=UNEVEN, export=tmp_path / "plain")
    cuts = [{"pipeline": 2}, {"pipeline": 2, "layers_per_stage": "1,4", "recompute": 2}, {"pipeline": 4}]
    cuts += [{"pipeline": 2, "chunks": 2}, {"pipeline": 2, "layers_per_stage": "4,1", "split_backward": True}]
    for number, options in enumerate(cuts):
        out = tmp_path / str(number)
        ranks = 2 * options["pipeline"] if number < 2 else options["pipeline"]
        model = tmp_path / f"{number} model"
        results = run_of(data, ranks, model=UNEVEN, out=str(out), export=model, **options)
        assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
        check_exports(model, tmp_path / "plain")
        checkpoint = str(tmp_path / str(max(0, number - 1)) / "step-2")  # of the cut before
        again = run_of(data, ranks, model=UNEVEN, out=str(tmp_path / f"{number} again"), resume=checkpoint, **options)
        assert losses(again) == pytest.approx(losses(plain)[2:], rel=1e-4)


def test_layers_of_stages():
    config = RunConfig(model=LlamaConfig(layers=61, hidden=16, heads=2, kv_heads=1, ffn=24), pipeline=8, recompute=20)
    assert sum(config.stage_layers) == 61
    assert set(config.stage_layers) <= {6, 7, 8}
    assert config.device_layers == list(config.stage_layers)
    assert config.stage_model.layers == 8
    assert sum(stage_recompute(config)) == 20
    chunked = replace(config, pipeline=2, chunks=2, layers_per_stage="20,10,11,20", recompute="full")
    assert chunked.device_layers == [31, 30]
    assert recompute_by_device(chunked) == [31, 30]


def test_recomputed_layers_of_interleaved_stages():
    config = RunConfig(model=MODEL, pipeline=2, chunks=2, recompute=3)
    assert stage_recompute(config) == [1, 1, 1, 0]
    assert device_recompute(config) == 2
    assert device_recompute(RunConfig(model=MODEL, pipeline=2, chunks=2, recompute="full")) == "full"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "3", "--hidden", "24"], "2 tensor ranks cannot share heads 3 evenly"),
        (["--ffn", "25"], "2 tensor ranks cannot share ffn 25 evenly"),
        (["--heads", "6", "--kv-heads", "3", "--hidden", "24"], "cannot share kv_heads 3 evenly"),
        (["--compare", "ddp"], "with ddp yet"),
        (["--chunks", "2"], "chunks is 2 and pipeline 1"),
        (["--split-backward"], "split_backward was given and pipeline is 1"),
        (["--ranks", "3"], "3 ranks cannot be pipelines of 1 stages with 2 tensor ranks each"),
    ],
)
def test_the_command_refuses_what_tensor_ranks_cannot_share(data, capfd, monkeypatch, options, message):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    common = ["--data", data, "--hidden", "16", "--ffn", "24", "--steps", "1", "--ranks", "2", "--tensor", "2"]
    assert main(["train", *common, *options]) != 0
    assert message in " ".join(capfd.readouterr().err.split())


def test_tensor_ranks_train_and_export_a_folder_model(data, tmp_path):
    """With as many losses, evaluations and weights as one process; offload as well."""
    transformers = pytest.importorskip("transformers", minversion="4.54")
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model = folder_model(tmp_path / "model")
    plain = run_of(data, 1, held_out=True, model=model, export=tmp_path / "plain")
    results = run_of(data, 2, held_out=True, model=model, tensor=2, offload=16 << 20, export=tmp_path / "out")
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    found, wanted = (r[0].evaluations["balanced"][0].loss for r in (results, plain))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert results[0].parameters == plain[0].parameters
    check_exports(tmp_path / "out", tmp_path / "plain")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "Qwen3ForCausalLM"


SIZES = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma3Text": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def folder_of(family, folder, **changes):
    """A new model of transformers."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder_model(folder)


def opened(folder):
    """Logits of an export, by transformers alone."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    made = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return made(torch.arange(40)[None]).logits


@pytest.mark.parametrize(
    ("family", "number", "options"),
    [
        ("Llama", 4, {"pipeline": 2, "tensor": 2, "zero": 1}),
        ("Qwen3", 2, {"pipeline": 2, "chunks": 2, "recompute": 3}),
        ("Gemma3Text", 4, {"pipeline": 2, "tensor": 2}),
        ("Mixtral", 2, {"pipeline": 2, "split_backward": True}),
        ("Mixtral", 4, {"pipeline": 2, "expert": 2}),
    ],
)
def test_a_folder_model_in_stages(ranks, data, tmp_path, family, number, options):
    """Losses, evaluations and weights of one process; it is saved, goes on, and is exported."""
    model = folder_of(family, tmp_path / "model")
    plain = run_of(data, 1, held_out=True, model=model, export=tmp_path / "plain")
    options |= {"held_out": True, "model": model}
    results = run_of(data, number, out=str(tmp_path / "run"), export=tmp_path / "out", **options)
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    found, wanted = (r[0].evaluations["balanced"][0].loss for r in (results, plain))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert {result.parameters for result in results} == {plain[0].parameters}
    check_exports(tmp_path / "out", tmp_path / "plain")
    torch.testing.assert_close(opened(tmp_path / "out"), opened(tmp_path / "plain"), rtol=1e-2, atol=1e-3)
    saved = {"model": model, "resume": str(tmp_path / "run/step-2")}
    alone = ranks(2, run_rank_with, data, saved | {"out": str(tmp_path / "alone")})
    again = ranks(number, run_rank_with, data, options | saved | {"out": str(tmp_path / "again")})
    for results in (again, alone):
        assert results[0].first_step == 2
        assert losses(results) == pytest.approx(losses(plain)[2:], rel=1e-4)


def test_memory_and_offload_of_a_folder_model_in_stages(data, tmp_path):
    model = folder_of("Gemma3Text", tmp_path / "model", num_hidden_layers=6, layer_types=None)
    plain = run_of(data, 1, model=model, steps=2)
    results = run_of(data, 2, model=model, steps=2, pipeline=2, recompute="auto", memory=3_000_000)
    assert isinstance(results[0].recompute, tuple)
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    offloaded = run_of(data, 2, model=model, steps=2, pipeline=2, offload=16 << 20)
    assert losses(offloaded) == pytest.approx(losses(plain), rel=1e-4)


def test_the_command_trains_a_folder_model_in_stages(data, tmp_path, monkeypatch, capfd):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = folder_of("Qwen3", tmp_path / "model")
    common = ["train", "--data", data, "--model", str(model.folder), "--context", "300", "--capacity", "300"]
    common += ["--tokens-per-step", "700"]
    staged = [*common, "--ranks", "2", "--pipeline", "2", "--steps", "4"]
    first, again = ["--out", str(tmp_path / "run"), "--save-every", "2"], ["--out", str(tmp_path / "again")]
    assert main([*common, "--ranks", "1", "--steps", "4", "--export", str(tmp_path / "plain")]) == 0
    assert main([*staged, *first, "--export", str(tmp_path / "out")]) == 0
    again += ["--resume", str(tmp_path / "run/checkpoints/step-2"), "--export", str(tmp_path / "2")]
    assert main([*staged, *again]) == 0
    wanted = opened(tmp_path / "plain")
    for name in ("out", "2"):
        torch.testing.assert_close(opened(tmp_path / name), wanted, rtol=1e-2, atol=1e-3)
    capfd.readouterr()
    assert main([*common, "--ranks", "5", "--pipeline", "5", "--steps", "1"]) != 0
    told = " ".join(capfd.readouterr().err.split())
    assert "4 layers cannot be cut into 5 stages, of which each has one at least; give 1 to 4 stages" in told


@pytest.mark.parametrize("given", [None, RouterLosses(balance=0.5, z=0.1)], ids=["configured", "given"])
def test_the_routers_loss_of_a_folder_model(given, data, tmp_path):
    """Stages on two devices, whose memory is measured first, train and evaluate as one process does."""
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = replace(folder_of("Mixtral", tmp_path / "model", **options), router_losses=given)
    plain = run_of(data, 1, held_out=True, model=model, steps=2)
    options = {"pipeline": 2, "chunks": 2, "recompute": "auto", "memory": 6_000_000}
    results = run_of(data, 2, held_out=True, model=model, steps=2, **options)
    assert losses(results) == pytest.approx(losses(plain), rel=1e-4)
    found, wanted = (r[0].evaluations["balanced"][0].loss for r in (results, plain))
    assert found == pytest.approx(wanted, rel=1e-4)


def test_configurations_that_cannot_be():
    with pytest.raises(InvalidUsage, match="pipeline is 0"):
        RunConfig(pipeline=0)
    with pytest.raises(InvalidUsage, match="3 layers cannot be cut into 4 stages"):
        RunConfig(model=LlamaConfig(layers=3), pipeline=4)
    with pytest.raises(InvalidUsage, match=r"layers of the stages are \[1, 1, 1\] for 2 stages"):
        RunConfig(model=LlamaConfig(layers=3), pipeline=2, layers_per_stage="1,1,1")
    with pytest.raises(InvalidUsage, match=r"slices is 4 and policies is \('static',\), of which only balanced has"):
        RunConfig(policies=("static",), slices=4)


def test_stages_with_other_groups_of_the_optimizer():
    """One has no group without decay; each group of the whole model has the names and options of its parameters."""

    def groups(module, only):
        named = [(name, p) for name, p in module.named_parameters()]
        norms = [p for name, p in named if "norm" in name]
        rest = [p for name, p in named if "norm" not in name]
        return [{"params": norms + rest}] if only else [{"params": norms, "weight_decay": 0.0}, {"params": rest}]

    def stages():
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm, pipeline=2)
            stage = split_model(Llama(CONFIG, seed=3), 2)[mesh.stage]
            optimizer = torch.optim.AdamW(groups(stage, mesh.stage == 0), lr=0.01, weight_decay=0.1)
            planner = Planner(None, ClusterSpec(1, 100, pipeline=2), cost_model=COST)
            trainer = Trainer(stage, optimizer, planner, mesh)
            for group in optimizer.param_groups:
                group["lr"] = 0.5 if group["weight_decay"] else 0.25
            trainer.step((8, 5), tokens_of((8, 5), CONFIG).__getitem__)
            return copy.deepcopy(trainer.state_dict())

    def whole(state):
        with hdp.init() as comm:
            model = Llama(CONFIG)
            optimizer = torch.optim.AdamW(groups(model, False), lr=0.01, weight_decay=0.1)
            trainer = Trainer(model, optimizer, Planner(None, ClusterSpec(1, 100), cost_model=COST), comm)
            trainer.load_state_dict(state)
            return [group["lr"] for group in optimizer.param_groups]

    states = run_threads(stages, 2)
    for state in states:
        names = {group["lr"]: group["params"] for group in state["optimizer"]["param_groups"]}
        assert len(names[0.5]) + len(names[0.25]) == len(state["optimizer"]["state"])
        assert all("blocks.0" not in name for name in names[0.25])
        assert "norm.weight" in names[0.25]
    assert run_threads(whole, 1, states[0])[0] == [0.5, 0.5]  # the first norm was in a group with decay
