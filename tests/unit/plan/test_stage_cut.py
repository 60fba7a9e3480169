"""How many layers each stage of a pipeline gets, and how much of the work that is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, MemoryModel, ModelSpec, stage_layers, stage_work
from hdpcomm.plan.specs import cluster_from_dict, cluster_to_dict
from hdpcomm.plan.stage_cut import by_layer, cut_layers, mean_work

LLAMA = replace(MODELS["llama-7b"], layers=61)
DEEPSEEK = ModelSpec(61, 7168, 128, 128, 2048, 129280, experts=256, top_k=8, dense_layers=3, dense_ffn=18432)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 9)
    stages = rng.randint(1, layers)
    costs = [rng.choice([1.0, 1.0, 2.0, rng.random()]) for _ in range(layers)]
    sizes = [rng.randint(0, 5) for _ in range(layers)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sum(costs[start:stop]) + (1.5 if stage == stages - 1 else 0.0)

    def memory(stage: int, start: int, stop: int) -> float:
        return sum(sizes[start:stop]) * (stages - stage)

    def figures(counts: tuple[int, ...]) -> tuple[float, float]:
        places = list(enumerate(pairwise(accumulate(counts, initial=0))))
        kinds = ((figure(stage, *ends) for stage, ends in places) for figure in (cost, memory))
        largest = [max(kind) for kind in kinds]
        return largest[0], largest[1]

    inner = combinations(range(1, layers), stages - 1)
    every = [tuple(b - a for a, b in pairwise((0, *borders, layers))) for borders in inner]
    best = min(figures(counts) for counts in every)
    assert figures(cut_layers(layers, stages, cost, memory)) == pytest.approx(best)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="61 layers cannot be cut into 62 stages, of which each has one at least"):
        stage_layers(LLAMA, 62)
    with pytest.raises(InvalidUsage, match="0 stages"):
        stage_layers(LLAMA, 0)
    assert stage_layers(LLAMA, 61) == (1,) * 61


def test_the_last_stage_has_fewer_layers_for_the_head() -> None:
    wide = ModelSpec(28, 1024, 16, 8, 3072, 151936, head_dim=128)
    counts = stage_layers(wide, 4)
    assert counts[-1] <= 3
    assert sum(counts) == 28
    assert stage_work(wide, (7,) * 4)[-1][0] > 1.7  # in place of that, the last one has most


def test_work_of_stages() -> None:
    for pipeline, chunks in ((4, 1), (8, 1), (16, 1), (4, 2)):
        counts = stage_layers(LLAMA, pipeline, chunks)
        work = stage_work(LLAMA, counts)
        for kind in zip(*work, strict=True):
            assert sum(kind) == pytest.approx(len(counts))
        assert max(linear for linear, *_ in work) < 1.06
        assert [round(layers * 61 / len(counts)) for *_, layers in work] == list(counts)
    assert stage_work(None, (3, 3, 3)) is None
    assert stage_work(None, (1, 3)) == ((0.5, 0.5, 0.5), (1.5, 1.5, 1.5))


def test_layers_of_several_kinds() -> None:
    """The first layers of DeepSeek are dense."""
    assert [each.dense_layers for each in by_layer(DEEPSEEK)] == [1] * 3 + [0] * 58
    dense, sparse = by_layer(DEEPSEEK)[0], by_layer(DEEPSEEK)[-1]
    both = 3 * dense.linear_flops_per_token + 58 * sparse.linear_flops_per_token
    head = 2.0 * DEEPSEEK.hidden * DEEPSEEK.vocab
    assert both - 60 * head == pytest.approx(DEEPSEEK.linear_flops_per_token)
    assert 3 * dense.params + 58 * sparse.params - 60 * 2 * 7168 * 129280 == DEEPSEEK.params


def test_mean_of_the_stages_in_what_was_measured() -> None:
    """As many layers, and as much of the head, as a stage has in the mean."""
    linear, attention, layers = mean_work(LLAMA, 61, 4, 16)
    assert attention == pytest.approx(61 / 4 / 16)
    assert layers == pytest.approx(61 / 4 / 16)
    assert linear < layers
    assert mean_work(None, 8, 4, 2) == (1.0, 1.0, 1.0)
    costs = CostModel(1e-9, 1e-6, 1e-3, kv_intra=1e-8, kv_domain=1e-8, experts=4e-7).at_work(0.5, 0.8, 0.9)
    assert (costs.linear, costs.attention, costs.fixed) == pytest.approx((5e-7, 8e-10, 9e-4))
    assert (costs.kv_intra, costs.kv_domain, costs.experts) == pytest.approx((8e-9, 8e-9, 3.6e-7))
    assert costs.weights == pytest.approx(0.6)


def test_memory_is_that_of_the_largest_stage() -> None:
    even = ClusterSpec(8, pipeline=16)
    uneven = replace(even, stage_work=stage_work(LLAMA, stage_layers(LLAMA, 16)))
    few = replace(even, stage_work=stage_work(LLAMA, (16, *(3,) * 15)))
    assert [each.most_layers(61) for each in (even, uneven, few)] == [4, 4, 16]
    found = [MemoryModel.of(LLAMA, each) for each in (even, uneven, few)]
    assert found[0].capacity > found[1].capacity > found[2].capacity > 0
    assert cluster_from_dict(cluster_to_dict(few)) == replace(few, device=few.hardware)


def test_commands_plan_for_layers_that_stages_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", "llama-7b", "--pipeline", "5", "--ranks", "8", "--tokens", "262144", "--context", "16384"]
    assert main(["plan", *common]) == 0
    assert main(["simulate", *common, "--chunks", "2"]) == 0
    assert main(["plan", *common, "--layers-per-stage", "6,6,7,7,6"]) == 0
    capsys.readouterr()
    for wrong, told in (
        (["--layers-per-stage", "6,6"], "[6, 6] for 5 stages of a model with 32 layers"),
        (["--layers-per-stage", "32", "--pipeline", "1"], "given without --pipeline"),
        (["--pipeline", "33"], "32 layers cannot be cut into 33 stages"),
    ):
        assert main(["plan", *common, *wrong]) != 0
        assert told in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["plan", *common, "--layers-per-stage", "6;6"])
    assert "no list of layers of each stage" in capsys.readouterr().err
