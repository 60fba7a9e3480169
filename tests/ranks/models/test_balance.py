"""Routers with biases that each step moves: the rule, equal bits on all meshes, even loads in the end."""

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt, balance_routers, compile_layers, set_recompute
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST

transformers = pytest.importorskip("transformers", minversion="5.23")

from tests.harness.families import model_of  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, padded  # noqa: E402

LENGTHS = (37, 1, 50, 12, 5, 3)
VOCABULARY, STEPS, RATE = 96, 4, 0.003
ONE_GROUP = {"n_group": 1, "topk_group": 1}


def plain():
    return model_of("deepseek-v3", vocab_size=VOCABULARY, **ONE_GROUP)


@functools.cache
def sequences(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def routers(model):
    return [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]


def biases(state):
    return {name.partition("layers.")[2]: x for name, x in state.items() if name.endswith("e_score_correction_bias")}


@functools.cache
def wanted():
    """Biases after the steps, by plain code in one process that counts each sequence's choices."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = [torch.zeros(4, dtype=torch.int64) for _ in routers(model)]
    for router, count in zip(routers(model), counts, strict=True):

        def add(_, __, out, count=count):
            count += torch.bincount(out[2].flatten(), minlength=4)

        router.register_forward_hook(add)
    for step in range(STEPS):
        for count in counts:
            count.zero_()
        total = torch.zeros(())
        for tokens in sequences(step):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            total = total + nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        optimizer.zero_grad()
        (total / sum(length - 1 for length in LENGTHS)).backward()
        optimizer.step()
        for router, count in zip(routers(model), counts, strict=True):
            mean = count.double().mean()
            router.e_score_correction_bias.add_((count < mean).float() - (count > mean).float(), alpha=RATE)
    return biases(model.state_dict())


def run(
    ranks=1, *, pipeline=1, expert=1, tensor=1, recompute="none", rate=RATE, late=False, steps=STEPS, zero=0, **planned
):
    """Biases on each rank after the steps; ``late``: balanced after the model was cut."""
    whole = [plain() for _ in range(ranks)]

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, pipeline=pipeline, expert=expert, tensor=tensor)
            hdp_ranks = ranks // pipeline // tensor
            cluster = ClusterSpec(hdp_ranks, 80 // hdp_ranks, pipeline=pipeline, tensor=tensor, expert=expert)
            model = adapt(whole[comm.rank], check=False)
            if not late:
                assert balance_routers(model, rate) == 1
            model = split_model(model, pipeline)[mesh.stage] if pipeline > 1 else model
            tensor_parallel(expert_parallel(model, mesh, check=False), mesh, check=False)
            if late:
                balance_routers(model, rate)
            set_recompute(getattr(model, "model", model) if pipeline > 1 else model, recompute)
            planner = Planner(None, cluster, cost_model=COST, **planned)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            models = [model] if pipeline > 1 else model
            trainer = Trainer(models, optimizer, planner, mesh, max_grad_norm=None, zero=zero)
            for step in range(steps):
                trainer.evaluate(LENGTHS, lambda i: sequences(9)[i])  # not counted
                metrics = trainer.step(LENGTHS, lambda i, step=step: sequences(step)[i])
            return biases(trainer.state_dict()["model"]), metrics

    return run_threads(rank, ranks)


def check(*args, **options):
    for found, metrics in run(*args, **options):
        assert found.keys() == wanted().keys()
        assert all(torch.equal(found[name], wanted()[name]) for name in found)
        assert metrics.expert_tokens_mean == sum(LENGTHS) * 2 / 4
        assert metrics.expert_tokens_dropped == 0


def test_the_oracle_moves_its_biases():
    (bias,) = wanted().values()
    assert bias.abs().max() >= 2 * RATE


@pytest.mark.parametrize(
    "mesh",
    [
        {"ranks": 1}, {"ranks": 3}, {"ranks": 2, "expert": 2}, {"ranks": 2, "tensor": 2}, {"ranks": 2, "pipeline": 2},
        {"ranks": 4, "tensor": 2, "expert": 2}, {"ranks": 4, "pipeline": 2, "tensor": 2},
    ],
    ids=str,
)  # fmt: skip
def test_biases_are_those_of_one_process_on_every_mesh(mesh):
    check(**mesh)


@pytest.mark.parametrize("late", [{"ranks": 2, "expert": 2}, {"ranks": 2}], ids=str)
def test_a_model_that_is_cut_already(late):
    check(**late, late=True)


@pytest.mark.parametrize(
    "option",
    [{"zero": 1}, {"zero": 3}, {"recompute": "full"}, {"recompute": 1}, {"queue": True}, {"slices": 4}],
    ids=str,
)
def test_biases_with_what_a_step_can(option):
    check(2, **option)


def test_without_a_rate_biases_stay():
    ((found, metrics),) = run(rate=0, steps=1)
    assert all(not bias.any() for bias in found.values())
    assert metrics.expert_tokens_mean == sum(LENGTHS) * 2 / 4


def trains(folder, accumulate, zero):
    """Biases of the model that transformers' Trainer saves after four steps."""
    from hdpcomm.integrations.huggingface import Trainer

    try:
        torch.set_num_threads(1)
        model = plain()
        balance_routers(model, RATE)
        data = {"train_dataset": documents(), "data_collator": padded}
        args = arguments(Path(folder), 1, accumulate, learning_rate=1e-2)
        trainer = Trainer(model=model, args=args, cost_model=COST, zero=zero, **data)
        trainer.train()
        trainer.save_model(folder)
    finally:
        leave()


def saved(folder):
    return biases(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_the_trainer_of_transformers(ranks, tmp_path):
    folders = [str(tmp_path / name) for name in ("one", "two")]
    ranks(1, trains, folders[0], 4, 0)
    ranks(2, trains, folders[1], 2, 3)
    (one,), (two,) = (saved(folder).values() for folder in folders)
    assert torch.equal(one, two)
    moves = one / RATE
    assert moves.abs().max() >= 2
    torch.testing.assert_close(moves, moves.round())


def test_the_command(tmp_path):
    model, text = plain().config, tmp_path / "text.txt"
    model.vocab_size = 256
    model.save_pretrained(tmp_path / "model")
    text.write_text("the cat sat on the mat and the dog lay down\n" * 200)
    command = ["train", "--model", str(tmp_path / "model"), "--data", str(text), "--tokenizer", "bytes"]
    command += ["--context", "64", "--tokens-per-step", "512", "--steps", "3", "--router-bias-rate", str(RATE)]
    found = []
    for mesh in (["--ranks", "1"], ["--ranks", "2", "--pipeline", "2"], ["--zero", "3", "--ranks", "2"]):
        assert main([*command, *mesh, "--export", str(tmp_path / "-".join(mesh))]) == 0
        found += saved(tmp_path / "-".join(mesh)).values()
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].abs().max() >= 2 * RATE
    assert main(["train", "--router-bias-rate", "0.1", "--steps", "1"]) == 6


def test_loads_become_even():
    """Some tokens come often and all want the same experts: after 300 steps loads, of the last 30, are within 10% of
    even."""
    torch.manual_seed(0)
    model = model_of("deepseek-v3", vocab_size=VOCABULARY, n_routed_experts=8, n_group=1, topk_group=1)
    shares = 1 / (torch.arange(VOCABULARY) + 5.0)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.multinomial(shares, 512, replacement=True, generator=generator) for _ in range(300)]

    def spread(rate, steps):
        with hdp.init() as comm:
            adapted = adapt(model, check=False)
            balance_routers(adapted, rate)
            planner = Planner(None, ClusterSpec(1, 512), cost_model=COST)
            trainer = Trainer(adapted, torch.optim.AdamW(adapted.parameters(), lr=1e-4), planner, comm)
            (load,) = trainer.runner.passes.loads
            loads = []
            for tokens in batches[:steps]:
                trainer.step([len(tokens)], lambda _, tokens=tokens: tokens)
                loads.append(load.routed.clone())
            last = torch.stack(loads[-30:]).double().sum(0)
            return float((last / last.mean() - 1).abs().max())

    before = {name: x.clone() for name, x in model.state_dict().items()}
    alone = spread(0, 30)
    model.load_state_dict(before)
    assert spread(0.001, 300) < 0.1 < alone


def test_what_is_refused():
    with pytest.raises(InvalidUsage, match="has no router with a bias"):
        balance_routers(model_of("mixtral", vocab_size=VOCABULARY))
    with pytest.raises(InvalidUsage, match="rate is -1"):
        balance_routers(plain(), -1)
    model = adapt(plain(), check=False)
    balance_routers(model)
    compile_layers(model)
    planner, optimizer = Planner(None, ClusterSpec(1, 128), cost_model=COST), torch.optim.SGD(model.parameters(), lr=1)
    with hdp.init() as comm, pytest.raises(InvalidUsage, match=r"compiled layers do not go together with balance_"):
        Trainer(model, optimizer, planner, comm)
