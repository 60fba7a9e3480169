"""Reinforcement learning from a rule: a small Llama of transformers learns to add digits, by GRPO.

torchrun --nproc-per-node 2 examples/grpo.py                   about a minute on two cores
torchrun --nproc-per-node 4 examples/grpo.py --generators 2    two ranks only generate, beside two that train

Ranks sample answers with a model of their own, which gets the trained weights before; what they have sampled goes to
those that train: one plan for all of it, prompts computed once, answers of any lengths. Where ranks only generate,
those that train are a batch behind them, which the log-probabilities of the sampling model make up for.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hdpcomm as hdp
from hdpcomm.plan import trees_of_prompts
from hdpcomm.train import Reshard, rollout
from hdpcomm.train.losses import grpo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--generators", type=int, default=0, help="ranks that only generate; 0: all ranks do both")
parser.add_argument("--prompts", type=int, default=8, help="of a step, for each rank that generates")
parser.add_argument("--answers", type=int, default=16, help="to a prompt")
parser.add_argument("--longest", type=int, default=4, help="tokens of an answer")
options = parser.parse_args()

PLUS, EQUALS, END, VOCABULARY = 10, 11, 12, 16  # 0 to 9 are digits
PROMPT = 4  # tokens


def reward_of(prompt: list[int], answer: list[int]) -> float:
    """1 for the sum and the end after it; a part of it for a digit that is near."""
    first, ends = answer[0], len(answer) == 2 and answer[1] == END
    near = max(0.0, 1.0 - abs(first - prompt[0] - prompt[2]) / 4) if first < 10 else 0.0
    return 0.7 * near**2 + 0.3 * ends


@torch.no_grad()
def sample(model: LlamaForCausalLM, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with their answers ``[prompts * answers, tokens]``, and the log-probabilities of the answers' tokens;
    with a cache of keys and values."""
    digits = torch.randint(0, 5, (options.prompts, 2), generator=draw)
    signs = torch.tensor([PLUS, EQUALS]).expand(options.prompts, 2)
    prompts = torch.stack((digits[:, 0], signs[:, 0], digits[:, 1], signs[:, 1]), 1)
    rows = prompts.repeat_interleave(options.answers, 0)
    chances = torch.empty(len(rows), 0)
    tokens, cache = rows, None
    for _ in range(options.longest):
        told = model(tokens, past_key_values=cache, use_cache=True)
        cache, logs = told.past_key_values, told.logits[:, -1].log_softmax(-1)
        tokens = torch.multinomial(logs.exp(), 1, generator=draw)
        rows, chances = torch.cat((rows, tokens), 1), torch.cat((chances, logs.gather(1, tokens)), 1)
    return rows, chances


def learn(trainer: hdp.Trainer, rows: torch.Tensor, chances: torch.Tensor) -> str:
    """A step on what all generators have sampled."""
    batch, rewards = [], []
    for row, own in zip(rows.tolist(), chances, strict=True):
        answer = row[PROMPT:]
        answer = answer[: answer.index(END) + 1] if END in answer else answer
        rewards.append(reward_of(row[:PROMPT], answer))
        batch.append(rollout(row[:PROMPT], answer, old_log_probs=own[: len(answer)]))
    grouped = torch.tensor(rewards).view(-1, options.answers)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    for each, advantage in zip(batch, advantages.flatten(), strict=True):
        each["advantages"] = advantage
    lengths = [len(each["tokens"]) for each in batch]
    trees = trees_of_prompts(lengths, [(i // options.answers, PROMPT) for i in range(len(lengths))])
    done = trainer.step(lengths, batch.__getitem__, trees=trees)
    right = float((grouped > 0.99).float().mean())
    return f"reward {float(grouped.mean()):.3f}, right {right:.0%}, {done.tokens:,} of {sum(lengths):,} tokens computed"


torch.set_num_threads(1)
with hdp.init() as world:
    if not 0 <= options.generators < world.size:
        raise SystemExit(f"--generators {options.generators}: of {world.size} ranks at least one has to train")
    learners = world.subset(range(world.size - options.generators))  # None on a rank that only generates
    generators = range(world.size - options.generators, world.size) if options.generators else range(world.size)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    actor = LlamaForCausalLM(config) if world.rank in generators else None
    trainer = None
    if learners is not None:
        model = hdp.adapt(LlamaForCausalLM(config))
        capacity = len(generators) * options.prompts * options.answers * (PROMPT + options.longest)
        planner = hdp.Planner.measured(model, learners, capacity=capacity, longest=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = hdp.Trainer(model, optimizer, planner, learners, loss=grpo(kl=0.0))
    weights = Reshard(
        dict(trainer.model.model.named_parameters()) if trainer else {},
        dict(actor.named_parameters()) if actor else {},
        world,
    )
    draw = torch.Generator().manual_seed(world.rank)
    a_rank = options.prompts * options.answers
    before = None
    for step in range(options.steps):
        weights.run()
        own = sample(actor, draw) if actor else None
        told = learn(trainer, *before) if options.generators and trainer and before else ""
        rows = torch.empty(len(generators), a_rank, PROMPT + options.longest, dtype=torch.int64)
        chances = torch.empty(len(generators), a_rank, options.longest)
        for place, rank in enumerate(generators):
            if own is not None and rank == world.rank:
                rows[place], chances[place] = own
            world.broadcast(rows[place], rank)
            world.broadcast(chances[place], rank)
        before = rows.flatten(0, 1), chances.flatten(0, 1)
        if not options.generators:
            told = learn(trainer, *before)
        if world.rank == 0 and told and (step % 5 == 0 or step == options.steps - 1):
            print(f"step {step}: {told}")
