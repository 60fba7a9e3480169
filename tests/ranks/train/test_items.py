"""Steps with images and videos, beside transformers' own model on each sample alone."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.models import adapt, items_of
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner, trees_of_prompts
from hdpcomm.testing import run_threads
from hdpcomm.train.losses import sft
from tests.harness.mesh_shapes import Shape
from tests.harness.tiny_media import FAMILIES, IMAGE, model_of, plain_losses, sample_of

pytest.importorskip("transformers")

ONE_KIND = ("t", "tit", "tiitit", "ti", "ttttttttttttt", "tit" * 6)
PARTS = {
    **dict.fromkeys(("llava", "gemma3", "qwen2_audio"), ONE_KIND),
    "text": ("t", "tit", "tvt", "itivt" + "tit" * 18, "v", "ttttttttttttttt", "ti"),
}


ALONE = Shape(0)


@cache
def wanted(family):
    """(samples, mean loss, gradients by name, the model anew) of transformers' own model."""
    model = model_of(family)
    samples = [sample_of(family, parts, seed) for seed, parts in enumerate(PARTS.get(family, PARTS["text"]))]
    total, labels = plain_losses(model, samples)
    return (
        samples,
        total / labels,
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        model_of(family),
    )


def stepped(family, *, capacity=None, change=lambda _: None, slices=1, shape=ALONE, offloads=False, **options):
    """(metrics, gradients by name, trainer) of one step of SGD with a rate of 1."""
    samples, *_, new = wanted(family)
    model = copy.deepcopy(new)
    change(model)
    adapted = adapt(model, recompute=options.pop("recompute", "none"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    comm = hdp.init()
    mesh = hdp.Mesh(comm, pipeline=shape.pipeline, tensor=shape.tensor, expert=shape.expert)
    capacity = capacity or -(-560 // mesh.hdp)
    cluster = ClusterSpec(
        mesh.hdp,
        capacity,
        pipeline=shape.pipeline,
        tensor=shape.tensor,
        chunks=shape.chunks,
        split_backward=shape.split,
    )
    cost, memory = CostModel(attention=1e-7, linear=1e-5), MemoryModel(capacity, kept=0.1)
    if offloads:
        pool = PinnedPool(16 << 20, device="cpu")
        options["offload"] = ActivationOffload(pool, adapted, ratio=1.0, min_bytes=1)
        memory = MemoryModel(capacity // 2, offloadable=0.5, copy_s=1e-9, host_tokens=1e6)
    planner = Planner(None, cluster, cost_model=cost, memory=memory, slices=slices)
    parts = adapted
    if shape.pipeline > 1:
        sizes = (3, 1) if shape.chunks * shape.pipeline == 2 else (1, 1, 1, 1)
        parts = split_model(adapted, shape.pipeline * shape.chunks, layers=sizes)[mesh.stage :: shape.pipeline]
    for part in parts if isinstance(parts, list) else [parts]:
        expert_parallel(part, mesh)
        tensor_parallel(part, mesh)
    trained = torch.nn.ModuleList(parts if isinstance(parts, list) else [parts]).parameters()
    optimizer = torch.optim.SGD([p for p in trained if p.requires_grad], lr=1.0)
    trainer = hdp.Trainer(parts, optimizer, planner, mesh, max_grad_norm=None, **options)
    items = [items_of(adapted, each) for each in samples]
    lengths = [len(each["tokens"]) for each in samples]
    metrics = trainer.step(lengths, lambda i: samples[i], items=items)
    after = {name.removeprefix("model."): x for name, x in trainer.whole_tensors()}
    found = {name: x - after[name] for name, x in before.items() if name in after}
    return metrics, found, {name for name, p in model.named_parameters() if p.requires_grad}, trainer


def check(family, found):
    metrics, gradients, trained, _ = found
    _, loss, own, _ = wanted(family)
    tolerance = 1e-6  # norms and rotations of transformers compute in float32
    assert abs(metrics.loss - loss) < tolerance * max(1.0, loss)
    assert len(gradients) >= len(own)
    for name in gradients:
        expected = own.get(name, torch.zeros(1)) if name in trained else torch.zeros(1)
        scale = max(1e-3, float(expected.abs().max()))
        assert float((gradients[name] - expected).abs().max()) < tolerance * scale, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_gradients_are_those_of_each_sample_alone(family, ranks):
    wanted(family)  # threads would draw from one generator
    for found in run_threads(lambda: stepped(family), ranks):
        check(family, found)


def freeze(model, inside):
    """``inside``: of what keeps its parameters as they are."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in inside)


CHANGES = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "recomputed": {"recompute": "full"},
    "frozen encoder": {"change": lambda model: freeze(model, ["visual", "vision", "projector"])},
    "frozen vision tower": {"change": lambda model: freeze(model, ["visual.blocks", "vision_tower"])},
    "frozen language model": {"change": lambda model: freeze(model, ["language_model", "lm_head"])},
    "sft": {"loss": sft()},
    "slices": {"slices": 8, "capacity": 100},
}


@pytest.mark.parametrize(
    ("family", "what"),
    [*((family, what) for family in ("qwen3_vl", "llava") for what in CHANGES),
     ("gemma3", "zero 3"), ("gemma3", "recomputed"), ("qwen2_audio", "zero 2"), ("qwen2_audio", "recomputed"),
     ("qwen2_audio", "slices")],
)  # fmt: skip
def test_gradients_of_other_steps(family, what):
    wanted(family)
    for found in run_threads(lambda: stepped(family, **CHANGES[what]), 2):
        check(family, found)
        assert found[3].model.media.recompute == (what == "recomputed")
        sliced = bool(found[3].ran.slices)
        assert sliced == (what == "slices" and family == "qwen3_vl")


SHAPES = {
    "tp 2": Shape(1, tensor=2),
    "hdp 2 tp 2": Shape(2, tensor=2),
    "pp 2": Shape(1, pipeline=2),
    "hdp 2 pp 2": Shape(2, pipeline=2),
    "hdp 2 pp 2, split backward": Shape(2, pipeline=2, split=True),
    "pp 2 tp 2": Shape(1, pipeline=2, tensor=2),
}


@pytest.mark.parametrize(
    ("family", "shape"),
    [*((family, shape) for family in ("qwen3_vl", "qwen2_5_vl", "llava") for shape in SHAPES),
     ("gemma3", "hdp 2 tp 2"), ("gemma3", "hdp 2 pp 2"), ("qwen2_audio", "hdp 2 tp 2"), ("qwen2_audio", "pp 2")],
)  # fmt: skip
def test_gradients_on_meshes(family, shape):
    wanted(family)
    for found in run_threads(lambda: stepped(family, shape=SHAPES[shape]), SHAPES[shape].ranks):
        check(family, found)
        spans = [span.phase for span in found[3].timeline.spans]
        assert spans[0] == "encoder"
        assert spans.count("encoder") == 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_items_are_encoded_a_number_of_patches_at_a_time(recompute, monkeypatch):
    """Fewer where they are encoded again, as all patches of a call then have activations."""
    from hdpcomm.models.media import MediaEncoder
    from hdpcomm.train.step import items as of_step

    wanted("qwen3_vl")
    monkeypatch.setattr(of_step, "_MOST_PATCHES", 100)
    monkeypatch.setattr(of_step, "_MOST_AGAIN", 48)  # an item has as many at most
    encode, calls = MediaEncoder._encode, []

    def counted(encoder, chosen, device):
        calls.append(sum(encoder.items(given)[number].patches for given, numbers in chosen for number in numbers))
        return encode(encoder, chosen, device)

    monkeypatch.setattr(MediaEncoder, "_encode", counted)
    for found in run_threads(lambda: stepped("qwen3_vl", recompute=recompute), 2):
        check("qwen3_vl", found)
    assert len(calls) > (16 if recompute == "full" else 4)
    assert max(calls) <= (48 if recompute == "full" else 100)


def test_seconds_of_encoding_are_those_of_the_busiest_device():
    from hdpcomm.train.step.items import encoding_s, items_on_devices

    samples, *_, new = wanted("qwen3_vl")

    def step():
        comm, adapted = hdp.init(), adapt(copy.deepcopy(new), check=False)
        planner = Planner(None, ClusterSpec(3, 560), cost_model=CostModel(1e-7, 1e-5, piece=1e-6))
        items = [items_of(adapted, each) for each in samples]
        lengths = [len(each["tokens"]) for each in samples]
        placed = items_on_devices(items, lengths, adapted.media, planner, hdp.Mesh(comm))
        loads = [0.0] * 3
        for sequence, number, device in zip(placed.sequence, placed.number, placed.device, strict=True):
            loads[device] += adapted.media.share_of_tokens(items[sequence][number].patches) * 1.1e-5
        assert encoding_s(placed, adapted.media, planner) == pytest.approx(max(loads))
        return max(loads) / sum(loads)

    assert all(1 / 3 < share < 0.36 for share in run_threads(step, 3))


def test_all_stages_share_an_encoder():
    """On four stages, and with the optimizer's state in parts."""
    wanted("llava")
    for shape, options in ((Shape(1, pipeline=4), {}), (Shape(2, pipeline=2), {"zero": 1})):
        for found in run_threads(lambda shape=shape, more=options: stepped("llava", shape=shape, **more), 4):
            check("llava", found)


@pytest.mark.parametrize("shape", [Shape(2, expert=2), Shape(2, pipeline=2, expert=2)])
def test_gradients_with_expert_ranks(shape):
    wanted("qwen3_vl_moe")
    for found in run_threads(lambda: stepped("qwen3_vl_moe", shape=shape), shape.ranks):
        check("qwen3_vl_moe", found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_in_turns_on_a_device(ranks):
    wanted("llava")
    for found in run_threads(lambda: stepped("llava", shape=Shape(ranks // 2, pipeline=2, chunks=2)), ranks):
        check("llava", found)


def add_lora(model):
    """Adapters of LoRA on attention of both parts; the given model is changed."""
    peft = pytest.importorskip("peft")
    found = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), model)
    for name, parameter in found.named_parameters():
        parameter.requires_grad = "lora_" in name
        if "lora_" in name:
            draw = torch.Generator().manual_seed(len(name))  # ranks are threads
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw).double()


def test_lora():
    """Beside one process with the same adapters."""
    wanted("llava")
    _, alone, _, _ = run_threads(lambda: stepped("llava", change=add_lora), 1)[0]
    assert sum("lora_" in name and bool(x.any()) for name, x in alone.items()) > 20
    for _, found, _, _ in run_threads(lambda: stepped("llava", change=add_lora), 3):
        for name, x in alone.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=1e-8, msg=name)


def test_offload():
    wanted("qwen3_vl")
    for found in run_threads(lambda: stepped("qwen3_vl", offloads=True), 2):
        check("qwen3_vl", found)
        assert found[3].offload.stats().stored_bytes > 0


def test_passes_without_gradients():
    """Losses and log-probabilities, of sequences on any ranks, and after a step those of the updated model."""
    samples, loss, _, _ = wanted("qwen3_vl")
    lengths = [len(each["tokens"]) for each in samples]

    def step():
        *_, trainer = stepped("qwen3_vl", loss=sft())
        items = [items_of(trainer.model, each) for each in samples]
        changed = trainer.evaluate(lengths, lambda i: samples[i], items=items)
        found, _ = trainer.log_probs(lengths, lambda i: samples[i], items=items)
        trainer.comm.all_reduce(changed)
        return changed.tolist(), -float(sum(each.sum() for each in found))

    for (total, labels), summed in run_threads(step, 3):
        assert labels == sum(lengths) - len(lengths)
        assert total / labels < loss - 0.01
        assert summed == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda given, _: given[:-1], "items of 6 sequences were given for 7"),
        (lambda given, _: [given[1], *given[1:]], "give items with tokens of their own inside"),
        (lambda given, _: [[], [], *given[2:]], r"fetch\(1\) gave 1 images and frames, and the step was planned for 0"),
        (lambda given, _: [[] for _ in given], r"fetch\(\d\) gave images, and the step was planned without"),
        (
            lambda given, comm: given if comm.rank else [*given[:1], given[1][:0], *given[2:]],
            "other|differ|planned for 0",
        ),
    ],
)
def test_other_items_than_those_of_the_sequences(change, told):
    samples, *_, new = wanted("qwen3_vl")

    def step():
        comm, adapted = hdp.init(), adapt(copy.deepcopy(new), check=False)
        planner = Planner(None, ClusterSpec(ranks=2, capacity=280), cost_model=CostModel(1e-7, 1e-5))
        trainer = hdp.Trainer(adapted, torch.optim.SGD(adapted.parameters(), lr=1.0), planner, comm)
        items = change([items_of(adapted, each) for each in samples], comm)
        trainer.step([len(each["tokens"]) for each in samples], lambda i: samples[i], items=items)

    with pytest.raises(Error, match=told):
        run_threads(step, 2)


def test_what_items_need():
    samples, *_, new = wanted("qwen3_vl")
    adapted = adapt(copy.deepcopy(new), check=False)
    with pytest.raises(InvalidUsage, match="has 0 tokens that stand for its images"):
        items_of(adapted, samples[1] | {"tokens": samples[0]["tokens"]})
    with pytest.raises(InvalidUsage, match="image_grid_thw tells of"):
        items_of(adapted, samples[1] | {"pixel_values": samples[1]["pixel_values"][1:]})
    with pytest.raises(InvalidUsage, match="takes text alone"):
        items_of(torch.nn.Linear(2, 2), samples[1])
    assert items_of(adapted, samples[0]) == []
    assert sum(item.tokens for item in items_of(adapted, samples[3])) == int(
        (samples[3]["tokens"] >= 120).sum()
    ) - 2 * len(items_of(adapted, samples[3]))


@pytest.mark.parametrize("family", ["qwen3_vl", "llava", "qwen2_audio"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_prompts_with_images_are_encoded_once(family, ranks):
    """Three answers to a prompt with images, two to a text, one alone: as each trajectory alone, in fewer tokens."""
    *_, new = wanted(family)
    first, other = sample_of(family, "titvt" if family == "qwen3_vl" else "titit", 1), sample_of(family, "ttt", 2)
    draw = torch.Generator().manual_seed(3)
    prompts, samples = [first, first, first, other, other, sample_of(family, "tit", 4)], []
    for prompt, count in zip(prompts, (5, 30, 2, 9, 4, 7), strict=True):
        answer = torch.randint(3, 120, (count,), generator=draw)
        samples.append(prompt | {"tokens": torch.cat((prompt["tokens"], answer))})
    lengths = [len(each["tokens"]) for each in samples]
    names = [(name, len(prompt["tokens"])) for name, prompt in zip("aaabbc", prompts, strict=True)]
    trees = trees_of_prompts(lengths, names)
    assert len(trees) == 2
    model = copy.deepcopy(new)
    total, labels = plain_losses(model, samples)
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def step():
        model, comm = copy.deepcopy(new), hdp.init()
        adapted, capacity = adapt(model), -(-240 // ranks)
        planner = Planner(None, ClusterSpec(comm.size, capacity), cost_model=CostModel(attention=1e-7, linear=1e-5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = hdp.Trainer(adapted, optimizer, planner, comm, max_grad_norm=None, loss=sft())
        items = [items_of(adapted, each) for each in samples]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        found, _ = trainer.log_probs(lengths, samples.__getitem__, items=items, trees=trees)
        metrics = trainer.step(lengths, samples.__getitem__, items=items, trees=trees)
        assert trainer.ran.tokens < sum(lengths)  # of trees
        assert -float(sum(each.sum() for each in found)) == pytest.approx(total, rel=1e-6)
        return metrics.loss, {name: before[name] - p.detach() for name, p in model.named_parameters()}

    for loss, gradients in run_threads(step, ranks):
        assert loss == pytest.approx(total / labels, rel=1e-6)
        for name, expected in own.items():
            scale = max(1e-3, float(expected.abs().max()))
            assert float((gradients[name] - expected).abs().max()) < 1e-6 * scale, name


def test_images_that_see_all_of_themselves():
    """Two of them without a token between them are one to transformers; slices and trees do not know them."""
    new = model_of("gemma3")
    draw = torch.Generator().manual_seed(1)
    tokens = torch.tensor([5, 6, *[IMAGE] * 8, 7, 8, 9])
    sample = {"tokens": tokens, "pixel_values": torch.randn(2, 3, 16, 16, generator=draw, dtype=torch.float64)}
    samples = [sample, sample_of("gemma3", "tit", 2)]
    model = copy.deepcopy(new)
    total, labels = plain_losses(model, samples)
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def step():
        model, comm = copy.deepcopy(new), hdp.init()
        adapted = adapt(model)
        planner = Planner(None, ClusterSpec(comm.size, 16), cost_model=CostModel(attention=1e-7, linear=1e-5))
        trainer = hdp.Trainer(adapted, torch.optim.SGD(model.parameters(), lr=1.0), planner, comm, max_grad_norm=None)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        items = [items_of(adapted, each) for each in samples]
        metrics = trainer.step([len(each["tokens"]) for each in samples], samples.__getitem__, items=items)
        return metrics.loss, {name: before[name] - p.detach() for name, p in model.named_parameters()}

    for loss, gradients in run_threads(step, 2):
        assert loss == pytest.approx(total / labels, rel=1e-6)
        for name, expected in own.items():
            assert float((gradients[name] - expected).abs().max()) < 1e-6 * max(1e-3, float(expected.abs().max())), name
    wanted("gemma3")
    with pytest.raises(InvalidUsage, match="slices, where images see all of themselves"):
        run_threads(lambda: stepped("gemma3", slices=8, capacity=40), 2)
    assert not adapt(copy.deepcopy(new)).takes_trees


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_between_steps(family):
    """An adapted model answers an image as the model did before, and trains on."""
    samples, *_, new = wanted(family)
    asked = samples[1]
    given = {name: x for name, x in asked.items() if name != "tokens"} | {"input_ids": asked["tokens"][None]}
    if family == "gemma3":
        given["token_type_ids"] = (given["input_ids"] == IMAGE).int()
    elif "vl" in family:
        given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = copy.deepcopy(new).eval().generate(**given, **options)
    model = copy.deepcopy(new)
    adapted = adapt(model)
    model.eval()
    with adapted.attention.original():
        assert torch.equal(model.generate(**given, **options), expected)
        with adapted.attention.planned(), pytest.raises(InvalidUsage, match=r"with adapted.attention.original\(\)"):
            model.generate(**given, **options)
    run_threads(lambda: check(family, stepped(family)), 1)
