"""Would copies of busy experts on other ranks shorten a step? Loads as measured in training, steps as simulated.

    python benchmarks/expert_replicas.py --json benchmarks/results/expert_replicas.json
    python benchmarks/expert_replicas.py --measure

Trains a small DeepSeek-V3 of transformers on the text and the code of this repository, once with routers that nothing
balances and once with moving biases (:func:`hdpcomm.models.balance_routers`), and counts the rows that each expert gets
in each layer and micro-batch. The experts of a layer lie on 8 ranks in their order. A replica is one more place on
every rank: each goes to the expert whose copies are the busiest, counted over the steps before, and the copies of an
expert share its rows equally. The busiest rank's rows over the mean go into the simulated step of a model with 128
experts of 22B active parameters on 64 H100 (``ClusterSpec.expert_imbalance``), with the time that the weights of
replicas and their gradients take on the links of a host.

``--measure`` times steps of a built-in model with 16 experts on 4 ranks of this machine, whose routers like those of
rank 0 best, with 0 and more replicas; the weights stay as they are. The fastest of the steps after the first two, since
four ranks may share fewer cores, with others.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import transformers

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig, adapt, balance_routers
from hdpcomm.models.expert_group import place_replicas
from hdpcomm.parallel import expert_parallel
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, ModelSpec, Planner
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.testing import spawn

TOP = Path(__file__).resolve().parents[1]
EXPERTS, RANKS, LENGTH, SEQUENCES = 64, 8, 512, 16
LINK = 450e9  # bytes/s of a rank to others of its host, each way: NVLink 4
MODEL = ModelSpec(94, 4096, 64, 4, 1536, 151_936, experts=128, top_k=8, name="235B, 22B active")


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=EXPERTS, num_experts_per_tok=4, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    return adapt(transformers.AutoModelForCausalLM.from_config(config))


def steps_of_text(seed: int) -> Iterator[list[torch.Tensor]]:
    """Sequences of bytes of one file each."""
    texts = [path.read_bytes() for room in ("docs", "hdpcomm", "csrc") for path in sorted((TOP / room).rglob("*.*"))
             if path.suffix in (".md", ".py", ".cpp")]  # fmt: skip
    texts = [text for text in texts if len(text) > LENGTH + 1]
    draw = random.Random(seed)
    while True:
        sequences = []
        for text in draw.choices(texts, k=SEQUENCES):
            first = draw.randrange(len(text) - LENGTH)
            sequences.append(torch.tensor(list(text[first : first + LENGTH + 1])))
        yield sequences


def measured_rows(rate: float, steps: int) -> torch.Tensor:
    """Rows of each expert ``[steps, layers, experts]``; a step is one micro-batch."""
    model, rows = small_model(), []
    balance_routers(model, rate)
    blocks = [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "has_gate")]
    for block in blocks:
        block.register_forward_pre_hook(
            lambda _, args: rows.append(torch.bincount(args[1].flatten(), minlength=EXPERTS))
        )
    with hdp.init() as comm:
        cluster = hdp.Mesh(comm).cluster(capacity=LENGTH * SEQUENCES)
        planner = Planner(None, cluster, cost_model=CostModel(attention=1e-12, linear=1e-6))
        trainer = hdp.Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), planner, comm)
        for number, sequences in zip(range(steps), steps_of_text(1), strict=False):
            done = trainer.step([LENGTH + 1] * SEQUENCES, lambda place, of=sequences: of[place])
            if number % 50 == 0:
                print(f"  step {number}: loss {done.loss:.3f}", flush=True)
    return torch.stack(rows).view(-1, len(blocks), EXPERTS).double()


def busiest(rows: torch.Tensor, places: Sequence[Sequence[int]]) -> float:
    """The rows of the busiest rank over the mean, for experts ``rows`` and those that each rank has a copy of."""
    copies = torch.zeros(EXPERTS)
    for held in places:
        copies[list(held)] += 1
    each = rows / copies
    return max(float(each[list(held)].sum()) for held in places) * len(places) / float(rows.sum())


def placed(expected: torch.Tensor, replicas: int) -> list[list[int]]:
    """The experts that each rank holds: in their order, and the replicas."""
    size = EXPERTS // RANKS
    held = place_replicas(expected.tolist(), RANKS, replicas)
    return [[*range(rank * size, rank * size + size), *others] for rank, others in enumerate(held)]


def imbalance(rows: torch.Tensor, replicas: int, last: int, before: int = 10) -> float:
    """Mean over the last micro-batches and all layers; replicas are placed by the micro-batches before each."""
    found = []
    for step in range(rows.shape[0] - last, rows.shape[0]):
        for layer in range(rows.shape[1]):
            expected = rows[step - before : step, layer].mean(0)
            found.append(busiest(rows[step, layer], placed(expected, replicas)))
    return mean(found)


def simulated_s(imbalanced: float, replicas: int, seeds: Sequence[int]) -> float:
    """Mean seconds of simulated steps, with what the replicas' weights (bf16) and gradients (fp32) add once a step."""
    cluster = ClusterSpec(ranks=64, ranks_per_node=8, capacity=8192, expert=RANKS, expert_imbalance=imbalanced)
    costs = CostModel.analytic(MODEL, replace(cluster, expert_imbalance=1.0))
    planner = Planner(None, cluster, cost_model=costs, memory=MemoryModel(8192), context=65536)
    drawn = [sample_lengths("byted", tokens=1 << 22, context=65536, seed=seed) for seed in seeds]
    moved = replicas * MODEL.layers * 3 * MODEL.hidden * MODEL.ffn * (2 + 4) / LINK
    return mean(planner.plan(lengths).makespan_s for lengths in drawn) + moved


def measured_steps(replicas: int, steps: int = 8) -> dict[str, float]:
    """On one of the ranks: fewest seconds, and bytes, of a step, and how much more the busiest rank computes."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        mesh = hdp.Mesh(comm, expert=comm.size, expert_replicas=replicas)
        config = LlamaConfig(vocabulary=256, layers=4, hidden=256, heads=4, kv_heads=2, ffn=768, experts=16, top_k=2)
        model = Llama(config, seed=0)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if name.endswith("router.weight"):  # the experts of rank 0 have the larger logits, of either sign
                    weights[:4].mul_(10)
        expert_parallel(model, mesh)
        planner = Planner(None, mesh.cluster(capacity=4096), cost_model=CostModel(attention=1e-9, linear=1e-5))
        trainer = hdp.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, mesh)
        tokens = torch.randint(256, (16, 513), generator=torch.Generator().manual_seed(0))
        done = [trainer.step([513] * 16, lambda place: tokens[place]) for _ in range(steps)][2:]
        return {
            "step_s": min(each.seconds for each in done), "bytes_sent": median(each.bytes_sent for each in done),
            "busiest_over_mean": done[-1].expert_imbalance,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default %(default)s)")
    parser.add_argument("--last", type=int, default=40, help="steps that are counted (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--measure", action="store_true", help="time steps on 4 ranks of this machine instead")
    options = parser.parse_args()
    if options.measure:
        for replicas in (0, 1, 2):
            print(f"{replicas} replicas: {spawn(measured_steps, 4, replicas, timeout=600.0)[0]}", flush=True)
        return
    found: list[dict[str, Any]] = []
    for name, rate in (("nothing", 0.0), ("biases", 0.002)):
        print(f"balanced by {name}:", flush=True)
        rows = measured_rows(rate, options.steps)
        for replicas in (0, 1, 2, 4):
            times = imbalance(rows, replicas, options.last)
            seconds = simulated_s(min(times, RANKS), replicas, range(3))
            plain = found[-replicas.bit_length()]["step_s"] if replicas else seconds
            found.append({
                "balanced_by": name, "replicas": replicas, "busiest_over_mean": times, "step_s": seconds,
                "shorter": 1 - seconds / plain,
            })  # fmt: skip
            print(f"  {replicas} replicas: {times:.3f} of the mean, step {seconds:.2f} s, {1 - seconds / plain:+.1%}")
    if options.json:
        about = {"date": date.today().isoformat(), "steps": options.steps, "last": options.last, "model": MODEL.name}
        options.json.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
