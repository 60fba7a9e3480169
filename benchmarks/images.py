"""Steps with images and videos, simulated on 8 to 512 devices and measured here, beside ways without a plan.

    python benchmarks/images.py simulated --json benchmarks/results/images.json
    python benchmarks/images.py measured --ranks 2 4 --json benchmarks/results/images.json

``simulated``: a language model of 7B and an encoder of 675M parameters (the sizes of Qwen2.5-VL-7B, patches of 14
pixels, 2 x 2 a token) on H100s, 32,768 tokens a device; three mixtures of samples of which all fit one device. Seconds
of encoding go by the same rule as the planner's; the language model by ``CostModel.analytic``. The ways:

- data parallel: each device has as many samples, in the order in which they come, and encodes its own;
- balanced encoder: the same, and items are dealt to all devices;
- balanced both: the encoder so, and samples are dealt by tokens (as VeOmni, pull requests 1074 and 1194 of
  ByteDance-Seed/VeOmni, describes it);
- planned: ``Planner`` and ``place_items``.

``bound``: the work of all, language model and encoder, by the number of devices: no way is faster under these costs.

``measured``: a small Qwen2.5-VL on CPU ranks: the step of a mixed batch with every sample on one rank that encodes its
own items, dealt in turns, and the planned step, in turns in one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from hdpcomm.plan import ClusterSpec, CostModel, Item, ModelSpec, Planner
from hdpcomm.plan.items import place_items

LANGUAGE = ModelSpec(28, 3584, 28, 4, 18_944, 152_064, name="7B")
ENCODER = 675e6, 32, 1280  # parameters, layers, width
CAPACITY = 32_768
DEVICES = (8, 64, 512)


def image(draw: random.Random, most: int) -> int:
    """Patches of an image from a quarter of a megapixel to ``most`` patches."""
    return int(min(most, 4 * round(draw.lognormvariate(7.3, 0.8) / 4) + 64))


def instructions(draw: random.Random) -> tuple[int, list[int]]:
    """(tokens of text, patches of each item): instructions; a fifth without an image, one in twelve a video."""
    text, kind = int(min(8192, draw.lognormvariate(6.0, 1.0))) + 16, draw.random()
    if kind < 0.2:
        return text, []
    if kind < 0.75:
        return text, [image(draw, 16_384)]
    if kind < 0.92:
        return text, [image(draw, 4096) for _ in range(draw.randint(2, 12))]
    return text, [4 * draw.choice((64, 144, 256))] * draw.randint(8, 96)


def documents(draw: random.Random) -> tuple[int, list[int]]:
    """Interleaved documents: long text, up to thirty images."""
    text = int(min(20_000, draw.lognormvariate(7.5, 1.1))) + 32
    return text, [image(draw, 4096) for _ in range(min(30, int(draw.expovariate(0.25))))]


def videos(draw: random.Random) -> tuple[int, list[int]]:
    """Half short talks about an image, half videos of 16 to 256 frames."""
    if draw.random() < 0.5:
        return draw.randint(32, 1024), [image(draw, 9216)]
    return draw.randint(64, 2048), [4 * draw.choice((64, 100, 144))] * draw.randint(16, 200)


FAMILIES: dict[str, Callable[[random.Random], tuple[int, list[int]]]] = {
    "instructions": instructions,
    "documents": documents,
    "videos": videos,
}


def batch_of(family: str, devices: int, seed: int) -> tuple[list[int], list[list[int]]]:
    """(tokens, patches of each item) of samples that fill the devices."""
    draw, lengths, items, total = random.Random(seed), [], [], 0
    while total < devices * CAPACITY:
        text, patches = FAMILIES[family](draw)
        while text + sum(patches) // 4 > CAPACITY:
            patches.pop()
        lengths.append(text + sum(patches) // 4)
        items.append(patches)
        total += lengths[-1]
    return lengths, items


def dealt(work: Sequence[float], devices: int) -> list[list[int]]:
    """The longest first, each to the device that has least."""
    found: list[list[int]] = [[] for _ in range(devices)]
    loads = np.zeros(devices)
    for number in sorted(range(len(work)), key=lambda number: -work[number]):
        device = int(loads.argmin())
        found[device].append(number)
        loads[device] += work[number]
    return found


def simulated(family: str, devices: int, seed: int) -> dict[str, float]:
    """Seconds of a step by each way."""
    lengths, items = batch_of(family, devices, seed)
    cluster = ClusterSpec(devices, CAPACITY, ranks_per_node=8)
    cost = CostModel.analytic(LANGUAGE, cluster)
    parameters, depth, width = ENCODER
    each = (cost.linear + cost.piece) / LANGUAGE.params

    def encoding(patches: int) -> float:
        return each * patches * (parameters + 2.0 * patches * width * depth)

    def language(samples: Sequence[int]) -> float:
        """Packs of one device, filled in their order."""
        packs: list[list[int]] = [[]]
        for sample in samples:
            if sum(packs[-1]) + lengths[sample] > CAPACITY:
                packs.append([])
            packs[-1].append(lengths[sample])
        return sum(cost.seconds(pack) for pack in packs if pack)

    own = [sum(map(encoding, patches)) for patches in items]
    turns = [list(range(device, len(lengths), devices)) for device in range(devices)]
    by_tokens = dealt([float(length) for length in lengths], devices)
    listed = [[Item(4 * place, 1, patches) for place, patches in enumerate(patches)] for patches in items]
    placed = place_items(listed, [max(1, 4 * len(patches)) for patches in items], devices, encoding)
    flat = np.array([encoding(item.patches) for patches in listed for item in patches])
    even = float(np.bincount(placed.device, flat, minlength=devices).max()) if len(flat) else 0.0
    plan = Planner(None, cluster, cost_model=cost).plan(lengths)
    whole = sum(cost.seconds([length]) - cost.fixed for length in lengths)
    return {
        "data parallel": max(language(samples) + sum(own[i] for i in samples) for samples in turns),
        "balanced encoder": even + max(map(language, turns)),
        "balanced both": even + max(map(language, by_tokens)),
        "planned": even + plan.makespan_s,
        "bound": (sum(own) + whole) / devices,
        "encoder share": sum(own) / (sum(own) + whole),
    }


def small_model() -> Any:
    import torch
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    text = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "depth": 6, "hidden_size": 128, "intermediate_size": 352, "num_heads": 4, "patch_size": 14,
        "out_hidden_size": 256, "window_size": 112, "fullatt_block_indexes": [2, 5],
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=500, video_token_id=501, vision_start_token_id=502,
        vision_end_token_id=503, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config)


def samples_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Text alone, one image, several, and a video, in turns of their own."""
    import torch

    draw, found = random.Random(seed), []
    for _ in range(count):
        kind = draw.choice(("text", "text", "one", "one", "several", "video"))
        number = {"text": 0, "one": 1, "several": draw.randint(3, 8), "video": 0}[kind]
        grids = [(1, 2 * draw.randint(4, 12), 2 * draw.randint(4, 12)) for _ in range(number)]
        frames = [(draw.randint(8, 24), 8, 12)] if kind == "video" else []
        tokens = [draw.randrange(3, 500) for _ in range(draw.choice((24, 60, 200)))]
        for place, token in ((grids, 500), (frames, 501)):
            for t, h, w in place:
                tokens += [502, *[token] * (t * h * w // 4), 503, draw.randrange(3, 500)]
        sample = {"tokens": torch.tensor(tokens)}
        for name, place in (("image", grids), ("video", frames)):
            if place:
                pixels = "pixel_values" if name == "image" else "pixel_values_videos"
                sample[pixels] = torch.randn(sum(t * h * w for t, h, w in place), 3 * 2 * 14**2)
                sample[f"{name}_grid_thw"] = torch.tensor(place)
        found.append(sample)
    return found


def measured(ranks: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step by each way, of this rank."""
    import torch

    import hdpcomm as hdp
    from hdpcomm.measure import profile_cost_model
    from hdpcomm.models import adapt, items_of
    from hdpcomm.plan import MicroBatch, PlannedStep, SequenceInfo, StepPlan
    from hdpcomm.train.step import items as step_items

    torch.set_num_threads(1)
    comm = hdp.init()
    model = adapt(small_model(), check=False)
    cluster = ClusterSpec(ranks, 8192)
    planner = Planner(None, cluster, cost_model=profile_cost_model(model, comm, longest=512))
    trainer = hdp.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), planner, comm)
    seconds: dict[str, list[float]] = {"data parallel": [], "planned": []}
    dealt_out = step_items.place_items

    def on_own_rank(*given: Any, **more: Any) -> Any:
        placed = dealt_out(*given, **more)
        placed.device[:] = placed.sequence % ranks
        return placed

    for seed in range(rounds + 1):
        samples = samples_of(seed, 8 * ranks)
        lengths = [len(each["tokens"]) for each in samples]
        items = [items_of(model, each) for each in samples]
        batches = [(i, (i % ranks,), (SequenceInfo(i, length),), 0.0, 1.0) for i, length in enumerate(lengths)]
        plan = StepPlan("turns", ranks, tuple(MicroBatch(*batch) for batch in batches), 1.0, 0.0, 0.0, 0.0)
        for way in sorted(seconds, reverse=seed % 2 == 0):
            step_items.place_items = on_own_rank if way == "data parallel" else dealt_out
            step: Any = PlannedStep(tuple(lengths), plan, 0.0) if way == "data parallel" else lengths
            comm.barrier()
            start = time.perf_counter()
            trainer.step(step, samples.__getitem__, items=items)
            comm.barrier()
            if seed:  # the first ones warm up
                seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(own) for way, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulated", "measured"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each way")
    parser.add_argument("--seeds", type=int, default=5, help="simulated batches of each kind")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = json.loads(given.json.read_text()) if given.json is not None and given.json.exists() else {}
    if given.what == "simulated":
        rows = {}
        for family in FAMILIES:
            for devices in DEVICES:
                steps = [simulated(family, devices, seed) for seed in range(given.seeds)]
                share = statistics.mean(each.pop("encoder share") for each in steps)
                over = {way: statistics.mean(each[way] / each["bound"] for each in steps) for way in steps[0]}
                del over["bound"]
                rows[f"{family}, {devices}"] = {**over, "encoder share": share}
                print(
                    f"{family:14}{devices:5}", *(f"{way} {value:.3f} " for way, value in over.items()), f"{share:.2f}"
                )
        found["simulated"] = {"seeds": given.seeds, "over_bound": rows}
    else:
        from hdpcomm.testing import spawn

        rows = found.setdefault("measured", {})
        for ranks in given.ranks:
            seconds = spawn(measured, ranks, ranks, given.rounds, timeout=1800)[0]
            rows[str(ranks)] = seconds | {"steps": given.rounds}
            print(ranks, seconds)
    found |= {"date": date.today().isoformat(), "machine": platform.processor() or platform.machine()}
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
