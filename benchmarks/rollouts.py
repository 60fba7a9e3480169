"""A step of GRPO with prompts computed once, beside plain packs and TRL's GRPOTrainer with DDP over gloo.

    python benchmarks/rollouts.py --json benchmarks/results/rollouts.json      two ranks on two cores, ten minutes

Each prompt has several answers, whose lengths are drawn from a log-normal distribution. All three train the same Llama
of transformers from the same weights on the same trajectories with the same advantages, one optimizer step on all of
them: ``trees`` with the prompts of the batch given to ``Trainer.step(trees=)``, ``packs`` without, ``trl`` by TRL's
trainer on padded rows, as many on each rank. The first two run in turns, and their first steps are not counted; TRL
follows in the same processes. Times are medians of the slower rank. ``work`` is the ratio of floating-point operations
by the formula (6 a parameter and token, 12 a layer, width and pair of query and key).
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.measure import profile_cost_model
from hdpcomm.plan import ClusterSpec, Planner, Tree, trees_of_prompts
from hdpcomm.testing import RankPool
from hdpcomm.train import Trainer, rollout
from hdpcomm.train.losses import grpo

RANKS = 2


def batch_of(options: argparse.Namespace) -> tuple[list[list[int]], list[list[list[int]]]]:
    """(prompts, answers to each)."""
    draw = torch.Generator().manual_seed(5)
    prompts = torch.randint(5, 250, (options.prompts, options.prompt), generator=draw).tolist()
    sizes = torch.exp(torch.randn(options.prompts, options.answers, generator=draw) + 4.5).clamp(1, options.longest)
    answers = [[torch.randint(5, 250, (int(n),), generator=draw).tolist() for n in row] for row in sizes]
    return prompts, answers


def reward_of(answer: list[int]) -> float:
    return float(sum(answer) % 7)


def model_of(options: argparse.Namespace) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.prompt + options.longest,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def planned(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Steps with trees and without, in turns: seconds, losses, norms and predicted seconds."""
    torch.set_num_threads(1)
    prompts, answers = batch_of(options)
    rewards = torch.tensor([[reward_of(answer) for answer in row] for row in answers])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    rows = [(g, k) for g in range(len(prompts)) for k in range(len(answers[g]))]
    made = [rollout(prompts[g], answers[g][k], advantages=float(advantages[g, k])) for g, k in rows]
    lengths = [len(each["tokens"]) for each in made]
    trees = trees_of_prompts(lengths, [(g, len(prompts[g])) for g, _ in rows])
    found: dict[str, dict[str, Any]] = {}
    with hdp.init() as comm:
        model = hdp.adapt(model_of(options))
        costs = profile_cost_model(model, comm, longest=min(4096, max(lengths)))
        planner = Planner(None, ClusterSpec(comm.size, options.capacity), cost_model=costs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None, loss=grpo(kl=0.0))
        for number in range(options.steps + 1):
            for kind, given in (("trees", trees), ("packs", [])):
                comm.barrier()
                started = time.perf_counter()
                metrics = trainer.step(lengths, made.__getitem__, trees=given)
                comm.barrier()
                row = found.setdefault(kind, {"seconds": []})
                row |= {"loss": metrics.loss, "norm": metrics.grad_norm, "predicted_s": metrics.predicted_s}
                row["tokens"] = metrics.tokens
                if number:
                    row["seconds"].append(time.perf_counter() - started)
    return found


def by_trl(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Steps of TRL's trainer."""
    import datasets
    import tokenizers
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    prompts, answers = batch_of(options)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter() - self.started)

    def rollouts(names: list[str], _: Any) -> dict[str, Any]:
        counts = [0] * len(prompts)
        told: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for name in names:
            g = int(name)
            answer = answers[g][counts[g]]
            counts[g] += 1
            told["prompt_ids"].append(prompts[g])
            told["completion_ids"].append(answer)
            told["logprobs"].append([0.0] * len(answer))
        return told

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward_of(list(answer)) for answer in completion_ids]

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    a_rank = options.prompts * options.answers // RANKS
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=options.rows, max_steps=options.trl_steps,
        gradient_accumulation_steps=a_rank // options.rows, num_generations=options.answers, learning_rate=0.0,
        optim="sgd", max_grad_norm=0.0, beta=0.0, loss_type="grpo", bf16=False, gradient_checkpointing=False,
        max_completion_length=options.longest, shuffle_dataset=False, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model_of(options), args=config, processing_class=tokenizer, reward_funcs=rewards, rollout_func=rollouts,
        train_dataset=datasets.Dataset.from_dict({"prompt": [str(g) for g in range(options.prompts)]}),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    trainer.accelerator.wait_for_everyone()
    return {"seconds": times, "loss": last["loss"], "norm": last["grad_norm"]}


def operations(lengths: list[int], squares: float, options: argparse.Namespace, parameters: int) -> float:
    return 6.0 * parameters * sum(lengths) + 12.0 * options.layers * options.hidden * squares / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "prompts": 8, "answers": 16, "prompt": 2048, "longest": 1024, "hidden": 128, "layers": 4, "capacity": 16384,
        "steps": 2, "trl_steps": 1, "rows": 4,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prompts, answers = batch_of(options)
    lengths = [len(p) + len(a) for p, row in zip(prompts, answers, strict=True) for a in row]
    trees = [Tree([-1, *[0] * len(row)], [len(p), *map(len, row)]) for p, row in zip(prompts, answers, strict=True)]
    parameters = sum(p.numel() for p in model_of(options).parameters())
    plain = operations(lengths, float(sum(n * n for n in lengths)), options, parameters)
    shared = operations([tree.num_tokens for tree in trees], sum(tree.squares for tree in trees), options, parameters)
    pool = RankPool(RANKS)
    by_rank = pool.run(planned, options, timeout=3000)
    rows: dict[str, dict[str, Any]] = by_rank[0]
    for kind in rows:
        rows[kind]["seconds"] = [max(times) for times in zip(*(each[kind]["seconds"] for each in by_rank), strict=True)]
    if options.trl_steps:
        with tempfile.TemporaryDirectory() as folder:
            theirs = pool.run(by_trl, options, folder, timeout=3000)
        rows["trl"] = theirs[0]
        rows["trl"]["seconds"] = [max(times) for times in zip(*(each["seconds"] for each in theirs), strict=True)]
    pool.close()
    base = median(rows["packs"]["seconds"])
    print(f"{'':6} {'seconds':>8} {'of packs':>9} {'loss':>12} {'gradient norm':>14}")
    for kind, row in rows.items():
        row["ratio"] = median(row["seconds"]) / base
        print(f"{kind:6} {median(row['seconds']):8.2f} {row['ratio']:9.3f} {row['loss']:12.3e} {row['norm']:14.6f}")
    print(f"work of trees over packs: {shared / plain:.3f}; tokens {rows['trees']['tokens']:,} of {sum(lengths):,}")
    predicted = rows["trees"]["predicted_s"] / rows["packs"]["predicted_s"]
    print(f"predicted: {predicted:.3f}; measured over work: {rows['trees']['ratio'] / (shared / plain):.3f}")
    if options.json:
        facts = {
            "date": str(date.today()), "machine": platform.machine(), "torch": torch.__version__,
            "options": {k: str(v) for k, v in vars(options).items()}, "work": shared / plain, "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
